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
from torch import Tensor

from ...utils.config import require_choice, require_numbers, require_range
from ...utils.errors import ConfigError
from .kl import kl_estimate
from .losses import MAX_LOG_RATIO, Stats, by_sequence, masked

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
        if self.weight is not None:
            return self.weight
        of_sequence = self.level == "sequence" and self.metric == "ratio"
        return "sequence_mean" if of_sequence else "token"

    def __post_init__(self) -> None:
        require_numbers(self, "rejection_sampling.")
        require_choice("rejection_sampling.level", self.level, ("token", "sequence"))
        require_choice("rejection_sampling.weight", self.weight, (None, *_WEIGHTS))
        require_range("rejection_sampling.weight_upper", self.weight_upper, low=0.0)
        require_choice("rejection_sampling.action", self.action, ("mask", "clamp"))
        require_choice("rejection_sampling.metric", self.metric, ("ratio", *_KL_METRICS))
        require_choice("rejection_sampling.agg", self.agg, ("mean", "sum", "max"))

        # Bounds that fit the metric, and something that the action can act on.
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
    prox_logp: Tensor,
    behave_logp: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    rejection: RejectionSamplingConfig | None,
) -> tuple[Tensor, Stats]:
    """Weight of every token from its ``[T]`` log-probabilities under the proximal and the sampling
    policy.

    Returns:
        ``[T]`` float32, 0 outside the loss mask and for rejected tokens, and the statistics
        ``behave_weight``, and
        ``rejected``: 1 where the weight was changed.
    """
    mask = loss_mask.bool()
    log_ratio = prox_logp.float() - behave_logp.float()
    log_ratio = masked(log_ratio, mask)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    # The token's own ratio, that of its sequence, or 1.
    weighs = "token" if rejection is None else rejection.weighs
    agg = _WEIGHTS[weighs]
    log_weights = log_ratio
    if weighs == "one":
        log_weights = torch.zeros_like(log_ratio)
    elif agg is not None:
        log_weights = by_sequence(log_ratio, mask, cu_seqlens, agg)
        log_weights = log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    plain = masked(log_weights.exp(), mask)

    weights = plain
    if rejection is not None:
        weights = _bounded(plain, log_ratio, mask, cu_seqlens, rejection)
    is_changed = weights != plain
    return weights, {
        "behave_weight": weights,
        "rejected": is_changed.float(),
    }


def _bounded(
    weights: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    rejection: RejectionSamplingConfig,
) -> Tensor:
    # The distance from the sampling policy. Estimates are of KL(prox || behave), as AReaL has them.
    metric = log_ratio
    zeros = torch.zeros_like(log_ratio)
    if rejection.metric == "kl_k3_behave":
        metric = kl_estimate(zeros, log_ratio, "k3")
    elif rejection.metric != "ratio":
        metric = kl_estimate(log_ratio, zeros, _KL_METRICS[rejection.metric])
    if rejection.level == "sequence":
        metric = by_sequence(metric, mask, cu_seqlens, rejection.agg)
    if rejection.metric == "ratio":
        metric = metric.clamp(max=MAX_LOG_RATIO).exp()

    # What lies outside of the bounds is masked, or clamped to them.
    lower = -torch.inf if rejection.lower is None else rejection.lower
    is_inside = (metric >= lower) & (metric <= rejection.upper)
    outside = zeros
    if rejection.action == "clamp":
        outside = weights.clamp(lower, rejection.upper)
    weights = torch.where(mask & ~is_inside, outside, weights)

    if rejection.weight_upper is not None:
        weights = weights.clamp(max=rejection.weight_upper)
    return weights


PROX_LOGP_METHODS = ("recompute", "loglinear", "metrics", "reuse_train_logp")


def prox_alpha(versions: Tensor, version: int) -> Tensor:
    """Position of the proximal policy between the sampling and the current one: float32 from 0 to
    1.

    ``versions``, in any shape, are the weights that sampled each token (negative if none did),
    ``version`` those that are updated.
    """
    n_behind = version - versions.float()
    # a = (v - 1 - b) / (v - b)
    alpha = (n_behind - 1.0) / n_behind.clamp(min=1.0)
    alpha = alpha.clamp(0.0, 1.0)
    return torch.where(versions >= 0, alpha, 0.0)


