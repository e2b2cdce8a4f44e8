"""The rank of this process, as its launcher tells it.

torchrun, Ray's `WorkerGroup` and most other launchers set RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE. ``srun python train.py`` sets variables of SLURM instead, and this module
translates them. All code reads the four variables from `launch_environment`.

SLURM's variables have traps:

- In an sbatch script they describe the job, and no task was started. Only srun sets SLURM_STEP_ID.
- An sbatch script that a task has submitted inherits the variables of that task's step, but has
  numbers of tasks of its own.
- In an interactive shell (``srun --preserve-env``) SLURM_NTASKS is that of the job.
- A worker of Ray inherits them from the task in which its node was started. It is not that task.
"""

import os
import re
from collections.abc import Mapping

from .errors import ConfigError

_FIRST_PORT = 20000
_N_PORTS = 10000
"""Range of rank 0's port, below the ports that Linux gives to outgoing connections."""
_TORCHRUN_GRACE_S = 30.0
"""Default of torch, and the only value of older versions. Torch 2.13 knows the variable."""


def launch_environment() -> Mapping[str, str]:
    """Return the environment of this process with the variables of its launcher.

    Example::

        rank = int(launch_environment().get("RANK", "0"))

    - Under torchrun, or wherever RANK is set, it is the environment as it is.
    - In one of several tasks of srun, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are
      added where they are not set, and LOCAL_WORLD_SIZE if SLURM tells it. The port follows from
      the ids of job and step, and from the number of restarts.
    - A process that is alone has no RANK.

    Raises:
        ConfigError: the process is one of several tasks of srun, and SLURM's variables do not say
            which.
    """
    environment = os.environ
    if "RANK" in environment or "RAY_RAYLET_PID" in environment:
        return environment
    if "SLURM_STEP_ID" not in environment:
        return environment
    n_tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if n_tasks == 1:
        return environment
    return {**_variables_of_task(environment, n_tasks), **environment}


def torchrun_grace_s() -> float | None:
    """Seconds from a signal to torchrun until it kills its ranks. None for a process that torchrun
    has not started.

    ``torchrun --shutdown-timeout`` cannot be seen here, its environment variable can.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    seconds = _number(os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    return _TORCHRUN_GRACE_S if seconds is None else float(seconds)


def is_task_of_srun() -> bool:
    """Return whether this process is one of several tasks of srun, and only SLURM has told its
    rank. Raises as `launch_environment` does.
    """
    return "RANK" not in os.environ and "RANK" in launch_environment()


def _variables_of_task(environment: Mapping[str, str], n_tasks: int | None) -> dict[str, str]:
    rank = _number(environment, "SLURM_PROCID")
    local_rank = _number(environment, "SLURM_LOCALID")
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    is_told = rank is not None and n_tasks is not None and rank < n_tasks
    is_placed = local_rank is not None and nodes != ""
    if not (is_told and is_placed and _is_of_this_step(environment)):
        raise ConfigError(
            "SLURM's variables do not say which task of srun this process is: "
            f"{_shown(environment)}. If it trains alone, unset SLURM_STEP_ID. Otherwise start it "
            "with srun itself, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(n_tasks),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_port(environment)),
    }
    n_here = _tasks_of_node(environment)
    if n_here is not None:
        variables["LOCAL_WORLD_SIZE"] = str(n_here)
    return variables


_PAIRS = (
    ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
)
"""A variable of the job and the same one of the step. In a task of srun they are equal."""


def _is_of_this_step(environment: Mapping[str, str]) -> bool:
    for name, of_step in _PAIRS:
        value = environment.get(name)
        if value is not None and value != environment.get(of_step):
            return False
    return True


def _shown(environment: Mapping[str, str]) -> str:
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"]
    for pair in _PAIRS:
        names += pair
    return ", ".join(f"{name}={environment.get(name, '')}" for name in names)


def first_host(nodes: str) -> str:
    """Return the first host of a list of nodes in SLURM's notation, where rank 0 runs: ``n08`` of
    ``n[08-11,14],login1``.
    """
    # A comma ends the first name, unless it is between brackets.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    name = nodes if first is None else first.group()
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)


def _tasks_of_node(environment: Mapping[str, str]) -> int | None:
    """Number of tasks on this node. None if SLURM does not tell."""
    node = _number(environment, "SLURM_NODEID")
    if node is None:
        return None
    # 8(x2),4 stands for two nodes with eight tasks and one with four.
    counts: list[int] = []
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    for n_tasks, n_nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(n_tasks)] * int(n_nodes or 1)
    if node >= len(counts):
        return None
    return counts[node]


def _port(environment: Mapping[str, str]) -> int:
    """Port of rank 0. A restarted job gets another one, because its old ranks may still live."""
    job = _number(environment, "SLURM_JOB_ID") or 0
    step = _number(environment, "SLURM_STEP_ID") or 0
    restarts = _number(environment, "SLURM_RESTART_COUNT") or 0
    return _FIRST_PORT + (job * 101 + step * 11 + restarts) % _N_PORTS


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
