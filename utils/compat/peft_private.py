"""Private names of PEFT: switching layers off without changing what is trained."""

from typing import Any

from . import Private, require

_OFF = "compute with the base model of LoRA"
NAMES = (
    Private("peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters", _OFF),
    Private("peft.utils.other:AuxiliaryTrainingWrapper.disable_adapters", _OFF),
)
require("peft", NAMES)


def is_off(layer: Any) -> bool:
    """Return whether a PEFT layer computes like the layer that it replaced."""
    return bool(layer._disable_adapters)


def switch_off(layer: Any, off: bool = True) -> None:
    """Switch the adapters of a PEFT layer off, so that it computes like the layer that it replaced,
    or on again.

    PEFT's public ``enable_adapters`` also changes ``requires_grad``, which FSDP2 does not expect
    during a run.
    """
    layer._disable_adapters = off
