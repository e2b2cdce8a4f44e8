"""Tasks of srun without torchrun: real processes with its environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import stretched
from tests.srun import job_variables, outside_of_slurm, srun, task_variables

JOIN = """
import os
from holdfast.engine import FSDPEngine, TrainEngineConfig
from holdfast.utils.distributed import gather_objects, get_rank, get_world_size
from holdfast.utils.logging import configure_logging, get_logger
configure_logging()
get_logger("holdfast.test").warning("begins")
for life in range(2):
    engine = FSDPEngine(TrainEngineConfig(path="x", timeout_s=30))
    engine.create_process_group()
    told = gather_objects(os.environ.get("SLURM_PROCID"), engine.control_group)
    print(f"rank {get_rank()} of {get_world_size()} heard {told}", flush=True)
    engine.destroy()
print("RANK" in os.environ)
"""

HANDLER = """
import sys, torch
from holdfast.engine import FinetuneSpec
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import HoldfastError
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
handler = RecoverHandler(RecoverConfig(fileroot=sys.argv[1]), FinetuneSpec(1, 4, 1))
try:
    handler.load((model, optimizer))
except HoldfastError as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("loaded")
"""


@pytest.mark.slow
def test_the_tasks_of_srun_join_without_torchrun() -> None:
    for rank, (code, output) in enumerate(srun(["-c", JOIN])):
        assert code == 0, output
        assert output.count(f"rank {rank} of 2 heard ['0', '1']\n") == 2, output
        assert f"rank {rank} holdfast.test | begins" in output
        assert output.endswith("False\n")  # programs that a rank starts are no ranks


@pytest.mark.slow
@pytest.mark.parametrize("variables", [job_variables(), task_variables(RAY_RAYLET_PID="1")])
def test_a_process_that_srun_did_not_start_stays_alone(variables: dict[str, str]) -> None:
    done = _run(["-c", JOIN], variables)
    assert done.returncode == 0 and "rank 0 of 1 heard ['0']" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_task_without_a_known_rank_is_refused_before_it_waits() -> None:
    done = _run(["-c", JOIN], task_variables(SLURM_NTASKS="1"))
    assert done.returncode == 1 and "unset SLURM_STEP_ID" in done.stdout, done.stdout
    assert "heard" not in done.stdout


@pytest.mark.slow
def test_tasks_of_another_trainer_are_not_several_runs_in_one_folder(tmp_path: Path) -> None:
    for code, output in srun(["-c", HANDLER, str(tmp_path / "runs")]):
        assert code == 1 and "ConfigError: this process is one of several tasks" in output, output
    assert not (tmp_path / "runs").exists()
    alone = _run(["-c", HANDLER, str(tmp_path / "runs")], job_variables())
    assert alone.returncode == 0 and "loaded" in alone.stdout, alone.stdout


def _run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=outside_of_slurm() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=stretched(60),
    )
