"""Fingerprints of a training state: equal at every world size, different after every step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from holdfast.engine.dcp.fingerprint import combine_samples, sample_state
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.distributed import gather_objects
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(180)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int64,
    torch.bool,
]


def fingerprint(state: DCPState) -> dict[str, Any]:
    return combine_samples(gather_objects(sample_state(state.live_tensors())))


def make_state(seed: int) -> DCPState:
    """Odd sizes, so that shards are uneven and some ranks have an empty shard of a bias."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 101), nn.Linear(101, 2), nn.BatchNorm1d(2))
    fully_shard(model)
    return DCPState(model, torch.optim.AdamW(model.parameters()))


def train(state: DCPState) -> None:
    state.model(torch.ones(4, 13)).square().sum().backward()
    assert state.optimizer is not None
    state.optimizer.step()
    state.optimizer.zero_grad()


def _train_and_save(rank: int, world_size: int, path: str) -> list[dict[str, Any]]:
    state = make_state(0)
    found = [fingerprint(state), fingerprint(state)]
    for _ in range(3):
        train(state)
        found.append(fingerprint(state))
    save_dcp(path, state)
    return found


def _load(rank: int, world_size: int, path: str) -> dict[str, Any]:
    state = make_state(1)
    load_dcp(path, state)
    return fingerprint(state)


def test_a_fingerprint_is_alike_at_every_world_size_and_changes_every_step(tmp_path: Any) -> None:
    path = str(tmp_path / "saved")
    fresh, again, *trained = run_ranks(_train_and_save, 2, path)[0]
    assert fresh == again and fresh["moved"] is False
    assert all(step["moved"] is True for step in trained)
    for part in ("model", "optim"):
        assert len({step[part] for step in (fresh, *trained)}) == 4, "no two steps have the same"
        assert all(len(step[part]) == 16 and int(step[part], 16) >= 0 for step in trained)
    for world_size in (1, 2, 3):
        assert run_ranks(_load, world_size, path) == [trained[-1]] * world_size


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of several shapes, under names of both parts."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for at, shape in enumerate([(), (1,), (7,), (64,), (65,), (9, 31), (3, 5, 7), (1000, 3)]):
        found[f"model.{at}"] = torch.randint(0, 2, shape, generator=generator).to(dtype)
        found[f"optim.state.{at}.exp_avg"] = torch.randint(0, 2, shape, generator=generator).to(
            dtype
        )
    return found


def _shard(rank: int, world_size: int) -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (world_size,)), []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for placement in (Shard(0), Shard(1), Replicate()):
            sharded = {
                name: distribute_tensor(tensor, mesh, [placement]) if tensor.dim() > 1 else tensor
                for name, tensor in tensors(dtype).items()
            }
            found.append(combine_samples(gather_objects(sample_state(sharded))))
    return found


def test_neither_the_sharded_dimension_nor_copies_on_several_ranks_change_it() -> None:
    whole = [
        combine_samples([sample_state(tensors(d))])
        for d in (torch.float32, torch.bfloat16, torch.int64)
    ]
    for found in run_ranks(_shard, 3):
        assert found == [expected for expected in whole for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sampled_bit_counts_whatever_the_dtype(dtype: torch.dtype) -> None:
    given = {
        "model.w": torch.zeros(8, 8).to(dtype),
        "optim.state.w.exp_avg": torch.zeros(5).to(dtype),
    }
    before = sample_state(given)
    seen = {before["model"]}
    for position in range(64):
        changed = {name: tensor.clone() for name, tensor in given.items()}
        changed["model.w"].view(-1)[position] = 1
        after = sample_state(changed)
        assert after["optim"] == before["optim"] and after["moved"] is False
        seen.add(after["model"])
    assert len(seen) == 65, "the position counts as well as the value"
    given["optim.state.w.exp_avg"][-1] = 1
    assert sample_state(given)["moved"] is True


def test_the_layout_of_memory_does_not_count_but_the_name_does() -> None:
    values = torch.randn(33, 7)
    plain = sample_state({"model.w": values})
    assert (
        plain
        == sample_state({"model.w": values.t().contiguous().t()})
        != sample_state({"model.v": values})
    )


def test_step_counts_empty_tensors_and_everything_else_are_left_out() -> None:
    state = {
        "optim.state.w.step": torch.tensor(5.0),
        "model.empty": torch.empty(0, 3),
        "rng.rank_00000.torch": torch.ones(9),
        "param_groups": torch.ones(9),
    }
    assert sample_state(state) == {"model": 0, "optim": 0, "moved": False}
    assert combine_samples([sample_state(state)] * 2) == {
        "model": "0" * 16,
        "optim": "0" * 16,
        "moved": False,
    }
