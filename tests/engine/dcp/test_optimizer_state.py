"""Optimizers with plain tensors for each rank's shard: every rank's values are stored, or the save
is refused.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import local_tensor
from holdfast.utils.errors import CheckpointMismatchError, ConfigError, PeerError
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(120)


class LocalMomentum(torch.optim.Optimizer):
    """Works on the local shards with plain tensors, as fused and 8-bit optimizers do.

    Args:
        block: None, or elements that share one more number, as in quantized moments.
    """

    def __init__(self, params: Any, lr: float = 0.1, block: int | None = None) -> None:
        super().__init__(params, {"lr": lr})
        self.block = block

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                local, grad, state = (
                    local_tensor(param),
                    local_tensor(param.grad),
                    self.state[param],
                )
                if not state:
                    state["step"], state["average"] = torch.tensor(0.0), torch.zeros_like(local)
                if self.block is not None:
                    state["largest"] = torch.ones(-(-local.numel() // self.block))
                state["step"] += 1
                state["average"].lerp_(grad, 0.3)
                local.sub_(state["average"] * group["lr"])


def make(
    world_size: int, seed: int, steps: int = 0, kind: Any = LocalMomentum, **options: Any
) -> DCPState:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 5), nn.Linear(5, 1)
    )  # some ranks have an empty shard of the last one
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    state = DCPState(model, kind(model.parameters(), **options))
    train(state, 0, steps)
    return state


def train(state: DCPState, first: int, last: int) -> None:
    assert state.optimizer is not None
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        state.model(x).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def averages(state: DCPState) -> list[torch.Tensor]:
    """The optimizer's averages, joined from all ranks."""
    assert state.optimizer is not None
    wholes = []
    for param in state.model.parameters():
        average = state.optimizer.state[param]["average"]
        assert type(average) is torch.Tensor, "it is the plain tensor it was"
        assert isinstance(param, DTensor) and average.shape == param.to_local().shape
        assert float(state.optimizer.state[param]["step"]) == 3
        whole = DTensor.from_local(
            average, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
        )
        wholes.append(whole.full_tensor().clone())
    return wholes


def weights(state: DCPState) -> list[torch.Tensor]:
    return [
        param.full_tensor().detach().clone()
        for param in state.model.parameters()
        if isinstance(param, DTensor)
    ]


