"""How a step is saved: at once, or staged and then written in the background; and what became of it.

A step is saved as a snapshot, as a Hugging Face export, or as both from one staged copy, the snapshot first. In the
background one step at a time is written, by a thread of its own that has its own process group (or, under Ray, its own
threads in the workers): all of it is agreed among the ranks there, nothing here. What it came to is looked at by the
next `dump`, `wait` or `close`, where rank 0 says for all whether it is done.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock

from ...engine.api import Stateful, StepInfo
from ...utils.distributed import is_write_failure
from ...utils.errors import CheckpointError, CheckpointWriteError, PeerError, StaleSnapshotError
from ...utils.logging import get_logger
from ..config import RecoverConfig
from ..coordinator import Ranks
from ..storage.generations import Generation
from ..triggers.schedule import Pace
from .at_exit import AtExit, end_with_error
from .hf_exports import HFExports
from .in_flight import InFlight, Job, patience_s
from .leader import Capture, GenerationWriter
from .rank import writer_group

logger = get_logger(__name__)


@dataclass
class SaveStats:
    """What became of the snapshots and exports of a handler, and what they have cost this process.

    Attributes:
        committed: snapshots that are generations now.
        failed: that are not.
        exported: Hugging Face exports that are there now, or were.
        exports_failed: that are not.
        skipped: steps that were due and not saved because one was still being written.
        waited: that had to wait for one that was still being written.
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


