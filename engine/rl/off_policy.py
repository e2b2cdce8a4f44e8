"""Corrections for tokens sampled by another policy: decoupled PPO, rejection, proximal
log-probabilities.

Asynchronous rollouts are sampled by weights some versions old, and by a server with other kernels
than the trainer. With ``use_decoupled_loss`` the ratio of the loss is relative to the proximal
policy (the trainer's policy before the update), and every token is weighed by ``w = p_prox /
p_behave``: Hilton et al., "Batch size-invariance for policy optimization", 2022; Fu et al.,
"AReaL", 2025, eq. 5. `RejectionSamplingConfig` bounds w. Weights are computed in the loss, on
packed tokens, because they may depend on the current policy. Micro-batches never cut a sequence.

Proximal log-probabilities without a forward pass (AReaL's ``prox_logp_method: loglinear``): a token
sampled by weights of version b, updated by weights of version v, has a proximal policy one version
behind v. So ``log p_prox = log p_behave + a (log p - log p_behave)`` with ``a = (v - 1 - b) / (v -
b)``, between 0 and 1, and 0 where nothing was sampled.
"""

import math
from dataclasses import dataclass

import torch

from ...utils.config import require_choice, require_numbers, require_range
from ...utils.errors import ConfigError
from .kl import kl_estimate
from .losses import MAX_LOG_RATIO, Stats, by_sequence

_KL_METRICS = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3", "kl_k3_behave": "k3"}
_WEIGHTS = {"token": None, "sequence_mean": "mean", "sequence_product": "sum", "one": None}
"""Aggregation of a sequence's token log-weights, by the name in ``weight``."""


@dataclass
class RejectionSamplingConfig:
    """Limits for the distance from the sampling policy, and the treatment of tokens or sequences
    beyond them (AReaL).
    """

    level: str = "token"
    """``token``, or ``sequence``: a sequence is judged as a whole."""
    action: str = "mask"
    """``mask``: rejected tokens have no gradient. ``clamp``: their weight is limited to the bounds
    (truncated importance sampling). Either way they count in means.
    """
    metric: str = "ratio"
    """``ratio`` is r = p_prox / p_behave, ``kl_k1`` log r, ``kl_k2`` (log r)^2 / 2, ``kl_k3`` 1 / r
    - 1 + log r, and ``kl_k3_behave`` (verl's k3) r - 1 - log r.
    """
    agg: str = "mean"
    """Aggregation of a sequence's token metrics: ``mean``, ``sum`` or ``max``. Ratios are
    aggregated as logarithms.
    """
    upper: float = 5.0
    """Largest accepted metric. Above 1 for ``ratio``."""
    lower: float | None = None
    """Smallest accepted metric. Null for no limit."""
    weight: str | None = None
    """Weight of a token: ``token``, its own ratio. ``sequence_mean``, the geometric mean of its
    sequence's ratios. ``sequence_product``, their product (verl, TRL). ``one``, no weight. Null
    (AReaL): ``sequence_mean`` with level ``sequence`` and metric ``ratio``, else ``token``.
    """
    weight_upper: float | None = None
    """Limit for weights, independent of rejection. Null for no limit."""

    @property
    def weighs(self) -> str:
        """``weight``, or the default for null."""
        return self.weight or (
            "sequence_mean" if (self.level, self.metric) == ("sequence", "ratio") else "token"
        )

    def __post_init__(self) -> None:
        require_numbers(self, "rejection_sampling.")
        require_choice("rejection_sampling.level", self.level, ("token", "sequence"))
        require_choice("rejection_sampling.weight", self.weight, (None, *_WEIGHTS))
        require_range("rejection_sampling.weight_upper", self.weight_upper, low=0.0)
        require_choice("rejection_sampling.action", self.action, ("mask", "clamp"))
        require_choice("rejection_sampling.metric", self.metric, ("ratio", *_KL_METRICS))
        require_choice("rejection_sampling.agg", self.agg, ("mean", "sum", "max"))
        if self.metric == "ratio":
            require_range("rejection_sampling.lower", self.lower, low=0.0)
            if self.upper <= 1:
                raise ConfigError(
                    f"config key 'rejection_sampling.upper' is {self.upper}; of ratios expected "
                    "more than 1"
                )
        elif self.action == "clamp":
            raise ConfigError(
                "config key 'rejection_sampling.action' is 'clamp', but its bounds are of "
                f"{self.metric}, not of the weight; take metric 'ratio', or action 'mask'"
            )
        if self.action == "clamp" and self.weight == "one":
            raise ConfigError(
                "config key 'rejection_sampling.action' is 'clamp', but "
                "'rejection_sampling.weight' is 'one': there is nothing to clamp; take action "
                "'mask', or another weight"
            )
        if self.lower is not None and self.lower > self.upper:
            raise ConfigError(
                f"config key 'rejection_sampling.lower' is {self.lower}, above "
                f"'rejection_sampling.upper', {self.upper}"
            )


