"""The examples on meshes whose ranks share data: they train each row once, and survive kills as on
any other mesh.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.chaos import GrpoRun, sha256
from examples.grpo import copy_digits, start_workers
from examples.grpo_job import GRPOConfig, split_rows
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError
from holdfast.utils.metrics import read_stats
from tests.integration import sft_runs
from tests.integration.killed_jobs import finish, finish_killed, last_generation, stats_of

STEPS = 8
SETTINGS = (
    f"total_steps={STEPS}",
    "n_prompts=64",
    "batch_size=8",
    "trackers=[]",
    "recover.freq_steps=2",
)
EXAMPLES = Path(__file__).parents[2] / "examples"
MESHES = {
    "r2": ("backend=fsdp:d2", "actor.fsdp.replicate_size=2"),
    "c2": ("backend=fsdp:d1c2",),
}
"""Overrides of the GRPO example for two trainers."""


def grpo_config(*overrides: str) -> GRPOConfig:
    return load_config(GRPOConfig, str(EXAMPLES / "grpo_copy.yaml"), overrides)


def test_the_driver_gives_trainers_with_the_same_data_the_same_rows() -> None:
    batch = {"input_ids": torch.arange(24).view(12, 2)}
    for overrides, expected in (
        ((), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        (("backend=fsdp:d2c2",), [[0, 1, 2, 3, 4, 5]] * 2 + [[6, 7, 8, 9, 10, 11]] * 2),
        (("backend=fsdp:t4",), [list(range(12))] * 4),
    ):
        shares = split_rows(batch, grpo_config("n_trainers=4", *overrides), 4, 3)
        assert [(share["input_ids"][:, 0] // 2).tolist() for (share,) in shares] == expected


class NoAttempt:
    """Records the numbers of ranks that are acceptable."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any]] = {}

    def worker_group(self, *args: Any, name: str, **options: Any) -> str:
        self.asked[name] = options
        return name


def test_the_number_of_trainers_fits_the_mesh() -> None:
    attempt: Any = NoAttempt()
    config = grpo_config("backend=fsdp:c2", "n_trainers=6", "min_trainers=2", "batch_size=3")
    start_workers(config, copy_digits(config), attempt)
    asked = attempt.asked["trainer"]
    assert (asked["world_size"], asked["min_world_size"], asked["multiple_of"]) == (6, 2, 2)
    for overrides, why in (
        (("backend=fsdp:d1c2", "n_trainers=3"), "data_parallel_size is 1, .*start 2 ranks"),
        (
            ("backend=fsdp:d2c2", "n_trainers=4", "min_trainers=2"),
            "data_parallel_size is 2, .*start 4 ranks",
        ),
        (
            ("backend=fsdp:d2c2", "n_trainers=4", "batch_size=3"),
            "'batch_size' is 3; expected a multiple of 2,",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            grpo_config(*overrides)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", MESHES)
def test_grpo_on_a_mesh_ends_with_the_same_bytes_after_a_trainer_and_the_driver_were_killed(
    tmp_path: Path, mesh: str
) -> None:
    reference, run = (
        GrpoRun(tmp_path / name, *SETTINGS, *MESHES[mesh]) for name in ("reference", "run")
    )
    finish(reference)
    finish_killed(run, trainer_after=2, driver_after=5)
    assert sha256(run.final_weights()) == sha256(reference.final_weights())
    files = last_generation(reference, STEPS - 1)
    first, second = (files[f"state/rank_{rank:05d}.pt"] for rank in range(2))
    assert (first == second) == (mesh != "r2"), (
        "ranks with the same data, and only they, have the same generators"
    )
    assert last_generation(run, STEPS - 1) == files
    stats = stats_of(run)
    assert stats == stats_of(reference) and [entry["step"] for entry in stats] == list(range(STEPS))
    assert {entry["n_seqs"] for entry in stats} == {8 * 16.0}, "ranks with the same data count once"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actor_and_critic_on_a_mesh_resume_together(tmp_path: Path) -> None:
    options: dict[str, Any] = {"script": EXAMPLES / "ppo_critic.py", "experiment": "ppo_critic"}
    settings = (*SETTINGS, "backend=fsdp:d1c2")
    reference, run = (
        GrpoRun(tmp_path / name, *settings, **options) for name in ("reference", "run")
    )
    finish(reference)
    finish_killed(run, trainer_after=2, driver_after=5)
    assert last_generation(run, STEPS - 1) == last_generation(reference, STEPS - 1)
    assert stats_of(run) == stats_of(reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_supervised_training_goes_on_with_another_mesh_and_logs_each_step_once(
    tmp_path: Path,
) -> None:
    overrides, last_step = ("trainer.total_epochs=6", "trainer.save_freq=7"), 59
    moments = [
        (random.randrange(0, 25), random.random() * 0.1),
        (random.randrange(27, 52), random.random() * 0.1),
    ]
    print(f"killing at (step, seconds after it) {moments}")
    for backend, (step, delay_s) in zip(("fsdp:d1c2", "fsdp:d2"), moments, strict=True):
        job = sft_runs.start(tmp_path, 2, *overrides, f"backend={backend}")
        sft_runs.kill_after(job, tmp_path / "stats.jsonl", step, delay_s)
    output = sft_runs.finish(sft_runs.start(tmp_path, 2, *overrides, "backend=fsdp:d1c2"))
    assert output.count(f"step  {last_step}/60") == 1, output
    stats = read_stats(tmp_path / "stats.jsonl")
    assert [entry["step"] for entry in stats] == list(range(last_step + 1))
    assert stats[-1]["loss"] < 0.2 * stats[0]["loss"]
