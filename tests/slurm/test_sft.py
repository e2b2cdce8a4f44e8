"""examples/slurm/sft.sbatch on a real SLURM, disturbed in the ways of a cluster.

Every run ends with the bytes of an undisturbed one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import stretched
from tests.slurm.cluster import Cluster, ask, until
from tests.slurm.jobs import SFT, Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TWO_RANKS = 2
OFTEN = "trainer.save_freq=3"
NO_SIGNAL = "--signal=USR1@0"

HOG = """
import time
taken = bytearray(b"1") * (1536 << 20)
time.sleep(3600)
"""
"""A program that takes most of the memory of a job."""


def assert_exact(job: Job, alone: Job, resumes: int = 1) -> None:
    """Check that a job continued from snapshots, and ended with the bytes of one left alone."""
    assert job.resumes == resumes, job.describe()
    assert job.digest() == alone.digest(), job.describe()


def preempt(job: Job) -> None:
    """Submit a job of higher priority that needs the whole node of ``job``."""
    node = f"--nodelist={job.fields['NodeList']}"
    command = ["--partition=high", node, "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(["sbatch", *command], check=True, timeout=stretched(60))


@pytest.mark.timeout(600)
def test_a_job_on_another_node_waits_for_ranks_that_live_on_a_lost_one(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run, arguments=(OFTEN,))
    job.freeze_at(5)
    first_ranks = set(job.ranks)
    node = job.fields["NodeList"]
    cluster.kill_slurmd(node)

    # The other node finds the folder locked for 90 s. SLURM starts its ranks again.
    job.wait_for_restart(1)
    until(lambda: "is in use by pid" in job.log, "ranks that give up", job.describe, 240)
    job.wait_for_restart(2)
    assert job.fields["NodeList"] != node
    assert first_ranks <= set(job.ranks)

    # The slurmd that comes back ends the first ranks.
    cluster.start_slurmd(node)
    until(lambda: not first_ranks & set(job.ranks), "the end of the first ranks", job.describe)
    job.finish()
    assert_exact(job, sft_alone)


def test_a_job_without_memory_fails_and_the_next_one_resumes(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    if not cluster.limits_memory:
        pytest.skip("SLURM needs version 1 of control groups to limit memory here")
    job = Job(cluster, SFT, run, arguments=(OFTEN,))
    job.freeze_at(5)
    # The kernel ends one of the ranks first.
    Path(f"/proc/{job.ranks[1]}/oom_score_adj").write_text("1000")
    step = ["srun", f"--jobid={job.id}", "--overlap", "--ntasks=1", sys.executable, "-c", HOG]
    with subprocess.Popen(step):
        until(lambda: len(job.ranks) < TWO_RANKS, "a killed rank", job.describe)
        job.thaw()
        job.end()
    assert job.state in ("FAILED", "OUT_OF_MEMORY"), job.describe()
    assert job.restarts == 0
    assert "oom" in job.log

    successor = Job(cluster, SFT, run, arguments=(OFTEN,))
    successor.finish()
    assert_exact(successor, sft_alone)


def test_a_chain_of_jobs_stops_before_each_limit(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    chain = ["--job-name=chain", "--dependency=singleton", "--no-requeue", NO_SIGNAL]
    until_limit = ("recover.must_save_by=slurm",)
    # Room for the start of Python, as it is on this machine now.
    minutes = 2 + 2 * sft_alone.seconds // 60
    first = Job(cluster, SFT, run, *chain, f"--time={minutes}", arguments=until_limit)
    second = Job(cluster, SFT, run, *chain, "--time=60", arguments=until_limit)

    # A third of the time is kept for a snapshot of unknown length.
    first.freeze_at(5)
    enough_s = first.seconds_left / 3
    until(lambda: first.seconds_left < enough_s, "the end of the first job's time", first.describe)
    first.thaw()
    second.finish()
    assert (first.state, first.code) == ("FAILED", "75:0"), first.describe()
    assert first.fields["EndTime"] <= second.fields["StartTime"]
    assert_exact(second, sft_alone)


def test_a_job_that_is_requeued_from_outside_resumes(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run)
    job.freeze_at(5)
    ask("scontrol", "requeue", job.id)
    job.finish()
    assert job.restarts == 1
    assert_exact(job, sft_alone)


def test_the_signal_before_the_time_limit_requeues_the_job(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run, "--time=60", "--signal=USR1@120")
    job.freeze_at(5)
    job.limit_minutes(2 + job.seconds // 60)
    job.wait_for_pending("USR1")
    job.limit_minutes(60)
    job.thaw()
    job.finish()
    assert job.restarts == 1
    assert "Exited with exit code 75" in job.log
    assert_exact(job, sft_alone)


def test_a_preempted_job_is_requeued_although_it_ends_in_its_grace_time(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run)
    job.freeze_at(5)
    preempt(job)
    job.finish()
    assert job.restarts == 1
    assert "Exited with exit code 75" in job.log
    assert_exact(job, sft_alone)


def test_a_signal_while_python_imports_requeues_the_job(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run)
    job.wait_for_ranks(TWO_RANKS)
    job.freeze()
    ask("scancel", "--signal=USR1", job.id)
    job.wait_for_pending("USR1")
    job.thaw()
    job.finish()
    assert job.restarts == 1
    assert "User defined signal 1" in job.log
    assert_exact(job, sft_alone, resumes=0)


def test_a_preemption_while_python_imports_requeues_the_job(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run)
    job.wait_for_ranks(TWO_RANKS)
    job.freeze()
    preempt(job)
    job.finish()
    assert job.restarts == 1
    assert "Terminated" in job.log
    assert_exact(job, sft_alone, resumes=0)


def test_the_time_limit_leaves_a_snapshot_to_the_next_job(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run, "--time=60", NO_SIGNAL)
    job.freeze_at(5)
    job.limit_minutes(1)
    job.end()
    assert job.state == "TIMEOUT", job.describe()
    assert job.restarts == 0
    assert job.snapshots

    successor = Job(cluster, SFT, run)
    successor.finish()
    assert_exact(successor, sft_alone)


def test_a_cancelled_job_leaves_a_snapshot_and_is_not_requeued(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, SFT, run)
    job.freeze_at(5)
    ask("scancel", job.id)
    job.end()
    assert job.state == "CANCELLED", job.describe()
    assert job.restarts == 0
    assert job.snapshots

    successor = Job(cluster, SFT, run)
    successor.finish()
    assert_exact(successor, sft_alone)
