"""Reports of a background job about its tasks, during the run and afterwards."""

import threading
import weakref

import pytest

from holdfast.engine.staging.background_job import BackgroundJob, JobState, Task
from holdfast.utils.errors import CheckpointWriteError, WorkerLost

pytestmark = pytest.mark.timeout(30)


def _job(*runs: object) -> BackgroundJob:
    """A job with tasks that return the given values, or raise them."""

    def task(number: int, outcome: object) -> Task:
        def run() -> object:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome() if callable(outcome) else outcome

        return Task(f"task {number}", run)

    return BackgroundJob(
        "test", [task(number, run) for number, run in enumerate(runs)], daemon=True
    )


def test_a_job_is_running_until_its_last_task_has_ended() -> None:
    gate, ended = threading.Event(), threading.Event()
    job = _job(1, gate.wait)
    job.start()
    job.call_at_end(ended.set)
    assert job.tasks[0].result() == 1
    assert [task.state for task in job.tasks] == [JobState.DONE, JobState.RUNNING]
    assert job.poll() is job.wait(0.01) is JobState.RUNNING and not ended.is_set()
    gate.set()
    assert job.wait(20) is JobState.DONE and ended.wait(20)


def test_a_failed_task_does_not_keep_the_next_one_from_running() -> None:
    job = _job(OSError("full"), 2)
    job.start()
    assert job.wait(20) is JobState.FAILED
    assert [task.state for task in job.tasks] == [JobState.FAILED, JobState.DONE] and job.tasks[
        1
    ].result() == 2
    with pytest.raises(OSError, match="full"):
        job.tasks[0].result()


def test_no_task_is_begun_once_the_group_is_broken() -> None:
    ran: list[int] = []
    job = _job(WorkerLost("actors", [1], "died"), lambda: ran.append(1))
    job.start()
    assert job.wait(20) is JobState.FAILED and ran == []
    with pytest.raises(CheckpointWriteError, match=r"the task 1 was not begun: .*actors"):
        job.tasks[1].result()


def test_a_task_that_has_ended_keeps_its_outcome_and_nothing_that_it_read() -> None:
    class Buffers:
        def write(self) -> int:
            return 1

    buffers = Buffers()
    known = weakref.ref(buffers)
    job = _job(buffers.write)
    del buffers
    job.start()
    assert job.wait(20) is JobState.DONE and known() is None
    assert job.tasks[0].result() == 1
