"""How long the end of a run waits for what is written in the background: as long as it makes progress."""

import time
from collections.abc import Callable
from threading import Event, Thread

from ...engine.staging.background_job import BackgroundJob, JobState

LINGER_S = 10.0
LINGER_SAVES = 3
"""How long to wait for what makes no progress any more: so long, and so many times as long as a save takes. It would be
longer only when a rank hangs, and then for nothing."""
_POLL_S = 0.2


def patience_s(save_s: float) -> float:
    """How long the end of a run waits for what does not move, where a save takes ``save_s``."""
    return LINGER_S + LINGER_SAVES * save_s


class ProgressWatch:
    """Looks at the progress of a job while `linger` waits for it.

    In a thread of its own: a look that does not come back is no progress. It is started with the job, because at the
    exit of the process no thread can be any more (Python 3.12).

    Args:
        job: that was started.
        written_bytes: how much it has written so far.
    """

    def __init__(self, job: BackgroundJob, written_bytes: Callable[[], int]) -> None:
        self._job, self._written_bytes = job, written_bytes
        self._lingers = Event()
        self._progress = (0, 0)
        self._thread = Thread(target=self._look, name="snapshot progress", daemon=True)
        self._thread.start()
        job.call_at_end(self._lingers.set)

    def linger(self, save_s: float) -> None:
        """Return when the job has ended, or when nothing has moved for too long.

        Args:
            save_s: how long a save takes as a rule; 0 when that is not known.
        """
        started_s = moved_s = time.monotonic()
        seen = self._progress
        self._lingers.set()
        while time.monotonic() - moved_s < max(patience_s(save_s), LINGER_S + moved_s - started_s):
            if self._job.wait(_POLL_S) is not JobState.RUNNING:
                break
            if (progress := self._progress) != seen:
                seen, moved_s = progress, time.monotonic()
        if self._job.poll() is not JobState.RUNNING:
            self.stop()

    def stop(self) -> None:
        """Wait for the end of the watch, once the job has ended; a look at a storage that hangs is left to itself."""
        self._thread.join(LINGER_S)

    def _look(self) -> None:
        self._lingers.wait()
        while self._job.poll() is JobState.RUNNING:
            ended = sum(task.state is not JobState.RUNNING for task in self._job.tasks)
            self._progress = ended, self._written_bytes()
            time.sleep(_POLL_S)
