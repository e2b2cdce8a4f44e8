"""`RecoverHandler`: snapshot a run when it is due, and bring it back to exactly there.

One generation holds everything a run is made of: every engine's shards, every process's generators, the data cursor,
the step, and the user's own objects. It becomes visible by one rename, after every rank has written, fsynced and
reported its files. The order of a dump is in `writing`; the order of a load is lock, choose and
verify, compare with the engines (nothing is touched before), data cursor, engines, user objects, generators, and a last
comparison of what is there with what was saved.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from ..engine.api import FinetuneSpec, Stateful, StepInfo
from ..utils.distributed import get_rank
from ..utils.errors import ConfigError, Preempted
from ..utils.lock import FolderLock
from ..utils.logging import get_logger
from ..utils.staging import as_write_error
from .choice import Choice, ResumeChoice
from .config import RecoverConfig
from .data_state import restore_data
from .exporting import HFExports
from .facts import check_restored, combine_ranks
from .info import RecoverInfo
from .mirror import Mirror
from .process_state import DRIVER_STATE, ProcessState, rank_state_name
from .rank_reading import check_rank, read_rank
from .rank_writing import close_writers, open_writer
from .ranks import DrivenRanks, LocalRanks, RankGroup, Ranks, RankTarget, rank_target
from .retention import RetentionRules
from .saving import Due, SaveStats, SnapshotSaver
from .schedule import Pace, SnapshotSchedule
from .stopping import StopNotice, StopRequests
from .store import Generation, GenerationStore
from .writing import GenerationWriter

logger = get_logger(__name__)


class RecoverHandler:
    """Snapshots and restores one run. Under torchrun every rank makes one and calls it; under Ray the driver does.

    Args:
        config: where, how often, and what to do at the start.
        ft_spec: how the run is cut into epochs; a generation of a run that was cut differently is refused.
        group: gloo group of the ranks, under torchrun; None is the default group.
        notices: asked after every step whether the run has to stop, as signals and ``must_save_by`` may make it:
            `holdfast.recover.supervisor.Attempt.draining`, or a cloud's preemption notice.
        tokenizer: saved beside the weights of Hugging Face exports (``hf_freq_steps``); may not change after `load`.
        processor: likewise.
    """

    def __init__(
        self,
        config: RecoverConfig,
        ft_spec: FinetuneSpec,
        *,
        group: dist.ProcessGroup | None = None,
        notices: Sequence[Callable[[], StopNotice | None]] = (),
        tokenizer: Any = None,
        processor: Any = None,
    ) -> None:
        self.config, self.ft_spec = config, ft_spec
        self.store = GenerationStore(config.recover_root)
        self.schedule = SnapshotSchedule(config.freq_epochs, config.freq_steps, config.freq_secs)
        self._group = group
        self._stateful: dict[str, Stateful] = {}
        self._key = uuid.uuid4().hex
        self._writer = GenerationWriter(self.store, self._key, uuid.uuid4().hex, self._stateful, self._retire)
        self._resume = ResumeChoice(config, ft_spec, self.store)
        self._retention = RetentionRules.from_config(config)
        self._stops = StopRequests(config.stop_signals, config.must_save_by, notices)
        self._pace = Pace()
        self._exports = HFExports(config, self._key, (tokenizer, processor))
        self._saver = SnapshotSaver(config, self._key, self._writer, self._exports, self._pace, self._after_commit)
        self._opened: Ranks | None = None
        self._lock = FolderLock(config.lock_path)
        self._mirror: Mirror | None = None
        self._at: int | None = None  # the step that was snapshotted or restored last
        self._loaded = self._closed = False
        if config.mode != "off" and (config.freq_epochs, config.freq_steps, config.freq_secs) == (None, None, None):
            logger.warning(
                "none of recover.freq_epochs, freq_steps and freq_secs is set: only forced snapshots are made"
            )

    @property
    def save_stats(self) -> SaveStats:
        """What became of the snapshots, and what they have cost."""
        return self._saver.stats

    @property
    def failed_saves(self) -> int:
        """Snapshots that failed since the last one that did not."""
        return self._saver.failed_in_a_row["snapshot"]

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
        """Lock the run's folder, and bring the run back to its newest sound generation.

        From here on the ``stop_signals`` lead to a snapshot and `Preempted`; `close` gives up both.

        Args:
            engine: one engine, a dict of named ones, or a `WorkerGroup` whose workers show theirs.
            dataloader: anything with ``state_dict``/``load_state_dict``. Only one that says it is ``rank_independent``
                (see `ResumableDataLoader`) can be resumed by another number of processes.

        Returns:
            what was restored, or None when there is nothing to resume and the run starts at step 0.

        Raises:
            FolderInUseError: another job uses the folder, and still did after ``lock_timeout_s``.
            CheckpointCorruptError: there was something to resume, but nothing of it is usable.
            CheckpointNotFoundError: mode ``must`` or ``resume_path``, and there is nothing.
            CheckpointMismatchError, DatasetMismatchError: the generation is not of this job. Nothing was changed.
            ConfigError: an export was asked for that cannot be made: nothing was changed; or the state could not be
                saved (see `DCPState.state_dict`).
            OSError, RuntimeError: there is no host memory to stage snapshots in.
        """
        self._require_open()
        if self.config.mode == "off":
            return None
        self._saver.settle(must=True)  # of a load before this one
        started, ranks = time.monotonic(), self._ranks(engine)
        self._exports.check(ranks)
        ranks.decide_slowly(self._take_folder)
        self._stops.install()
        choice = self._resume.choose(ranks, self._mirror)
        if choice is not None:
            self._restore(ranks, *choice, dataloader)
            ranks.decide(partial(self._settle, choice))
            logger.info("resumed from %s in %.3f s", choice[0], time.monotonic() - started)
        aside_s = self.config.save_timeout_s if self.config.async_save else None
        ranks.run_all(open_writer, self._key, aside_s, self.schedule.is_ever_due, self._exports.request)
        self._loaded, self._opened = True, ranks
        self._go_on_exporting(ranks, choice)
        self._pace.step_begins()
        return None if choice is None else choice[1]

    def dump(
        self,
        engine: Any,
        step_info: StepInfo,
        dataloader: Stateful | None = None,
        *,
        force: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Snapshot the run after the step ``step_info``, and export its weights, if due; returns when both are staged.

        From then on everything may change but parameters and optimizer state, for which the next ``optimizer.step``
        waits. Code that changes them elsewhere does so in `changing_weights`, else the snapshot fails; an engine of
        one's own that always does says so (see `DCPState`). The rest is done in the background; `wait` returns when it
        is committed. With ``async_save`` off all of it is done here.

        Call it after every step, whether one is due or not: it is also where a request to stop is answered, and where a
        failure in the background is told.

        Args:
            engine: as for `load`.
            step_info: the step that was just trained.
            dataloader: as for `load`; its cursor must be that of the last trained batch.
            force: snapshot although none is due (but never one step twice).
            metrics: numbers that ``keep_best`` chooses by; rank 0's count.

        Returns:
            whether a snapshot was taken. One that fails, now or later, is logged, and training goes on; the older
            generations are untouched, and nothing half-written is left. So are exports.

        Raises:
            Preempted: the run was asked to stop, and is snapshotted.
            CheckpointWriteError, StaleSnapshotError, PeerError: one more snapshot or export in a row has failed than
                ``save_failures_allowed``, or a forced snapshot, or the last one before a stop.
            Exception: whatever else ended a snapshot in the background.
            ConfigError: a user object's state could not be read back, `load` was not called before, or the step lies
                before one that is there already.
        """
        self._require_open()
        if self.config.mode == "off":
            return False
        if not self._loaded:
            raise ConfigError("dump was called before load: whether the run is to be resumed must be known first")
        if step_info.steps_per_epoch != self.ft_spec.steps_per_epoch:
            raise ConfigError(
                f"step_info counts {step_info.steps_per_epoch} steps an epoch, the handler's ft_spec "
                f"{self.ft_spec.steps_per_epoch}: load would refuse the generation. Use ft_spec.steps_per_epoch"
            )
        ranks = self._ranks(engine)
        stop = self._asked_to_stop(ranks)
        must, aside = force or stop is not None, self.config.async_save and stop is None
        saved = self._try_to_save(ranks, step_info, dataloader, metrics or {}, must=must, in_background=aside)
        if stop is not None:
            logger.warning("step %d: stopping after a snapshot: %s", step_info.global_step, stop)
            self._saver.settle()  # of this very step, if it was taken before
            ranks.decide_slowly(self._finish_copies)  # all wait for it: the first that exits may end them all
            self.close()
            raise Preempted(stop)
        self._pace.step_begins()
        return saved

    def wait(self) -> None:
        """Return when every snapshot and export that `dump` has begun is committed; every rank calls it.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: the last one could not be.
            Exception: whatever else ended it.
        """
        self._require_open()
        self._saver.settle(must=True)

    def close(self, *, wait: bool = True) -> None:
        """Take no more snapshots, and give signals and the folder up; may be called twice.

        As a context manager the handler is closed at the end of the block; when that ends with an error, after the time
        that a snapshot takes, if one is being written; when it is interrupted, at once.

        Args:
            wait: for the snapshot that is being written, and for copies to the mirror that are under way, up to
                ``mirror_timeout_s``; the next start makes those again that were not finished. Else that snapshot is
                given up, unless it is being committed at this moment.

        Raises:
            see `wait`; nothing without ``wait``.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:  # from the last to the first, whatever any of them raises
            ends.callback(self._lock.release)
            ends.callback(self._close_mirror, wait)
            ends.callback(self._stops.uninstall)  # a signal that nothing has answered is passed on here
            if wait and self._opened is not None:
                ends.callback(close_writers, self._opened, self._key)
            self._saver.close(wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None and not issubclass(failed, KeyboardInterrupt):
            self._saver.linger()
        self.close(wait=failed is None)

    # Dump

    def _asked_to_stop(self, ranks: Ranks) -> str | None:
        """What asks any rank to stop: a signal need not reach all of them, nor at the same step."""
        self._pace.step_ends()
        n_saves = 2 if self.config.async_save else 1  # a last one may have to wait for one that is begun now
        reasons = ranks.here(lambda: self._stops.due(self._pace.save_s, self._pace.step_s, n_saves))
        stop = next((reason for reason in reasons if reason is not None), None)
        if stop is not None:
            self._stops.grant()
        return stop

    def _is_due(self, step_info: StepInfo, must: bool) -> bool:
        if not (must or self.schedule.due(step_info)):
            return False
        with as_write_error(self.store.root):
            newest = max((generation.step for generation in self.store.generations()), default=-1)
        newest = max(newest, -1 if self._saver.step is None else self._saver.step)
        if newest > step_info.global_step or newest == step_info.global_step != self._at:
            raise ConfigError(
                f"step {step_info.global_step} is to be snapshotted, but {self.store.root} holds step {newest}: the "
                "job went back. Start from the step after the one that load returned"
            )
        return newest < step_info.global_step

    def _try_to_save(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        *,
        must: bool,
        in_background: bool,
    ) -> bool:
        started, step = time.monotonic(), step_info.global_step
        self._saver.look(ranks)
        if must:
            self._saver.insist(step)
        due, saved = None, False
        with self._saver.tolerating(step, must):
            due = ranks.decide(lambda: Due(self._is_due(step_info, must), self._exports.due(step)))
        if due == Due(snapshot=False, export=False) or not self._saver.make_way(must):
            return False
        wanted = self._resume.resume_path
        resumed_from = None if wanted is None else str(wanted), self._resume.origin
        if due is not None:
            saved = self._saver.save(
                ranks, step_info, due, dataloader, metrics, resumed_from, must=must, in_background=in_background
            )
        if saved:
            self._at = step
        if due is None or due.snapshot:
            self.schedule.mark(step_info)  # after a failure too, lest with freq_secs every step tries again
        self.save_stats.blocked_s = time.monotonic() - started
        return saved

    def _after_commit(self, generation: Generation) -> None:
        if self._mirror is not None:
            self._mirror.submit(generation)
        self._retire()

    def _retire(self) -> None:
        self.store.retire(self._retention, set() if self._mirror is None else self._mirror.pinned())

    def _finish_copies(self) -> None:
        if self._mirror is not None:
            self._mirror.wait(self.config.mirror_timeout_s)

    def _close_mirror(self, wait: bool) -> None:
        if self._mirror is not None:
            self._mirror.close(self.config.mirror_timeout_s if wait else 0.0)
            self._retire()  # what had to wait for its copy

    # Load

    def _take_folder(self) -> None:
        self._lock.acquire(self.config.lock_timeout_s)
        if self.config.mirror_path is not None and self._mirror is None:
            self._mirror = Mirror(self.config.mirror_path, self.config.mirror_max_to_keep)

    def _settle(self, resumed: Choice) -> None:
        """What is newer than the generation resumed is given up, and a copy that a crash cut short is made again."""
        self._resume.go_back(resumed, self._mirror)
        path, info = resumed
        if self._mirror is not None and path.parent.resolve() == self.store.root.resolve():
            self._mirror.submit(Generation(info.last_step_info.global_step, path))

    def _restore(self, ranks: Ranks, path: Path, info: RecoverInfo, dataloader: Stateful | None) -> None:
        ranks.run_all(check_rank, str(path))
        caller = 0 if ranks.is_driver else get_rank(self._group)
        ranks.here(lambda: restore_data(path, dataloader, caller, ranks.n_callers))
        process = ProcessState.read(path, DRIVER_STATE) if ranks.is_driver else None
        states = ranks.run_all(read_rank, str(path), info.weight_versions)
        rng = {Path(rank_state_name(rank)).stem: state.rng for rank, state in enumerate(states)}
        if process is not None:
            rng[Path(DRIVER_STATE).stem] = process.restore(self._stateful)
        restored = {name: digest for name, digest in rng.items() if digest is not None}
        facts = combine_ranks([state.samples for state in states])
        table = check_restored(path.name, (info.engines, info.rng), (facts, restored))
        logger.info("step %d of run %s\n%s", info.last_step_info.global_step, info.run_id, table)
        if info.world_size > ranks.world_size:
            logger.warning(
                "%d ranks saved it, now there are %d: the user objects and generators of the others stay behind",
                info.world_size, ranks.world_size,
            )  # fmt: skip
        self._writer.run_id, self._writer.last_facts = info.run_id, info.engines
        self._at = info.last_step_info.global_step
        self._pace.saved(info.save_s)
        self.schedule.mark(info.last_step_info)

    def _go_on_exporting(self, ranks: Ranks, resumed: Choice | None) -> None:
        """Give up exports of a life that is given up, and make the one that a crash has kept from the step resumed."""
        here = resumed is not None and resumed[0].parent.resolve() == self.store.root.resolve()
        step = -1 if resumed is None else resumed[1].last_step_info.global_step
        ranks.decide(lambda: self._exports.go_back(step if here else step - 1))
        if resumed is not None and ranks.decide(lambda: self._exports.due(step)):
            background = self.config.async_save
            self._saver.save(ranks, resumed[1].last_step_info, Due(False, export=True), in_background=background)

    def _ranks(self, engine: Any) -> Ranks:
        if isinstance(engine, RankGroup):
            return DrivenRanks(engine)
        target: RankTarget = rank_target(engine)
        return LocalRanks(RankTarget(target.engines, target.stateful | self._stateful, self._group), self._group)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the RecoverHandler is closed; make a new one")
