"""The GRPO example under Ray on simulated GPUs: two trainers have one each, and the rollout worker
has a third.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from examples.chaos import GrpoRun, sha256
from holdfast.utils.metrics import read_stats
from tests.limits import stretched
from tests.ray_clusters import cluster_of

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(300)]

STEPS = 6
SETTINGS = (
    f"total_steps={STEPS}",
    "n_prompts=60",
    "batch_size=4",
    "n_samples=4",
    "gpus_per_trainer=1",
    "gpus_per_rollout=1",
    "actor.device=cuda",
    "recover.freq_steps=2",
    "trackers=[]",
    "log_level=INFO",
)
PATIENCE_S = stretched(120.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A Ray with three GPUs, which it cannot count itself."""
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")  # each rank names its device
    with cluster_of(1, num_cpus=3, num_gpus=3) as cluster:
        yield cluster


def train_until(run: GrpoRun, step: int, attempt: int = 0) -> None:
    """Wait until attempt ``attempt`` has begun and ``step`` is logged."""
    run.wait_until(
        lambda: (
            (len(run.attempts()) > attempt and run.last_step() >= step)
            or run.exit_code() is not None
        ),
        PATIENCE_S,
    )
    assert run.exit_code() is None, run.log_tail()


def final_digest(run: GrpoRun) -> str:
    """Wait for the end of a run. Returns the SHA-256 of its weights."""
    assert run.wait(PATIENCE_S) == 0, run.log_tail()
    output = (run.fileroot / "output.log").read_text(errors="replace")
    # Rank 1 tells warnings alone, and ends without the device that `actor.device` asks for.
    line = (
        "rank 0 holdfast.engine.training.process_groups | computing on cuda:0 "
        "(simulated CUDA device)"
    )
    assert line in output, output
    stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
    assert [entry["step"] for entry in stats] == list(range(STEPS))
    return sha256(run.final_weights())


def test_a_killed_trainer_and_a_killed_rollout_worker_leave_no_trace(
    cluster: Cluster, tmp_path: Path
) -> None:
    address = f"ray_address={cluster.address}"
    untouched, killed = (
        GrpoRun(tmp_path / name, *SETTINGS, address) for name in ("untouched", "killed")
    )
    try:
        untouched.start()
        expected = final_digest(untouched)
        killed.start()
        train_until(killed, 0)
        first = killed.pids()
        assert killed.kill("rollout")
        train_until(killed, 2)
        assert killed.pids()["trainer"] == first["trainer"], "the trainers were left alone"
        assert killed.kill("trainer", 1)
        assert final_digest(killed) == expected
    finally:
        untouched.stop()
        killed.stop()
    assert killed.pids()["rollout"] != first["rollout"]
    assert [(attempt["number"], attempt["step"]) for attempt in killed.attempts()] == [
        (0, 0),
        (1, 2),
    ]
