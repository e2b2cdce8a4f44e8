"""verl's FSDP and VeOmni engines with Holdfast's checkpoints. Importing this module in a worker
enables it.

    python -m verl.trainer.main_ppo actor_rollout_ref.model.external_lib=holdfast.integrations.verl
    \\
        critic.model.external_lib=holdfast.integrations.verl actor_rollout_ref.actor.strategy=fsdp2
        ...

Every Ray worker imports ``external_lib``, and every process imports the modules in
``VERL_USE_EXTERNAL_MODULES``. ``global_step_<N>/actor`` (and ``critic``) then hold ``dcp``, which
any number of ranks can load, and ``huggingface``.
"""

from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

from ..engine.dcp.load import load_dcp
from ..engine.dcp.save import save_dcp
from ..engine.dcp.state import DCPState
from ..engine.hf.save import save_hf
from ..recover.engines import HostEngine
from ..utils.compat.verl_private import BaseManager, count_expert_ranks, tracker_of, use_manager
from ..utils.distributed import control_group, rank_zero_decides
from ..utils.errors import CheckpointNotFoundError, ConfigError
from ..utils.files import remove_folder
from ..utils.logging import get_logger
from .verl_retention import DCP, parse_step_folder, retire

logger = get_logger(__name__)

PROTOCOL = (
    "verl's trainer writes actor, critic, data.pt and the tracker one after another: each model "
    "is complete or not there at all, but a step is resumed only once the tracker names it, the "
    "tracker itself is written in place, and what a rollout has sampled is sampled again"
)
"""Limits of every checkpoint manager of verl, because its trainer writes several files one after
another.
"""

_HF = "huggingface"


class HoldfastCheckpointManager(BaseManager):
    """Checkpoint manager for one FSDP2 engine of verl, in place of its ``FSDPCheckpointManager``.

    ``save_contents`` and ``load_contents`` are verl's: ``model``, ``optimizer``, ``extra``
    (schedule and random generators, only together with the optimizer) and ``hf_model``.
    ``tokenizer`` is verl's older name of ``processing_class``.

    Raises:
        ConfigError: the model is not sharded with FSDP2, or the contents cannot be saved.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
        tokenizer: Any = None,
        **_: Any,
    ) -> None:
        if not isinstance(model, FSDPModule):
            raise ConfigError(
                f"a {type(model).__name__} is not sharded with FSDP2: set strategy=fsdp2"
            )

        # Each rank has other experts under the same names then.
        n_ranks = count_expert_ranks()
        if n_ranks > 1:
            raise ConfigError(
                f"VeOmni deals the experts to {n_ranks} ranks under the same names, so that a "
                "checkpoint would hold those of one rank; set expert_parallel_size=1"
            )
        if processing_class is None:
            processing_class = tokenizer
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config)

        # verl has set the contents. Schedule and generators are in the optimizer's part.
        contents_of = {"save": self.checkpoint_save_contents, "load": self.checkpoint_load_contents}
        for verb, contents in contents_of.items():
            lacks_optimizer = "extra" in contents and "optimizer" not in contents
            if "model" not in contents or lacks_optimizer:
                raise ConfigError(
                    f"checkpoint.{verb}_contents is {list(contents)}; expected 'model', and "
                    "'extra' (schedule and generators) only together with 'optimizer'"
                )
        self._group = control_group()
        if self.rank == 0:
            logger.warning("%s", PROTOCOL)

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save to ``local_path``. An earlier save of the same step is replaced when this one is
        complete.

        Then older steps are removed. ``max_ckpt_to_keep`` steps stay, including those of earlier
        processes, and the step that verl's tracker names, which verl updates later.

        Raises:
            CheckpointWriteError: a rank could not write. The old contents are untouched.
        """
        if local_path is None:
            return
        path = Path(local_path)
        hf = path / _HF
        self.previous_global_step = global_step
        rank_zero_decides(partial(path.mkdir, parents=True, exist_ok=True), self._group)
        save_dcp(
            path / DCP,
            self._state(self.should_save_optimizer, self.should_save_extra),
            self._group,
            replace=True,
        )

        # An export of an earlier save does not stay next to other weights.
        rank_zero_decides(lambda: remove_folder(hf) if hf.exists() else None, self._group)
        if self.should_save_hf_model:
            save_hf(self.model, hf, group=self._group, tokenizer=self.processing_class)
        else:  # for verl's merger
            rank_zero_decides(partial(self._save_config, hf), self._group)

        # Older steps go only now that this one is complete.
        rank_zero_decides(
            lambda: retire(path, max_ckpt_to_keep, _named_by_tracker(path)), self._group
        )

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Load a checkpoint of `save_checkpoint` on any number of ranks, after comparing every
        digest.

        Raises:
            CheckpointNotFoundError: nothing is there, or only files of verl's own manager.
            CheckpointCorruptError, CheckpointMismatchError: as `load_dcp`. No parameter was
                changed.
        """
        if local_path is None:
            return
        path = Path(local_path)
        if not rank_zero_decides((path / DCP).is_dir, self._group):
            theirs = ""
            if any(path.glob("*.pt")):
                theirs = " but files of verl's own manager: resume once without external_lib"
            raise CheckpointNotFoundError(f"{path} has no {DCP!r} of Holdfast{theirs}")
        state = self._state(self.should_load_optimizer, self.should_load_extra)
        load_dcp(path / DCP, state, self._group)

    def _save_config(self, hf: Path) -> None:
        self.model.config.save_pretrained(hf)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(hf)

    def _state(self, with_optim: bool, with_extra: bool) -> DCPState:
        scheduler = self.lr_scheduler if with_extra else None
        engine = HostEngine(self.model, self.optimizer, scheduler, self._group)
        return engine.dcp_state(with_optim)


def _named_by_tracker(saved: Path) -> int | None:
    """The step in verl's tracker, which lies in the root of the run."""
    place = parse_step_folder(saved)
    if place is None:
        return None
    root, _, _ = place
    try:
        return int(tracker_of(root).read_text())
    except (OSError, ValueError):  # no tracker yet, or one torn by a kill
        return None


use_manager(HoldfastCheckpointManager)
