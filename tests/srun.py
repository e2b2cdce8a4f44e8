"""Tasks as srun starts them: real processes with its environment, as SLURM 22.05 sets it, and the
first of two nodes at 127.0.0.1.
"""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from holdfast.utils.launch import launch_environment
from tests.limits import stretched


def job_variables(**changes: str) -> dict[str, str]:
    """Variables of a job of two tasks, in its sbatch script, where a first task is set too."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        **changes,
    }


def task_variables(rank: int = 0, /, **changes: str) -> dict[str, str]:
    """Variables of a task of srun in that job, of which each runs on its own node."""
    return job_variables(
        **{
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank),
            **changes,
        }
    )


def outside_of_slurm() -> dict[str, str]:
    """Environment of this process without the variables of launchers."""
    launchers = ("SLURM_", "RAY_RAYLET", "MASTER_", "TORCHELASTIC")
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(launchers) and name not in own
    }


def start(command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start a Python process with these variables of SLURM and no others."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=outside_of_slurm() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def job_with_a_free_port() -> str:
    """Id of a job whose port nobody listens at."""
    while True:
        job = str(random.randrange(1_000_000))
        environ = os.environ.copy()
        os.environ.clear()
        os.environ.update(outside_of_slurm() | task_variables(SLURM_JOB_ID=job))
        try:
            port = int(launch_environment()["MASTER_PORT"])
        finally:
            os.environ.clear()
            os.environ.update(environ)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return job


def srun(command: Sequence[str], timeout_s: float = 60, **changes: Any) -> list[tuple[int, str]]:
    """Run two tasks. Return the exit code and the output of each."""
    job = job_with_a_free_port()
    tasks = [start(command, task_variables(rank, SLURM_JOB_ID=job, **changes)) for rank in (0, 1)]
    try:
        outputs = [task.communicate(timeout=stretched(timeout_s))[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    return [(task.returncode, output) for task, output in zip(tasks, outputs, strict=True)]
