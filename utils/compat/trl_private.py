"""Private attributes of TRL's trainers that change during training and must be restored."""

from collections.abc import Mapping
from typing import Any

import torch

from . import require_attributes

# Attributes that several trainers share.
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
"""Maps a class of ``trl.trainer`` to the attributes that its training changes.

Left out are the texts of the last completions, which are only shown, and the weights that vLLM has,
because it receives the restored ones.
"""


def kept_by(trainer: Any) -> tuple[str, ...]:
    """Return the attributes in `KEPT` that a trainer has.

    Raises:
        UnsupportedVersionError: the trainer's class should have a buffer of samples, but the
            installed TRL has none under this name.
    """
    # The nearest class of TRL decides, because users derive their own from it.
    known: tuple[str, ...] = ()
    for cls in type(trainer).__mro__:
        if is_trls(cls) and cls.__name__ in KEPT:
            known = KEPT[cls.__name__]
            break

    # Without its buffer, a trainer would sample other completions than before the stop.
    if "_step" in known:
        require_attributes("trl", trainer, _BUFFER, "go on with what was sampled before a snapshot")
    return tuple(name for name in known if hasattr(trainer, name))


def is_trls(cls: type) -> bool:
    """Return whether a class is one of TRL's stable trainers or a base of them, and not one of
    ``trl.experimental``.
    """
    return cls.__module__.startswith("trl.trainer.")


def forget_buffer(trainer: Any, batches: int) -> bool:
    """Make a trainer that samples do so at its next step, because its buffer was cut for other
    batches.

    ``batches`` is the number that the loader has given in this epoch. Returns whether the trainer
    samples.
    """
    if not hasattr(trainer, "_buffered_inputs"):
        return False
    trainer._buffered_inputs = None
    trainer._step = batches
    return True


def restore_kept(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Restore attributes. Tensors go to the trainer's device, metrics into the existing
    dictionaries.
    """
    for name, value in saved.items():
        # These are defaultdicts, and stay so.
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
    if isinstance(value, list):
        return [_to_device(each, device) for each in value]
    return value
