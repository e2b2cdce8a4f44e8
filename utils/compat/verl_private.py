"""Names of verl: the base class of checkpoint managers, and the place where its FSDP engine looks for one."""

from pathlib import Path
from typing import Any

from . import privates, require

_MANAGER = "verl.utils.checkpoint.checkpoint_manager"
_BASE = f"{_MANAGER}:BaseCheckpointManager"

NAMES = privates(
    {
        "save and load what verl's FSDP engine trains": [
            f"{_BASE}(model, optimizer, lr_scheduler, processing_class, checkpoint_config)",
            f"{_BASE}.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)",
            f"{_BASE}.load_checkpoint(local_path, hdfs_path, del_local_after_load)",
            *(f"{_BASE}.should_{do}_{what}" for do in ("save", "load") for what in ("model", "optimizer", "extra")),
            f"{_MANAGER}:get_checkpoint_tracker_filename(root_path)",
        ],
        "take the place of verl's own checkpoint manager": [
            "verl.workers.engine.fsdp.transformer_impl:FSDPCheckpointManager"
        ],
    }
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
