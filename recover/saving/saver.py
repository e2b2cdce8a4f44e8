"""`Saver`: decide whether a step is saved, save it now or in the background, and account for the
outcome.

A save in order:

1. `Saver.save`: is the step due, and is the last one written?
2. `SnapshotWriter.capture` in ``snapshot.py``: every rank captures its state. `dump` can return
   now.
3. `SnapshotWriter.write`: every rank writes its part, the leader commits the generation and copies
   it.
4. `Saver.settle`: collect the result, and raise or count a failure.

One step at a time is written in the background, on a thread with its own process group, or under
Ray on threads of the workers. Its collectives therefore never interleave with those of training.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

import torch.distributed as dist

from ...engine.staging.background_job import BackgroundJob, JobState, Task
from ...utils.distributed import collective_broke, is_write_failure
from ...utils.errors import (
    CheckpointWriteError,
    ConfigError,
    HoldfastError,
    PeerError,
    StaleSnapshotError,
)
from ...utils.files import as_write_error
from ...utils.logging import get_logger
from ..config import RecoverConfig
from ..data.restore import RestoredEpoch
from ..info import finite_numbers
from ..storage.run_folder import RunFolder
from ..triggers import Triggers, Wanted
from .exports import Exports
from .process_end import ProcessEnd, end_with_error
from .snapshot import SnapshotWriter, TrainedStep

logger = get_logger(__name__)

LINGER_S = 10.0
LINGER_SAVES = 3
"""The end of a run waits `LINGER_S` plus `LINGER_SAVES` usual saves without progress. Only a rank
that hangs would need longer.
"""
_POLL_S = 0.2


@dataclass
class SaveStats:
    """Outcomes and costs of the snapshots and exports of a handler, in this process."""

    committed: int = 0  # snapshots that became generations
    failed: int = 0  # snapshots that could not be committed
    exported: int = 0  # committed Hugging Face exports
    exports_failed: int = 0  # exports that could not be committed
    skipped: int = 0  # due steps that were not saved, because an earlier one was being written
    waited: int = 0  # due steps that waited for an earlier one
    waited_s: float = 0.0  # seconds spent waiting, in total
    blocked_s: float = 0.0  # seconds that the last save kept training, including the wait
    save_s: float = 0.0  # seconds from the start to the commit of the last snapshot
    # seconds that the last export took, including the snapshot of the same step
    export_s: float = 0.0


class Saver:
    """Saves the steps of one handler. ``failed_in_a_row`` counts the failed snapshots and exports
    since a success.
    """

    def __init__(
        self,
        config: RecoverConfig,
        folder: RunFolder,
        triggers: Triggers,
        snapshots: SnapshotWriter,
        exports: Exports,
    ) -> None:
        self.stats = SaveStats()
        self.failed_in_a_row = {"snapshot": 0, "export": 0}
        self._config = config
        self._folder = folder
        self._triggers = triggers
        self._snapshots = snapshots
        self._exports = exports
        self._background: BackgroundStep | None = None
        self._process_end = ProcessEnd(self._finish_last)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, as far as this process knows."""
        return self._background is None or self._background.ended

    def wants(self, trained: TrainedStep, epoch: RestoredEpoch | None, force: bool) -> Wanted:
        """Return what `Triggers` cannot know about a step: forced snapshots, exports, results to
        collect.
        """
        # Mistakes of the caller are found at the first step, not at the first snapshot.
        finite_numbers(trained.metrics or {})
        if epoch is not None:
            epoch.check(trained.info)
        wanted = Wanted.FORCE if force else Wanted(0)
        if self._background is not None and self._background.ended:
            wanted |= Wanted.SETTLE
        if self._exports.due(trained.info.global_step):
            wanted |= Wanted.EXPORT
        return wanted

    def save(self, trained: TrainedStep, wanted: Wanted, last_step: int | None) -> bool:
        """Save a step as far as it is ``wanted``, in the background unless it is the last.
        Collective over the callers.

        A forced snapshot and the one before a stop must not fail. ``last_step`` was snapshotted or
        restored last. Returns whether a snapshot was taken: committed, or staged for the
        background.
        """
        started_s = time.monotonic()
        step = trained.info.global_step
        must = bool(wanted & (Wanted.FORCE | Wanted.STOP))
        background = self._background
        if must and background is not None and background.step == step:
            background.must = True  # this very snapshot is being written

        # Find out what is to be saved. If that fails, nothing is saved.
        snapshot = must or Wanted.SNAPSHOT in wanted
        is_new: bool | None = None
        with self.tolerating(step, must):
            is_new = snapshot and trained.ranks.decide(partial(self._is_new, step, last_step))

        saved = False
        if is_new is not None:
            kinds = ["snapshot"] if is_new else []
            if Wanted.EXPORT in wanted:
                kinds.append("export")
            if not kinds or not self._wait_or_skip(must):
                return False
            in_background = self._config.async_save and Wanted.STOP not in wanted
            saved = self.save_kinds(trained, kinds, must=must, in_background=in_background)

        # After a failure too: with freq_secs every step would try again.
        if snapshot:
            self._triggers.schedule.mark(trained.info)
        self.stats.blocked_s = time.monotonic() - started_s
        self._folder.journal.note(
            "save",
            step=step,
            blocked_s=round(self.stats.blocked_s, 4),
            failed_in_a_row=self.failed_in_a_row["snapshot"],
        )
        return saved

    def save_kinds(
        self,
        trained: TrainedStep,
        kinds: Sequence[str],
        *,
        must: bool = False,
        in_background: bool,
    ) -> bool:
        """Do the same for a step that is due as ``kinds``: ``snapshot``, ``export`` or both, in
        this order.
        """
        ranks = trained.ranks
        step = trained.info.global_step
        must = must and "snapshot" in kinds  # an export may fail, because the next start makes it
        writes: dict[str, Callable[[], float]] = {}
        with self.tolerating(step, must, kinds[0]):
            if "export" in kinds:
                self._exports.last_step = step
            capture = self._snapshots.capture(trained, kinds, in_background)
            writers = {"snapshot": self._snapshots, "export": self._exports}
            writing_ranks = ranks.in_background() if in_background else ranks
            for kind in kinds:
                writes[kind] = partial(writers[kind].write, writing_ranks, capture)

        # The thread takes the writes over. What they return is collected by `settle`.
        if in_background and writes:
            staged_bytes = partial(self._folder.staged_bytes, step)
            self._background = BackgroundStep(step, writes, must=must, written_bytes=staged_bytes)
            self._process_end.watch()
            return "snapshot" in kinds

        # Here and now. A failed snapshot does not keep the export from being made.
        committed = self.stats.committed
        for kind, write in writes.items():
            with self.tolerating(step, must and kind == "snapshot", kind):
                self._count(kind, write())
        return self.stats.committed > committed

    def _is_new(self, step: int, last_step: int | None) -> bool:
        # The newest step on disk, or the one that is on its way there. Steps of another job, which
        # has taken the folder, would be taken for this one's.
        self._folder.confirm()
        store = self._folder.generations
        with as_write_error(store.root):
            newest = max((generation.step for generation in store.generations()), default=-1)
        background = self._background
        if background is not None and "snapshot" in background.tasks:
            newest = max(newest, background.step)
        if newest > step or newest == step != last_step:
            raise ConfigError(
                f"step {step} is to be snapshotted, but {store.root} holds step {newest}: the job "
                "went back. Start from the step after the one that load returned"
            )
        return newest < step

    def _wait_or_skip(self, must: bool) -> bool:
        """Wait for a step that is still being written, or return False to skip the new one."""
        background = self._background
        if background is None:
            return True
        step = background.step
        started_s = time.monotonic()

        # Log only the first step that is skipped, unless the save takes too long.
        if self._config.on_busy == "skip" and not must:
            self.stats.skipped += 1
            pending_s = started_s - background.began_s
            if not background.was_busy:
                logger.info(
                    "a step is due to be saved, but step %d is still being written: skipped", step
                )
            elif pending_s > self._config.save_timeout_s:
                logger.warning("step %d has been pending for %.0f s; skipped", step, pending_s)
            background.was_busy = True
            return False

        # Or wait for it, whatever it takes.
        self.settle()
        waited_s = time.monotonic() - started_s
        self.stats.waited += 1
        self.stats.waited_s += waited_s
        logger.info(
            "a step is due to be saved, but step %d was still being written: waited %.3f s",
            step,
            waited_s,
        )
        return True

    @contextmanager
    def tolerating(self, step: int, must: bool, kind: str = "snapshot") -> Iterator[None]:
        """Log and count a snapshot or export that fails in this block, up to
        ``save_failures_allowed`` in a row.

        Raises the error if it ``must`` not fail, or a rank failed for another reason than storage
        or a stale snapshot.
        """
        try:
            yield
        except (CheckpointWriteError, StaleSnapshotError, PeerError) as error:
            if kind == "snapshot":
                self.stats.failed += 1
            else:
                self.stats.exports_failed += 1
            # The meaning of other errors for the run is unknown.
            is_tolerable = is_write_failure(error) or isinstance(error, StaleSnapshotError)
            if must or not is_tolerable:
                raise
            self.failed_in_a_row[kind] += 1
            n_failed = self.failed_in_a_row[kind]
            allowed = self._config.save_failures_allowed
            if n_failed > allowed:
                raise
            logger.error(
                "step %d: %s failed, %d in a row (%d allowed): %s",
                step,
                kind,
                n_failed,
                allowed,
                error,
            )

    def _count(self, kind: str, seconds: float) -> None:
        self.failed_in_a_row[kind] = 0
        if kind == "snapshot":
            self.stats.committed += 1
            self.stats.save_s = seconds
        else:
            self.stats.exported += 1
            self.stats.export_s = seconds
        self._triggers.saved(seconds)

    def settle(self, must: bool = False) -> None:
        """Wait until nothing is being written, and collect the results. With ``must`` every failure
        is raised.
        """
        background = self._background
        if background is None:
            return
        background.wait()  # KeyboardInterrupt here leaves the state unchanged
        self._background = None
        # The last one is collected first: if both have failed, the snapshot's error is raised.
        with ExitStack() as results:
            for kind in background.tasks:
                must_not_fail = must or (background.must and kind == "snapshot")
                results.callback(self._collect, background, kind, must_not_fail)

    def _collect(self, background: "BackgroundStep", kind: str, must: bool) -> None:
        with self.tolerating(background.step, must or background.lost_peers(kind), kind):
            self._count(kind, background.result(kind))

    def linger(self) -> None:
        """Wait for the background while it makes progress. The run ends with an error, so nothing
        follows.
        """
        if self._background is not None:
            self._background.linger(self._triggers.save_s)

    def close(self, *, settle: bool) -> None:
        """Stop writing in the background. With ``settle``, collect the results first, and raise
        every failure.

        Otherwise nothing is committed after this call, unless a commit hangs (see
        `RunFolder.end_commits`).
        """
        try:
            if settle:
                self.settle(must=True)
        finally:
            self._abandon()
            self._process_end.cancel()

    def _abandon(self) -> None:
        self._folder.end_commits(LINGER_S + LINGER_SAVES * self._triggers.save_s)
        background = self._background
        self._background = None
        if background is not None:
            background.give_up()

    def _finish_last(self) -> None:
        # The process did not call `close`: finish its last snapshot, or end it with an error.
        background = self._background
        if background is None:
            return
        try:
            self.linger()
        finally:
            self._abandon()
            background.require_snapshot()


