"""Ranks that reach different parameters in a backward: experts, towers, adapters.

The reference is the same model without sharding, in one process that computes every rank's
micro-batches.
"""

import copy
import itertools
import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.engine import ParallelStrategy, TrainEngineConfig
from holdfast.engine.training.counters import EngineCounters
from holdfast.engine.training.gradient_sync import accumulating
from holdfast.engine.training.meshes import Meshes, open_meshes
from holdfast.engine.training.optimizer_step import clip_and_step
from holdfast.engine.training.sharding import shard_model
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

MAX_NORM = 0.5
STEPS: list[list[list[str]]] = [
    [
        ["a", "ab"],
        ["a", "ct"],
    ],  # by rank, then micro-batch: the experts it reaches in addition to s and t, a tower
    [["ae", ""], ["e!", ""]],  # one loss is not finite
    [["d", ""], ["", "z"]],
    [["", "be"], ["", "b"]],
]
"""No backward of the first step reaches d. z has a gradient of zeros, which counts as a gradient.
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abcdesz"})
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor, reached: str) -> torch.Tensor:
        x = x + self.frozen(x).tanh()
        for name in (key for key in self.experts if key in f"{reached}s"):
            x = x + (name != "z") * self.experts[name](x).tanh()
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.tower, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList([Block(), Block()])

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, x: torch.Tensor, reached: str) -> torch.Tensor:
        x = self.embedding(x)
        if "t" in reached:
            x = x + self.tower(x)
        for block in self.blocks[: 1 if "1" in reached else None]:
            x = block(x, reached)
        return self.head(x).square().mean() * (math.inf if "!" in reached else 1.0)


def make_model(only_adapters: bool) -> Model:
    torch.manual_seed(0)
    model = Model()
    if only_adapters:
        for name, param in model.named_parameters():
            param.requires_grad_("experts" in name)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5
    )


def inputs_of(step: int, rank: int, index: int) -> torch.Tensor:
    return torch.randn(
        5, 6, generator=torch.Generator().manual_seed(100 * step + 10 * rank + index)
    )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments. A parameter that was never updated has no moments."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    found = {}
    for name, param in model.named_parameters():
        found[name] = whole(param)
        found |= {
            f"{name}/{key}": whole(value) for key, value in optimizer.state.get(param, {}).items()
        }
    return found


def open_cpu_meshes(world_size: int, replicas: int) -> Meshes:
    strategy = ParallelStrategy(world_size, replicate_size=replicas)
    return open_meshes(strategy, torch.device("cpu"), timedelta(seconds=60))


def _sharded(
    rank: int, world_size: int, only_adapters: bool, replicas: int, sync_last: bool
) -> list[Any]:
    model: Any = make_model(only_adapters)
    meshes = open_cpu_meshes(world_size, replicas)
    shard_model(model, TrainEngineConfig(dtype="float32"), (Block,), meshes.fsdp)
    optimizer, counters, results = make_optimizer(model), EngineCounters(), []
    for step, plan in enumerate(STEPS):
        with accumulating(model, len(plan[rank]), meshes, sync_last) as before_backward:
            for index, reached in enumerate(plan[rank]):
                before_backward(index)
                (model(inputs_of(step, rank, index), reached) / len(plan[rank])).backward()
        stats = clip_and_step(
            model, optimizer, MAX_NORM, counters, torch.zeros((), dtype=torch.float64)
        )
        results.append((stats["grad_norm"], stats["update_skipped"], state_of(model, optimizer)))
    return results


def unsharded(only_adapters: bool) -> list[Any]:
    model = make_model(only_adapters)
    optimizer, results = make_optimizer(model), []
    for step, plan in enumerate(STEPS):
        for rank, parts in enumerate(plan):
            for index, reached in enumerate(parts):
                (model(inputs_of(step, rank, index), reached) / (len(parts) * len(plan))).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        results.append((norm, not math.isfinite(norm), copy.deepcopy(state_of(model, optimizer))))
    return results


CASES = list(itertools.product([False, True], [1, 2], [False, True]))
QUICK = [(False, 1, False), (True, 2, True)]


@pytest.mark.parametrize(("only_adapters", "replicas", "sync_last"), slow_but(QUICK, CASES))
def test_parameters_that_some_ranks_do_not_reach_are_trained_as_on_one_process(
    only_adapters: bool, replicas: int, sync_last: bool
) -> None:
    expected = unsharded(only_adapters)
    assert [skipped for _, skipped, _ in expected] == [False, True, False, False]
    first, third = expected[0][2], expected[2][2]
    assert (
        "blocks.0.experts.d.weight/step" not in first and "blocks.0.experts.z.weight/step" in third
    )
    for results in run_ranks(_sharded, 2, only_adapters, replicas, sync_last):
        for (norm, skipped, state), (norm_there, skipped_there, state_there) in zip(
            results, expected, strict=True
        ):
            assert skipped == skipped_there and (
                skipped or norm == pytest.approx(norm_there, rel=1e-5)
            )
            assert state.keys() == state_there.keys()
            for name, tensor in state_there.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


PLANS: list[list[list[str]]] = [
    [["a", "ac"], ["a", "ac"]],  # c is reached in the last micro-batch alone
    [["a", "a"], ["ab", "ac"]],  # and on one rank alone
    [["a", "1"], ["b", "1"]],  # the last one runs the first block alone
]


def _gradients(
    rank: int, plan: list[list[str]], dtype: torch.dtype, sync_last: bool
) -> dict[str, torch.Tensor]:
    model: Any = make_model(only_adapters=False)
    meshes = open_cpu_meshes(len(plan), replicas=1)
    name = str(dtype).removeprefix("torch.")
    shard_model(model, TrainEngineConfig(dtype=name), (Block,), meshes.fsdp)
    with accumulating(model, len(plan[rank]), meshes, sync_last) as before_backward:
        for index, reached in enumerate(plan[rank]):
            before_backward(index)
            model(inputs_of(0, rank, index).to(dtype), reached).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.full_tensor() for name, grad in found.items() if grad is not None}


def _once_a_step_as_in_every_micro_batch(
    rank: int, world_size: int, plan: list[list[str]], dtype: torch.dtype
) -> None:
    every = _gradients(rank, plan, dtype, sync_last=False)
    last = _gradients(rank, plan, dtype, sync_last=True)
    assert every.keys() == last.keys()
    for name, grad in every.items():
        torch.testing.assert_close(last[name], grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_are_summed_once_a_step_are_those_of_every_micro_batch(
    plan: list[list[str]], dtype: torch.dtype
) -> None:
    run_ranks(_once_a_step_as_in_every_micro_batch, 2, plan, dtype, timeout_s=10)


def _leave_out_a_block(rank: int, world_size: int, sync_last: bool) -> str | None:
    model: Any = make_model(only_adapters=False)
    meshes = open_cpu_meshes(world_size, replicas=2)
    shard_model(model, TrainEngineConfig(dtype="float32"), (Block,), meshes.fsdp)
    try:
        with accumulating(model, 2, meshes, sync_last) as before_backward:
            for index, reached in enumerate(("a", "a1")):  # the second runs the first block alone
                before_backward(index)
                model(inputs_of(0, rank, index), reached).backward()
    except RuntimeError as error:
        assert all(param.grad is None for param in model.parameters())
        return str(error)
    twin = make_model(only_adapters=False)
    for other in range(world_size):
        twin(inputs_of(0, other, 0), "a").backward()
    last: Any = model.blocks[1]
    expected = twin.blocks[1].get_submodule("experts.s").weight.grad / world_size  # type: ignore[operator]
    torch.testing.assert_close(last.experts["s"].weight.grad.full_tensor(), expected)
    return None


def test_a_block_that_the_last_micro_batch_leaves_out_keeps_its_gradient_or_is_an_error() -> None:
    assert run_ranks(_leave_out_a_block, 2, True) == [None] * 2
    for message in run_ranks(_leave_out_a_block, 2, False):
        assert message is not None and "set fsdp.gradient_sync to 'last'" in message
