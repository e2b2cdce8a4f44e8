"""`Saver`: saves the steps of a run, at once or in the background, and says what became of each.

A step is saved as a snapshot, as a Hugging Face export, or as both from one staged copy, the snapshot first. In the
background one step at a time is written, by a thread of its own that has its own process group (or, under Ray, its own
threads in the workers): its collectives run there only, never on the training thread. The next `dump`, `wait` or
`close` collects the result; in `dump` rank 0 says for all whether it is there.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from ...engine.api import Stateful, StepInfo
from ...engine.staging.background_job import BackgroundJob, JobState, Task
from ...utils.collective_errors import collective_broke
from ...utils.distributed import is_write_failure
from ...utils.errors import CheckpointWriteError, ConfigError, HoldfastError, PeerError, StaleSnapshotError
from ...utils.logging import get_logger
from ...utils.write_errors import as_write_error
from ..config import RecoverConfig
from ..coordinator import Ranks
from ..storage.run_folder import RunFolder
from ..triggers.schedule import Pace
from .at_exit import AtExit, end_with_error
from .exports import ExportWriter
from .progress import ProgressWatch, patience_s
from .rank_session import RankSession
from .snapshot import SnapshotWriter

logger = get_logger(__name__)


@dataclass
class SaveStats:
    """What became of the snapshots and exports of a handler, and what they have cost this process.

    Attributes:
        committed: snapshots that are generations now.
        failed: snapshots that could not be committed.
        exported: Hugging Face exports that are there now, or were.
        exports_failed: exports that could not be committed.
        skipped: steps that were due and not saved because one was still being written.
        waited: due steps that had to wait for a pending one.
        waited_s: for how long in all.
        blocked_s: how long the last one kept training, the wait included.
        save_s: how long the last snapshot took from its beginning to its commit.
        export_s: how long the last export took, the snapshot of the same step included.
    """

    committed: int = 0
    failed: int = 0
    exported: int = 0
    exports_failed: int = 0
    skipped: int = 0
    waited: int = 0
    waited_s: float = 0.0
    blocked_s: float = 0.0
    save_s: float = 0.0
    export_s: float = 0.0


@dataclass(frozen=True)
class Due:
    """What is to be made of a step."""

    snapshot: bool
    export: bool = False

    @property
    def kinds(self) -> list[str]:
        """``snapshot`` and ``export``, of those that are; in the order of their writing."""
        return [kind for kind, due in (("snapshot", self.snapshot), ("export", self.export)) if due]


@dataclass
class _StepInBackground:
    """A step that is being written, or whose result was not collected yet.

    Attributes:
        step: the step.
        tasks: ``snapshot`` or ``export`` -> its task in the job, which returns the seconds it took.
        must: whether a failed snapshot is raised rather than counted. Exports are counted: a resume makes the last one.
        began_s: on the monotonic clock.
        job: writes it.
        watch: on the progress of the job.
        distributed: whether this process was in torch.distributed when the job began.
        was_busy: whether another step was skipped for it.
    """

    step: int
    tasks: dict[str, Task]
    must: bool
    began_s: float
    job: BackgroundJob
    watch: ProgressWatch
    distributed: bool
    was_busy: bool = False


class Saver:
    """Saves the steps of one handler, one at a time.

    Args:
        config: ``on_busy`` and ``save_failures_allowed`` count.
        folder: of the run.
        snapshots: of the run.
        exports: of the run.
        pace: told how long each step took to save.

    Attributes:
        stats: see `SaveStats`.
        snapshots: see above.
        exports: see above.
        failed_in_a_row: ``snapshot`` or ``export`` -> how many, since the last one that did not fail.
    """

    def __init__(
        self, config: RecoverConfig, folder: RunFolder, snapshots: SnapshotWriter, exports: ExportWriter, pace: Pace
    ) -> None:
        self.stats, self.failed_in_a_row = SaveStats(), {"snapshot": 0, "export": 0}
        self._config, self._folder, self._pace = config, folder, pace
        self.snapshots, self.exports = snapshots, exports
        self._background: _StepInBackground | None = None
        self._at_exit = AtExit(self._end_of_process)

    @property
    def step(self) -> int | None:
        """The step whose snapshot is being written, as far as it was looked at; the same on all ranks."""
        background = self._background
        return background.step if background is not None and "snapshot" in background.tasks else None

    @property
    def written(self) -> bool:
        """Whether what was begun in the background has ended, and was not collected yet."""
        return self._background is not None and self._background.job.poll() is not JobState.RUNNING

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, as far as this process knows."""
        return self._background is None or self.written

    def is_new(self, step: int, last: int | None) -> bool:
        """Whether ``step`` is not snapshotted yet; in the leader.

        Args:
            step: that was just trained.
            last: the step that was snapshotted or restored last; None: none yet.

        Raises:
            ConfigError: there is a later step, or another run's.
            CheckpointWriteError: the folder cannot be listed.
        """
        store = self._folder.generations
        with as_write_error(store.root):
            newest = max((generation.step for generation in store.generations()), default=-1)
        newest = max(newest, -1 if self.step is None else self.step)
        if newest > step or newest == step != last:
            raise ConfigError(
                f"step {step} is to be snapshotted, but {store.root} holds step {newest}: the job went back. Start "
                "from the step after the one that load returned"
            )
        return newest < step

    def save(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        due: Due,
        dataloader: Stateful | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        must: bool = False,
        in_background: bool,
    ) -> bool:
        """Save a step, or only stage it and leave the rest to the background; collective over the callers.

        Args:
            ranks: whose state.
            step_info: the step that was just trained.
            due: what to make of it.
            dataloader: see `Capture`.
            metrics: likewise.
            must: when the snapshot fails, here or in the background, that is never passed over.
            in_background: whether to return when the state is staged.

        Returns:
            whether a snapshot was taken: committed, or staged in the background.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: see `tolerating`; in the background by `settle`.
            ConfigError: a user object's state could not be read back.
        """
        step, writes, began_s = step_info.global_step, dict[str, Callable[[Ranks], float]](), time.monotonic()
        if due.export:
            self.exports.begin(step)
        with self.tolerating(step, must and due.snapshot, due.kinds[0]):
            if due.snapshot:
                capture = self.snapshots.capture(
                    ranks, step_info, dataloader, metrics or {}, in_background=in_background, export=due.export
                )
                writes["snapshot"] = partial(self.snapshots.write, capture=capture)
            else:
                ranks.run_sessions(RankSession.capture, in_background, False, True)
            if due.export:
                writes["export"] = partial(self._export, step=step, began_s=began_s, in_background=in_background)
        if in_background and writes:
            self._begin(ranks.in_background(), step, writes, must, began_s)
            return due.snapshot
        committed = self.stats.committed
        for kind, write in writes.items():
            with self.tolerating(step, must and kind == "snapshot", kind):
                self._count(kind, write(ranks))
        return self.stats.committed > committed

    def _begin(
        self, ranks: Ranks, step: int, writes: Mapping[str, Callable[[Ranks], float]], must: bool, began_s: float
    ) -> None:
        tasks = {kind: Task(f"{kind} of step {step}", partial(write, ranks)) for kind, write in writes.items()}
        # A daemon: a rank or a storage that hangs must not keep this process from its exit.
        job = BackgroundJob("snapshot", list(tasks.values()), daemon=True)
        job.start()
        watch = ProgressWatch(job, partial(self._folder.staged_bytes, step))
        self._background = _StepInBackground(step, tasks, must, began_s, job, watch, dist.is_initialized())
        self._at_exit.register()

    def _export(self, ranks: Ranks, step: int, began_s: float, *, in_background: bool) -> float:
        """Write the export; returns seconds since the save began."""
        final = self.exports.write(ranks, step, in_background=in_background)
        seconds = time.monotonic() - began_s
        logger.info("step %d: exported %s in %.3f s", step, final, seconds)
        return seconds

    @contextmanager
    def tolerating(self, step: int, must: bool, kind: str = "snapshot") -> Iterator[None]:
        """Log and count a snapshot or export that fails in this block, within ``save_failures_allowed``.

        Raises:
            CheckpointWriteError, StaleSnapshotError: one that must not fail, or one more in a row than
                ``save_failures_allowed``.
            PeerError: the same on another rank; or another rank failed for any other reason.
        """
        try:
            yield
        except (CheckpointWriteError, StaleSnapshotError, PeerError) as error:
            self.stats.failed += kind == "snapshot"
            self.stats.exports_failed += kind == "export"
            if must or not (is_write_failure(error) or isinstance(error, StaleSnapshotError)):
                raise
            self.failed_in_a_row[kind] += 1
            n_failed, allowed = self.failed_in_a_row[kind], self._config.save_failures_allowed
            if n_failed > allowed:
                raise
            logger.error("step %d: %s failed, %d in a row (%d allowed): %s", step, kind, n_failed, allowed, error)

    def _count(self, kind: str, seconds: float) -> None:
        self.failed_in_a_row[kind] = 0
        if kind == "snapshot":
            self.stats.committed += 1
            self.stats.save_s = seconds
        else:
            self.stats.exported += 1
            self.stats.export_s = seconds
        self._pace.saved(seconds)

    def note_blocked(self, step: int, seconds: float) -> None:
        """How long the save of a step has kept training."""
        self.stats.blocked_s = seconds
        self._folder.journal.note(
            "save", step=step, blocked_s=round(seconds, 4), failed_in_a_row=self.failed_in_a_row["snapshot"]
        )

    def settle(self, must: bool = False) -> None:
        """Return when nothing is being written any more.

        Args:
            must: pass over no failure.

        Raises:
            Exception: what the background raised; see `tolerating`.
        """
        if (background := self._background) is None:
            return
        background.job.wait()  # KeyboardInterrupt here leaves the state unchanged
        background.watch.stop()
        self._background = None
        with ExitStack() as told:  # of the export first: should both have failed, the snapshot's error is raised
            for kind, task in background.tasks.items():
                told.callback(self._collect, background, must or (background.must and kind == "snapshot"), kind, task)

    def _collect(self, background: _StepInBackground, must: bool, kind: str, task: Task) -> None:
        step, error = background.step, task.error()
        alone = background.distributed and _lost_peers(error)
        with self.tolerating(step, must or alone, kind):
            if alone:
                raise CheckpointWriteError(
                    f"step {step}: the {kind} is lost, because the ranks could not reach each other while it was "
                    f"written ({type(error).__name__}: {error}). Either a rank has ended, or torch.distributed was "
                    "destroyed: call wait or close of the RecoverHandler before destroy_process_group. What was "
                    "committed before is intact"
                ) from error
            self._count(kind, task.result())

    def require_success(self, step: int) -> None:
        """Have the failure of the snapshot of ``step``, if that is being written, raised."""
        if self._background is not None and self._background.step == step:
            self._background.must = True

    def wait_or_skip(self, must: bool) -> bool:
        """Whether a step that is due can be saved now: wait for the one that is being written, or skip this one.

        Raises:
            see `settle`.
        """
        if (background := self._background) is None:
            return True
        step, started_s = background.step, time.monotonic()
        if self._config.on_busy == "skip" and not must:
            self.stats.skipped += 1
            if not background.was_busy:
                logger.info("a step is due to be saved, but step %d is still being written: skipped", step)
            elif started_s - background.began_s > self._config.save_timeout_s:
                logger.warning("step %d has been pending for %.0f s; skipped", step, started_s - background.began_s)
            background.was_busy = True
            return False
        self.settle()
        waited_s = time.monotonic() - started_s
        self.stats.waited += 1
        self.stats.waited_s += waited_s
        logger.info("a step is due to be saved, but step %d was still being written: waited %.3f s", step, waited_s)
        return True

    def linger(self) -> None:
        """Wait for what is being written while it makes progress: the run ends with an error, nothing follows it."""
        if self._background is not None:
            self._background.watch.linger(self._pace.save_s)

    def close(self, *, settle: bool) -> None:
        """End the background.

        Args:
            settle: wait for what is being written; else, and when that is interrupted, nothing is committed any more
                once this has returned, unless a commit hangs (see `RunFolder.end_commits`).

        Raises:
            see `settle`; nothing without ``settle``.
        """
        try:
            if settle:
                self.settle(must=True)
        finally:
            self._abandon()
            self._at_exit.unregister()

    def _abandon(self) -> None:
        self._folder.end_commits(patience_s(self._pace.save_s))
        background, self._background = self._background, None
        if background is None:
            return
        for kind, task in background.tasks.items():
            if task.state is JobState.RUNNING:
                logger.warning("step %d: the %s that was being written is given up", background.step, kind)
            elif (error := task.error()) is not None:
                logger.error("step %d: %s failed: %s", background.step, kind, error)

    def _end_of_process(self) -> None:
        """Nobody has called `close`: the last snapshot is finished, or the process ends with an error that says so."""
        if (background := self._background) is None:
            return
        try:
            self.linger()
        finally:
            self._abandon()
            snapshot = background.tasks.get("snapshot")
            if snapshot is not None and snapshot.state is not JobState.DONE:
                error = snapshot.error() or TimeoutError("it was not finished")
                end_with_error(
                    f"step {background.step}: the process ends without its snapshot ({type(error).__name__}: {error}); "
                    "call wait or close of the RecoverHandler before it ends, and before torch.distributed or the "
                    "engine is destroyed"
                )


def _lost_peers(error: BaseException | None) -> bool:
    if collective_broke(error):
        return True
    foreign = isinstance(error, ValueError) and not isinstance(error, HoldfastError)
    return foreign and not dist.is_initialized()  # torch says so of a group that is gone
