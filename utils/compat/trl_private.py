"""What TRL's trainers keep to themselves and change while they train: what a run resumed has to find again."""

from collections.abc import Mapping
from typing import Any

import torch

from . import require_attributes

_METRICS = ("_metrics", "_total_train_tokens")
_BUFFER = ("_step", "_buffered_inputs")
_SAMPLING = (*_BUFFER, "_current_train_step_time", *_METRICS)
_ENTROPY = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")

KEPT: dict[str, tuple[str, ...]] = {
    "DPOTrainer": _METRICS,
    "DistillationTrainer": _SAMPLING,
    "GRPOTrainer": (*_SAMPLING, *_ENTROPY),
    "KTOTrainer": _METRICS,
    "RLOOTrainer": _SAMPLING,
    "RewardTrainer": _METRICS,
    "SFTTrainer": _METRICS,
}
"""Class of ``trl.trainer`` -> attributes that its training changes. Not among them are the texts of the completions
sampled last, which are only shown, and which weights vLLM has: it is given those that were restored."""


def kept_by(trainer: Any) -> tuple[str, ...]:
    """What a trainer has of those in `KEPT`.

    Raises:
        UnsupportedVersionError: its class has a buffer of samples in TRL as it is known here, and the installed one's
            has none under this name.
    """
    known = next((KEPT[cls.__name__] for cls in type(trainer).__mro__ if is_trls(cls) and cls.__name__ in KEPT), ())
    if "_step" in known:
        require_attributes("trl", trainer, _BUFFER, "go on with what was sampled before a snapshot")
    return tuple(name for name in known if hasattr(trainer, name))


def is_trls(cls: type) -> bool:
    """Whether a class is one of TRL's stable trainers, or a base of these; not one of ``trl.experimental``."""
    return cls.__module__.startswith("trl.trainer.")


def forget_buffer(trainer: Any, batches: int) -> bool:
    """Have a trainer that samples do so at its next step, since what it has in its buffer was cut otherwise; whether it
    is such a trainer.

    Args:
        trainer: of any class.
        batches: of the loader that were given in this epoch.
    """
    if not hasattr(trainer, "_buffered_inputs"):
        return False
    trainer._buffered_inputs, trainer._step = None, batches
    return True


def restore_kept(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Put attributes back; tensors go to the trainer's device, metrics into the dictionaries that are there."""
    for name, value in saved.items():
        if name == "_metrics":
            for mode, metrics in value.items():
                trainer._metrics[mode].clear()
                trainer._metrics[mode].update(metrics)
        else:
            setattr(trainer, name, _to_device(value, trainer.args.device))


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(each, device) for key, each in value.items()}
    return [_to_device(each, device) for each in value] if isinstance(value, list) else value