def interpolate_prox_logp(
    behave_logp: Tensor,
    logprobs: Tensor,
    alpha: Tensor,
    loss_mask: Tensor,
) -> Tensor:
    """Approximate the log-probabilities of the proximal policy: ``behave_logp + alpha * (logprobs -
    behave_logp)``.

    Detached float32, and 0 outside ``loss_mask``. All arguments have one shape.
    """
    mask = loss_mask.bool()
    behave_logp = masked(behave_logp.detach(), mask)
    logprobs = masked(logprobs.detach(), mask)
    # lerp gives exactly ``logprobs`` where alpha is 1.
    return torch.lerp(behave_logp, logprobs, alpha)


def approximation_errors(
    prox_logp: Tensor,
    behave_logp: Tensor,
    logprobs: Tensor,
    alpha: Tensor,
    mask: Tensor,
) -> Stats:
    """Absolute error of approximations of the recomputed ``prox_logp``, in its shape.

    ``loglinear_error`` is the error of `interpolate_prox_logp`, ``linear_error`` of a line between
    the probabilities of sampler and trainer, ``rollout_error`` of the sampler's log-probabilities.
    """
    mask = mask.bool()
    prox_logp = masked(prox_logp.detach(), mask)
    behave_logp = masked(behave_logp.detach(), mask)
    logprobs = masked(logprobs.detach(), mask)

    # On a line between log-probabilities, and on one between probabilities.
    loglinear = interpolate_prox_logp(behave_logp, logprobs, alpha, mask)
    linear = (1.0 - alpha) * behave_logp.exp() + alpha * logprobs.exp()
    linear = linear.clamp(min=1e-10).log()
    return {
        "loglinear_error": (prox_logp - loglinear).abs(),
        "linear_error": (prox_logp - linear).abs(),
        "rollout_error": (prox_logp - behave_logp).abs(),
    }


_ROLLOUT_METRICS = {"k1": "ratio", "k2": "kl_k2", "k3": "kl_k3_behave"}
_ROLLOUT_LEVELS = {
    "token": ("token", "mean"),
    "seq_sum": ("sequence", "sum"),
    "seq_mean": ("sequence", "mean"),
    "seq_max": ("sequence", "max"),
}
ROLLOUT_RS = {
    f"{name}_{k}": (level, agg, metric)
    for name, (level, agg) in _ROLLOUT_LEVELS.items()
    for k, metric in _ROLLOUT_METRICS.items()
    if f"{name}_{k}" != "seq_max_k1"  # which verl does not have
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

    # Without ``rollout_rs`` nothing is rejected, and weights are limited.
    if rollout_rs is None:
        return RejectionSamplingConfig(
            upper=float("inf"),
            weight=weight,
            weight_upper=upper,
        )

    if rollout_rs not in ROLLOUT_RS:
        raise ConfigError(
            f"config key 'rollout_rs' is {rollout_rs!r}; expected one of {', '.join(ROLLOUT_RS)}"
        )
    level, agg, metric = ROLLOUT_RS[rollout_rs]
    low, high = _bounds(rs_threshold, metric == "ratio")
    return RejectionSamplingConfig(
        level=level,
        action="mask",
        metric=metric,
        agg=agg,
        upper=high,
        lower=low,
        weight=weight,
        weight_upper=upper,
    )


def _bounds(
    threshold: str | float | None,
    of_ratio: bool,
) -> tuple[float | None, float]:
    lower, _, upper = str(threshold).rpartition("_")
    try:
        low = float(lower or "nan")
        high = float(upper)
    except ValueError:
        low = high = math.nan

    if not of_ratio:
        fits = not lower
    elif lower:
        fits = low > 0
    else:
        fits = high > 1
    if not (high > 0 and fits):
        raise ConfigError(
            f"config key 'rollout_rs_threshold' is {threshold!r}; expected a number above 0, or, "
            "with k1, one above 1 or 'lower_upper', with a point in both (0.5_2.0; YAML reads "
            "0.5_2 as 0.52)"
        )

    if not of_ratio:
        return None, high
    # verl's k1 is -log r, so these are bounds of 1 / r.
    most = 1.0 / low if lower else high
    return 1.0 / high, most
