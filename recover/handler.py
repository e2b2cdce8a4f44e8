"""`RecoverHandler`: snapshot a run when it is due, and bring it back to exactly there.

One generation holds everything a run is made of: every engine's shards, every process's generators, the data cursor,
the step, and the user's own objects. It becomes visible by one rename, after every rank has written, fsynced and
reported its files. The order of a dump is in `saving.snapshot`, that of a load here and in `resuming.restore`.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch.distributed as dist

from ..engine.api import FinetuneSpec, Stateful, StepInfo
from ..utils.errors import ConfigError, Preempted
from ..utils.logging import get_logger
from ..utils.rng import capture_rng, restore_rng
from .config import RecoverConfig
from .coordinator import Ranks, SessionRef, ranks_of
from .data.epoch_order import note_order
from .info import RecoverInfo
from .resuming.check import check_shared
from .resuming.restore import Position, restore_run
from .resuming.select import Choice, ResumeChoice
from .saving.exports import ExportWriter
from .saving.rank_session import RankSession
from .saving.saver import Due, Saver, SaveStats
from .saving.snapshot import SnapshotWriter, finite_numbers
from .storage.generations import Generation, GenerationStore
from .storage.run_folder import RunFolder
from .triggers.signals import StopNotice
from .triggers.triggers import Triggers, Wanted

logger = get_logger(__name__)


class RecoverHandler:
    """Snapshots and restores one run. Under torchrun every rank makes one and calls it; under Ray the driver does.

    Args:
        config: where, how often, and what to do at the start.
        ft_spec: how the run is cut into epochs; a generation of a run that was cut differently is refused.
        group: gloo group of the ranks, under torchrun; None is the default group.
        notices: asked after every step whether the run has to stop, as signals and ``must_save_by`` may make it:
            `holdfast.recover.supervisor.Attempt.draining`, or a cloud's preemption notice.
        epochs_may_change: resume also where an epoch had another number of steps; the place in the data is the caller's
            then (`StepInfo.at` counts the restored ``global_step`` anew).
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
        epochs_may_change: bool = False,
        tokenizer: Any = None,
        processor: Any = None,
    ) -> None:
        self.config, self.ft_spec = config, ft_spec
        self._group, self._stateful, self._sessions = group, dict[str, Stateful](), SessionRef()
        self._folder = RunFolder(config)
        self._triggers = Triggers(config, notices)
        self._resume = ResumeChoice(config, ft_spec, self.store, epochs_may_change=epochs_may_change)
        snapshots = SnapshotWriter(self._folder, uuid.uuid4().hex, self._stateful)
        exports = ExportWriter(config, self._folder, (tokenizer, processor))
        self._saver = Saver(config, self._folder, snapshots, exports, self._triggers.pace)
        self._position: Position | None = None
        self._closed = False
        if config.mode != "off" and not self._triggers.schedule.is_ever_due:
            logger.warning("none of recover.freq_epochs, freq_steps and freq_secs is set: only forced snapshots come")

    @property
    def store(self) -> GenerationStore:
        """The generations of the run."""
        return self._folder.generations

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
        the mirror are judged by names, sizes and ``recover_info.json``: a `load` raises if
        digests do not match, or if it would resume at another step than this returned.

        Raises:
            CheckpointCorruptError, CheckpointNotFoundError, CheckpointMismatchError: as `load`.
        """
        self._require_open()
        return None if self.config.mode == "off" else self._resume.peek(self._group)

    def load(self, engine: Any, dataloader: Stateful | None = None) -> RecoverInfo | None:
        """Lock the run's folder, and bring the run back to its newest sound generation.

        From here on the ``stop_signals`` lead to a snapshot and `Preempted`; `close` gives up both, and so does a first
        `load` that raises.

        Args:
            engine: one engine, a dict of named ones, or a `WorkerGroup` whose workers show theirs; in place of an
                engine also ``(model, optimizer, lr_scheduler)``, or any object with these attributes.
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
                told; or the dataloader's position after the restore is not the saved one. No engine was changed.
            ConfigError: a rank does not see the folder, or an export was asked for that cannot be made: nothing was
                changed; or the state could not be saved (see `DCPState.state_dict`).
            OSError, RuntimeError: there is no host memory to stage snapshots in.
        """
        self._require_open()
        if self.config.mode == "off":
            return None
        self._saver.settle(must=True)  # of a load before this one
        ranks = ranks_of(engine, self._stateful, self._group, self._sessions)
        with ExitStack() as undo:
            if self._position is None:  # the caller may never close a handler that has not loaded
                undo.callback(self._folder.close, wait=False)
                undo.callback(self._triggers.stops.uninstall)
            ranks.decide_slowly(self._folder.open)
            with self._folder.journal.beginning():
                info = self._load(ranks, dataloader)
            undo.pop_all()
        return info

    def _load(self, ranks: Ranks, dataloader: Stateful | None) -> RecoverInfo | None:
        started, position = time.monotonic(), Position(ranks)
        self._saver.exports.check(ranks)
        check_shared(ranks, self.config.trial_root)
        self._triggers.stops.install()
        note_order(dataloader)
        choice = self._resume.choose(ranks, self._folder.mirror)
        if choice is not None:
            self._restore(position, choice, dataloader)
            ranks.decide(partial(self._give_up_newer, choice))
        self._folder.note_start(choice, ranks.world_size, time.monotonic() - started)
        self._saver.snapshots.resumed_from = self._resume.resumed_from
        background_s = self.config.save_timeout_s if self.config.async_save else None
        snapshots, exports = self._triggers.schedule.is_ever_due, self._saver.exports.request
        ranks.open_sessions(RankSession.open, background_s, snapshots, exports)
        self._go_on_exporting(ranks, choice)
        self._position = position
        self._triggers.pace.step_begins()
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
        if self._position is None:
            raise ConfigError("restore_rng was called before load: what to put the generators back to is not known")
        if self._position.rng is not None:
            restore_rng(self._position.rng)
            if self._position.ranks.is_driver:
                self._position.ranks.run_sessions(RankSession.restore_rng)

    def dump(
        self,
        engine: Any,
        step_info: StepInfo | int,
        dataloader: Stateful | None = None,
        *,
        force: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Snapshot the run after the step ``step_info``, and export its weights, if due; returns when both are staged.

        From then on everything may change but parameters and optimizer state, for which the next ``optimizer.step``
        waits. Code that changes them elsewhere does so in `changing_weights`, else the snapshot fails; a custom engine
        that always does leaves `DCPState.changes_only_in_step` False, and is copied before this returns. The rest is
        done in the background; `wait` returns when it is committed. With ``async_save`` off all of it is done here.

        Call it after every step, whether one is due or not: it is also where a request to stop is answered, and where a
        failure in the background is told.

        Args:
            engine: as for `load`.
            step_info: the step that was just trained; of a host that counts only these, its ``global_step``.
            dataloader: as for `load`; its cursor must be that of the last trained batch, or what it is ahead of that be
                in the state of a registered object (`holdfast.engine.rollouts`).
            force: snapshot although none is due (but never one step twice); one rank that says so is enough.
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
            ConfigError: a user object's state could not be read back, a metric is no number, `load` was not called
                before, the step lies before one that is there already, or the sampler was set to another epoch than the
                one resumed.
        """
        self._require_open()
        if self.config.mode == "off":
            return False
        if self._position is None:
            raise ConfigError("dump was called before load: whether the run is to be resumed must be known first")
        if not isinstance(step_info, StepInfo):
            step_info = StepInfo.at(step_info, self.ft_spec.steps_per_epoch)
        if step_info.steps_per_epoch != self.ft_spec.steps_per_epoch:
            raise ConfigError(
                f"step_info counts {step_info.steps_per_epoch} steps an epoch, the handler's ft_spec "
                f"{self.ft_spec.steps_per_epoch}: load would refuse the generation. Use ft_spec.steps_per_epoch"
            )
        ranks = ranks_of(engine, self._stateful, self._group, self._sessions)
        self._folder.journal.note("step", step=step_info.global_step)
        wanted, stop = self._triggers.after_step(
            ranks, step_info, partial(self._ask, self._position, step_info, force, metrics or {})
        )
        self._position.epoch = None
        if Wanted.SETTLE in wanted:
            self._saver.settle()
        saved, must = False, Wanted.FORCE in wanted or stop is not None
        if must or wanted & (Wanted.SNAPSHOT | Wanted.EXPORT):
            background = self.config.async_save and stop is None
            saved = self._save(ranks, step_info, wanted, dataloader, metrics or {}, must=must, in_background=background)
        if stop is not None:
            self._folder.note_stop(step_info.global_step, stop)
            self._saver.settle()  # of this very step, if it was taken before
            ranks.decide_slowly(self._folder.finish_copies)  # torchrun kills the other ranks when one exits
            self.close()
            raise Preempted(stop)
        self._triggers.pace.step_begins()
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

        As a context manager the handler is closed at the end of the block. When that raises, a snapshot that is being
        written is waited for as long as it makes progress; on KeyboardInterrupt it is not.

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
            ends.callback(self._folder.close, wait=wait)
            ends.callback(self._triggers.stops.uninstall)  # a signal that nothing has answered is passed on here
            if self._position is not None:
                ranks = self._position.ranks
                # Without ``wait`` not where ranks may hang, and not while a write reads the buffers.
                if wait or (self._saver.idle and not ranks.is_driver):
                    ends.callback(ranks.close_sessions)
            self._saver.close(settle=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None and not issubclass(failed, KeyboardInterrupt):
            self._saver.linger()
        self.close(wait=failed is None)

    # Dump

    def _ask(self, position: Position, step_info: StepInfo, force: bool, metrics: Mapping[str, float]) -> Wanted:
        """What is wanted after a step beside what `Triggers` knows of."""
        finite_numbers(metrics)  # what cannot be saved is an error before anything is staged
        if position.epoch is not None:
            position.epoch.check(step_info)
        wanted = (Wanted.FORCE if force else Wanted(0)) | (Wanted.SETTLE if self._saver.written else Wanted(0))
        return wanted | Wanted.EXPORT if self._saver.exports.due(step_info.global_step) else wanted

    def _save(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        wanted: Wanted,
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        *,
        must: bool,
        in_background: bool,
    ) -> bool:
        assert self._position is not None, "`dump` has looked"
        started, step, export = time.monotonic(), step_info.global_step, Wanted.EXPORT in wanted
        if must:
            self._saver.require_success(step)
        snapshot, failed, saved = must or Wanted.SNAPSHOT in wanted, True, False
        with self._saver.tolerating(step, must):
            is_new = snapshot and ranks.decide(partial(self._saver.is_new, step, self._position.step))
            failed = False
        if not failed:
            due = Due(is_new, export)
            if not due.kinds or not self._saver.wait_or_skip(must):
                return False
            saved = self._saver.save(ranks, step_info, due, dataloader, metrics, must=must, in_background=in_background)
        if saved:
            self._position.step = step
        if snapshot:
            self._triggers.schedule.mark(step_info)  # after a failure too, lest with freq_secs every step tries again
        self._saver.note_blocked(step, time.monotonic() - started)
        return saved

    # Load

    def _give_up_newer(self, resumed: Choice) -> None:
        """What is newer than the generation resumed is given up, and a copy that a crash cut short is made again."""
        self._resume.go_back(resumed, self._folder.mirror)
        self._folder.copy(Generation(resumed[1].last_step_info.global_step, resumed[0]))

    def _restore(self, position: Position, choice: Choice, dataloader: Stateful | None) -> None:
        position.epoch = restore_run(position.ranks, choice, dataloader, self._stateful)
        position.rng, info = capture_rng(), choice[1]
        position.step = info.last_step_info.global_step
        self._saver.snapshots.run_id, self._saver.snapshots.last_facts = info.run_id, info.engines
        self._triggers.pace.saved(info.save_s)
        self._triggers.schedule.mark(info.last_step_info)

    def _go_on_exporting(self, ranks: Ranks, resumed: Choice | None) -> None:
        """Quarantine exports of steps that are given up; make that of the step resumed, if a crash came before it."""
        here = resumed is not None and resumed[0].parent.resolve() == self.store.root.resolve()
        step = -1 if resumed is None else resumed[1].last_step_info.global_step
        ranks.decide(lambda: self._saver.exports.go_back(step if here else step - 1))
        if resumed is not None and ranks.decide(lambda: self._saver.exports.due(step)):
            background = self.config.async_save
            self._saver.save(ranks, resumed[1].last_step_info, Due(False, export=True), in_background=background)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the RecoverHandler is closed; make a new one")
