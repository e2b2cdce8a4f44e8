"""Fingerprints of a training state, the same at every world size: a sample, and an exact sum over
all bits.

Sample (`sample_state`): up to 64 elements of every tensor, evenly spread, are hashed with name and
position. The hashes are added, so the sums of all ranks add up to the sum of one rank alone. Two
snapshots with the same fingerprint and an optimizer step between them are copies of the same
buffers by mistake. Cost: one gather per tensor and one copy from the device. 450 tensors (150
parameters with AdamW, 28,800 elements) take about 11 ms of one CPU core.

Exact sum (`bit_sum`): each element, as an integer, is multiplied by one odd pseudo-random weight
per dimension, chosen by its index there. The products are added modulo 2**64, so the sums of shards
add up, whichever dimensions are sharded. One changed element always changes the sum, because odd
numbers have inverses. Several changes cancel out only by chance, about once in 2**64. Nothing is
cached or copied to the host.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...utils.distributed import RankGroup, get_group_ranks
from ..memory.tensors import counts_here, local_box, local_tensor

Sums = dict[str, int | bool]
"""Result of `sample_state`."""

SAMPLES = 64
PARTS = ("model", "optim")

_MODULUS = 2**64

# Integers by number of bytes.
_BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}

# Elements that `bit_sum` widens at a time.
_WIDENED_ON_CPU = 1 << 19
_WIDENED_ON_GPU = 1 << 24

# Factors of `_weights_of`, as int64: 0x9e3779b97f4a7c15 and 0xbf58476d1ce4e5b9.
_MIX_1 = -7046029254386353131
_MIX_2 = -4658895280553007687


class _Picked(NamedTuple):
    """Places of this rank's samples of a tensor."""

    positions: np.ndarray  # in the flattened global tensor
    places: Tensor  # in the flattened local tensor, on its device


def sample_state(
    tensors: Mapping[str, Tensor],
    group: RankGroup = None,
) -> Sums:
    """This rank's share of the fingerprints of a state.

    Args:
        tensors: dotted name (``model.*`` or ``optim.*``, others are ignored) -> live or staged
            tensor. ``optim`` tensors with one element are ignored, because a step count alone would
            change the sum. If several ranks hold the same part, the first of them takes the
            samples.
        group: the ranks that hold the tensors.

    Returns:
        part -> sum of hashes modulo 2**64, and ``moved``: whether any sampled bit of the
        optimizer's tensors is set. None is set before the first step.
    """
    ranks = None if group is None else get_group_ranks(group)
    picks: dict[Any, _Picked] = {}
    names = []
    positions = []
    values = []
    for name, tensor in tensors.items():
        if not _is_sampled(name, tensor.numel()):
            continue
        local = local_tensor(tensor.detach())

        # Many tensors are cut alike, so their samples are at the same places.
        layout: tuple[Any, ...] = (tensor.shape, local.device)
        if isinstance(tensor, DTensor):
            layout += (tensor.device_mesh, tensor.placements)
        if layout not in picks:
            picks[layout] = _pick(tensor, local.device, ranks)
        picked = picks[layout]

        if len(picked.positions):
            names.append(name)
            positions.append(picked.positions)
            values.append(_take(local, picked.places))

    # The values of all tensors leave a device together.
    host = _to_host(values)
    sampler = BlockSampler()
    for name, at, data in zip(names, positions, host, strict=True):
        sampler.count(name, at, data)
    return sampler.sums


def combine_samples(ranks: Iterable[Sums]) -> dict[str, str | bool]:
    """Combine the `sample_state` of all ranks: part -> 16 hex digits, and ``moved``."""
    ranks = list(ranks)
    combined: dict[str, str | bool] = {}
    for part in PARTS:
        total = sum(int(rank[part]) for rank in ranks)
        combined[part] = f"{total % _MODULUS:016x}"
    combined["moved"] = any(rank["moved"] for rank in ranks)
    return combined


class BlockSampler:
    """`sample_state` of whole tensors that one process reads block by block."""

    def __init__(self) -> None:
        self.sums: Sums = dict.fromkeys(PARTS, 0)
        self.sums["moved"] = False

    def add(
        self,
        name: str,
        numel: int,
        first: int,
        values: Tensor,
    ) -> None:
        """Take the samples of one block of a tensor with ``numel`` elements: ``values``,
        contiguous, on the CPU.

        ``first`` is the index of the block's first element in the flattened tensor.
        """
        if not _is_sampled(name, numel):
            return
        positions = _positions(numel)
        begins = np.searchsorted(positions, first)
        ends = np.searchsorted(positions, first + values.numel())
        positions = positions[begins:ends]
        if len(positions):
            samples = _take(values, torch.from_numpy(positions - first))
            self.count(name, positions, samples.numpy())

    def count(
        self,
        name: str,
        positions: np.ndarray,
        data: np.ndarray,
    ) -> None:
        """Add samples, ``[n, itemsize]`` bytes at ``positions`` of the flattened tensor."""
        part = name.partition(".")[0]
        total = self.sums[part] + _hash(name, positions, data)
        self.sums[part] = total % _MODULUS
        if part == "optim" and data.any():
            self.sums["moved"] = True


def _is_sampled(
    name: str,
    numel: int,
) -> bool:
    if name.startswith("optim."):
        return numel > 1
    return numel > 0 and name.startswith("model.")


