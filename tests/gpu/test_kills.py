"""SIGKILL of ranks that compute on GPUs: a resumed run ends with the bytes of an undisturbed one.

The jobs run with deterministic algorithms (`deterministic.py`), and with attention that has
deterministic kernels.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.chaos import sha256
from tests.gpu.conftest import Machine
from tests.gpu.figures import Figures
from tests.helpers import free_port
from tests.integration.sft_runs import SCRIPT, finish, kill_after, start, wait_for_step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

EPOCHS, STEPS = 12, 120
TIMEOUT_S = 30.0
"""Longest wait in a collective."""
BOUND_S = TIMEOUT_S + 60
"""Limit for the end of a rank whose peer is dead: that wait, `close_process_groups`, and the end
itself.
"""
PATIENCE_S = 240.0
REPEATABLE = Path(__file__).with_name("deterministic.py")
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def settings(machine: Machine) -> list[str]:
    keys = [
        f"engine.device={machine.device}",
        f"engine.timeout_s={TIMEOUT_S}",
        "engine.attn_impl=eager",
    ]
    return [*keys, f"trainer.total_epochs={EPOCHS}", "trainer.save_freq=7"]


def launch(run: Path, machine: Machine) -> subprocess.Popen[str]:
    return start(run, machine.ranks, *settings(machine), script=(REPEATABLE, SCRIPT), env=CUBLAS)


def final_digest(run: Path) -> str:
    return sha256(run / "hf" / f"global_step_{STEPS - 1}" / "model.safetensors")


@pytest.fixture(scope="module")
def expected(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the weights of an undisturbed run."""
    run = tmp_path_factory.mktemp("untouched")
    finish(launch(run, machine), PATIENCE_S)
    return final_digest(run)


def test_a_killed_job_resumes_and_ends_with_the_weights_of_one_unharmed(
    machine: Machine, expected: str, tmp_path: Path
) -> None:
    kill_after(launch(tmp_path, machine), tmp_path / "stats.jsonl", 40, 0.05)
    assert not (tmp_path / "hf").exists()
    resumed = finish(launch(tmp_path, machine), PATIENCE_S)
    assert f"step   0/{STEPS}" not in resumed, resumed
    assert final_digest(tmp_path) == expected


@contextmanager
def without_a_launcher(run: Path, machine: Machine) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks without a launcher, because torchrun would end the remaining one."""
    env = (
        os.environ
        | CUBLAS
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    )
    command = [sys.executable, str(REPEATABLE), str(SCRIPT), f"trainer.default_local_dir={run}"]
    command += ["trainer.trackers=[]", *settings(machine)]
    jobs = []
    try:
        for rank in range(2):
            own, pipe = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, subprocess.PIPE
            jobs.append(
                subprocess.Popen(command, env=own, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            )
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.wait()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_whose_peer_is_killed_ends_in_time_and_resumes(
    two_gpus: Machine, figures: Figures, expected: str, killed: int, tmp_path: Path
) -> None:
    with without_a_launcher(tmp_path, two_gpus) as jobs:
        wait_for_step(jobs[0], tmp_path / "stats.jsonl", 30, timeout_s=120)
        jobs[killed].kill()
        at = time.monotonic()
        output, _ = jobs[1 - killed].communicate(timeout=BOUND_S)
        took_s = time.monotonic() - at
        assert jobs[1 - killed].returncode != 0, output
    assert "Error" in output or "error" in output, "it ended without a word"
    figures.add(
        f"rank {killed} killed: the other ends after",
        took_s,
        "s",
        f"2 ranks, timeout_s={TIMEOUT_S:g}",
    )
    assert not (tmp_path / "hf").exists()
    resumed = finish(launch(tmp_path, two_gpus), PATIENCE_S)
    assert f"step   0/{STEPS}" not in resumed, resumed
    assert final_digest(tmp_path) == expected
