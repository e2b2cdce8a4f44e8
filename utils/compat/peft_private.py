"""What peft keeps to itself: how its layers are switched off without a change of what is trained."""

from typing import Any

from . import Private, require

_OFF = "compute with the base model of LoRA"
NAMES = (
    Private("peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters", _OFF),
    Private("peft.utils.other:AuxiliaryTrainingWrapper.disable_adapters", _OFF),
)
require("peft", NAMES)


def is_off(layer: Any) -> bool:
    """Whether a layer of peft computes as what it has replaced."""
    return bool(layer._disable_adapters)


def switch_off(layer: Any, off: bool = True) -> None:
    """Have a layer of peft compute as what it has replaced, or not.

    The public ``enable_adapters`` changes ``requires_grad`` as well, which FSDP2 does not expect during a run.
    """
    layer._disable_adapters = off
