"""`BackgroundJob`: tasks on a thread of their own while training goes on, and what became of each.

Used by `FSDPEngine.save(blocking=False)` and by `RecoverHandler`. Nothing is raised in the thread: who polls the job
reads the outcome of its tasks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from threading import Thread
from typing import Any

import torch

from ...utils.collective_errors import collective_broke
from ...utils.errors import CheckpointWriteError, WorkerLost


class JobState(Enum):
    """Of a job or a task."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Task:
    """One function that a job calls.

    Args:
        name: for messages: "snapshot of step 5".
        run: no arguments; called once, in the thread of the job.
    """

    def __init__(self, name: str, run: Callable[[], Any]) -> None:
        self.name, self.run = name, run
        self._outcome: Future[Any] = Future()

    @property
    def state(self) -> JobState:
        """RUNNING also before it is begun."""
        if not self._outcome.done():
            return JobState.RUNNING
        return JobState.DONE if self._outcome.exception() is None else JobState.FAILED

    def result(self) -> Any:
        """What ``run`` returned, or raises what it raised; waits for it."""
        return self._outcome.result()

    def error(self) -> BaseException | None:
        """What ``run`` raised; None when it did not, or has not ended yet."""
        return self._outcome.exception() if self._outcome.done() else None

    def complete(self, broken: BaseException | None) -> BaseException | None:
        """Run, and keep what that comes to; in the thread of the job.

        Args:
            broken: what broke the ranks' process group before; the task then fails without being run.

        Returns:
            what has broken the group by now.
        """
        try:
            if broken is not None:
                raise CheckpointWriteError(
                    f"the {self.name} was not begun: what was written before it broke the ranks' process group "
                    f"({broken})"
                )
            self._outcome.set_result(self.run())
        except BaseException as error:  # for whoever asks for the result
            self._outcome.set_exception(error)
            if collective_broke(error) or isinstance(error, WorkerLost):
                return error
        return broken


class BackgroundJob:
    """Tasks that are run one after the other, each whatever the ones before came to, unless they broke the group.

    Args:
        name: of the thread.
        tasks: in order.
        daemon: whether the process may end before the job; else it waits for the thread.
    """

    def __init__(self, name: str, tasks: Sequence[Task], *, daemon: bool) -> None:
        self.tasks = list(tasks)
        self._n_threads = torch.get_num_threads()
        self._thread = Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def call_at_end(self, function: Callable[[], None]) -> None:
        """Have ``function`` called when the last task has ended, in the thread of the job; now if it has."""
        self.tasks[-1]._outcome.add_done_callback(lambda _: function())

    def poll(self) -> JobState:
        """The state now: RUNNING until all tasks have ended, then FAILED if any has failed."""
        states = {task.state for task in self.tasks}
        return next((state for state in (JobState.RUNNING, JobState.FAILED) if state in states), JobState.DONE)

    def wait(self, timeout_s: float | None = None) -> JobState:
        """`poll` once all tasks have ended, or after ``timeout_s``. KeyboardInterrupt here leaves the job unchanged."""
        wait([task._outcome for task in self.tasks], timeout_s)
        if (state := self.poll()) is not JobState.RUNNING:
            self._thread.join()  # it frees tensors at its end; a process that ends meanwhile is aborted by torch
        return state

    def _run(self) -> None:
        torch.set_num_threads(self._n_threads)  # else a new thread takes all cores
        broken: BaseException | None = None
        for task in self.tasks:
            broken = task.complete(broken)
