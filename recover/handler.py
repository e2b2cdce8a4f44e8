"""`RecoverHandler`: snapshot a run when it is due, and bring it back to exactly there.

One generation holds everything a run is made of: every engine's shards, every process's generators, the data cursor,
the step, and the user's own objects. It becomes visible by one rename, after every rank has written, fsynced and
reported its files. The order of a dump is in `saving.leader`, that of a load here and in `resuming.restore`.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch.distributed as dist

from ..engine.api import FinetuneSpec, Stateful, StepInfo
from ..utils.atomic_folder import as_write_error
from ..utils.errors import ConfigError, Preempted
from ..utils.folder_lock import FolderLock
from ..utils.logging import get_logger
from ..utils.rng import RngState, capture_rng, restore_rng
from .config import RecoverConfig
from .coordinator import Ranks, ranks_of
from .data.epoch_order import note_order
from .data.position import RestoredEpoch
from .info import RecoverInfo
from .resuming.restore import restore_run
from .resuming.select import Choice, ResumeChoice
from .saving.hf_exports import HFExports
from .saving.leader import GenerationWriter
from .saving.manager import Due, SaveStats, SnapshotSaver
from .saving.rank import close_writers, open_writers, restore_rank_rng
from .storage.generations import Generation, GenerationStore
from .storage.upkeep import GenerationUpkeep
from .triggers.schedule import Pace, SnapshotSchedule
from .triggers.signals import StopNotice, StopRequests

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
        self._upkeep = GenerationUpkeep(config, self.store)
        self._writer = GenerationWriter(self.store, self._key, uuid.uuid4().hex, self._stateful, self._upkeep.retire)
        self._resume = ResumeChoice(config, ft_spec, self.store)
        self._stops = StopRequests(config.stop_signals, config.must_save_by, notices)
        self._pace = Pace()
        self._exports = HFExports(config, self._key, (tokenizer, processor))
        self._lock = FolderLock(config.lock_path)
        self._saver = SnapshotSaver(
            config, self._key, self._writer, self._exports, self._pace, self._upkeep.committed, self._lock.confirm
        )
        self._opened: Ranks | None = None
        self._at: int | None = None  # the step that was snapshotted or restored last
        self._epoch: RestoredEpoch | None = None
        self._rng: RngState | None = None
        self._closed = False
        if config.mode != "off" and not self.schedule.is_ever_due:
            logger.warning("none of recover.freq_epochs, freq_steps and freq_secs is set: only forced snapshots come")

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

    def peek(self) -> StepInfo | None:
        """The last step of what `load` would restore; None when the run would start at step 0, or mode is ``off``.

        For a host that must know it before there is an engine. Changes nothing, takes no lock, and works before
        torch.distributed is initialised; once it is, every rank calls it, and rank 0 decides. Generations here and at
        the mirror are judged by names, sizes and ``recover_info.json``: a `load` that then finds the bytes damaged, or
        another step than was told for another reason, raises.

        Raises:
            CheckpointCorruptError, CheckpointNotFoundError, CheckpointMismatchError: as `load`.
        """
        self._require_open()
        return None if self.config.mode == "off" else self._resume.peek(self._group)

    def load(self, engine: Any, dataloader: Stateful | None = None) -> RecoverInfo | None:
        """Lock the run's folder, and bring the run back to its newest sound generation.

        From here on the ``stop_signals`` lead to a snapshot and `Preempted`; `close` gives up both.

        Args:
            engine: one engine, a dict of named ones, or a `WorkerGroup` whose workers show theirs.
            dataloader: anything with ``state_dict``/``load_state_dict``. Only one that says it is ``rank_independent``
                (see `ResumableDataLoader`) can be resumed by another number of processes. A sampler that orders samples
                by epoch (``set_epoch``) is told that of the snapshot; begin the loop over epochs with the epoch of
                ``last_step_info.next()``.

        Returns:
            what was restored, or None when there is nothing to resume and the run starts at step 0.

        Raises:
            FolderInUseError: another job uses the folder, and still did after ``lock_timeout_s``.
            CheckpointCorruptError: there was something to resume, but nothing of it is usable.
            CheckpointNotFoundError: mode ``must`` or ``resume_path``, and there is nothing.
            CheckpointMismatchError, DatasetMismatchError: the generation is not of this job, or not the one that `peek`
                told; or ``dataloader`` is not where it was once it was restored. No engine was changed.
            ConfigError: an export was asked for that cannot be made: nothing was changed; or the state could not be
                saved (see `DCPState.state_dict`).
            OSError, RuntimeError: there is no host memory to stage snapshots in.
        """
        self._require_open()
        if self.config.mode == "off":
            return None
        self._saver.settle(must=True)  # of a load before this one
        started, ranks = time.monotonic(), ranks_of(engine, self._stateful, self._group)
        self._exports.check(ranks)
        ranks.decide_slowly(self._take_folder)
        self._stops.install()
        note_order(dataloader)
        choice = self._resume.choose(ranks, self._upkeep.mirror)
        if choice is not None:
            self._restore(ranks, choice, dataloader)
            ranks.decide(partial(self._settle, choice))
            logger.info("resumed from %s in %.3f s", choice[0], time.monotonic() - started)
        aside_s = self.config.save_timeout_s if self.config.async_save else None
        open_writers(ranks, self._key, aside_s, self.schedule.is_ever_due, self._exports.request)
        self._opened = ranks
        self._go_on_exporting(ranks, choice)
        self._pace.step_begins()
        return None if choice is None else choice[1]

    def restore_rng(self) -> None:
        """Put the generators back to what `load` restored; nothing when the run was fresh. As often as one likes.

        For a host that draws between `load` and its first step, as a loader that is begun does. Under torchrun it
        puts back those of this process, under Ray those of the driver and of all ranks.

        Raises:
            ConfigError: `load` was not called before.
        """
        self._require_open()
        if self.config.mode == "off":
            return
        if self._opened is None:
            raise ConfigError("restore_rng was called before load: what to put the generators back to is not known")
        if self._rng is not None:
            restore_rng(self._rng)
            if self._opened.is_driver:
                self._opened.run_all(restore_rank_rng, self._key)

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
            FolderInUseError: the lock on the folder was lost, and another job has used it since: nothing is committed.
            Exception: whatever else ended a snapshot in the background.
            ConfigError: a user object's state could not be read back, `load` was not called before, the step lies
                before one that is there already, or the sampler was set to another epoch than the one resumed.
        """
        self._require_open()
        if self.config.mode == "off":
            return False
        if self._opened is None:
            raise ConfigError("dump was called before load: whether the run is to be resumed must be known first")
        if step_info.steps_per_epoch != self.ft_spec.steps_per_epoch:
            raise ConfigError(
                f"step_info counts {step_info.steps_per_epoch} steps an epoch, the handler's ft_spec "
                f"{self.ft_spec.steps_per_epoch}: load would refuse the generation. Use ft_spec.steps_per_epoch"
            )
        ranks = ranks_of(engine, self._stateful, self._group)
        stop = self._asked_to_stop(ranks, step_info)
        must, aside = force or stop is not None, self.config.async_save and stop is None
        saved = self._try_to_save(ranks, step_info, dataloader, metrics or {}, must=must, in_background=aside)
        if stop is not None:
            logger.warning("step %d: stopping after a snapshot: %s", step_info.global_step, stop)
            self._saver.settle()  # of this very step, if it was taken before
            ranks.decide_slowly(self._upkeep.finish_copies)  # all wait for it: the first that exits may end them all
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
            ends.callback(self._give_up_folder, wait)
            ends.callback(self._stops.uninstall)  # a signal that nothing has answered is passed on here
            # Without waiting for anybody: remote ranks may hang, and what is being written is read from the buffers.
            if self._opened is not None and (wait or (self._saver.idle and not self._opened.is_driver)):
                ends.callback(close_writers, self._opened, self._key)
            self._saver.close(wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None and not issubclass(failed, KeyboardInterrupt):
            self._saver.linger()
        self.close(wait=failed is None)

    # Dump

    def _asked_to_stop(self, ranks: Ranks, step_info: StepInfo) -> str | None:
        """What asks any rank to stop: a signal need not reach all of them, nor at the same step."""
        self._pace.step_ends()
        n_saves = 2 if self.config.async_save else 1  # a last one may have to wait for one that is begun now

        def due() -> str | None:
            if self._epoch is not None:
                self._epoch.check(step_info)
            return self._stops.due(self._pace.save_s, self._pace.step_s, n_saves)

        reasons = ranks.here(due)
        self._epoch = None
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

    # Load

    def _take_folder(self) -> None:
        self._lock.acquire(self.config.lock_timeout_s)
        self._upkeep.open_mirror()

    def _settle(self, resumed: Choice) -> None:
        """What is newer than the generation resumed is given up, and a copy that a crash cut short is made again."""
        self._resume.go_back(resumed, self._upkeep.mirror)
        self._upkeep.copy(Generation(resumed[1].last_step_info.global_step, resumed[0]))

    def _restore(self, ranks: Ranks, choice: Choice, dataloader: Stateful | None) -> None:
        self._epoch = restore_run(ranks, choice, dataloader, self._stateful)
        self._rng, info = capture_rng(), choice[1]
        self._writer.run_id, self._writer.last_facts = info.run_id, info.engines
        self._at = info.last_step_info.global_step
        self._pace.saved(info.save_s)
        self.schedule.mark(info.last_step_info)

    def _go_on_exporting(self, ranks: Ranks, resumed: Choice | None) -> None:
        """Set aside exports of steps that are given up; make that of the step resumed, if a crash came before it."""
        here = resumed is not None and resumed[0].parent.resolve() == self.store.root.resolve()
        step = -1 if resumed is None else resumed[1].last_step_info.global_step
        ranks.decide(lambda: self._exports.go_back(step if here else step - 1))
        if resumed is not None and ranks.decide(lambda: self._exports.due(step)):
            background = self.config.async_save
            self._saver.save(ranks, resumed[1].last_step_info, Due(False, export=True), in_background=background)

    def _give_up_folder(self, wait: bool) -> None:
        if self._saver.hangs:  # nothing is asked of it; who may still commit keeps others out until the process ends
            return
        with ExitStack() as ends:
            ends.callback(self._lock.release)
            self._upkeep.close(wait)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the RecoverHandler is closed; make a new one")