class BackgroundStep:
    """The writes of one step, from the start of their thread until their results are collected.

    A second thread looks at the progress while `linger` waits, because a look at a storage that
    hangs does not return, which counts as no progress. It starts with the job: no thread can be
    started during the exit of the process (Python 3.12).
    """

    def __init__(
        self,
        step: int,
        writes: Mapping[str, Callable[[], float]],
        *,
        must: bool,
        written_bytes: Callable[[], int],
    ) -> None:
        self.step = step
        self.began_s = time.monotonic()
        # raise a failed snapshot rather than count it. A failed export is counted: a resume makes
        # it
        self.must = must
        self.was_busy = False  # another step was skipped because of this one
        self.tasks = {kind: Task(f"{kind} of step {step}", write) for kind, write in writes.items()}
        self._distributed = dist.is_initialized()
        self._written_bytes = written_bytes
        self._lingers = Event()
        self._progress = (0, 0)  # ended writes, written bytes

        # Daemon threads: a rank or a storage that hangs must not keep this process from its exit.
        self.job = BackgroundJob("snapshot", list(self.tasks.values()), daemon=True)
        self.job.start()
        self._watch = Thread(target=self._look, name="snapshot progress", daemon=True)
        self._watch.start()
        self.job.call_at_end(self._lingers.set)

    @property
    def ended(self) -> bool:
        """Whether all writes have ended."""
        return self.job.poll() is not JobState.RUNNING

    def wait(self) -> None:
        """Wait for the end of both threads. KeyboardInterrupt here changes nothing."""
        self.job.wait()
        self._watch.join(LINGER_S)  # a look at a storage that hangs is left behind

    def lost_peers(self, kind: str) -> bool:
        """Whether the write failed because the ranks could not reach each other."""
        error = self.tasks[kind].error()
        if not self._distributed or error is None:
            return False
        if collective_broke(error):
            return True
        # torch's error for a destroyed group.
        is_ours = isinstance(error, HoldfastError)
        return isinstance(error, ValueError) and not is_ours and not dist.is_initialized()

    def result(self, kind: str) -> float:
        """Return how long the write took, or raise its error."""
        if self.lost_peers(kind):
            error = self.tasks[kind].error()
            raise CheckpointWriteError(
                f"step {self.step}: the {kind} is lost, because the ranks could not reach each "
                f"other while it was written ({type(error).__name__}: {error}). Either a rank has "
                "ended, or torch.distributed was destroyed: call wait or close of the "
                "RecoverHandler before destroy_process_group. What was committed before is intact"
            ) from error
        return self.tasks[kind].result()

    def linger(self, save_s: float) -> None:
        """Wait until all writes have ended, or until they have made no progress for too long."""
        started_s = moved_s = time.monotonic()
        seen = self._progress
        self._lingers.set()
        while True:
            # Storage that was slow so far may take as long again.
            patience_s = LINGER_S + max(LINGER_SAVES * save_s, moved_s - started_s)
            if time.monotonic() - moved_s >= patience_s:
                break
            if self.job.wait(_POLL_S) is not JobState.RUNNING:
                break
            progress = self._progress
            if progress != seen:
                seen = progress
                moved_s = time.monotonic()
        if self.ended:
            self._watch.join(LINGER_S)

    def _look(self) -> None:
        # Storage is asked only while `linger` waits for an answer.
        self._lingers.wait()
        while not self.ended:
            n_ended = sum(task.state is not JobState.RUNNING for task in self.tasks.values())
            self._progress = n_ended, self._written_bytes()
            time.sleep(_POLL_S)

    def give_up(self) -> None:
        """Log the unfinished and failed writes. Their results will not be collected."""
        for kind, task in self.tasks.items():
            if task.state is JobState.RUNNING:
                logger.warning(
                    "step %d: the %s that was being written is given up", self.step, kind
                )
                continue
            error = task.error()
            if error is not None:
                logger.error("step %d: %s failed: %s", self.step, kind, error)

    def require_snapshot(self) -> None:
        """End the process with code 1 if its snapshot was not committed. See `end_with_error`."""
        snapshot = self.tasks.get("snapshot")
        if snapshot is None or snapshot.state is JobState.DONE:
            return
        error = snapshot.error() or TimeoutError("it was not finished")
        end_with_error(
            f"step {self.step}: the process ends without its snapshot "
            f"({type(error).__name__}: {error}); call wait or close of the RecoverHandler "
            "before it ends, and before torch.distributed or the engine is destroyed"
        )
