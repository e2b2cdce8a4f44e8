"""How a snapshot is taken: at once, or staged and then written in the background; and what became of it.

In the background one snapshot at a time is written, by a thread of its own that has its own process group (or, under
Ray, its own threads in the workers): every step of it is agreed among the ranks there, none of them here. What it came
to is looked at by the next `dump`, `wait` or `close`, where rank 0 says for all whether it is done.
"""

import atexit
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread

from ..engine.api import Stateful, StepInfo
from ..utils.distributed import is_write_failure
from ..utils.errors import CheckpointWriteError, PeerError, StaleSnapshotError
from ..utils.logging import get_logger
from .config import RecoverConfig
from .rank_writing import writer_group
from .ranks import Ranks
from .schedule import Pace
from .store import Generation
from .writing import Capture, GenerationWriter

logger = get_logger(__name__)

LINGER_S = 10.0
LINGER_SAVES = 3
"""A run that ends with an error waits for its last snapshot for so long, and so many times as long as one takes: longer
when a rank hangs, and then for nothing."""


@dataclass
class SaveStats:
    """What became of the snapshots of a handler, and what they have cost this process.

    Attributes:
        committed: snapshots that are generations now.
        failed: that are not.
        skipped: due ones that were not taken because one was still being written.
        waited: that had to wait for one that was still being written.
        waited_s: for how long in all.
        blocked_s: how long the last one kept training, the wait included.
        save_s: how long the last one took from its beginning to its commit.
    """

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    waited: int = 0
    waited_s: float = 0.0
    blocked_s: float = 0.0
    save_s: float = 0.0


@dataclass
class _InFlight:
    """A snapshot that is being written, or was, and nobody has looked since."""

    step: int
    must: bool
    outcome: Future[float]
    began_s: float
    was_in_the_way: bool = False


