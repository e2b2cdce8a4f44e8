"""Whole jobs with copies at real servers: whatever is killed, the run ends with the bytes of an
undisturbed one.
"""

import shutil
from pathlib import Path

import pytest

from tests.recover.mirrors import listing
from tests.storage.conftest import Place
from tests.storage.jobs import STEPS, JobProcess, Record, copies_at, mirror_of, wait_for_a_copy
from tests.storage.servers import SeaweedFS

pytestmark = pytest.mark.timeout(400)
ALL = pytest.mark.parametrize("place", ["hdfs", "webhdfs", "s3"], indirect=True)
BOTH = pytest.mark.parametrize("place", ["hdfs", "s3"], indirect=True)


@ALL
def test_a_run_whose_folder_is_lost_ends_with_the_same_bytes(
    place: Place, model_folder: Path, tmp_path: Path, expected: list[Record]
) -> None:
    job = JobProcess(model_folder, tmp_path, place.url, place.environment, steps=STEPS - 4)
    job.start()
    assert job.wait() == expected[:-4]
    assert copies_at(place.url) == dict.fromkeys([STEPS - 5, STEPS - 7], "complete")

    shutil.rmtree(job.folder)
    job = JobProcess(model_folder, tmp_path, place.url, place.environment)
    job.start()
    assert job.wait() == expected[-4:]
    assert copies_at(place.url) == dict.fromkeys([STEPS - 1, STEPS - 3], "complete")


@BOTH
def test_a_job_killed_in_a_copy_resumes_from_the_one_before(
    place: Place, model_folder: Path, tmp_path: Path, expected: list[Record]
) -> None:
    job = JobProcess(model_folder, tmp_path, place.url, place.environment)
    while True:
        # A busy machine may notice a copy when it is complete. The next start begins another.
        kill_in_a_copy(job, place, after=max(mirror_of(place.url).traces(), default=1))
        states = copies_at(place.url)
        if states and {"complete", "incomplete"} == set(states.values()):
            break
        assert max(states, default=0) < STEPS - 1, f"no copy was caught: {states}"
    newest = max(step for step, state in states.items() if state == "complete")
    assert max(states) > newest

    shutil.rmtree(job.folder)
    job.start()
    assert job.wait() == expected[newest + 1 :]
    assert copies_at(place.url) == dict.fromkeys([STEPS - 1, STEPS - 3], "complete")
    assert not any(".copying" in name for name in listing(place.url))


@BOTH
def test_a_job_killed_in_its_first_copy_starts_again_at_step_0(
    place: Place, model_folder: Path, tmp_path: Path, expected: list[Record]
) -> None:
    # A copy that a busy machine noticed too late is removed.
    job = JobProcess(model_folder, tmp_path, place.url, place.environment, steps=4)
    for _ in range(5):
        kill_in_a_copy(job, place, after=0)
        shutil.rmtree(job.folder)
        if set(copies_at(place.url).values()) == {"incomplete"}:
            break
        mirror_of(place.url).forget_newer(-1)
    else:
        pytest.fail("no copy was caught")

    job.start()
    assert job.wait() == expected[:4]
    assert "but no copy of them was ever finished" in job.log()
    assert set(copies_at(place.url).values()) == {"complete"}


def kill_in_a_copy(job: JobProcess, place: Place, after: int) -> None:
    """Start the job and kill it in the copy of a step after this one, which the suspended server
    cannot complete.
    """
    job.start()
    wait_for_a_copy(place.url, job, after)
    place.data_server.suspend()
    job.kill()
    place.data_server.resume()
    place.servers.wait()


@BOTH
def test_training_goes_on_while_the_storage_is_down(
    place: Place, model_folder: Path, tmp_path: Path, expected: list[Record]
) -> None:
    job = JobProcess(model_folder, tmp_path, place.url, place.environment, steps=3)
    job.start()
    assert job.wait() == expected[:3]

    # It starts from its folder, and warns of two copies.
    place.data_server.kill()
    try:
        job = JobProcess(model_folder, tmp_path, place.url, place.environment, steps=5)
        job.start()
        assert job.wait(240) == expected[2:5]
    finally:
        place.data_server.start()
        place.servers.wait()
    assert "global_step_3 at" in job.log() and "no copy of" in job.log()
    assert mirror_of(place.url).steps() == [1]

    # The next start makes them.
    job = JobProcess(model_folder, tmp_path, place.url, place.environment, steps=6)
    job.start()
    assert job.wait() == expected[4:6]
    assert mirror_of(place.url).steps() == [5, 3]


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_job_that_may_only_read_trains_without_copies(
    place: Place, s3: SeaweedFS, model_folder: Path, tmp_path: Path, expected: list[Record]
) -> None:
    job = JobProcess(model_folder, tmp_path, place.url, s3.environment("reader"), steps=3)
    job.start()
    assert job.wait() == expected[:3]
    assert "Access Denied" in job.log() and "no copy of" in job.log()
    assert copies_at(place.url) == {}