def behave_weights(
    prox_logp: torch.Tensor,
    behave_logp: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rejection: RejectionSamplingConfig | None,
) -> tuple[torch.Tensor, Stats]:
    """Weight of every token from its ``[T]`` log-probabilities under the proximal and the sampling
    policy.

    Returns:
        ``[T]`` float32, 0 outside the loss mask and for rejected tokens, and the statistics
        ``behave_weight``, and
        ``rejected``: 1 where the weight was changed.
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, prox_logp.float() - behave_logp.float(), 0.0).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    log_weights = log_ratio
    if rejection is not None and rejection.weighs == "one":
        log_weights = torch.zeros_like(log_ratio)
    elif rejection is not None and (agg := _WEIGHTS[rejection.weighs]) is not None:
        log_weights = by_sequence(log_ratio, mask, cu_seqlens, agg).clamp(
            -MAX_LOG_RATIO, MAX_LOG_RATIO
        )
    plain = torch.where(mask, log_weights.exp(), 0.0)
    weights = (
        plain if rejection is None else _bounded(plain, log_ratio, mask, cu_seqlens, rejection)
    )
    return weights, {"behave_weight": weights, "rejected": (weights != plain).float()}


def _bounded(
    weights: torch.Tensor,
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rejection: RejectionSamplingConfig,
) -> torch.Tensor:
    values, zeros = log_ratio, torch.zeros_like(log_ratio)
    if rejection.metric == "kl_k3_behave":
        values = kl_estimate(zeros, log_ratio, "k3")
    elif rejection.metric != "ratio":  # estimates of KL(prox || behave), as AReaL has them
        values = kl_estimate(log_ratio, zeros, _KL_METRICS[rejection.metric])
    if rejection.level == "sequence":
        values = by_sequence(values, mask, cu_seqlens, rejection.agg)
    metric = values.clamp(max=MAX_LOG_RATIO).exp() if rejection.metric == "ratio" else values
    lower = -torch.inf if rejection.lower is None else rejection.lower
    inside = (metric >= lower) & (metric <= rejection.upper)
    outside = zeros if rejection.action == "mask" else weights.clamp(lower, rejection.upper)
    weights = torch.where(mask & ~inside, outside, weights)
    return weights if rejection.weight_upper is None else weights.clamp(max=rejection.weight_upper)


PROX_LOGP_METHODS = ("recompute", "loglinear", "metrics", "reuse_train_logp")


def prox_alpha(versions: torch.Tensor, version: int) -> torch.Tensor:
    """Position of the proximal policy between the sampling and the current one: float32 from 0 to
    1.

    ``versions``, in any shape, are the weights that sampled each token (negative if none did),
    ``version`` those that are updated.
    """
    behind = version - versions.float()
    alpha = ((behind - 1.0) / behind.clamp(min=1.0)).clamp(0.0, 1.0)
    return torch.where(versions >= 0, alpha, 0.0)


def interpolate_prox_logp(
    behave_logp: torch.Tensor, logprobs: torch.Tensor, alpha: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Approximate the log-probabilities of the proximal policy: ``behave_logp + alpha * (logprobs -
    behave_logp)``.

    Detached float32, and 0 outside ``loss_mask``. All arguments have one shape.
    """
    mask = loss_mask.bool()
    behave_logp, logprobs = (
        torch.where(mask, x.detach().float(), 0.0) for x in (behave_logp, logprobs)
    )
    return torch.lerp(behave_logp, logprobs, alpha)  # exactly ``logprobs`` where alpha is 1