def _pick(
    tensor: Tensor,
    device: torch.device,
    ranks: Sequence[int] | None,
) -> _Picked:
    box = local_box(tensor)
    positions = _positions(tensor.numel())
    if not counts_here(tensor, ranks):
        positions = positions[:0]
    if not tensor.dim():
        return _Picked(positions, torch.from_numpy(positions).to(device))

    # Indices of the samples, one array per dimension, relative to the block of this rank.
    in_tensor = np.unravel_index(positions, tensor.shape)
    in_block = []
    is_here = np.ones(len(positions), bool)
    for index, begin, size in zip(in_tensor, *box, strict=True):
        relative = index - begin
        is_here &= relative >= 0
        is_here &= relative < size
        in_block.append(relative)

    # numpy refuses a block without elements, even for no sample at all.
    places = np.empty(0, np.int64)
    if is_here.any():
        places = np.ravel_multi_index(
            [relative[is_here] for relative in in_block],
            box.sizes,
        )
    return _Picked(positions[is_here], torch.from_numpy(places).to(device))


def _positions(numel: int) -> np.ndarray:
    # From the first to the last element in equal steps. A small tensor has each element once.
    steps = np.arange(SAMPLES)
    return np.unique(steps * (numel - 1) // (SAMPLES - 1))


def _take(
    local: Tensor,
    positions: Tensor,
) -> Tensor:
    """Bytes ``[n, itemsize]`` of elements, on the device. Taken as integers: not every dtype can be
    gathered.
    """
    values = local.resolve_conj().resolve_neg()
    words = values.view(_BITS.get(values.itemsize, values.dtype))
    taken = words.take(positions)
    return taken.view(torch.uint8).reshape(len(positions), -1)


def _to_host(values: list[Tensor]) -> list[np.ndarray]:
    """``[n, itemsize]`` bytes of each, with one copy from each device."""
    host: list[Any] = [None] * len(values)
    for device in {value.device for value in values}:
        numbers = [number for number, value in enumerate(values) if value.device == device]
        joined = torch.cat([values[number].reshape(-1) for number in numbers])
        on_host = joined.cpu().numpy()

        # The values of each tensor are cut out again.
        begin = 0
        for number in numbers:
            value = values[number]
            end = begin + value.numel()
            host[number] = on_host[begin:end].reshape(tuple(value.shape))
            begin = end
    return host


def _hash(
    name: str,
    indices: np.ndarray,
    data: np.ndarray,
) -> int:
    """Sum of the hashes of elements: xxh3_64 of position and bytes, seeded with the hash of the
    name.
    """
    seed = xxhash.xxh3_64_intdigest(name.encode())
    positions = indices.astype("<i8")[:, None].view(np.uint8)
    records = np.concatenate([positions, data], axis=1)

    # Slices of one bytes object are hashed faster than rows of an array.
    raw = records.tobytes()
    width = records.shape[1]
    digest = xxhash.xxh3_64_intdigest
    return sum(digest(raw[at : at + width], seed) for at in range(0, len(raw), width))


def bit_sum(
    name: str,
    block: Tensor,
    offsets: Sequence[int],
) -> int:
    """Sum over a block of the tensor ``name``, as an int64. ``offsets`` are the first index of each
    dimension.
    """
    # The result, with i, j, k for the index of an element in the whole tensor:
    #     sum of bits[i, j, k] * weight_0[i] * weight_1[j] * weight_2[k], modulo 2**64
    # Complex numbers have one more dimension, for their two parts. A scalar has one of length 1.
    values = block.detach()
    values = values.resolve_conj()
    values = values.resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    elif not values.dim():
        values = values.reshape(1)

    # A dimension that was added begins at 0.
    weights = []
    firsts = (*offsets, 0)
    for dim, size in enumerate(values.shape):
        key = f"{dim}.{name}"
        weights.append(_weights_of(key, firsts[dim], size, values.device))

    # Seen as a matrix: the last dimension makes the columns,
    # and all others together make the rows.
    of_columns = torch.ones_like(weights[0][:1])
    if len(weights) > 1:
        of_columns = weights.pop()
    of_rows = weights[0]
    for of_dim in weights[1:]:
        products = of_rows[:, None] * of_dim
        of_rows = products.flatten()
    matrix = values.reshape(len(of_rows), len(of_columns))

    # A few rows at a time are widened to int64, which bounds the memory.
    n_elements = _WIDENED_ON_CPU
    if values.is_cuda:
        n_elements = _WIDENED_ON_GPU
    n_rows = max(1, n_elements // max(1, len(of_columns)))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for rows, of_row in zip(
        matrix.split(n_rows),
        of_rows.split(n_rows),
        strict=True,
    ):
        bits = rows.contiguous().view(_BITS[rows.itemsize])
        words = bits.to(torch.int64)
        sums = (words * of_columns).sum(-1)
        total += (sums * of_row).sum()
    return int(total)


def _weights_of(
    key: str,
    first: int,
    size: int,
    device: torch.device,
) -> Tensor:
    """Odd pseudo-random weights (``[size]`` int64) of the indices from ``first`` on.

    Each index, mixed with the hash of ``key``, goes through the function that ends a step of
    SplitMix64. A product carries each bit to all higher ones, and a shift carries the high bits
    down again. Products overflow, as they should. The last bit is set, so the weight is odd.
    """
    # Without its last bit the hash fits int64.
    seed = xxhash.xxh3_64_intdigest(key.encode()) >> 1
    mixed = torch.arange(first, first + size, device=device) ^ seed
    mixed = mixed * _MIX_1
    mixed = mixed ^ (mixed >> 29)
    mixed = mixed * _MIX_2
    mixed = mixed ^ (mixed >> 32)
    return mixed | 1
