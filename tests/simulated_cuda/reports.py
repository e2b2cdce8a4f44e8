"""A test fails if the simulated device has seen a bug in any process that it started: a plugin of
pytest.

Ranks of `run_ranks` check themselves. Jobs under torchrun and Ray do not, and some of their
processes are killed.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.simulated_cuda.device import REPORTS

_FOLDER = pytest.StashKey[TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Name a folder for the reports, before anything starts a process."""
    config.stash[_FOLDER] = folder = TemporaryDirectory(prefix="simulated-cuda-")
    os.environ[REPORTS] = folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder."""
    config.stash[_FOLDER].cleanup()


@pytest.fixture(autouse=True)
def no_reports_of_bugs() -> Iterator[None]:
    """Fail the test if there is a report."""
    yield
    found = {}
    for path in Path(os.environ[REPORTS]).iterdir():
        found[path.name] = path.read_text()
        path.unlink()
    assert not found, "\n".join(f"process {pid}:\n{bugs}" for pid, bugs in found.items())
