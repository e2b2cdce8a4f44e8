"""The coefficient of an adaptive KL controller is saved in the generation of its engine."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.api import Batch
from holdfast.engine.config import OptimizerConfig
from holdfast.engine.fsdp_engine import FSDPEngine
from holdfast.engine.rl import NormConfig, PPOActor, PPOActorConfig
from holdfast.utils.logging import get_logger
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, digest, make_handler, newest, step_info

STEPS, KILLED_IN = 4, 2


def make_actor(path: str, kl_target: float | None) -> PPOActor:
    config = PPOActorConfig(
        path=path,
        dtype="float32",
        optimizer=OptimizerConfig(lr=1e-2),
        group_size=2,
        ppo_n_minibatches=2,
        reward_norm=NormConfig("group", std_level=None),
        kl_ctl=0.1,
        kl_target=kl_target,
        kl_horizon=30,
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    return PPOActor(config, engine)


def make_batch(step: int, rank: int) -> Batch:
    """Four rows of up to eight tokens."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    mask = torch.arange(8) < torch.tensor([8, 5, 6, 3])[:, None]
    return {
        "input_ids": torch.randint(0, 15, (4, 8), generator=draw) * mask,
        "attention_mask": mask.long(),
        "loss_mask": mask & (torch.arange(8) > 1),
        "rewards": torch.rand(4, generator=draw),
        "ref_logp": -2.7 + torch.randn(4, 8, generator=draw) / 3,
    }


def _train(
    rank: int, world_size: int, path: str, root: str, kl_target: float | None, kill: str
) -> Any:
    actor = make_actor(path, kl_target)
    engine: Any = actor.engine
    handler = make_handler(root, freq_steps=1)
    info = handler.load(engine)
    used = []

    def place(name: str, step: int) -> None:
        if info is None and rank == 1 and (name, step) == (kill, KILLED_IN):
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(0 if info is None else info.last_step_info.next().global_step, STEPS):
        batch = make_batch(step, rank)
        batch["logprobs"] = actor.compute_logp(batch)
        ready = actor.compute_advantages(batch)
        place("before the update", step)
        used.append(actor.ppo_update(ready)["kl_ctl"])
        place("before the snapshot", step)
        handler.dump(engine, step_info(step))
        place("after the snapshot", step)
    handler.wait()
    handler.close()
    found = {
        "used": used,
        "value": actor.kl_ctl.value,
        "digest": digest({"actor": engine.dcp_state()}),
    }
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(folder, tiny_qwen3())
    return str(folder)


KILLS = ["before the update", "before the snapshot", "after the snapshot"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kill", KILLS)
def test_a_run_that_was_killed_ends_with_the_coefficient_and_the_weights_of_one_that_was_not(
    tmp_path: Path, model_path: str, kill: str
) -> None:
    untouched, same = run_ranks(_train, 2, model_path, str(tmp_path / "untouched"), 0.02, "")
    assert untouched == same and len(set(untouched["used"])) == STEPS
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(_train, 2, model_path, str(tmp_path / "killed"), 0.02, kill, timeout_s=20)
    resumed, _ = run_ranks(_train, 2, model_path, str(tmp_path / "killed"), 0.02, kill)
    assert (
        0 < len(resumed["used"]) < STEPS
        and resumed["used"] == untouched["used"][-len(resumed["used"]) :]
    )
    assert (resumed["value"], resumed["digest"]) == (untouched["value"], untouched["digest"])


@pytest.mark.slow
def test_a_generation_without_a_controller_is_loaded_by_a_run_with_one_and_the_other_way_round(
    tmp_path: Path, model_path: str
) -> None:
    run_ranks(_train, 1, model_path, str(tmp_path), None, "")
    assert newest(tmp_path).name == f"global_step_{STEPS - 1}"
    ((value, warned),) = run_ranks(_load, 1, model_path, str(tmp_path), 0.02)
    assert value == 0.1 and warned == ["the checkpoint has no state of 'kl_ctl'; it starts anew"]
    run_ranks(_train, 1, model_path, str(tmp_path / "with"), 0.02, "")
    ((value, warned),) = run_ranks(_load, 1, model_path, str(tmp_path / "with"), None)
    assert value == 0.1 and warned == [
        "the checkpoint has a state of 'kl_ctl', which this engine was not given; it is ignored"
    ]


def _load(
    rank: int, world_size: int, path: str, root: str, kl_target: float | None
) -> tuple[float, list[str]]:
    warned: list[str] = []
    get_logger("holdfast.engine.training.counters").addFilter(
        lambda record: warned.append(record.getMessage()) or True
    )
    actor = make_actor(path, kl_target)
    assert make_handler(root, freq_steps=1).load(actor.engine) is not None
    actor.engine.destroy()  # type: ignore[attr-defined]
    return actor.kl_ctl.value, warned
