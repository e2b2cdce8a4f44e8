"""`RecoverHandler`: snapshot a run when it is due, and bring it back to exactly there.

One generation holds everything a run is made of: every engine's shards, every process's generators, the data cursor,
the step, and the user's own objects. It becomes visible by one rename, after every rank has written, fsynced and
reported its files. The order of a dump is the order of `_write_generation`; the order of a load is choose and verify,
compare with the engines (nothing is touched before), data cursor, engines, user objects, generators.
"""

import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from ..engine.api import FinetuneSpec, Stateful, StepInfo
from ..utils.distributed import get_rank
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError, ConfigError
from ..utils.files import write_durably
from ..utils.logging import get_logger
from ..utils.manifest import FileEntry, seal_files
from ..utils.staging import as_write_error
from .config import RecoverConfig
from .dataloader import restore_dataloader
from .info import INFO_NAME, RecoverInfo
from .ranks import DrivenRanks, LocalRanks, RankGroup, Ranks, RankTarget, rank_target
from .schedule import SnapshotSchedule
from .snapshot import (
    DATA_STATE,
    DRIVER_STATE,
    check_bytes,
    check_rank,
    load_plain,
    pack_plain,
    read_process_state,
    read_rank,
    unpack_plain,
    weight_versions,
    write_process_state,
    write_rank,
)
from .store import Generation, GenerationStore

logger = get_logger(__name__)


