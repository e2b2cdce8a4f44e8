"""A sum over every bit changes with any change, and does not depend on how tensors are cut."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.engine.dcp.base_model import FrozenBase, sums_of
from holdfast.engine.dcp.fingerprint import bit_sum
from holdfast.utils.distributed import gather_objects
from tests.engine.dcp.test_fingerprint import DTYPES
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(180)

LONG = 2**19 + 3  # longer than one piece


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16, torch.int64], DTYPES), ids=str)
def test_one_bit_anywhere_is_another_sum(dtype: torch.dtype) -> None:
    n_bytes = torch.empty(0, dtype=dtype).itemsize
    data = torch.zeros(LONG * n_bytes, dtype=torch.uint8)
    before = bit_sum("weight", data.view(dtype), (0,))
    for at in (0, n_bytes - 1, 2**19 * n_bytes - 1, 2**19 * n_bytes, len(data) - 1):
        for bit in (1,) if dtype is torch.bool else (1, 64, 128):
            data[at] ^= bit
            assert bit_sum("weight", data.view(dtype), (0,)) != before
            data[at] ^= bit
    assert bit_sum("weight", data.view(dtype), (0,)) == before


def test_names_places_and_order_count() -> None:
    values = torch.arange(24, dtype=torch.int32).view(4, 6)
    swapped = values.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    mirrored = values.clone()
    mirrored[0, 1], mirrored[1, 0] = values[1, 0], values[0, 1]
    found = [
        bit_sum("weight", each, (0, 0))
        for each in (values, values.flip(0), values.flip(1), swapped, mirrored)
    ]
    found += [
        bit_sum("bias", values, (0, 0)),
        bit_sum("weight", values, (1, 0)),
        bit_sum("weight", values, (0, 1)),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_blocks_of_any_shape_add_up_to_the_whole(dtype: torch.dtype) -> None:
    values = torch.randn(7, 5, 9).to(dtype)
    rows, columns = ((0, 3), (3, 7)), ((0, 1), (1, 9))
    parts = [
        bit_sum("weight", values[a:b, :, c:d], (a, 0, c)) for a, b in rows for c, d in columns
    ]  # views that are not contiguous
    assert (sum(parts) - bit_sum("weight", values, (0, 0, 0))) % 2**64 == 0


class _Largest(TorchDispatchMode):
    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.n_bytes = max(self.n_bytes, *(each.untyped_storage().nbytes() for each in tensors), 0)
        return out


@pytest.mark.parametrize("shape", [(2, 1600, 1024), (3200, 1024), (3200 * 1024,)], ids=str)
def test_a_few_megabytes_are_widened_at_a_time(shape: tuple[int, ...]) -> None:
    """Also of experts, whose matrices are one tensor. The weights of a long vector are as long as
    it is.
    """
    values = torch.ones(shape, dtype=torch.uint8)
    with _Largest() as largest:
        bit_sum("weight", values, (0, 0, 0))
    assert largest.n_bytes <= max(8 << 19, 8 * shape[0] if len(shape) == 1 else 0)


def cut_alike() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "long": torch.randn(7, 20011),
        "deep": torch.randn(5, 3, 4),
        "flat": torch.randn(9),
        "one": torch.ones(()),
    }


def _sums_of_ranks(rank: int, world_size: int) -> list[int]:
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        dims = getattr(placement, "dim", -1)
        tensors: Any = {
            name: distribute_tensor(tensor, mesh, [placement]) if tensor.dim() > dims else tensor
            for name, tensor in cut_alike().items()
        }
        found.append(sum(gather_objects(sum(sums_of(tensors).values()))) % 2**64)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_add_up_to_one_number_whatever_they_hold(world_size: int) -> None:
    expected = sum(sums_of(cut_alike()).values()) % 2**64
    assert run_ranks(_sums_of_ranks, world_size) == [[expected] * 4] * world_size


def test_a_write_that_torch_does_not_count_is_noticed_anywhere() -> None:
    named = {"weight": nn.Parameter(torch.randn(300, 300), requires_grad=False)}
    for at in (1, 45_001, 89_999):  # none of these elements is in the sample of a tensor
        base = FrozenBase(named)
        assert base.changed(named) == []
        named["weight"].data.view(-1)[at] += 1e-3
        assert base.changed(named) == ["weight"]
        base.drop(named.keys(), ["weight"], None)
        assert not base.sums


def test_tensors_of_inference_mode_have_a_sum_too() -> None:
    with torch.inference_mode():
        made = cut_alike()
    assert sums_of(made) == sums_of(cut_alike())
