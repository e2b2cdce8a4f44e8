"""Names of verl: the base class of checkpoint managers, and the place where its FSDP engine looks for one."""

from pathlib import Path
from typing import Any

from . import Private, require

_SAVE = "save and load what verl's FSDP engine trains"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_BASE = "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager"

NAMES = (
    Private(_BASE, _SAVE, ("model", "optimizer", "lr_scheduler", "processing_class", "checkpoint_config")),
    Private(f"{_BASE}.save_checkpoint", _SAVE, ("local_path", "hdfs_path", "global_step", "max_ckpt_to_keep")),
    Private(f"{_BASE}.load_checkpoint", _SAVE, ("local_path", "hdfs_path", "del_local_after_load")),
    *(
        Private(f"{_BASE}.should_{do}_{what}", _SAVE)
        for do in ("save", "load")
        for what in ("model", "optimizer", "extra")
    ),
    Private("verl.utils.checkpoint.checkpoint_manager:get_checkpoint_tracker_filename", _SAVE, ("root_path",)),
    Private(f"{_ENGINE}:FSDPCheckpointManager", "take the place of verl's own checkpoint manager"),
)
require("verl", NAMES)

from verl.utils.checkpoint import checkpoint_manager  # type: ignore[import-not-found]
from verl.workers.engine.fsdp import transformer_impl  # type: ignore[import-not-found]

BaseManager: Any = checkpoint_manager.BaseCheckpointManager
"""Base class of verl's checkpoint managers."""


def tracker_of(root: Path) -> Path:
    """Return the file in which verl's trainer names the step to resume from."""
    return Path(checkpoint_manager.get_checkpoint_tracker_filename(str(root)))


def use_manager(manager: Any) -> None:
    """Make every new FSDP engine of this process save and load with ``manager``."""
    transformer_impl.FSDPCheckpointManager = manager
