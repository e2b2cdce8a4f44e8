"""Jobs that want the same lock."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.utils.locking import Job


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a lock file that is not there yet, and neither is its folder."""
    return tmp_path / "run" / ".lock"


@pytest.fixture
def start_job(path: Path) -> Iterator[Callable[[], Job]]:
    """Starts a `Job` with a lock on ``path``; all of them end with the test."""
    jobs: list[Job] = []

    def start() -> Job:
        jobs.append(Job(path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
