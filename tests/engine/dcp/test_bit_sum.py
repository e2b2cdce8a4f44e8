"""A sum over every bit: another one after any change, the same however tensors are cut."""

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from holdfast.engine.dcp import bit_sum
from holdfast.engine.dcp.bit_sum import BitSum, unchanging_bits
from holdfast.utils.distributed import gather_objects
from tests.engine.dcp.test_fingerprint import DTYPES
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(180)

MODULUS = 2**64
BLOCK = 2**16


def total(values: torch.Tensor, name: str = "weight", first: int = 0) -> int:
    bits = BitSum()
    bits.add(name, first, values)
    return bits.total()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_anywhere_is_another_sum(dtype: torch.dtype) -> None:
    n_bytes = torch.empty(0, dtype=dtype).itemsize
    data = torch.zeros((BLOCK + 3) * n_bytes, dtype=torch.uint8)
    before = total(data.view(dtype))
    for at in (0, n_bytes - 1, BLOCK * n_bytes - 1, BLOCK * n_bytes, len(data) - 1):
        for bit in (1,) if dtype is torch.bool else (1, 64, 128):
            data[at] ^= bit
            assert total(data.view(dtype)) != before
            data[at] ^= bit
    assert total(data.view(dtype)) == before


def test_names_places_and_order_count() -> None:
    values = torch.arange(BLOCK + 100, dtype=torch.int32)
    swapped = values.clone()
    swapped[[3, BLOCK + 3]] = swapped[[BLOCK + 3, 3]]
    found = [total(values), total(values, "bias"), total(values, first=1), total(values.flip(0)), total(swapped)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_parts_in_any_order_are_the_sum_of_the_whole(dtype: torch.dtype) -> None:
    values = torch.randn(3 * BLOCK + 17).to(dtype)
    ends = [0, 1, 70, BLOCK - 1, BLOCK + 5, 3 * BLOCK, len(values)]
    parts = list(pairwise(ends))
    bits = BitSum()
    for begin, end in reversed(parts):
        bits.add("weight", begin, values[begin:end])
    assert bits.total() == total(values)


def cut_alike() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"long": torch.randn(7, 20011), "deep": torch.randn(5, 3, 4), "flat": torch.randn(9), "one": torch.ones(())}


def _sums_of_ranks(rank: int, world_size: int) -> list[int]:
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        dims = getattr(placement, "dim", -1)
        tensors: Any = {
            name: distribute_tensor(tensor, mesh, [placement]) if tensor.dim() > dims else tensor
            for name, tensor in cut_alike().items()
        }
        found.append(sum(gather_objects(unchanging_bits(tensors, 0))) % MODULUS)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_add_up_to_one_number_whatever_they_hold(world_size: int) -> None:
    expected = unchanging_bits(cut_alike(), 0)
    assert run_ranks(_sums_of_ranks, world_size) == [[expected] * 4] * world_size


def test_what_did_not_change_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    add = BitSum.add

    def noted(self: BitSum, name: str, first: int, values: torch.Tensor) -> None:
        read.append(name)
        add(self, name, first, values)

    monkeypatch.setattr(BitSum, "add", noted)
    params = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in cut_alike().items()}
    first = unchanging_bits(params, 0)
    assert unchanging_bits(params, 0) == first and len(read) == len(params)
    with torch.no_grad():
        params["flat"][1] += 1
    changed = unchanging_bits(params, 0)
    assert changed != first and read[len(params) :] == ["flat"]
    params["flat"].data = params["flat"].data.clone()
    assert unchanging_bits(params, 0) == changed and read[len(params) :] == ["flat"] * 2
    assert unchanging_bits(params, 1) == changed and len(read) == 2 * len(params) + 2, "another sample: all is read"
    gc.collect()
    count = len(bit_sum._known)
    del params
    assert len(bit_sum._known) == count - 4, "no memory is held"


def test_tensors_of_inference_mode_have_a_sum_too() -> None:
    with torch.inference_mode():
        made = cut_alike()
    assert unchanging_bits(made, 0) == unchanging_bits(cut_alike(), 0)
