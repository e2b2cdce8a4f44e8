"""The rank that the launcher of a process tells: torchrun's variables, or those of srun."""

import os

import pytest

from holdfast.utils.devices import device_here
from holdfast.utils.errors import ConfigError
from holdfast.utils.launch import first_host, is_task_of_srun, launch_environment
from holdfast.utils.processes import reading_threads
from tests.srun import job_variables, outside_of_slurm, task_variables

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def _launch(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> dict[str, str]:
    """`launch_environment` in a process with these variables of SLURM and no others."""
    for name in os.environ.keys() - outside_of_slurm().keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return dict(launch_environment())


def test_a_task_of_srun_has_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _launch(monkeypatch, task_variables(1))
    assert [found[name] for name in RANK_NAMES] == ["1", "2", "0", "1", "127.0.0.1"]
    assert is_task_of_srun() and 20000 <= int(found["MASTER_PORT"]) < 30000


def test_a_restarted_job_and_a_second_step_have_other_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = set()
    for change in ({}, {"RESTART_COUNT": "1"}, {"STEP_ID": "1"}, {"JOB_ID": "4712"}):
        variables = {f"SLURM_{name}": value for name, value in change.items()}
        found = _launch(monkeypatch, task_variables() | variables)
        ports.add(found["MASTER_PORT"])
    assert len(ports) == 4


@pytest.mark.parametrize(
    ("counts", "node", "expected"),
    [("8(x2),4", 0, "8"), ("8(x2),4", 1, "8"), ("8(x2),4", 2, "4"), ("2,1", 1, "1")],
)
def test_the_tasks_of_a_node_share_its_cores(
    counts: str, node: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_TASKS_PER_NODE": counts}
    found = _launch(monkeypatch, task_variables() | sizes | {"SLURM_NODEID": str(node)})
    assert found["LOCAL_WORLD_SIZE"] == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert reading_threads() == min(16 // int(expected), 8)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "no SLURM"),
        (job_variables(), "an sbatch script, whose job has two tasks"),
        (
            task_variables(SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1"),
            "an interactive shell, which has the number of tasks of its job",
        ),
        (task_variables(RAY_RAYLET_PID="1"), "a worker of a Ray node that srun started"),
    ],
)
def test_a_process_that_is_no_task_of_several_is_alone(
    variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "RANK" not in _launch(monkeypatch, variables), why
    assert not is_task_of_srun()


def test_variables_that_are_set_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "MASTER_ADDR": "node7"}
    found = _launch(monkeypatch, task_variables(1) | torchrun)
    assert {name: found[name] for name in torchrun} == torchrun
    assert "MASTER_PORT" not in found and not is_task_of_srun()
    monkeypatch.delenv("RANK")
    assert launch_environment()["MASTER_ADDR"] == "node7"  # the rest is srun's
    assert launch_environment()["MASTER_PORT"].startswith("2")


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_PROCID": "2"},
        {"SLURM_PROCID": "x"},
        {"SLURM_LOCALID": ""},
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"SLURM_NTASKS": "1"},
        {"SLURM_TASKS_PER_NODE": "1"},
    ],
)
def test_a_task_whose_rank_cannot_be_known_is_refused(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"do not say which task.*{name}={value}.*unset SLURM"):
        _launch(monkeypatch, task_variables() | changes)


def test_the_device_is_that_of_the_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    _launch(monkeypatch, task_variables(SLURM_LOCALID="3"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert device_here("cuda").index == 3


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("n[08-11,14],login1", "n08"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("rack[2-3]node[05,07]", "rack2node05"),
        ("n[3,1]x,y", "n3x"),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes: str, expected: str) -> None:
    assert first_host(nodes) == expected
