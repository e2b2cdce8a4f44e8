"""`RecoverHandler`: snapshot a run when a snapshot is due, and resume it exactly where it was.

One generation holds the whole run: the shards of every engine, the generators of every process, the
data cursor, the step, and the user's own objects. It becomes visible by one rename, after every
rank has written, fsynced and reported its files. `dump` continues in `saving.saver` and
`saving.snapshot`, `load` in `resuming.choice` and `resuming.restore`.
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
from .data.capture import note_order
from .data.trial import try_stream
from .info import RecoverInfo
from .ranks import Ranks, SessionRef, ranks_of
from .resuming.check import check_shared
from .resuming.choice import Choice, ResumeChoice
from .resuming.restore import Position, restore_run
from .saving.exports import Exports
from .saving.saver import Saver, SaveStats
from .saving.snapshot import RankSession, SnapshotWriter
from .storage.generations import Generation, GenerationStore
from .storage.run_folder import RunFolder
from .triggers import StopNotice, Triggers, Wanted

logger = get_logger(__name__)


class RecoverHandler:
    """Snapshots and restores one run. Under torchrun every rank makes one and calls it, under Ray
    the driver does.

    Example::

        handler = RecoverHandler(RecoverConfig("math", "trial0", fileroot="runs", freq_steps=20), ft_spec)
        info = handler.load(engine, dataloader=loader)
        step_info = StepInfo.at(0, ft_spec.steps_per_epoch) if info is None else info.last_step_info.next()
        with handler:
            for batch in loader:
                engine.train_batch(batch, loss_fn, loss_weight_fn)
                handler.dump(engine, step_info, dataloader=loader)
                step_info = step_info.next()

    Args:
        config: where, how often, and what to do at the start.
        ft_spec: how the run is cut into epochs. A generation of a run that was cut differently is
            refused.
        group: gloo group of the ranks, under torchrun. None means the default group.
        notices: functions asked after every step whether the run has to stop, in addition to
            signals and ``must_save_by``. Examples are
            `holdfast.recover.supervisor.Attempt.draining` and a cloud's preemption notice.
        epochs_may_change: resume even if an epoch had another number of steps. The caller then
            restores the place in the data (`StepInfo.at` gives the position of the restored
            ``global_step``).
        tokenizer: saved with Hugging Face exports (``hf_freq_steps``). Must not change after
            `load`.
        processor: saved with Hugging Face exports. Must not change after `load`.
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
        self._resume = ResumeChoice(
            config, ft_spec, self.store, epochs_may_change=epochs_may_change
        )
        self._snapshots = SnapshotWriter(self._folder, uuid.uuid4().hex, self._stateful)
        exporting = config.hf_freq_steps is not None
        self._exports = Exports(config, self._folder, tokenizer, processor) if exporting else None
        self._saver = Saver(config, self._folder, self._triggers, self._snapshots, self._exports)
        self._position: Position | None = None
        self._closed = False
        if config.mode != "off" and not self._triggers.schedule.is_ever_due:
            logger.warning(
                "none of recover.freq_epochs, freq_steps and freq_secs is set: only forced "
                "snapshots come"
            )

    @property
    def store(self) -> GenerationStore:
        """The generations of the run."""
        return self._folder.generations

    @property
    def save_stats(self) -> SaveStats:
        """Outcomes and costs of the snapshots and exports."""
        return self._saver.stats

    @property
    def failed_saves(self) -> int:
        """Number of failed snapshots since the last success."""
        return self._saver.failed_in_a_row["snapshot"]

    def register(self, name: str, thing: Stateful) -> None:
        """Save and restore an object of this process with every generation.

        Example::

            handler.register("kl", kl_controller)

        Args:
            name: unique key in the file.
            thing: an object whose state may hold tensors, numbers, strings, lists and dicts.

        Raises:
            ConfigError: the name is taken, or the object has no ``state_dict``/``load_state_dict``.
        """
        if name in self._stateful:
            raise ConfigError(f"an object is already registered as {name!r}")
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"{name!r} is a {type(thing).__name__}, which lacks state_dict/load_state_dict"
            )
        self._stateful[name] = thing

    def peek(self) -> StepInfo | None:
        """Return the last step of the generation that `load` would restore. None for a fresh run or
        mode ``off``.

        For a host that must know the step before it builds an engine. Changes nothing, takes no
        lock, and works before torch.distributed is initialised (afterwards every rank calls it).
        Generations here and at the mirror are judged by names, sizes and ``recover_info.json``. A
        later `load` raises if it finds wrong bytes or another step.

        Raises:
            CheckpointCorruptError, CheckpointNotFoundError, CheckpointMismatchError: as `load`.
        """
        self._require_open()
        return None if self.config.mode == "off" else self._resume.peek(self._group)

    def load(self, engine: Any, dataloader: Stateful | None = None) -> RecoverInfo | None:
        """Lock the folder of the run, and restore its newest sound generation.

        From now on the ``stop_signals`` lead to a snapshot and `Preempted`. `close` gives up the
        lock and the signals, and so does a first `load` that raises.

        Args:
            engine: one engine, a dict of named ones, or a `WorkerGroup` whose workers have them as
                attributes. Each engine may also be ``(model, optimizer, lr_scheduler)`` or any
                object with these attributes.
            dataloader: an object with ``state_dict``/``load_state_dict``. It can be resumed by
                another number of processes only if it is ``rank_independent`` (see
                `ResumableDataLoader`). A sampler that orders samples by epoch (``set_epoch``) is
                set to the epoch of the snapshot, so begin the loop over epochs with the epoch of
                ``last_step_info.next()``.

        Returns:
            description of the restored run, or None if there is nothing to resume and the run
            starts at step 0.

        Raises:
            FolderInUseError: another job uses the folder, and still did after ``lock_timeout_s``.
            CheckpointCorruptError: there was something to resume, but none of it is usable.
            CheckpointNotFoundError: mode ``must`` or ``resume_path``, and there is nothing.
            CheckpointMismatchError, DatasetMismatchError: the generation belongs to another job or
                is not the one that `peek` announced, or the dataloader is not at the saved
                position. No engine was changed.
            ConfigError: a rank does not see the folder, an export is impossible, or the state could
                not be saved (see `DCPState.state_dict`). Nothing was changed.
            OSError, RuntimeError: there is no host memory to stage snapshots in.
        """
        self._require_open()
        if self.config.mode == "off":
            return None
        self._saver.settle(must=True)  # snapshots since an earlier load
        ranks = ranks_of(engine, self._stateful, self._group, self._sessions)
        with ExitStack() as undo:
            if self._position is None:  # the caller may never close a handler that has not loaded
                undo.callback(self._folder.close, wait=False)
                undo.callback(self._triggers.stops.uninstall)
            ranks.decide_slowly(self._folder.open)
            self._folder.journal.begin()
            with self._folder.journal.telling():
                info = self._load(ranks, dataloader)
            undo.pop_all()
        return info

    def _load(self, ranks: Ranks, dataloader: Stateful | None) -> RecoverInfo | None:
        started, position = time.monotonic(), Position(ranks)
        if self._exports is not None:
            self._exports.check(ranks)
        check_shared(ranks, self.config.trial_root)
        self._triggers.stops.install()
        note_order(dataloader)
        ranks.here(partial(try_stream, dataloader))
        choice = self._resume.choose(ranks, self._folder.mirror)
        if choice is not None:
            self._restore(position, choice, dataloader)
            ranks.decide(partial(self._give_up_newer, choice))
        # A resume_path of another run leads to a run of its own, in whose folder the other one's
        # copies are refused.
        self._snapshots.run_id = ranks.decide(self.store.run_id) or self._snapshots.run_id
        self._folder.note_start(choice, ranks.world_size, time.monotonic() - started)
        self._snapshots.resumed_from = self._resume.resumed_from
        background_s = self.config.save_timeout_s if self.config.async_save else None
        request = None if self._exports is None else self._exports.request
        ranks.open_sessions(
            RankSession.open, background_s, self._triggers.schedule.is_ever_due, request
        )
        if self._exports is not None:
            self._resume_exports(ranks, self._exports, choice)
        self._position = position
        self._triggers.step_begins()
        return None if choice is None else choice[1]

    def _restore(self, position: Position, choice: Choice, dataloader: Stateful | None) -> None:
        position.epoch = restore_run(position.ranks, choice, dataloader, self._stateful)
        position.rng, info = capture_rng(), choice[1]
        position.step = info.last_step_info.global_step
        self._snapshots.last_facts = info.engines
        self._triggers.saved(info.save_s)
        self._triggers.schedule.mark(info.last_step_info)

    def _give_up_newer(self, resumed: Choice) -> None:
        # Copied again, because a crash may have cut the copy short.
        self._resume.go_back(resumed, self._folder.mirror)
        self._folder.copy(Generation(resumed[1].last_step_info.global_step, resumed[0]))

    def _resume_exports(self, ranks: Ranks, exports: Exports, resumed: Choice | None) -> None:
        # Quarantine exports of steps that are given up, and make the resumed step's if a crash came
        # before it.
        here = resumed is not None and resumed[0].parent.resolve() == self.store.root.resolve()
        step = -1 if resumed is None else resumed[1].last_step_info.global_step
        ranks.decide(lambda: exports.give_up(after=step if here else step - 1))
        if resumed is not None and ranks.decide(lambda: exports.due(step)):
            last_step = resumed[1].last_step_info
            self._saver.save_kinds(
                ranks, last_step, ["export"], in_background=self.config.async_save
            )

    def restore_rng(self) -> None:
        """Restore the random generators to their state at the end of `load`. Does nothing for a
        fresh run.

        For a host that draws between `load` and its first step, for example because it starts a
        loader. May be called any number of times. Under torchrun it restores this process, under
        Ray the driver and all ranks.

        Raises:
            ConfigError: `load` was not called before.
        """
        self._require_open()
        if self.config.mode == "off":
            return
        if self._position is None:
            raise ConfigError(
                "restore_rng was called before load: what to put the generators back to is not "
                "known"
            )
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
        """Snapshot the run after a step, and export its weights, if either is due. Returns when the
        state is staged.

        After that everything may change except parameters and optimizer state, for which the next
        ``optimizer.step`` waits. Code that changes them elsewhere must do so in `changing_weights`,
        else the snapshot fails. A custom engine that always does so leaves
        `DCPState.changes_only_in_step` False, and is copied before this returns. Writing and
        committing happen in the background, and `wait` returns when they are done. With
        ``async_save`` off they happen here.

        Call it after every step, whether a snapshot is due or not: requests to stop are answered
        here, and failures in the background are reported here.

        Args:
            engine: as for `load`.
            step_info: the step that was just trained. A host that only counts steps may pass its
                ``global_step``.
            dataloader: as for `load`. Its cursor must stand at the last trained batch, or a
                registered object must hold the batches that it is ahead (see
                `holdfast.engine.rollouts`).
            force: snapshot although none is due, but never the same step twice. One rank that asks
                is enough.
            metrics: numbers that ``keep_best`` chooses by. Those of rank 0 are used.

        Returns:
            whether a snapshot was taken. A failure, now or later, is logged, and training
            continues. Older generations stay untouched, and nothing half-written is left. The same
            holds for exports.

        Raises:
            Preempted: the run was asked to stop, and its snapshot is committed.
            CheckpointWriteError, StaleSnapshotError, PeerError: more snapshots or exports in a row
                failed than ``save_failures_allowed``, or a forced snapshot failed, or the last one
                before a stop.
            FolderInUseError: the lock on the folder was lost, and another job has used it since.
                Nothing is committed.
            Exception: any other error of a snapshot in the background.
            ConfigError: a user object's state could not be read back, a metric is not a number,
                `load` was not called, the step is older than the newest snapshot, or the sampler
                was set to another epoch than the resumed one.
        """
        self._require_open()
        if self.config.mode == "off":
            return False
        if self._position is None:
            raise ConfigError(
                "dump was called before load: whether the run is to be resumed must be known first"
            )
        if not isinstance(step_info, StepInfo):
            step_info = StepInfo.at(step_info, self.ft_spec.steps_per_epoch)
        if step_info.steps_per_epoch != self.ft_spec.steps_per_epoch:
            raise ConfigError(
                f"step_info counts {step_info.steps_per_epoch} steps an epoch, the handler's "
                f"ft_spec {self.ft_spec.steps_per_epoch}: load would refuse the generation. Use "
                "ft_spec.steps_per_epoch"
            )
        ranks, metrics = (
            ranks_of(engine, self._stateful, self._group, self._sessions),
            metrics or {},
        )
        self._folder.journal.note("step", step=step_info.global_step)
        ask = partial(self._saver.wants, step_info, self._position.epoch, force, metrics)
        wanted, stop = self._triggers.after_step(ranks, step_info, ask)
        self._position.epoch = None
        if Wanted.SETTLE in wanted:
            self._saver.settle()
        saved = False
        if wanted & ~Wanted.SETTLE:
            saved = self._saver.save(
                ranks, step_info, wanted, self._position.step, dataloader, metrics
            )
            if saved:
                self._position.step = step_info.global_step
        if stop is not None:
            self._folder.note_stop(step_info.global_step, stop)
            self._saver.settle()  # this very step, if its snapshot was taken before
            ranks.decide_slowly(
                self._folder.finish_copies
            )  # torchrun kills the other ranks when one exits
            self.close()
            raise Preempted(stop)
        self._triggers.step_begins()
        return saved

    def wait(self) -> None:
        """Wait until every snapshot and export that `dump` has begun is committed. Every rank calls
        it.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: the last one failed.
            Exception: any other error of the background.
        """
        self._require_open()
        self._saver.settle(must=True)

    def close(self, *, wait: bool = True) -> None:
        """Stop taking snapshots, and give up the signals and the folder. May be called twice.

        As a context manager the handler is closed at the end of the block. If the block raises, a
        snapshot that is being written is waited for while it makes progress, except after
        KeyboardInterrupt.

        Args:
            wait: wait for the snapshot that is being written, and up to ``mirror_timeout_s`` for
                copies to the mirror. The next start repeats copies that were not finished. Without
                ``wait`` the snapshot is given up, unless it is being committed at this moment.

        Raises:
            Exception: see `wait`. Nothing is raised without ``wait``.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:  # run in reverse order, even if one raises
            ends.callback(self._folder.close, wait=wait)
            # A signal that nothing has answered is passed on here, after the error that ends the
            # handler was printed.
            ends.push(lambda _, error, __: self._triggers.stops.uninstall(error))
            if self._position is not None:
                ranks = self._position.ranks
                # Without ``wait`` not where ranks may hang, and not while a write reads the
                # buffers.
                if wait or (self._saver.idle and not ranks.is_driver):
                    ends.callback(ranks.close_sessions)
            self._saver.close(settle=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None and not issubclass(failed, KeyboardInterrupt):
            self._saver.linger()
        self.close(wait=failed is None)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the RecoverHandler is closed; make a new one")
