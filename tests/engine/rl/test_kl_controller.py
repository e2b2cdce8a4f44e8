"""Coefficients of the KL in rewards."""

import math

import pytest

from holdfast.engine.api import Stateful
from holdfast.engine.rl.kl import AdaptiveKLController, FixedKLController


@pytest.mark.parametrize("kls", [[0.3] * 5, [0.01] * 5, [0.11, 0.09, 0.1, 0.5, 0.0]])
def test_an_adaptive_coefficient_follows_its_formula_and_continues_from_its_state(
    kls: list[float],
) -> None:
    controller, value = AdaptiveKLController(0.2, 0.1, 100), 0.2
    for kl in kls:
        restored = AdaptiveKLController(9.0, 0.1, 100)
        restored.load_state_dict(controller.state_dict())
        controller.update(kl, 16)
        restored.update(kl, 16)
        value = value * (1 + max(min(kl / 0.1 - 1, 0.2), -0.2) * 16 / 100)
        assert controller.value == restored.value and math.isclose(
            controller.value, value, rel_tol=1e-12
        )


def test_a_batch_beyond_the_horizon_does_not_turn_the_coefficient_around() -> None:
    controller = AdaptiveKLController(0.2, 0.1, 10)
    controller.update(0.0, 1000)
    assert controller.value == pytest.approx(0.16)


def test_a_fixed_coefficient_stays() -> None:
    controller = FixedKLController(0.2)
    controller.update(5.0, 100)
    assert controller.value == 0.2 and isinstance(controller, Stateful)
