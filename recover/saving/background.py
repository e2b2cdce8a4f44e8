"""A step that is written on a separate thread while training continues, and how the end of a run waits for it."""

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from threading import Event, Thread
from typing import NoReturn

import torch.distributed as dist

from ...engine.staging.background_job import BackgroundJob, JobState, Task
from ...utils.distributed import collective_broke
from ...utils.errors import CheckpointWriteError, HoldfastError
from ...utils.logging import get_logger

logger = get_logger(__name__)

LINGER_S = 10.0
LINGER_SAVES = 3
"""The end of a run waits `LINGER_S` plus `LINGER_SAVES` usual saves for a write that makes no progress. Only a
rank that hangs would need longer, and then waiting is useless."""
_POLL_S = 0.2


def patience_s(save_s: float) -> float:
    """Return how long the end of a run waits for a write without progress if saves usually take ``save_s``."""
    return LINGER_S + LINGER_SAVES * save_s


class BackgroundStep:
    """The writes of one step, from the start of their thread until their results are collected.

    A second thread looks at the progress while `linger` waits, because a look at a storage that hangs does not return,
    which counts as no progress. It starts with the job: no thread can be started during the exit of the process
    (Python 3.12).

    Args:
        step: the step.
        writes: ``snapshot`` or ``export`` -> function that writes it and returns the seconds that took.
        must: whether a failed snapshot is raised rather than counted. A failed export is counted: a resume makes it.
        written_bytes: returns how much has been written so far.

    Attributes:
        tasks: ``snapshot`` or ``export`` -> its task in ``job``.
        began_s: start, on the monotonic clock.
        was_busy: whether another step was skipped because of this one.
    """

    def __init__(
        self, step: int, writes: Mapping[str, Callable[[], float]], *, must: bool, written_bytes: Callable[[], int]
    ) -> None:
        self.step, self.must, self.began_s, self.was_busy = step, must, time.monotonic(), False
        self.tasks = {kind: Task(f"{kind} of step {step}", write) for kind, write in writes.items()}
        self._distributed, self._written_bytes = dist.is_initialized(), written_bytes
        self._lingers, self._progress = Event(), (0, 0)
        # A daemon thread: a rank or a storage that hangs must not keep this process from its exit.
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
        foreign = isinstance(error, ValueError) and not isinstance(error, HoldfastError)
        return collective_broke(error) or (foreign and not dist.is_initialized())  # torch's error for a destroyed group

    def result(self, kind: str) -> float:
        """Return how long the write took, or raise its error."""
        if self.lost_peers(kind):
            error = self.tasks[kind].error()
            raise CheckpointWriteError(
                f"step {self.step}: the {kind} is lost, because the ranks could not reach each other while it was "
                f"written ({type(error).__name__}: {error}). Either a rank has ended, or torch.distributed was "
                "destroyed: call wait or close of the RecoverHandler before destroy_process_group. What was "
                "committed before is intact"
            ) from error
        return self.tasks[kind].result()

    def linger(self, save_s: float) -> None:
        """Wait until all writes have ended, or until they have made no progress for too long (see `patience_s`)."""
        started_s = moved_s = time.monotonic()
        seen = self._progress
        self._lingers.set()
        while time.monotonic() - moved_s < max(patience_s(save_s), LINGER_S + moved_s - started_s):
            if self.job.wait(_POLL_S) is not JobState.RUNNING:
                break
            if (progress := self._progress) != seen:
                seen, moved_s = progress, time.monotonic()
        if self.ended:
            self._watch.join(LINGER_S)

    def _look(self) -> None:
        self._lingers.wait()
        while not self.ended:
            n_ended = sum(task.state is not JobState.RUNNING for task in self.tasks.values())
            self._progress = n_ended, self._written_bytes()
            time.sleep(_POLL_S)

    def give_up(self) -> None:
        """Log the unfinished and failed writes. Their results will not be collected."""
        for kind, task in self.tasks.items():
            if task.state is JobState.RUNNING:
                logger.warning("step %d: the %s that was being written is given up", self.step, kind)
            elif (error := task.error()) is not None:
                logger.error("step %d: %s failed: %s", self.step, kind, error)

    def require_snapshot(self) -> None:
        """End the process with an error if its snapshot was not committed. Called during the exit of the process."""
        snapshot = self.tasks.get("snapshot")
        if snapshot is not None and snapshot.state is not JobState.DONE:
            error = snapshot.error() or TimeoutError("it was not finished")
            _end_with_error(
                f"step {self.step}: the process ends without its snapshot ({type(error).__name__}: {error}); "
                "call wait or close of the RecoverHandler before it ends, and before torch.distributed or the "
                "engine is destroyed"
            )


class AtExit:
    """Calls a function when the process that registered it ends by itself, before functions registered earlier.

    Before Python 3.13 a process forked by multiprocessing runs no ``atexit`` functions at its end, only finalizers of
    multiprocessing. The function is therefore registered as both, and must allow a second call.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._pid = -1
        self._finalizer: Finalize | None = None

    def register(self) -> None:
        """Register the function. A second call does nothing."""
        if self._finalizer is None:
            self._pid = os.getpid()
            self._finalizer = Finalize(None, self._call, exitpriority=0)
            atexit.register(self._call)

    def unregister(self) -> None:
        """Cancel the registration."""
        if self._finalizer is not None:
            atexit.unregister(self._call)
            self._finalizer.cancel()
            self._finalizer = None

    def _call(self) -> None:
        if os.getpid() == self._pid:  # a forked child inherits the registration
            self._function()


def _end_with_error(message: str) -> NoReturn:
    """Log an error and end the process with code 1. An ending process cannot change its exit code in any other way.

    Functions that are registered to run later are not called.
    """
    try:
        logger.error(message)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
