"""Losses of the critic and of supervised fine-tuning, and KL estimates, as pure functions of per-token tensors.

All per-token arguments have one common shape (``[T]`` packed, or ``[B, S]``), are computed in float32 and are aligned
with the token they are about. Entries where ``loss_mask`` is 0 may hold anything, NaN included: they
touch neither the result nor the gradient.
"""

import torch

from ..api import Batch

MAX_LOG_RATIO = 20.0
"""Beyond e^20 a ratio says nothing but can overflow, and an infinite ratio would make the gradient NaN."""

Stats = dict[str, torch.Tensor]
"""Detached per-token tensors, to be averaged over the loss mask."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``values`` where ``mask`` is not 0; 0 (still connected to the graph) where it is 0 everywhere."""
    mask = mask.bool()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def count_loss_tokens(micro_batch: Batch) -> torch.Tensor:
    """The weight of a micro-batch's mean: its number of loss tokens, a float32 scalar (a `LossWeightFn`)."""
    return micro_batch["loss_mask"].bool().sum().float()


def sft_loss(logprobs: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Cross entropy: mean of ``-log p(token)`` over the loss tokens, a scalar."""
    return masked_mean(-logprobs, loss_mask)


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: str = "k3") -> torch.Tensor:
    """Per-token estimate of ``KL(policy || reference)`` from tokens the policy drew.

    With ``l = log p_ref - log p``: k1 is ``-l``, k2 is ``l^2 / 2``, k3 is ``e^l - 1 - l`` (unbiased, never negative).
    ``low_var_kl`` is k3 limited to 10, as in verl and AReaL: no gradient beyond. Schulman, "Approximating KL
    Divergence", 2020, http://joschu.net/blog/kl-approx.html; k3 as a term of the loss: Shao et al., "DeepSeekMath",
    2024, eq. 4. ``l`` is limited to 20 under the exponential.

    The gradient is that of the value but for k1, whose own has an expectation of 0 whatever the policy: it is that of
    k2, which is the gradient of the KL in expectation (Tang and Munos, "On a few pitfalls in KL divergence gradient
    estimation for RL", 2025).
    """
    log_ratio = ref_logprobs.float() - logprobs.float()
    k2 = log_ratio.square() / 2
    if kind == "k1":
        return -log_ratio.detach() + (k2 - k2.detach())
    if kind == "k2":
        return k2
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    k3 = torch.expm1(log_ratio) - log_ratio
    return k3.clamp(max=10.0) if kind == "low_var_kl" else k3


def kl_stats(name: str, logprobs: torch.Tensor, others: torch.Tensor, loss_mask: torch.Tensor) -> Stats:
    """``name`` and ``<name>_k1``: k3 and k1 estimates of the KL from the policy that drew the tokens to another one.

    Args:
        name: of the statistic.
        logprobs: of the policy that drew the tokens.
        others: of the other one, in the same shape.
        loss_mask: outside it nothing matters.
    """
    log_ratio = torch.where(loss_mask.bool(), (others - logprobs).detach().float(), 0.0)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {name: kl_estimate(torch.zeros_like(log_ratio), log_ratio), f"{name}_k1": -log_ratio}


def ppo_critic_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    eps_clip: float = 0.5,
) -> tuple[torch.Tensor, Stats]:
    """Clipped value loss of each token: ``max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) / 2``.

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", 2015, keep the value
    function near the old one; the clipped form is that of the reference implementation of PPO (OpenAI baselines).

    Returns:
        losses in the shape of the arguments, and the stats ``value``, ``value_clip_fraction`` and ``value_error``
        (``|v - R|``).
    """
    mask = loss_mask.bool()
    values, old_values, returns = (torch.where(mask, x.float(), 0.0) for x in (values, old_values, returns))
    held = torch.maximum(torch.minimum(values, old_values + eps_clip), old_values - eps_clip)
    plain, clipped = (values - returns).square(), (held - returns).square()
    stats = {
        "value": values,
        "value_clip_fraction": (clipped > plain).float(),
        "value_error": (values - returns).abs(),
    }
    return torch.maximum(plain, clipped) / 2, {name: value.detach() for name, value in stats.items()}
