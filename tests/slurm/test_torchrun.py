"""Ranks of torchrun on a real SLURM. Every run that may finish ends with the bytes of an
undisturbed one.
"""

import os
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from tests.slurm.cluster import Cluster, ask, until
from tests.slurm.jobs import SFT, Job
from tests.slurm.test_sft import OFTEN, assert_exact

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TORCHRUN = replace(SFT, path="tests/slurm/torchrun.sbatch")
TORCHRUN_WAITS_S = 30
"""Seconds from the signal until torchrun kills its ranks."""
LATE_S = TORCHRUN_WAITS_S + 8
CAN_WAIT = "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_torchrun_leaves_a_snapshot_and_the_status_requeues_the_job(
    cluster: Cluster, sft_alone: Job, run: Path, name: str
) -> None:
    job = Job(cluster, TORCHRUN, run)
    job.freeze_at(5)
    ask("scancel", f"--signal={name}", job.id)
    job.wait_for_pending(name)
    job.thaw()
    job.finish()
    assert job.restarts == 1
    assert "Exited with exit code 1" in job.log
    assert "to be continued" in job.log
    assert_exact(job, sft_alone)


def test_torchrun_kills_a_rank_whose_step_lasts_longer_than_half_a_minute(
    cluster: Cluster, sft_alone: Job, run: Path
) -> None:
    job = Job(cluster, TORCHRUN, run, arguments=(OFTEN,))
    job.freeze_at(5)
    saved = job.snapshots
    first_ranks = set(job.ranks)
    ask("scancel", "--signal=TERM", job.id)

    # No snapshot of step 5 and later, but the job continues from the one before.
    until(lambda: not first_ranks & set(job.ranks), "the end of the ranks", job.describe)
    job.finish()
    assert job.restarts == 1
    assert f"{SFT.resumed}{saved[-1]}" in job.log
    assert_exact(job, sft_alone)


@pytest.mark.skipif(not CAN_WAIT, reason="torchrun waits as long as it is told from torch 2.13 on")
def test_torchrun_waits_for_a_longer_step_if_it_is_told(
    cluster: Cluster, sft_alone: Job, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    job = Job(cluster, TORCHRUN, run)
    job.freeze_at(5)
    ask("scancel", "--signal=TERM", job.id)
    job.wait_for_pending("TERM")
    time.sleep(LATE_S)
    job.thaw()
    job.finish()
    assert job.restarts == 1
    assert_exact(job, sft_alone)
