"""Names of verl: the base class of checkpoint managers, and the places where its FSDP engines look
for one.
"""

import sys
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
            *(
                f"{_BASE}.should_{do}_{what}"
                for do in ("save", "load")
                for what in ("model", "optimizer", "extra")
            ),
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
    """Make every new FSDP engine of this process save and load with ``manager``, also VeOmni's if
    it is installed.
    """
    veomni: Any = sys.modules.get(
        "verl.workers.engine.veomni.transformer_impl"
    )  # verl imports it if it can
    for module in (transformer_impl, veomni):
        if module is not None:
            module.FSDPCheckpointManager = manager


def count_expert_ranks() -> int:
    """Return the number of ranks that VeOmni has dealt the experts to, unknown to DTensor."""
    veomni: Any = sys.modules.get("veomni.distributed.parallel_state")
    state = None if veomni is None else veomni.get_parallel_state()
    return state.ep_size if state is not None and state.ep_enabled else 1
