"""Weights for tokens that another policy sampled than the one whose updates are clipped: decoupled PPO.

Asynchronous rollouts are sampled by weights that are some versions old, and by a server whose kernels are not the
trainer's. With ``use_decoupled_loss`` the ratio of the loss is taken to the proximal policy (the trainer's own, as it
stands before the update), and every token is weighed by ``w = p_prox / p_behave``: Hilton et al., "Batch
size-invariance for policy optimization", 2022; Fu et al., "AReaL", 2025, eq. 5. `RejectionSamplingConfig` bounds w.

The weights are known before the update, so they are computed once, on the padded batch.
"""

from dataclasses import dataclass

import torch

from ...utils.config import require_choice, require_range
from ...utils.errors import ConfigError
from .losses import MAX_LOG_RATIO, Stats, kl_estimate, kl_stats


@dataclass
class RejectionSamplingConfig:
    """Which tokens or sequences are too far from the policy that sampled them, and what becomes of these (AReaL)."""

    level: str = "token"
    """``token``, or ``sequence``: a sequence is judged as a whole. With the metric ``ratio`` the weight of all of its
    tokens is then the geometric mean of theirs."""
    action: str = "mask"
    """``mask``: they have no gradient; ``clamp``: their weight is limited to the bounds (truncated importance
    sampling). Either way they count where a mean is taken."""
    metric: str = "ratio"
    """``ratio`` is r = p_prox / p_behave; ``kl_k1`` log r, ``kl_k2`` (log r)^2 / 2, ``kl_k3`` 1 / r - 1 + log r."""
    agg: str = "mean"
    """How a sequence's metric is made of that of its tokens: ``mean``, ``sum`` or ``max``; of ratios by logarithms."""
    upper: float = 5.0
    """Beyond this is too far; above 1 for ``ratio``."""
    lower: float | None = None
    """Below this, too; null for no limit."""

    def __post_init__(self) -> None:
        require_choice("rejection_sampling.level", self.level, ("token", "sequence"))
        require_choice("rejection_sampling.action", self.action, ("mask", "clamp"))
        require_choice("rejection_sampling.metric", self.metric, ("ratio", "kl_k1", "kl_k2", "kl_k3"))
        require_choice("rejection_sampling.agg", self.agg, ("mean", "sum", "max"))
        if self.metric == "ratio":
            require_range("rejection_sampling.lower", self.lower, low=0.0)
            if self.upper <= 1:
                raise ConfigError(
                    f"config key 'rejection_sampling.upper' is {self.upper}; of ratios expected more than 1"
                )
        elif self.action == "clamp":
            raise ConfigError(
                f"config key 'rejection_sampling.action' is 'clamp', but its bounds are of {self.metric}, not of the "
                "weight; take metric 'ratio', or action 'mask'"
            )
        if self.lower is not None and self.lower > self.upper:
            raise ConfigError(
                f"config key 'rejection_sampling.lower' is {self.lower}, above 'rejection_sampling.upper', {self.upper}"
            )


def behave_weights(
    prox_logp: torch.Tensor,
    behave_logp: torch.Tensor,
    loss_mask: torch.Tensor,
    rejection: RejectionSamplingConfig | None,
) -> tuple[torch.Tensor, Stats]:
    """The weight of every token, 0 where it was rejected.

    Args:
        prox_logp: ``[B, S]`` log-probabilities under the proximal policy.
        behave_logp: ``[B, S]`` under the one that sampled.
        loss_mask: ``[B, S]``; outside it nothing matters.
        rejection: None: all weights as they are.

    Returns:
        ``[B, S]`` float32, 0 outside the loss mask, and the statistics ``behave_kl`` and ``behave_kl_k1`` (`kl_stats`
        of KL(behave || prox)), ``behave_weight``, and ``rejected``: 1 where the weight was changed.
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, prox_logp.float() - behave_logp.float(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if rejection is not None and rejection.level == "sequence" and rejection.metric == "ratio":
        log_weights = _of_sequence(log_ratio, mask, "mean")
    else:
        log_weights = log_ratio
    plain = torch.where(mask, log_weights.exp(), 0.0)
    weights = plain if rejection is None else _bounded(plain, log_ratio, mask, rejection)
    stats = {"behave_weight": weights, "rejected": (weights != plain).float()}
    return weights, {**kl_stats("behave_kl", behave_logp, prox_logp, mask), **stats}


def _bounded(
    weights: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor, rejection: RejectionSamplingConfig
) -> torch.Tensor:
    values = log_ratio
    if rejection.metric != "ratio":  # estimates of KL(prox || behave), as AReaL has them
        values = kl_estimate(log_ratio, torch.zeros_like(log_ratio), rejection.metric.removeprefix("kl_"))
    if rejection.level == "sequence":
        values = _of_sequence(values, mask, rejection.agg)
    metric = values.clamp(max=MAX_LOG_RATIO).exp() if rejection.metric == "ratio" else values
    lower = -torch.inf if rejection.lower is None else rejection.lower
    inside = (metric >= lower) & (metric <= rejection.upper)
    outside = torch.zeros_like(weights) if rejection.action == "mask" else weights.clamp(lower, rejection.upper)
    return torch.where(mask & ~inside, outside, weights)


def _of_sequence(values: torch.Tensor, mask: torch.Tensor, agg: str) -> torch.Tensor:
    """What a row has of its tokens in the mask, at all of its tokens; 0 without such."""
    counts = mask.sum(1, keepdim=True)
    if agg == "max":
        largest = values.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
        return torch.where(counts > 0, largest, 0.0).expand_as(values)
    sums = torch.where(mask, values, 0.0).sum(1, keepdim=True)
    return (sums / counts.clamp(min=1) if agg == "mean" else sums).expand_as(values)
