"""Start `examples/sft.py` under real torchrun, kill it at some moment, and check the result."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from holdfast.utils.metrics import read_stats
from tests.limits import stretched

SCRIPT = Path(__file__).parents[2] / "examples" / "sft.py"


def start(
    run: Path,
    ranks: int,
    *overrides: str,
    script: Sequence[Path] = (SCRIPT,),
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Train in the folder ``run``, with one rank without torchrun.

    Args:
        script: command to run: the example, or a script with the example as its argument.
        env: additional environment variables.
    """
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks > 1
        else []
    )
    arguments = [
        *map(str, script),
        f"trainer.default_local_dir={run}",
        "trainer.trackers=[]",
        *overrides,
    ]
    return subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen[str], timeout_s: float = 80) -> str:
    """Wait for a job to succeed and return its output."""
    try:
        output, _ = job.communicate(timeout=stretched(timeout_s))
    except subprocess.TimeoutExpired:
        kill_tree(job)
        raise
    assert job.returncode == 0, output
    return output


def kill_tree(job: subprocess.Popen[str], launcher_only: bool = False) -> None:
    """SIGKILL torchrun and all its children, or only torchrun, in which case the ranks must end
    too.
    """
    launcher = psutil.Process(job.pid)
    tree = [*launcher.children(recursive=True), launcher]
    for process in [launcher] if launcher_only else tree:
        process.kill()
    job.wait(timeout=stretched(20))
    _, alive = psutil.wait_procs(tree, timeout=stretched(5))
    assert not alive


def kill_after(
    job: subprocess.Popen[str], stats: Path, step: int, delay_s: float, launcher_only: bool = False
) -> None:
    """Kill the job ``delay_s`` after it has logged ``step``."""
    wait_for_step(job, stats, step)
    time.sleep(delay_s)
    kill_tree(job, launcher_only)


def wait_for_step(
    job: subprocess.Popen[str], stats: Path, step: int, timeout_s: float = 60
) -> None:
    """Wait until the job has logged ``step``."""
    deadline = time.monotonic() + stretched(timeout_s)
    while not (stats.exists() and any(entry["step"] >= step for entry in read_stats(stats))):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, f"the job did not reach step {step}"
        time.sleep(0.01)


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Relative path -> contents of all files below ``folder``."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
