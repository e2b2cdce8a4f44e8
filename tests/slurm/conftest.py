"""One SLURM for all tests of this folder, and the runs that nobody disturbs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.__main__ import FOLDER
from tests.slurm.cluster import NODES, Cluster, ask, until
from tests.slurm.jobs import GRPO, SFT, Job, Script


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Two nodes."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        pytest.skip("make test-slurm starts a SLURM for this test")
    cluster = Cluster(Path(folder))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """Two idle nodes. What a test leaves in the queue is cancelled."""
    yield slurm
    ask("scancel", "--user=root")
    ask("scancel", "--user=root", "--signal=KILL")
    until(lambda: ask("squeue", "--noheader") == "", "an empty queue", slurm.logs)
    until(lambda: slurm.states() == dict.fromkeys(NODES, "idle"), "idle nodes", slurm.logs)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of the run."""
    return tmp_path / "run"


def run_alone(slurm: Cluster, script: Script, run: Path) -> Job:
    """Return a job that has ended without a disturbance."""
    job = Job(slurm, script, run)
    job.finish()
    assert job.restarts == 0
    assert job.resumes == 0
    assert len(job.snapshots) == 1  # of the last step
    return job


@pytest.fixture(scope="session")
def sft_alone(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An SFT job that nobody has disturbed."""
    return run_alone(slurm, SFT, tmp_path_factory.mktemp("sft") / "run")


@pytest.fixture(scope="session")
def grpo_alone(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A GRPO job that nobody has disturbed."""
    return run_alone(slurm, GRPO, tmp_path_factory.mktemp("grpo") / "run")
