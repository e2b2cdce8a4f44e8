"""A step that is written in the background, by a thread of its own; and how long the end of a run waits for it."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread

from ..engine.collective_errors import collective_broke
from ..utils.errors import CheckpointWriteError, WorkerLost
from .ranks import Ranks

LINGER_S = 10.0
LINGER_SAVES = 3
"""How long to wait for what makes no progress any more: so long, and so many times as long as a save takes. It would be
longer only when a rank hangs, and then for nothing."""
_POLL_S = 0.2


@dataclass
class Job:
    """A snapshot or an export, and the seconds it took. An export never must: the next start makes the last one."""

    kind: str
    write: Callable[[Ranks], float]
    must: bool = False
    outcome: Future[float] = field(default_factory=Future)


@dataclass
class InFlight:
    """A step that is being written, or was, and nobody has looked since.

    Attributes:
        step: the step.
        jobs: what is made of it, one after the other.
        staged_bytes: how much of it is in its staging folders now, of all ranks.
        began_s: on the monotonic clock.
        was_in_the_way: whether another step was skipped for it.
    """

    step: int
    jobs: list[Job]
    staged_bytes: Callable[[], int]
    began_s: float
    was_in_the_way: bool = False
    _thread: Thread = field(init=False)

    def start(self, ranks: Ranks) -> None:
        """Begin with the jobs."""
        # A daemon: a rank that hangs must not keep this process from its exit.
        self._thread = Thread(target=self._fulfil, args=(ranks,), name="snapshot", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether all jobs came to an end."""
        return all(job.outcome.done() for job in self.jobs)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when they did, or after ``timeout_s``."""
        wait([job.outcome for job in self.jobs], timeout_s)
        if self.done():
            # It frees tensors at its end; a process that ends meanwhile is aborted by torch (SIGABRT).
            self._thread.join()

    def linger(self, save_s: float) -> None:
        """Return when they did, or when nothing has moved for too long.

        Args:
            save_s: how long a save takes as a rule; 0 when that is not known.
        """
        started_s = moved_s = time.monotonic()
        seen = self._progress()
        while not self.done() and time.monotonic() - moved_s < LINGER_S + max(
            LINGER_SAVES * save_s, moved_s - started_s
        ):
            self.wait(_POLL_S)
            if (progress := self._progress()) != seen:
                seen, moved_s = progress, time.monotonic()
        self.wait(0)  # for the thread, should they have been done before

    def lost_snapshot(self) -> str | None:
        """Why there is no generation of the step, once nothing is waited for any more; None if there is, or none was to
        be."""
        for job in self.jobs:
            if job.kind == "snapshot":
                error = job.outcome.exception() if job.outcome.done() else TimeoutError("it was not finished")
                return None if error is None else f"{type(error).__name__}: {error}"
        return None

    def _progress(self) -> tuple[int, int]:
        return sum(job.outcome.done() for job in self.jobs), self.staged_bytes()

    def _fulfil(self, ranks: Ranks) -> None:
        """In the background: whatever this comes to is for who settles it."""
        broken: BaseException | None = None
        for job in self.jobs:
            try:
                if broken is not None:
                    raise CheckpointWriteError(
                        f"the {job.kind} of step {self.step} was not begun: what was written before it broke the "
                        f"ranks' process group ({broken})"
                    )
                job.outcome.set_result(job.write(ranks))
            except BaseException as error:
                job.outcome.set_exception(error)
                if collective_broke(error) or isinstance(error, WorkerLost):
                    broken = error
