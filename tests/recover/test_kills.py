"""Ranks killed at random times during a dump, alone and together. tests/faults kills at every
system call.
"""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.engine import MicroBatchSpec
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import GenerationStore
from holdfast.utils.rng import seed_rng
from tests.engine.meshes import mesh_options
from tests.engine.models import HAS_PLANS, tiny_qwen3_moe, write_model_folder
from tests.helpers import run_ranks
from tests.recover.runs import (
    Tiny,
    digest,
    draw,
    hidden,
    make_batch,
    make_engine,
    make_handler,
    make_loader,
    nll,
    step_info,
    stream,
    token_count,
)
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)


class _Sharded:
    """Two sharded layers whose every weight is the number of the step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        fully_shard(
            self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        )
        self.state = DCPState(self.model, torch.optim.AdamW(self.model.parameters()))

    def fill(self, step: int) -> None:
        with torch.no_grad():
            for tensor in self.state.live_tensors().values():
                tensor.fill_(step)

    def values(self) -> set[float]:
        tensors = self.state.live_tensors().values()
        return {
            value
            for tensor in tensors
            for value in (getattr(tensor, "_local_tensor", tensor)).unique().tolist()
        }


def _dump_until_killed(
    rank: int,
    world_size: int,
    root: str,
    async_save: bool,
    victims: tuple[int, ...],
    delay_s: float,
) -> int:
    sharded, handler = _Sharded(), make_handler(root, freq_steps=1, async_save=async_save)
    info = handler.load(sharded.state)
    step = info.last_step_info.global_step if info else -1
    assert info is None or sharded.values() == {step}
    assert rank != 0 or hidden(root) == []
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    while victims:
        step += 1
        sharded.fill(step)
        handler.dump(sharded.state, step_info(step))
        if (
            rank in victims and timer.ident is None
        ):  # after the first dump, so that every attempt makes progress
            timer.start()
    return step


@pytest.mark.parametrize("async_save", slow_but([True], [True, False]))
def test_ranks_killed_while_they_dump_resume_the_newest_complete_generation(
    tmp_path: Path, async_save: bool
) -> None:
    draw = random.Random(4)
    store, last = GenerationStore(tmp_path / "e" / "t" / "recover"), -1
    for victims in [(0,), (1,), (0, 1)]:
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(
                _dump_until_killed,
                2,
                str(tmp_path),
                async_save,
                victims,
                draw.uniform(0.01, 0.4),
                timeout_s=20,
            )
        generations = store.generations()
        for generation in generations:
            assert store.verify(generation.path).last_step_info.global_step == generation.step
        assert generations[0].step > last
        last = generations[0].step
    assert run_ranks(_dump_until_killed, 2, str(tmp_path), async_save, (), 0.0) == [last, last]
    assert store.quarantined() == []


def _train(
    rank: int,
    world_size: int,
    root: str,
    mesh: tuple[str, int],
    steps: int,
    victims: tuple[int, ...],
    delay_s: float,
) -> tuple[str, int]:
    """Train up to a step, unless killed some time after the first dump. Returns a digest of
    everything, and the step that was resumed.
    """
    engine = make_engine(f"{root}/model", mb_spec=MicroBatchSpec(n_mbs=2), **mesh_options(*mesh))
    seed_rng(3, engine.data_parallel_rank)
    loader = make_loader("own", engine.data_parallel_rank, engine.data_parallel_world_size)
    handler = make_handler(root, freq_steps=1, hf_freq_steps=3)
    info = handler.load(engine, loader)
    first = info.last_step_info.global_step + 1 if info else 0
    timer, batches = (
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)),
        stream(loader),
    )
    for step in range(first, steps):
        engine.train_batch(make_batch([*next(batches), int(10 * draw()[2])]), nll, token_count)
        engine.step_lr_scheduler()
        handler.dump(engine, step_info(step), loader)
        if rank in victims and timer.ident is None:
            timer.start()
    handler.close()
    return digest({"default": engine.dcp_state()}), first


MESHES = [
    ("fsdp:d4", 2),
    ("fsdp:d2c2", 1),
    *([("fsdp:d2t2", 1), ("fsdp:d4e2", 1)] if HAS_PLANS else []),
]
"""Backend and replicas of four ranks."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_of_a_mesh_that_are_killed_end_with_the_bytes_of_a_run_that_was_not(
    tmp_path: Path, mesh: tuple[str, int]
) -> None:
    draw_delay, killed = random.Random(5), str(tmp_path / "killed")
    for name in ("killed", "whole"):
        write_model_folder(tmp_path / name / "model", tiny_qwen3_moe())
    for victims in [(0,), (3,), (1, 2), (0, 1, 2, 3)]:
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(
                _train, 4, killed, mesh, 10_000, victims, draw_delay.uniform(0, 0.6), timeout_s=30
            )
    store = GenerationStore(tmp_path / "killed" / "e" / "t" / "recover")
    for generation in store.generations():
        assert store.verify(generation.path).last_step_info.global_step == generation.step
    last = store.generations()[0].step
    found = run_ranks(_train, 4, killed, mesh, last + 4, (), 0.0)
    expected = run_ranks(_train, 4, str(tmp_path / "whole"), mesh, last + 4, (), 0.0)
    assert found == [(state, last + 1) for state, _ in expected]
    others = [
        (4, ("fsdp", 1)),
        (2, ("fsdp", 1)),
        (2, ("fsdp", 2)),
        (4, ("fsdp", 4)),
        (2, ("fsdp:d1c2", 1)),
    ]
    for world_size, other in others:  # nothing left to train: what was loaded
        again = run_ranks(_train, world_size, killed, other, last + 4, (), 0.0)
        assert again == [(expected[0][0], last + 4)] * world_size


def test_the_step_of_a_killed_dump_can_be_dumped_again(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    staging = handler.store.open_staging(0)
    (staging / "default").mkdir()
    assert handler.dump(tiny.state, step_info(0)), "somebody's leftover is in nobody's way"
    assert [name.partition("-")[0] for name in hidden(tmp_path)] == [".staging"]
    info: Any = make_handler(tmp_path).load(tiny.state)
    assert info.last_step_info.global_step == 0 and hidden(tmp_path) == []