def approximation_errors(
    prox_logp: torch.Tensor,
    behave_logp: torch.Tensor,
    logprobs: torch.Tensor,
    alpha: torch.Tensor,
    mask: torch.Tensor,
) -> Stats:
    """Absolute error of approximations of the recomputed ``prox_logp``, in its shape.

    ``loglinear_error`` is the error of `interpolate_prox_logp`, ``linear_error`` of a line between
    the probabilities of sampler and trainer, ``rollout_error`` of the sampler's log-probabilities.
    """
    all_logprobs = (prox_logp, behave_logp, logprobs)
    prox_logp, behave_logp, logprobs = (
        torch.where(mask.bool(), x.detach().float(), 0.0) for x in all_logprobs
    )
    linear = ((1.0 - alpha) * behave_logp.exp() + alpha * logprobs.exp()).clamp(min=1e-10).log()
    loglinear = interpolate_prox_logp(behave_logp, logprobs, alpha, mask)
    approximations = {"loglinear": loglinear, "linear": linear, "rollout": behave_logp}
    return {f"{name}_error": (prox_logp - each).abs() for name, each in approximations.items()}


_ROLLOUT_METRICS = {"k1": "ratio", "k2": "kl_k2", "k3": "kl_k3_behave"}
_ROLLOUT_LEVELS = {
    "token": ("token", "mean"),
    "seq_sum": ("sequence", "sum"),
    "seq_mean": ("sequence", "mean"),
}
ROLLOUT_RS = {
    f"{level}_{k}": (*found, metric)
    for level, found in (_ROLLOUT_LEVELS | {"seq_max": ("sequence", "max")}).items()
    for k, metric in _ROLLOUT_METRICS.items()
    if (level, k) != ("seq_max", "k1")
}
"""Name in ``rollout_rs`` -> level, agg and metric."""
_ROLLOUT_WEIGHTS = {None: "one", "token": "token", "sequence": "sequence_product"}


def rejection_from_rollout_keys(
    rollout_is: str | None,
    is_threshold: float,
    rollout_rs: str | None,
    rs_threshold: str | float | None,
) -> RejectionSamplingConfig | None:
    """Convert verl's keys (``algorithm.rollout_correction``). None if neither ``rollout_is`` nor
    ``rollout_rs`` is set.

    verl weighs tokens by ``rollout_is`` and rejects them by ``rollout_rs``, each from the ratio of
    the trainer's probability to the sampler's. ``rollout_rs_threshold`` is an upper bound, or
    ``lower_upper``. With ``k1`` it bounds the inverse ratio, and a single number t means ``1/t_t``.

    Raises:
        ConfigError: an unknown name, several at once, or a threshold that is missing or not a
            number.
    """
    require_choice("rollout_is", rollout_is, tuple(_ROLLOUT_WEIGHTS))
    weight = _ROLLOUT_WEIGHTS[rollout_is]
    upper = None if rollout_is is None else is_threshold
    if rollout_rs is None and rs_threshold is not None:
        raise ConfigError(
            f"config key 'rollout_rs_threshold' is {rs_threshold!r}, but 'rollout_rs' is null"
        )
    if rollout_rs is None and upper is None:
        return None
    if upper is not None and not upper > 0:
        raise ConfigError(f"config key 'rollout_is_threshold' is {upper}; expected more than 0")
    if rollout_rs is None:  # nothing is rejected, weights are limited
        return RejectionSamplingConfig(upper=float("inf"), weight=weight, weight_upper=upper)
    if rollout_rs not in ROLLOUT_RS:
        raise ConfigError(
            f"config key 'rollout_rs' is {rollout_rs!r}; expected one of {', '.join(ROLLOUT_RS)}"
        )
    level, agg, metric = ROLLOUT_RS[rollout_rs]
    low, high = _bounds(rs_threshold, metric == "ratio")
    return RejectionSamplingConfig(level, "mask", metric, agg, high, low, weight, upper)


def _bounds(threshold: str | float | None, of_ratio: bool) -> tuple[float | None, float]:
    lower, _, upper = str(threshold).rpartition("_")
    try:
        low, high = float(lower or "nan"), float(upper)
    except ValueError:
        low = high = math.nan
    fits = (low > 0 if lower else high > 1) if of_ratio else not lower
    if not (high > 0 and fits):
        raise ConfigError(
            f"config key 'rollout_rs_threshold' is {threshold!r}; expected a number above 0, or, "
            "with k1, one above 1 or 'lower_upper', with a point in both (0.5_2.0; YAML reads "
            "0.5_2 as 0.52)"
        )
    if not of_ratio:
        return None, high
    return 1.0 / high, 1.0 / low if lower else high  # verl's k1 is -log r
