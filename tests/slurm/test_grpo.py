"""examples/slurm/grpo.sbatch on a real SLURM: a Ray cluster on two nodes that is stopped. Every run
ends with the bytes of an undisturbed one.
"""

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, ask
from tests.slurm.jobs import GRPO, Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SIGNALS = {
    "USR1": ["--batch", "--signal=USR1"],  # as --signal=B:USR1@600 sends it
    "TERM": ["--signal=TERM"],  # to all steps, as a preemption does
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_stopped_driver_requeues_the_job(
    cluster: Cluster, grpo_alone: Job, run: Path, name: str
) -> None:
    job = Job(cluster, GRPO, run)
    job.freeze_at(3)
    ask("scancel", *SIGNALS[name], job.id)
    job.wait_for_pending(name)
    job.thaw()
    job.finish()
    assert job.restarts == 1
    assert "Exited with exit code 75" in job.log
    assert job.resumes == 1
    assert job.digest() == grpo_alone.digest()
