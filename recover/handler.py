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

from ..engine.api import FinetuneSpec, Stateful, StepInfo
from ..utils.distributed import RankGroup
from ..utils.errors import ConfigError, Preempted
from ..utils.logging import get_logger
from ..utils.processes import die_with_torchrun
from ..utils.rng import capture_rng, restore_rng
from .config import RecoverConfig
from .data.capture import note_order, require_same_settings, require_state
from .data.trial import try_stream
from .info import RecoverInfo
from .ranks import Ranks, SessionRef, ranks_of
from .resuming.check import check_shared
from .resuming.choice import Choice, ResumeChoice
from .resuming.restore import Position, restore_run
from .saving.exports import Exports
from .saving.saver import Saver, SaveStats
from .saving.snapshot import RankSession, SnapshotWriter, TrainedStep
from .storage.generations import Generation, GenerationStore
from .storage.run_folder import RunFolder
from .triggers import StopNotice, Triggers, Wanted

logger = get_logger(__name__)


class RecoverHandler:
    """Snapshots and restores one run. Under torchrun every rank makes one and calls it, under Ray
    the driver does.

    Example::

        config = RecoverConfig("math", "trial0", fileroot="runs", freq_steps=20)
        handler = RecoverHandler(config, ft_spec)
        info = handler.load(engine, dataloader=loader)
        step_info = handler.first_step(info)
        with handler:
            for batch in loader:
                engine.train_batch(batch, loss_fn, loss_weight_fn)
                engine.step_lr_scheduler()
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
            restores the place in the data. `first_step` counts in the new epochs.
        tokenizer: saved with Hugging Face exports (``hf_freq_steps``). Must not change after
            `load`.
        processor: saved with Hugging Face exports. Must not change after `load`.
    """

    def __init__(
        self,
        config: RecoverConfig,
        ft_spec: FinetuneSpec,
        *,
        group: RankGroup = None,
        notices: Sequence[Callable[[], StopNotice | None]] = (),
        epochs_may_change: bool = False,
        tokenizer: Any = None,
        processor: Any = None,
    ) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self._group = group
        self._stateful: dict[str, Stateful] = {}  # registered objects of this process
        self._sessions = SessionRef()
        self._position: Position | None = None  # from `load` on
        self._closed = False

        # Files of the run, and when to write them.
        self._folder = RunFolder(config)
        self._triggers = Triggers(config, notices)
        if config.mode != "off" and not self._triggers.schedule.is_ever_due:
            logger.warning(
                "none of recover.freq_epochs, freq_steps and freq_secs is set: only forced "
                "snapshots come"
            )

        # `load` and `dump`.
        self._resume = ResumeChoice(
            config, ft_spec, self.store, epochs_may_change=epochs_may_change
        )
        self._snapshots = SnapshotWriter(self._folder, uuid.uuid4().hex, self._stateful)
        self._exports = Exports(config, self._folder, tokenizer, processor)
        self._saver = Saver(config, self._folder, self._triggers, self._snapshots, self._exports)

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

    def goodput(self) -> dict[str, float]:
        """Return ``goodput`` and ``lost_s`` of the run so far, for the statistics of a step.

        Call it before the `dump` of that step.

        ``goodput`` is the share of the run's wall time, over all its attempts, that was spent on
        steps that count, this one included. ``lost_s`` is the time in seconds that starts and kills
        have cost. Both are those of `holdfast goodput`. The first call reads the run's journal,
        and each later one only the lines since the last one.

        Example::

            stats_logger.log(step, {**stats, **handler.goodput()})

        Returns:
            nothing in mode ``off``, before `load`, and in processes other than the leader. So it
            cannot be given to `all_reduce_stats`, which needs the same names on all ranks.
        """
        self._require_open()
        if self._position is None or not self._position.ranks.is_leader:
            return {}
        return self._folder.wall_time.with_step().statistics()

    def register(self, name: str, thing: Stateful) -> None:
        """Save and restore an object of this process with every generation.

        Example::

            handler.register("kl", kl_controller)

        Args:
            name: unique key in the file.
            thing: an object whose state may hold tensors, numbers, strings, lists and dicts. If it
                has ``follow_log`` too, as a `RolloutExecutor` has, it gets a log of its own.

        Raises:
            ConfigError: the name is taken, the object has no ``state_dict``/``load_state_dict``, or
                `load` was called before.
        """
        if self._position is not None:
            raise ConfigError(
                f"{name!r} is registered after load, which would not restore its state at a "
                "restart; register it before load"
            )
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
        if self.config.mode == "off":
            return None
        return self._resume.peek(self._group)

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
                `first_step`.

        Returns:
            description of the restored run, or None if there is nothing to resume and the run
            starts at step 0. `first_step` tells the step to train first.

        Raises:
            JobRefusedError: another job uses the folder, and still did after ``lock_timeout_s``. If
                it is not caught, the process ends with code 75.
            CheckpointCorruptError: there was something to resume, but none of it is usable.
            CheckpointNotFoundError: mode ``must`` or ``resume_path``, and there is nothing.
            CheckpointMismatchError, DatasetMismatchError: the generation belongs to another job or
                is not the one that `peek` announced, or the dataloader is not at the saved
                position. No engine was changed.
            ConfigError: a rank does not see the folder, an export is impossible, the dataloader has
                no state or, if it is ``rank_independent``, another dataset or seed than on
                another rank, the state could not be saved (see `DCPState.state_dict`), or SLURM
                does not tell the end of the job (``must_save_by``). Nothing was changed.
            OSError, RuntimeError: there is no host memory to stage snapshots in.
        """
        self._require_open()
        if self.config.mode == "off":
            return None
        self._saver.settle(must=True)  # snapshots since an earlier load
        ranks = ranks_of(engine, self._stateful, self._group, self._sessions)
        self._triggers.stops.find_deadline(ranks)
        with ExitStack() as undo:
            if self._position is None:  # the caller may never close a handler that has not loaded
                undo.callback(self._folder.close, wait=False)
                undo.callback(self._triggers.stops.signals.uninstall)
            ranks.decide_slowly(self._folder.open)
            self._folder.journal.begin()
            with self._folder.journal.telling():
                info = self._load(ranks, dataloader)
            undo.pop_all()
        return info

    def first_step(self, info: RecoverInfo | None) -> StepInfo:
        """Return the step to train first, given the result of `load`: the one after the restored
        step, or step 0.

        With ``epochs_may_change``, a run whose epochs had another number of steps continues at the
        position of its next ``global_step`` in epochs of ``ft_spec``.

        Example::

            step_info = handler.first_step(handler.load(engine, dataloader=loader))
        """
        steps_per_epoch = self.ft_spec.steps_per_epoch
        if info is None:
            return StepInfo.at(0, steps_per_epoch)
        last = info.last_step_info
        if last.steps_per_epoch != steps_per_epoch:
            return StepInfo.at(last.global_step + 1, steps_per_epoch)
        return last.next()

    def _load(self, ranks: Ranks, dataloader: Stateful | None) -> RecoverInfo | None:
        started = time.monotonic()
        die_with_torchrun()  # engines of other trainers have not done it
        position = Position(ranks, has_data=dataloader is not None)

        # Refuse what could not be saved or resumed, before anything is restored.
        self._exports.check(ranks)
        check_shared(ranks, self.store.root.parent)
        self._triggers.stops.signals.install()
        ranks.here(partial(require_state, dataloader))
        note_order(dataloader)
        ranks.here(partial(try_stream, dataloader, self.ft_spec.total_train_epochs))

        resumed = self._resume.choose(ranks, self._folder.mirror)
        if resumed is None or resumed.info.lacks("data"):  # a restored loader compares them itself
            require_same_settings(ranks, dataloader)
        if resumed is not None:
            position.epoch = restore_run(ranks, resumed, dataloader, self._stateful)
            position.rng = capture_rng()
            position.step = resumed.step
            self._snapshots.last_facts = resumed.info.engines
            self._triggers.saved(resumed.info.save_s)
            self._triggers.schedule.mark(resumed.info.last_step_info)
            ranks.decide_slowly(partial(self._give_up_newer, resumed))

        # Registered objects read what happened since their state, in every caller.
        went_back = resumed is not None and self._resume.is_wanted(resumed.path)
        follow = partial(self._folder.logs.follow, self._stateful, ranks.is_leader, went_back)
        ranks.here(follow)

        # A resume_path of another run leads to a run of its own, in whose folder the other one's
        # copies are refused.
        self._snapshots.run_id = ranks.decide(self.store.run_id) or self._snapshots.run_id
        load_s = time.monotonic() - started
        total_steps = self.ft_spec.total_train_steps
        self._folder.note_start(resumed, ranks.world_size, load_s, total_steps)
        self._snapshots.resumed_from = self._resume.resumed_from

        self._prepare_saves(ranks, resumed)
        self._position = position
        self._triggers.step_begins()
        return None if resumed is None else resumed.info

    def _prepare_saves(self, ranks: Ranks, resumed: Choice | None) -> None:
        """Allocate what snapshots and exports need, so that they find it later."""
        ranks.open_sessions(
            RankSession.open,
            self.config.save_timeout_s if self.config.async_save else None,
            self._triggers.schedule.is_ever_due,
            self._exports.request,
        )
        if self._exports.request is not None:
            self._resume_exports(ranks, resumed)

    def _give_up_newer(self, resumed: Choice) -> None:
        self._resume.go_back(resumed, self._folder.mirror)
        # Copied again, because a crash may have cut the copy short.
        self._folder.copy(Generation(resumed.step, resumed.path))

    def _resume_exports(self, ranks: Ranks, resumed: Choice | None) -> None:
        exports = self._exports
        if resumed is None:
            ranks.decide(partial(exports.give_up, after=-1))
            return
        # Give up the exports of later steps, and of this step if another run has trained it.
        is_own = resumed.path.parent.resolve() == self.store.root.resolve()
        last_kept = resumed.step if is_own else resumed.step - 1
        ranks.decide(partial(exports.give_up, after=last_kept))

        # A crash may have come before the export of this step.
        if ranks.decide(partial(exports.due, resumed.step)):
            restored = TrainedStep(ranks, resumed.info.last_step_info)
            self._saver.save_kinds(restored, ["export"], in_background=self.config.async_save)

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
        position = self._position
        if position is None:
            raise ConfigError(
                "restore_rng was called before load: what to put the generators back to is not "
                "known"
            )
        if position.rng is not None:
            restore_rng(position.rng)
            if position.ranks.is_driver:
                position.ranks.run_sessions(RankSession.restore_rng)

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
                `load` was not called, only one of `load` and `dump` got a dataloader, the step is
                older than the newest snapshot, or the sampler was set to another epoch than the
                resumed one.
        """
        self._require_open()
        if self.config.mode == "off":
            return False
        position = self._position
        if position is None:
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
        ranks = ranks_of(engine, self._stateful, self._group, self._sessions)
        trained = TrainedStep(ranks, step_info, dataloader, metrics)
        step = step_info.global_step
        self._folder.journal.note("step", step=step)

        # All callers agree on what to do. A mistake of one is raised in all.
        def ask() -> Wanted:
            position.check_dataloader(dataloader)
            return self._saver.wants(trained, position.epoch, force)

        wanted, stop = self._triggers.after_step(ranks, step_info, ask)
        position.epoch = None

        if Wanted.SETTLE in wanted:
            self._saver.settle()
        saved = False
        if wanted & ~Wanted.SETTLE:
            saved = self._saver.save(trained, wanted, position.step)
            if saved:
                position.step = step

        if stop is not None:
            self._folder.note_stop(step, stop)
            self._saver.settle()  # this very step, if its snapshot was taken before
            # torchrun kills the other ranks when one exits.
            left_s = self._triggers.left_s(ranks)
            ranks.decide_slowly(partial(self._folder.finish_copies, left_s))
            self.close()
            raise Preempted(stop)
        self._triggers.step_begins()
        return saved

    def make_due(self) -> None:
        """Make the next step due, for a host whose epoch ended where it could not be saved. Every
        rank calls it.

        Unlike with ``force``, the snapshot may fail or be skipped as any that is due.
        """
        self._require_open()
        self._triggers.schedule.owe()

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
            ends.push(lambda _, error, __: self._triggers.stops.signals.uninstall(error))
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
