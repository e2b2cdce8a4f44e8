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
    torchrun = [
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
    ]
    file = ROOT / "examples" / "integrations" / f"{name}.py"
    command = [sys.executable, *(("-m", *torchrun) if ranks > 1 else ()), str(file), str(folder)]
    log = open(folder / "log", "ab")  # noqa: SIM115
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen[bytes], folder: Path) -> str:
    assert process.wait(stretched(200)) == 0, (folder / "log").read_text()[-4000:]
    return (folder / "digest.txt").read_text()


def steps_saved(folder: Path) -> set[str]:
    return {
        path.name
        for pattern in ("*/*/recover/global_step_*", "global_step_*")
        for path in folder.glob(pattern)
    }


_IMPORT_EACH = """
import runpy, sys
given = list(sys.path[1:])
for file in sys.argv[1:]:
    sys.path[:] = [file.rpartition("/")[0], *given]  # as `python file` sets it
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]
    try:
        runpy.run_path(file, run_name="imported")
    except ModuleNotFoundError as error:
        print(file, error.name)
"""


@pytest.mark.slow
def test_every_example_that_is_started_as_a_file_finds_its_modules(tmp_path: Path) -> None:
    files = [
        file
        for file in (ROOT / "examples").rglob("*.py")
        if file.name not in ("__init__.py", "tiny.py")
    ]
    command = [sys.executable, "-c", _IMPORT_EACH, *map(str, files)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=stretched(90)
    )
    assert done.returncode == 0, done.stderr
    missing = dict(line.split() for line in done.stdout.splitlines())
    assert set(missing.values()) <= {
        host for host, _ in JOBS.values() if find_spec(host) is None
    }, missing


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_an_example_killed_at_random_moments_ends_as_one_left_alone(
    name: str, tmp_path: Path
) -> None:
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
