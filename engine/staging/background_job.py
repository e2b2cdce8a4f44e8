"""Tasks on a background thread while training goes on. Nothing is raised there: each task keeps its
outcome.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from threading import Thread
from typing import Any

import torch

from ...utils.distributed import collective_broke
from ...utils.errors import CheckpointWriteError, WorkerLost


class JobState(Enum):
    """State of a job or a task."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Task:
    """One function that a job calls, once, in its thread. ``name`` is for messages: "snapshot of
    step 5". ``outcome`` gets what the function returns or raises.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], Any],
    ) -> None:
        self.name = name
        self.run = run
        self.outcome: Future[Any] = Future()

    @property
    def state(self) -> JobState:
        """RUNNING until the function has returned or raised."""
        if not self.outcome.done():
            return JobState.RUNNING
        if self.outcome.exception() is not None:
            return JobState.FAILED
        return JobState.DONE

    def result(self) -> Any:
        """Wait for the function, then return its result or raise its error."""
        return self.outcome.result()

    def error(self) -> BaseException | None:
        """The exception of the function. None if it raised none, or has not ended yet."""
        if not self.outcome.done():
            return None
        return self.outcome.exception()

    def complete(self, broken: BaseException | None) -> BaseException | None:
        """Call the function and keep its outcome alone. Called in the thread of the job.

        After an error that broke the process group of the ranks (``broken``) the task fails without
        a call. Returns the error that has broken the group by now, if any.
        """
        try:
            if broken is not None:
                raise CheckpointWriteError(
                    f"the {self.name} was not begun: what was written before it broke the ranks' "
                    f"process group ({broken})"
                )
            self.outcome.set_result(self.run())
        except BaseException as error:
            # `result` raises it. Tasks after this one only fail if the ranks cannot agree any more.
            self.outcome.set_exception(error)
            if collective_broke(error) or isinstance(error, WorkerLost):
                return error
        finally:
            # Free what the function holds, also if the outcome is kept for long.
            del self.run
        return broken


class BackgroundJob:
    """Tasks that run one after the other. A failed task stops the later ones only if it broke the
    process group.

    With ``daemon`` the process may end before the job.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[Task],
        *,
        daemon: bool,
    ) -> None:
        self.tasks = list(tasks)
        self._n_threads = torch.get_num_threads()
        self._thread = Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        """Start the thread. Called once."""
        self._thread.start()

    def call_at_end(self, function: Callable[[], None]) -> None:
        """Call ``function`` in the thread of the job when the last task has ended, or now if it
        has.
        """
        last = self.tasks[-1]
        last.outcome.add_done_callback(lambda _: function())

    def poll(self) -> JobState:
        """RUNNING until all tasks have ended, then FAILED if any has failed, else DONE."""
        # A failed task does not end the job.
        states = {task.state for task in self.tasks}
        for state in (JobState.RUNNING, JobState.FAILED):
            if state in states:
                return state
        return JobState.DONE

    def wait(self, timeout_s: float | None = None) -> JobState:
        """`poll` once all tasks have ended, or after ``timeout_s``. KeyboardInterrupt here leaves
        the job unchanged.
        """
        wait([task.outcome for task in self.tasks], timeout_s)
        state = self.poll()
        if state is not JobState.RUNNING:
            # It frees tensors at its end, and torch aborts a process that ends meanwhile.
            self._thread.join()
        return state

    def _run(self) -> None:
        torch.set_num_threads(self._n_threads)  # else a new thread takes all cores
        broken: BaseException | None = None
        for task in self.tasks:
            broken = task.complete(broken)