class SnapshotSaver:
    """Saves the steps of one handler, one at a time.

    Args:
        config: ``on_busy`` and ``save_failures_allowed`` count.
        key: of the handler, which the ranks know it by.
        writer: of the run.
        exports: of the run.
        pace: told how long each step took to save.
        after_commit: called with each new generation, in the leader.
        confirm_folder: raises when the folder is no longer this run's; called before each commit, in the leader.

    Attributes:
        stats: see `SaveStats`.
        failed_in_a_row: ``snapshot`` or ``export`` -> how many, since the last one that did not fail.
        hangs: whether a commit was under way when this was closed, and may still come to something.
    """

    def __init__(
        self,
        config: RecoverConfig,
        key: str,
        writer: GenerationWriter,
        exports: HFExports,
        pace: Pace,
        after_commit: Callable[[Generation], None],
        confirm_folder: Callable[[], None],
    ) -> None:
        self.stats, self.failed_in_a_row = SaveStats(), {"snapshot": 0, "export": 0}
        self._config, self._key, self._writer, self._exports, self._pace = config, key, writer, exports, pace
        self._after_commit, self._confirm_folder = after_commit, confirm_folder
        self.hangs = False
        self._in_flight: InFlight | None = None
        self._commit_lock, self._abandoned = Lock(), False
        self._at_exit = AtExit(self._end_of_process)

    @property
    def step(self) -> int | None:
        """The step whose snapshot is being written, as far as it was looked at; the same on all ranks."""
        in_flight = self._in_flight
        return in_flight.step if in_flight and any(job.kind == "snapshot" for job in in_flight.jobs) else None

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, as far as this process knows."""
        return self._in_flight is None or self._in_flight.done()

    @contextmanager
    def tolerating(self, step: int, must: bool, kind: str = "snapshot") -> Iterator[None]:
        """Pass over a snapshot, or an export, that fails in this block, if it may.

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

    def look(self, ranks: Ranks) -> None:
        """Settle what was being written if it is done by now; collective over the callers.

        Raises:
            see `settle`.
        """
        if (in_flight := self._in_flight) is not None and ranks.decide(in_flight.done):
            self.settle()

    def settle(self, must: bool = False) -> None:
        """Return when nothing is being written any more.

        Args:
            must: pass over no failure.

        Raises:
            Exception: what the background raised; see `tolerating`.
        """
        if (in_flight := self._in_flight) is None:
            return
        in_flight.wait()  # who interrupts this finds it as it was
        self._in_flight = None
        with ExitStack() as told:  # of the export first: should both have failed, the snapshot's error is raised
            for job in in_flight.jobs:
                told.callback(self._tell, in_flight.step, job.must or must, job)

    def _tell(self, step: int, must: bool, job: Job) -> None:
        with self.tolerating(step, must, job.kind):
            self._count(job.kind, job.outcome.result())

    def insist(self, step: int) -> None:
        """The snapshot of ``step``, if it is being written, must not fail, after all."""
        if self._in_flight is not None and self._in_flight.step == step:
            for job in self._in_flight.jobs:
                job.must = job.kind == "snapshot"

    def make_way(self, must: bool) -> bool:
        """Whether a step that is due can be saved now: wait for the one that is being written, or skip this one.

        Raises:
            see `settle`.
        """
        if (in_flight := self._in_flight) is None:
            return True
        step, started = in_flight.step, time.monotonic()
        if self._config.on_busy == "skip" and not must:
            self.stats.skipped += 1
            if not in_flight.was_in_the_way:
                logger.info("a step is due to be saved, but step %d is still being written: skipped", step)
            elif started - in_flight.began_s > self._config.save_timeout_s:
                logger.warning("step %d is being written since %.0f s; skipped", step, started - in_flight.began_s)
            in_flight.was_in_the_way = True
            return False
        self.settle()
        waited_s = time.monotonic() - started
        self.stats.waited += 1
        self.stats.waited_s += waited_s
        logger.info("a step is due to be saved, but step %d was still being written: waited %.3f s", step, waited_s)
        return True

    def save(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        due: Due,
        dataloader: Stateful | None = None,
        metrics: Mapping[str, float] | None = None,
        resumed_from: tuple[str | None, str | None] = (None, None),
        *,
        must: bool = False,
        in_background: bool,
    ) -> bool:
        """Save a step, or only stage it and leave the rest to the background; collective over the callers.

        Args:
            ranks: whose state.
            step_info: the step that was just trained.
            due: what to make of it.
            dataloader: see `Capture`, as are the next two.
            metrics: remembered.
            resumed_from: remembered.
            must: when the snapshot fails, here or in the background, that is never passed over.
            in_background: whether to return when the state is staged.

        Returns:
            whether a snapshot was taken: committed, or staged in the background.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: see `tolerating`; in the background by `settle`.
            ConfigError: a user object's state could not be read back.
        """
        step, jobs, began_s = step_info.global_step, list[Job](), time.monotonic()
        if due.export:
            self._exports.begin(step)
        with self.tolerating(step, must and due.snapshot, "snapshot" if due.snapshot else "export"):
            if due.snapshot:
                capture = self._writer.capture(
                    ranks, step_info, dataloader, metrics or {}, resumed_from, staged=in_background, export=due.export
                )
                jobs.append(Job("snapshot", partial(self._write, capture=capture), must))
            else:
                self._exports.capture(ranks, staged=in_background)
            if due.export:
                jobs.append(Job("export", partial(self._export, step=step, staged=in_background, began_s=began_s)))
        if in_background and jobs:
            in_flight = InFlight(step, jobs, partial(self._staged_bytes, step), began_s)
            in_flight.start(ranks.aside(None if ranks.is_driver else writer_group(self._key)))
            self._in_flight = in_flight
            self._at_exit.register()
            return due.snapshot
        committed = self.stats.committed
        for job in jobs:
            with self.tolerating(step, job.must, job.kind):
                self._count(job.kind, job.write(ranks))
        return self.stats.committed > committed

    def linger(self) -> None:
        """Wait for what is being written while it makes progress: the run ends with an error, nothing follows it."""
        if self._in_flight is not None:
            self._in_flight.linger(self._pace.save_s)

    def close(self, settle: bool) -> None:
        """End the background.

        Args:
            settle: wait for what is being written; else, and when that is interrupted, nothing is committed any more
                once this has returned, unless a commit `hangs`.

        Raises:
            see `settle`; nothing without ``settle``.
        """
        try:
            if settle:
                self.settle(must=True)
        finally:
            self._abandon()
            self._at_exit.unregister()

    def _end_of_process(self) -> None:
        """Nobody has called `close`: the last snapshot is finished, or the process ends with an error that says so."""
        if (in_flight := self._in_flight) is None:
            return
        try:
            self.linger()
        finally:
            self._abandon()
            if (lost := in_flight.lost_snapshot()) is not None:
                end_with_error(
                    f"step {in_flight.step}: the process ends without its snapshot ({lost}); call wait or close of the "
                    "RecoverHandler before it ends, and before torch.distributed or the engine is destroyed"
                )

    def _staged_bytes(self, step: int) -> int:
        return self._writer.staged_bytes(step) + self._exports.staged_bytes(step)

    def _abandon(self) -> None:
        self._abandoned = True
        if self._commit_lock.acquire(timeout=patience_s(self._pace.save_s)):
            self._commit_lock.release()
        else:
            logger.error("a commit does not come back: the storage of %s hangs", self._config.recover_root)
            self.hangs = True
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        for job in in_flight.jobs:
            if not job.outcome.done():
                logger.warning("step %d: the %s that was being written is given up", in_flight.step, job.kind)
            elif error := job.outcome.exception():
                logger.error("step %d: %s failed: %s", in_flight.step, job.kind, error)

    @contextmanager
    def _committing(self) -> Iterator[None]:
        with self._commit_lock:
            if self._abandoned:
                raise CheckpointWriteError("the run ended with an error while the snapshot was being written")
            self._confirm_folder()
            yield

    def _write(self, ranks: Ranks, capture: Capture) -> float:
        """In whichever thread; the seconds since the snapshot was begun."""
        generation, n_bytes = self._writer.write(ranks, capture, self._committing)
        seconds, step = time.monotonic() - capture.began_s, capture.step_info.global_step
        logger.info("step %d: committed %s, %d bytes in %.3f s", step, generation.path, n_bytes, seconds)

        def follow() -> None:
            with self._committing():
                try:
                    self._after_commit(generation)
                except (CheckpointError, OSError, RuntimeError) as error:  # (no thread can be started at the very end)
                    logger.error("step %d: committed, but what follows failed: %s", step, error)

        ranks.decide(follow)
        return seconds

    def _export(self, ranks: Ranks, step: int, staged: bool, began_s: float) -> float:
        """In whichever thread; the seconds since the step was begun to be saved."""
        final = self._exports.write(ranks, step, staged, self._committing)
        seconds = time.monotonic() - began_s
        logger.info("step %d: exported %s in %.3f s", step, final, seconds)
        return seconds

    def _count(self, kind: str, seconds: float) -> None:
        self.failed_in_a_row[kind] = 0
        if kind == "snapshot":
            self.stats.committed += 1
            self.stats.save_s = seconds
        else:
            self.stats.exported += 1
            self.stats.export_s = seconds
        self._pace.saved(seconds)
