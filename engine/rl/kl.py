"""KL estimates, and coefficients of the KL penalty in rewards: fixed, or adapted to keep the KL
near a target.
"""

import torch
from torch import Tensor

from ..api import StateDict
from .losses import MAX_LOG_RATIO, Stats, masked


class FixedKLController:
    """A constant coefficient ``value``."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, kl: float, n: int) -> None:
        """Do nothing. See `AdaptiveKLController.update`."""

    def state_dict(self) -> StateDict:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the coefficient."""
        self.value = float(state_dict["value"])


class AdaptiveKLController(FixedKLController):
    """A coefficient ``value`` that grows while the KL is above its target, and shrinks while it is
    below.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, arXiv 1909.08593,
    section 2.2. `PPOActor` registers it with its engine, which saves ``value`` with the optimizer.
    Target (nats per token) and horizon are not saved: a resumed run uses its configuration.
    """

    def __init__(
        self,
        value: float,
        target: float,
        horizon: int,
    ) -> None:
        super().__init__(value)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """``value *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon`` for n sequences with the
        mean ``kl``.

        n is limited to ``horizon``, else the coefficient could become negative.
        """
        error = kl / self.target - 1.0
        error = min(max(error, -0.2), 0.2)
        share = min(n / self.horizon, 1.0)
        self.value *= 1.0 + error * share


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: str = "k3",
) -> Tensor:
    """Per-token estimate of ``KL(policy || reference)`` from tokens that the policy sampled.

    With ``l = log p_ref - log p``: k1 is ``-l``, k2 is ``l^2 / 2``, k3 is ``e^l - 1 - l``
    (unbiased, never negative). ``low_var_kl`` is k3 limited to 10, as in verl and AReaL, without
    gradient beyond. ``l`` is limited to 20 under the exponential. Schulman, "Approximating KL
    Divergence", 2020, http://joschu.net/blog/kl-approx.html. k3 as a term of the loss: Shao et al.,
    "DeepSeekMath", 2024, eq. 4.

    The gradient of k1 has an expectation of 0 whatever the policy, so k1 uses the gradient of k2,
    which is the gradient of the KL in expectation (Tang and Munos, "On a few pitfalls in KL
    divergence gradient estimation for RL", 2025).
    """
    log_ratio = ref_logprobs.float() - logprobs.float()
    k2 = log_ratio.square() / 2
    if kind == "k2":
        return k2
    if kind == "k1":
        # The value of k1 with the gradient of k2.
        k1 = -log_ratio.detach()
        return k1 + (k2 - k2.detach())

    # k3, with expm1 because e^l - 1 loses its digits where l is near 0.
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    k3 = torch.expm1(log_ratio) - log_ratio
    if kind == "low_var_kl":
        k3 = k3.clamp(max=10.0)
    return k3


def kl_stats(
    name: str,
    logprobs: Tensor,
    others: Tensor,
    loss_mask: Tensor,
) -> Stats:
    """``name`` and ``<name>_k1``: k3 and k1 estimates of the KL from the sampling policy
    (``logprobs``) to ``others``.
    """
    log_ratio = (others - logprobs).detach()
    log_ratio = masked(log_ratio, loss_mask.bool())
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = kl_estimate(torch.zeros_like(log_ratio), log_ratio)
    return {
        name: k3,
        f"{name}_k1": -log_ratio,
    }
