"""A step that is written in the background, by a thread of its own; and how long the end of a run waits for it."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Event, Thread

from ...engine.collective_errors import collective_broke
from ...utils.errors import CheckpointWriteError, WorkerLost
from ..coordinator import Ranks

LINGER_S = 10.0
LINGER_SAVES = 3
"""How long to wait for what makes no progress any more: so long, and so many times as long as a save takes. It would be
longer only when a rank hangs, and then for nothing."""
_POLL_S = 0.2


def patience_s(save_s: float) -> float:
    """How long the end of a run waits for what does not move, where a save takes ``save_s``."""
    return LINGER_S + LINGER_SAVES * save_s


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
    _lingers: Event = field(default_factory=Event)
    _progress: tuple[int, int] = (0, 0)
    _threads: list[Thread] = field(default_factory=list)

    def start(self, ranks: Ranks) -> None:
        """Begin with the jobs."""
        # Daemons: a rank or a storage that hangs must not keep this process from its exit. The one that watches is
        # started now, because at the exit none can be any more (Python 3.12).
        self._threads = [
            Thread(target=self._fulfil, args=(ranks,), name="snapshot", daemon=True),
            Thread(target=self._watch, name="snapshot progress", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def done(self) -> bool:
        """Whether all jobs came to an end."""
        return all(job.outcome.done() for job in self.jobs)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when they did, or after ``timeout_s``."""
        wait([job.outcome for job in self.jobs], timeout_s)
        if self.done():
            # They free tensors at their end; a process that ends meanwhile is aborted by torch (SIGABRT).
            writing, watching = self._threads
            writing.join()
            watching.join(LINGER_S)  # it may be looking at a storage that hangs

    def linger(self, save_s: float) -> None:
        """Return when they did, or when nothing has moved for too long.

        Args:
            save_s: how long a save takes as a rule; 0 when that is not known.
        """
        started_s = moved_s = time.monotonic()
        seen = self._progress
        self._lingers.set()
        while not self.done() and time.monotonic() - moved_s < max(patience_s(save_s), LINGER_S + moved_s - started_s):
            self.wait(_POLL_S)
            if (progress := self._progress) != seen:
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

    def _watch(self) -> None:
        """While somebody lingers: a look that does not come back is no progress."""
        self._lingers.wait()
        while not self.done():
            self._progress = sum(job.outcome.done() for job in self.jobs), self.staged_bytes()
            time.sleep(_POLL_S)

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
        self._lingers.set()