class SnapshotSaver:
    """Takes the snapshots of one handler, one at a time.

    Args:
        config: ``on_busy`` and ``save_failures_allowed`` count.
        key: of the handler, which the ranks know it by.
        writer: of the run.
        pace: told how long each snapshot took.
        after_commit: called with each new generation, by who decides.

    Attributes:
        stats: see `SaveStats`.
        failed_in_a_row: snapshots, since the last one that did not fail.
    """

    def __init__(
        self,
        config: RecoverConfig,
        key: str,
        writer: GenerationWriter,
        pace: Pace,
        after_commit: Callable[[Generation], None],
    ) -> None:
        self.stats, self.failed_in_a_row = SaveStats(), 0
        self._config, self._key, self._writer, self._pace = config, key, writer, pace
        self._after_commit = after_commit
        self._in_flight: _InFlight | None = None
        self._commit_lock, self._abandoned = Lock(), False

    @property
    def step(self) -> int | None:
        """The step whose snapshot is being written, as far as it was looked at; the same on all ranks."""
        return None if self._in_flight is None else self._in_flight.step

    @contextmanager
    def tolerating(self, step: int, must: bool) -> Iterator[None]:
        """Pass over a snapshot that fails in this block, if it may.

        Raises:
            CheckpointWriteError, StaleSnapshotError: one that must not fail, or one more in a row than
                ``save_failures_allowed``.
            PeerError: the same on another rank; or another rank failed for any other reason.
        """
        try:
            yield
        except (CheckpointWriteError, StaleSnapshotError, PeerError) as error:
            self.stats.failed += 1
            if must or not (is_write_failure(error) or isinstance(error, StaleSnapshotError)):
                raise
            self.failed_in_a_row += 1
            n_failed, allowed = self.failed_in_a_row, self._config.save_failures_allowed
            if n_failed > allowed:
                raise
            logger.error("step %d: snapshot failed, %d in a row (%d allowed): %s", step, n_failed, allowed, error)

    def look(self, ranks: Ranks) -> None:
        """Settle what was being written if it is done by now; all that call the handler call this.

        Raises:
            see `settle`.
        """
        if (in_flight := self._in_flight) is not None and ranks.decide(in_flight.outcome.done):
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
        wait([in_flight.outcome])  # who interrupts this finds it as it was
        self._in_flight = None
        with self.tolerating(in_flight.step, in_flight.must or must):
            self._count(in_flight.outcome.result())

    def insist(self) -> None:
        """The snapshot that is being written must not fail, after all."""
        if self._in_flight is not None:
            self._in_flight.must = True

    def make_way(self, must: bool) -> bool:
        """Whether a snapshot that is due can be taken now: wait for the one that is being written, or skip this one.

        Raises:
            see `settle`.
        """
        if (in_flight := self._in_flight) is None:
            return True
        step, started = in_flight.step, time.monotonic()
        if self._config.on_busy == "skip" and not must:
            self.stats.skipped += 1
            if not in_flight.was_in_the_way:
                logger.info("a snapshot is due, but that of step %d is still being written: skipped", step)
            elif started - in_flight.began_s > self._config.save_timeout_s:
                logger.warning("step %d is being written since %.0f s; skipped", step, started - in_flight.began_s)
            in_flight.was_in_the_way = True
            return False
        self.settle()
        waited_s = time.monotonic() - started
        self.stats.waited += 1
        self.stats.waited_s += waited_s
        logger.info("a snapshot is due, but that of step %d was still being written: waited %.3f s", step, waited_s)
        return True

    def save(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        resumed_from: tuple[str | None, str | None],
        *,
        must: bool,
        in_background: bool,
    ) -> None:
        """Take a snapshot, or only stage it and leave the rest to the background; all that call the handler call this.

        Args:
            ranks: whose state.
            step_info: the step that was just trained.
            dataloader: see `Capture`, as are the next two.
            metrics: remembered.
            resumed_from: remembered.
            must: when it fails in the background, that is never passed over.
            in_background: whether to return when the state is staged.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: it failed; not before `settle` in the background.
            ConfigError: a user object's state could not be read back.
        """
        capture = self._writer.capture(ranks, step_info, dataloader, metrics, resumed_from, staged=in_background)
        if not in_background:
            self._count(self._write(ranks, capture))
            return
        aside = ranks.aside(None if ranks.is_driver else writer_group(self._key))
        outcome: Future[float] = Future()
        # A daemon: a rank that hangs must not keep this process from its exit.
        Thread(target=self._fulfil, args=(outcome, aside, capture), name="snapshot", daemon=True).start()
        self._in_flight = _InFlight(step_info.global_step, must, outcome, capture.began_s)
        atexit.unregister(self.linger)  # once is enough, however many snapshots there are
        atexit.register(self.linger)

    def linger(self) -> None:
        """Give what is being written the time it takes as a rule: the run ends with an error, nothing follows it."""
        if self._in_flight is not None:
            wait([self._in_flight.outcome], timeout=LINGER_S + LINGER_SAVES * self._pace.save_s)

    def close(self, settle: bool) -> None:
        """End the background.

        Args:
            settle: wait for what is being written; else, and when that is interrupted, nothing is committed any more
                once this has returned.

        Raises:
            see `settle`; nothing without ``settle``.
        """
        try:
            if settle:
                self.settle(must=True)
        finally:
            self._abandon()
            atexit.unregister(self.linger)

    def _abandon(self) -> None:
        with self._commit_lock:
            self._abandoned = True
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        if not in_flight.outcome.done():
            logger.warning("step %d: the snapshot that was being written is given up", in_flight.step)
        elif error := in_flight.outcome.exception():
            logger.error("step %d: snapshot failed: %s", in_flight.step, error)

    @contextmanager
    def _committing(self) -> Iterator[None]:
        with self._commit_lock:
            if self._abandoned:
                raise CheckpointWriteError("the run ended with an error while the snapshot was being written")
            yield

    def _fulfil(self, outcome: Future[float], ranks: Ranks, capture: Capture) -> None:
        """In the background: whatever this comes to is for who settles it."""
        try:
            outcome.set_result(self._write(ranks, capture))
        except BaseException as error:
            outcome.set_exception(error)

    def _write(self, ranks: Ranks, capture: Capture) -> float:
        """In whichever thread; the seconds since the snapshot was begun."""
        generation, n_bytes = self._writer.write(ranks, capture, self._committing)
        seconds, step = time.monotonic() - capture.began_s, capture.step_info.global_step
        logger.info("step %d: committed %s, %d bytes in %.3f s", step, generation.path, n_bytes, seconds)

        def follow() -> None:
            with self._committing():
                self._after_commit(generation)

        ranks.decide(follow)
        return seconds

    def _count(self, seconds: float) -> None:
        self.failed_in_a_row = 0
        self.stats.committed += 1
        self.stats.save_s = seconds
        self._pace.saved(seconds)