def _save(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    state = make(world_size, 0, steps=3)
    save_dcp(f"{folder}/c", state)
    saved = averages(state)
    train(state, 3, 5)
    return {"averages": saved, "after": weights(state)}


def _load(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    fresh, stepped = make(world_size, 1), make(world_size, 2, steps=1)
    found = []
    for state in (fresh, stepped):
        load_dcp(f"{folder}/c", state)
        found.append(averages(state))
    train(fresh, 3, 5)
    return {"averages": found, "after": weights(fresh)}


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.slow
def test_a_plain_tensor_of_ranks_shards_comes_back_at_any_world_size(tmp_path: Path) -> None:
    saved = run_ranks(_save, 2, str(tmp_path))[0]
    assert all(average.abs().sum() > 0 for average in saved["averages"])
    for world_size in (1, 2, 3):
        for result in run_ranks(_load, world_size, str(tmp_path)):
            assert all(same(found, saved["averages"]) for found in result["averages"])
            if world_size == 2:
                assert same(result["after"], saved["after"])


def mapped(function: Any, nested: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: mapped(function, value) if isinstance(value, Mapping) else function(value)
        for key, value in nested.items()
    }


def _hand_over(rank: int, world_size: int) -> None:
    for kind in (LocalMomentum, torch.optim.RMSprop):
        for part in (lambda tensor: tensor, local_tensor):
            state = make(world_size, 0, steps=3, kind=kind)
            fresh = make(world_size, 1, kind=kind)
            fresh.load_state_dict(mapped(part, state.state_dict()))
            for each in (state, fresh):
                train(each, 3, 5)
            assert same(weights(fresh), weights(state)), kind


def test_a_fresh_optimizer_takes_state_in_memory_whole_or_in_parts() -> None:
    run_ranks(_hand_over, 2)


class OnlyAverages(torch.optim.Optimizer):
    """Counts no steps, so that a rank without elements has no element of its state either."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            average.lerp_(param.grad, 0.3)
            param.sub_(average * 0.1)


def _one_row(seed: int, steps: int) -> DCPState:
    torch.manual_seed(seed)
    model = nn.Linear(4, 1, bias=False)
    fully_shard(model)
    state = DCPState(model, OnlyAverages(model.parameters()))
    train(state, 0, steps)
    return state


def _hand_over_a_row(rank: int, world_size: int, folder: str) -> None:
    for steps in (0, 3):
        state = _one_row(0, steps)
        fresh = _one_row(1, steps=0)
        fresh.load_state_dict(state.state_dict())
        for each in (state, fresh):
            train(each, 3, 5)
        assert same(weights(fresh), weights(state))

    # torch's own load would leave the averages out.
    save_dcp(folder, state)
    with pytest.raises(CheckpointMismatchError, match="has no state before its first step"):
        dcp.load({"dcp": _one_row(1, steps=0)}, checkpoint_id=folder)


def test_a_rank_without_any_element_takes_and_refuses_state_like_the_others(tmp_path: Path) -> None:
    run_ranks(_hand_over_a_row, 2, f"{tmp_path}/c")


def _refused(rank: int, world_size: int, folder: str) -> str:
    state = make(world_size, 0, steps=1, block=4)
    with pytest.raises((ConfigError, PeerError)) as refused:
        save_dcp(f"{folder}/c", state)
    return str(refused.value)


def test_plain_tensors_that_may_differ_between_ranks_are_refused_with_name_and_shapes(
    tmp_path: Path,
) -> None:
    for message in run_ranks(_refused, 2, str(tmp_path)):
        assert re.search(
            r"LocalMomentum keeps 'largest' of 0.weight as a plain tensor \[[23]\]", message
        ), message
        assert re.search(r"\[[23], 4\] as this rank's shard of the parameter \[5, 4\]", message), (
            message
        )
    assert list(tmp_path.iterdir()) == []


class Older(DCPState):
    """Saves plain tensors of rank 0 for all ranks."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["optim_local"]
        for entries in state["optim"]["state"].values():
            entries["average"] = local_tensor(entries["average"])
        return state


def _older(rank: int, world_size: int, folder: str) -> list[str]:
    state = make(world_size, 0, steps=3)
    save_dcp(f"{folder}/c", Older(state.model, state.optimizer))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    load_dcp(f"{folder}/c", make(world_size, 1))
    return lines


def test_a_folder_with_rank_0s_part_for_all_loads_and_says_so(tmp_path: Path) -> None:
    for lines in run_ranks(_older, 2, str(tmp_path)):
        assert any("average" in line and "rank 0" in line for line in lines), lines


class Rounded(torch.Tensor):
    """Bfloat16 moments in a wrapper that looks like float32, like the 8-bit moments of torchao."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor) -> "Rounded":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner.bfloat16()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner.float() if isinstance(arg, Rounded) else arg for arg in args]
        out = func(*plain, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            args[0].inner.copy_(out)
            return args[0]
        return cls(out) if func is torch.ops.aten.detach.default else out


def test_moments_in_a_class_of_tensors_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = Rounded(state["exp_avg"])
    with pytest.raises(
        ConfigError,
        match=r"AdamW keeps 'exp_avg' of weight as a .*\.Rounded, whose values a checkpoint",
    ):
        save_dcp(tmp_path / "saved", DCPState(model, optimizer))
    assert not (tmp_path / "saved").exists()


class Several(torch.optim.Optimizer):
    """Steps the optimizers inside, as wrappers of Muon and AdamW do."""

    def __init__(self, inside: Any, groups: list[Any], shares_state: bool) -> None:
        super().__init__([{"params": list(group["params"])} for group in groups], {"lr": 0.1})
        self.inside = inside
        self.param_groups = groups
        self.shares_state = shares_state

    def step(self, closure: Any = None) -> None:
        inside = self.inside.values() if isinstance(self.inside, dict) else self.inside
        for optimizer in inside:
            optimizer.step()
            if self.shares_state:
                self.state.update(optimizer.state)


def several(kind: type, shares_state: bool) -> DCPState:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    one = torch.optim.AdamW(model[0].parameters())
    other = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    inside: Any = [one, other] if kind is list else {"adamw": one, "sgd": other}
    optimizer = Several(inside, one.param_groups + other.param_groups, shares_state)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return DCPState(model, optimizer)


@pytest.mark.parametrize("shares_state", [False, True])
@pytest.mark.parametrize("kind", [list, dict])
def test_state_in_optimizers_inside_of_another_is_refused(
    kind: type, shares_state: bool, tmp_path: Path
) -> None:
    state = several(kind, shares_state)
    with pytest.raises(ConfigError, match=r"Several keeps state in an optimizer inside \(AdamW\)"):
        save_dcp(tmp_path / "saved", state)
    Accelerator(cpu=True)  # its optimizers need one
    prepared = DCPState(state.model, AcceleratedOptimizer(state.optimizer))
    with pytest.raises(ConfigError, match=r"AcceleratedOptimizer keeps state .* \(AdamW\)"):
        save_dcp(tmp_path / "saved", prepared)
    assert not (tmp_path / "saved").exists()


def test_an_optimizer_that_shows_the_state_of_one_inside_is_saved_and_loaded(
    tmp_path: Path,
) -> None:
    Accelerator(cpu=True)  # its optimizers need one
    inner, states = [], []
    for _ in range(2):
        model = nn.Linear(4, 3)
        inner.append(torch.optim.AdamW(model.parameters()))
        states.append(DCPState(model, AcceleratedOptimizer(inner[-1])))
    states[0].model(torch.ones(2, 4)).sum().backward()
    inner[0].step()
    save_dcp(tmp_path / "saved", states[0])
    load_dcp(tmp_path / "saved", states[1])
    first, second = (repr([*optimizer.state.values()]) for optimizer in inner)
    assert "exp_avg" in first and first == second


def _save_zero(rank: int, world_size: int, folder: Path) -> str:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    try:
        save_dcp(folder / "saved", DCPState(model, optimizer))
    except ConfigError as error:
        return str(error)
    return "saved"


def test_moments_that_torch_spreads_over_replicas_are_refused_and_not_lost(tmp_path: Path) -> None:
    for message in run_ranks(_save_zero, 2, tmp_path):
        assert "ZeroRedundancyOptimizer keeps state in an optimizer inside (AdamW)" in message
    assert not (tmp_path / "saved").exists()