class RecoverHandler:
    """Snapshots and restores one run. Under torchrun every rank makes one and calls it; under Ray the driver does.

    Args:
        config: where, how often, and what to do at the start.
        ft_spec: how the run is cut into epochs; a generation of a run that was cut differently is refused.
        group: gloo group of the ranks, under torchrun; None is the default group.
    """

    def __init__(self, config: RecoverConfig, ft_spec: FinetuneSpec, *, group: dist.ProcessGroup | None = None) -> None:
        self.config, self.ft_spec = config, ft_spec
        self.store = GenerationStore(config.recover_root)
        self.schedule = SnapshotSchedule(config.freq_epochs, config.freq_steps, config.freq_secs)
        self._group = group
        self._stateful: dict[str, Stateful] = {}
        self._run_id = uuid.uuid4().hex
        self._resume_path = None if config.resume_path is None else Path(config.resume_path).resolve()
        self._loaded = self._closed = False
        if config.mode != "off" and (config.freq_epochs, config.freq_steps, config.freq_secs) == (None, None, None):
            logger.warning(
                "none of recover.freq_epochs, freq_steps and freq_secs is set: only forced snapshots are made"
            )

    def register(self, name: str, thing: Stateful) -> None:
        """Have an object of this process saved and restored with every generation.

        Args:
            name: unique; the key in the file.
            thing: its state may hold tensors, numbers, strings, lists and dicts.

        Raises:
            ConfigError: the name is taken, or the object has no ``state_dict``/``load_state_dict``.
        """
        if name in self._stateful:
            raise ConfigError(f"an object is already registered as {name!r}")
        if not isinstance(thing, Stateful):
            raise ConfigError(f"{name!r} is a {type(thing).__name__}, which lacks state_dict/load_state_dict")
        self._stateful[name] = thing

    def load(self, engine: Any, dataloader: Stateful | None = None) -> RecoverInfo | None:
        """Bring the run back to its newest sound generation.

        Args:
            engine: one engine, a dict of named ones, or a `WorkerGroup` whose workers show theirs.
            dataloader: anything with ``state_dict``/``load_state_dict``. Only one that says it is ``rank_independent``
                (see `ResumableDataLoader`) can be resumed by another number of processes.

        Returns:
            what was restored, or None when there is nothing to resume and the run starts at step 0.

        Raises:
            CheckpointCorruptError: there was something to resume, but nothing of it is usable.
            CheckpointNotFoundError: mode ``must`` or ``resume_path``, and there is nothing.
            CheckpointMismatchError, DatasetMismatchError: the generation is not of this job. Nothing was changed.
        """
        self._require_open()
        if self.config.mode == "off":
            return None
        started, ranks = time.monotonic(), self._ranks(engine)
        choice = self._choose_verified(ranks)
        if choice is None:
            self._loaded = True
            return None
        path, info = choice
        ranks.run_all(check_rank, str(path))
        ranks.here(partial(self._restore_data, ranks.n_callers, path, dataloader))
        ranks.run_all(read_rank, str(path), info.weight_versions)
        if ranks.is_driver:
            read_process_state(path, DRIVER_STATE, self._stateful)
        ranks.decide(partial(self._set_aside_newer, path, info.last_step_info.global_step))
        self._run_id = info.run_id
        self.schedule.mark(info.last_step_info)
        self._loaded = True
        logger.info("resumed from %s in %.3f s", path, time.monotonic() - started)
        return info

    def dump(
        self, engine: Any, step_info: StepInfo, dataloader: Stateful | None = None, *, force: bool = False
    ) -> bool:
        """Snapshot the run after the step ``step_info``, if one is due; returns when it is committed.

        Args:
            engine: as for `load`.
            step_info: the step that was just trained.
            dataloader: as for `load`; its cursor must be that of the last trained batch.
            force: snapshot although none is due (but never one step twice).

        Returns:
            whether a generation was made.

        Raises:
            CheckpointWriteError: any rank could not write; older generations are untouched, and no new one is visible
                (but see `GenerationStore.commit`). Training can go on; the next due step is tried again.
            ConfigError: a user object's state could not be read back, `load` was not called before, or the step lies
                before one that is there already.
        """
        self._require_open()
        if self.config.mode == "off":
            return False
        if not self._loaded:
            raise ConfigError("dump was called before load: whether the run is to be resumed must be known first")
        ranks = self._ranks(engine)
        if not ranks.decide(lambda: self._is_due(step_info, force)):
            return False
        started = time.monotonic()
        generation, n_bytes = self._write_generation(ranks, step_info, dataloader)
        self.schedule.mark(step_info)
        seconds = time.monotonic() - started
        logger.info(
            "step %d: committed %s, %d bytes in %.3f s", step_info.global_step, generation.path, n_bytes, seconds
        )
        ranks.decide(lambda: self.store.retire(self.config.max_ckpt_to_keep))
        return True

    def wait(self) -> None:
        """Return when every snapshot that `dump` has begun is committed, which a `dump` that returned already is."""
        self._require_open()

    def close(self) -> None:
        """Take no more snapshots; may be called twice."""
        self._closed = True

    # Dump

    def _is_due(self, step_info: StepInfo, force: bool) -> bool:
        if not (force or self.schedule.due(step_info)):
            return False
        newest = max((generation.step for generation in self.store.generations()), default=-1)
        if newest > step_info.global_step:
            raise ConfigError(
                f"step {step_info.global_step} is to be snapshotted, but {self.store.root} holds step {newest}: the "
                "job went back. Start from the step after the one that load returned"
            )
        return newest < step_info.global_step

    def _write_generation(
        self, ranks: Ranks, step_info: StepInfo, dataloader: Stateful | None
    ) -> tuple[Generation, int]:
        step = step_info.global_step
        staging = ranks.decide(lambda: self.store.open_staging(step))
        try:
            data = _data_states(ranks, dataloader)  # first: asking torchdata's loader may draw a number
            written = [entry for rank in ranks.run_all(write_rank, str(staging)) for entry in rank]
            versions = ranks.run_all(weight_versions)[0]
            resume_path = None if self._resume_path is None else str(self._resume_path)
            info = RecoverInfo(step_info, self._run_id, ranks.world_size, versions, resume_path)
            return ranks.decide(partial(self._commit, ranks, staging, info, written, data))
        except BaseException:
            if ranks.is_decider:
                self.store.discard(staging)
            raise

    def _commit(
        self, ranks: Ranks, staging: Path, info: RecoverInfo, written: list[FileEntry], data: dict[str, Any] | None
    ) -> tuple[Generation, int]:
        files = {INFO_NAME: info.to_json()}
        if data is not None:
            files[DATA_STATE] = pack_plain("dataloader state", data)
        with as_write_error(staging):
            for name, content in files.items():
                write_durably(staging / name, content)
            entries = written + seal_files(staging, files)
            if ranks.is_driver:
                entries += write_process_state(str(staging), DRIVER_STATE, self._stateful)
        generation = self.store.commit(staging, info.last_step_info.global_step, entries, _manifest_facts(info))
        return generation, sum(entry.bytes for entry in entries)

    # Load

    def _choose_verified(self, ranks: Ranks) -> tuple[Path, RecoverInfo] | None:
        """The generation to resume from: one process chooses by names and sizes, all ranks compare the bytes."""
        ranks.decide(self.store.sweep)
        while (choice := ranks.decide(self._choose)) is not None:
            problems = [problem for problem in ranks.run_all(check_bytes, str(choice[0])) if problem is not None]
            if not problems:
                return choice
            ranks.decide(partial(self._refuse, choice[0], problems[0]))
        return None

    def _refuse(self, path: Path, problem: str) -> None:
        if path == self._resume_path:
            raise CheckpointCorruptError(problem)
        (generation,) = (generation for generation in self.store.generations() if generation.path == path)
        self.store.set_aside(generation, problem)

    def _choose(self) -> tuple[Path, RecoverInfo] | None:
        newest, wanted = self.store.newest_valid(self.store.inspect), self._resume_path
        if wanted is not None and (newest is None or newest[1].resume_path != str(wanted)):
            choice = (wanted, self.store.inspect(wanted))
        elif newest is not None:
            choice = (newest[0].path, newest[1])
        else:
            self._check_fresh()
            return None
        self._check_same_run(*choice)
        return choice

    def _check_fresh(self) -> None:
        if rejected := self.store.rejected():
            raise CheckpointCorruptError(
                f"{self.store.root} has no usable generation left: {', '.join(path.name for path in rejected)} were "
                "set aside. Look at them, restore a copy, or move the folder away to start from step 0"
            )
        if self.config.mode == "must":
            raise CheckpointNotFoundError(f"recover.mode is 'must', but {self.store.root} has no generation to resume")

    def _set_aside_newer(self, resumed: Path, step: int) -> None:
        """What a ``resume_path`` goes back behind is no longer this run's; resuming the newest sets nothing aside."""
        for generation in self.store.generations():
            if generation.step > step or (generation.step == step and generation.path.resolve() != resumed.resolve()):
                self.store.set_aside(generation, f"superseded by resume_path {resumed.name}")

    def _check_same_run(self, path: Path, info: RecoverInfo) -> None:
        saved, now = info.last_step_info.steps_per_epoch, self.ft_spec.steps_per_epoch
        if saved != now:
            raise CheckpointMismatchError(
                f"{path} is of a run with {saved} steps an epoch, this one has {now}; use its dataset and batch size"
            )

    def _restore_data(self, n_callers: int, path: Path, dataloader: Stateful | None) -> None:
        exists = (path / DATA_STATE).exists()
        if dataloader is None and exists:
            raise CheckpointMismatchError(
                f"{path} holds a dataloader's state; pass that dataloader, or data starts over"
            )
        if dataloader is None:
            return
        if not exists:
            raise CheckpointMismatchError(f"{path} holds no dataloader state; was it saved without a dataloader?")
        saved = unpack_plain(path / DATA_STATE)
        states, rank_independent = saved["states"], saved["rank_independent"]
        if len(states) != n_callers and not rank_independent:
            raise CheckpointMismatchError(
                f"{path} holds dataloader states of {len(states)} processes, now there are {n_callers}; only a "
                "dataloader that is rank_independent, as ResumableDataLoader, can change their number"
            )
        own = states[0] if rank_independent else states[get_rank(self._group)]
        restore_dataloader(dataloader, load_plain(path / DATA_STATE, own))

    def _ranks(self, engine: Any) -> Ranks:
        if isinstance(engine, RankGroup):
            return DrivenRanks(engine)
        target: RankTarget = rank_target(engine)
        return LocalRanks(RankTarget(target.engines, target.stateful | self._stateful, self._group), self._group)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the RecoverHandler is closed; make a new one")


def _data_states(ranks: Ranks, dataloader: Stateful | None) -> dict[str, Any] | None:
    """The packed state of every process that calls the handler; of the first only, when any number can resume it."""
    if dataloader is None:
        return None
    states = ranks.here(lambda: pack_plain("dataloader state", dataloader.state_dict()))
    rank_independent = getattr(dataloader, "rank_independent", False)
    return {"rank_independent": rank_independent, "states": states[:1] if rank_independent else states}


def _manifest_facts(info: RecoverInfo) -> Mapping[str, Any]:
    return {
        "run_id": info.run_id,
        "step": info.last_step_info.global_step,
        "step_info": asdict(info.last_step_info),
        "weight_versions": info.weight_versions,
        "world_size": info.world_size,
        "mesh": {"dp": info.world_size},
        "libraries": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
