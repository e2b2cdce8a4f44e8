"""Coefficients of the KL penalty in rewards: fixed, or adapted so that the KL stays near a target.

An adaptive one has state, which `PPOActor` hands to its engine: it is saved with the optimizer, in the same folder.
"""

from typing import Any


class FixedKLController:
    """A coefficient that stays as it is.

    Attributes:
        value: the coefficient.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, kl: float, n: int) -> None:
        """Nothing changes; see `AdaptiveKLController.update`."""

    def state_dict(self) -> dict[str, Any]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a coefficient back."""
        self.value = float(state_dict["value"])


class AdaptiveKLController(FixedKLController):
    """A coefficient that grows while the KL is above its target, and shrinks while it is below.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, arXiv 1909.08593, section 2.2. Target
    and horizon are no state: a run that is resumed has those of its configuration.

    Attributes:
        value: the coefficient.
        target: KL in nats a token.
        horizon: sequences in which a KL that stays 20 % off changes the coefficient by about a fifth.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        super().__init__(value)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, n: int) -> None:
        """``value *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon``.

        Args:
            kl: of the batch, in nats a token.
            n: sequences in it; more than ``horizon`` count as so many, else the coefficient could become negative.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(n / self.horizon, 1.0)


def make_kl_controller(value: float, target: float | None, horizon: int) -> FixedKLController:
    """An adaptive one if there is a target."""
    return FixedKLController(value) if target is None else AdaptiveKLController(value, target, horizon)
