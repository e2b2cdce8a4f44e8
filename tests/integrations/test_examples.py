"""The examples of every host, killed at random moments and started again by the same command."""

import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import free_port
from tests.limits import stretched

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
JOBS = {
    "trl_grpo": ("trl", 1),
    "accelerate_sft": ("accelerate", 2),
    "fsdp2_script": ("torch", 2),
    "verl_fsdp": ("verl", 2),
}


def start(name: str, folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    torchrun = ["torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}", "-m"]
    command = [sys.executable, "-m", *(torchrun if ranks > 1 else ()), f"examples.integrations.{name}", str(folder)]
    log = open(folder / "log", "ab")  # noqa: SIM115
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen[bytes], folder: Path) -> str:
    assert process.wait(stretched(200)) == 0, (folder / "log").read_text()[-4000:]
    return (folder / "digest.txt").read_text()


def steps_saved(folder: Path) -> set[str]:
    return {path.name for pattern in ("*/*/recover/global_step_*", "global_step_*") for path in folder.glob(pattern)}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_an_example_killed_at_random_moments_ends_as_one_left_alone(name: str, tmp_path: Path) -> None:
    host, ranks = JOBS[name]
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed")
    left, killed = tmp_path / "left", tmp_path / "killed"
    left.mkdir()
    killed.mkdir()
    expected = finish(start(name, left, ranks), left)
    draw, kills = random.Random(name), 0
    for _ in range(4):
        before, process = steps_saved(killed), start(name, killed, ranks)
        while process.poll() is None and steps_saved(killed) == before:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    assert kills >= 2, "too quick to be killed"
    assert finish(start(name, killed, ranks), killed) == expected
