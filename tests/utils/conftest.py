"""Fixtures: jobs that compete for a lock."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.utils.locking import Job


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of a lock file that does not exist yet, in a folder that does not exist either."""
    return tmp_path / "run" / ".lock"


@pytest.fixture
def start_job(path: Path) -> Iterator[Callable[[], Job]]:
    """Starts a `Job` with a lock on ``path``. All jobs end with the test."""
    jobs: list[Job] = []

    def start() -> Job:
        jobs.append(Job(path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
