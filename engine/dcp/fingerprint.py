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
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ..memory.tensors import counts_here, local_box, local_tensor

SAMPLES = 64
PARTS = ("model", "optim")

_MODULUS = 2**64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, int | bool]:
    """This rank's share of the fingerprints of a state.

    Args:
        tensors: dotted name (``model.*`` or ``optim.*``, others are ignored) -> live or staged
            tensor. ``optim`` tensors with one element are ignored, because a step count alone would
            change the sum. If several ranks hold the same part, the first of them takes the
            samples.

    Returns:
        part -> sum of hashes modulo 2**64, and ``moved``: whether any sampled bit of the
        optimizer's tensors is set. None is set before the first step.
    """
    picks: dict[Any, tuple[np.ndarray, torch.Tensor]] = {}  # many tensors are cut alike
    found: list[tuple[str, np.ndarray, torch.Tensor]] = []
    for name, tensor in tensors.items():
        if not _is_sampled(name, tensor.numel()):
            continue
        local = local_tensor(tensor.detach())
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
        key = (tensor.shape, local.device, *layout)
        if key not in picks:
            picks[key] = _pick(tensor, local.device)
        positions, places = picks[key]
        if len(positions):
            found.append((name, positions, _take(local, places)))
    sampler = BlockSampler()
    for (name, positions, _), data in zip(
        found, _to_host([values for *_, values in found]), strict=True
    ):
        sampler.count(name, positions, data)
    return sampler.sums


def combine_samples(ranks: Iterable[Mapping[str, int | bool]]) -> dict[str, str | bool]:
    """Combine the `sample_state` of all ranks: part -> 16 hex digits, and ``moved``."""
    ranks = list(ranks)
    parts = {part: f"{sum(int(rank[part]) for rank in ranks) % _MODULUS:016x}" for part in PARTS}
    return parts | {"moved": any(rank["moved"] for rank in ranks)}


class BlockSampler:
    """`sample_state` of whole tensors that one process reads block by block."""

    def __init__(self) -> None:
        self.sums: dict[str, int | bool] = dict.fromkeys(PARTS, 0) | {"moved": False}

    def add(self, name: str, numel: int, first: int, values: torch.Tensor) -> None:
        """Take the samples of one block of a tensor with ``numel`` elements: ``values``,
        contiguous, on the CPU.

        ``first`` is the index of the block's first element in the flattened tensor.
        """
        if not _is_sampled(name, numel):
            return
        positions = _positions(numel)
        positions = positions[(positions >= first) & (positions < first + values.numel())]
        if len(positions):
            self.count(name, positions, _take(values, torch.from_numpy(positions - first)).numpy())

    def count(self, name: str, positions: np.ndarray, data: np.ndarray) -> None:
        """Add samples, ``[n, itemsize]`` bytes at ``positions`` of the flattened tensor."""
        part = name.partition(".")[0]
        self.sums[part] = (self.sums[part] + _hash(name, positions, data)) % _MODULUS
        self.sums["moved"] = bool(self.sums["moved"]) or (part == "optim" and bool(data.any()))


def _is_sampled(name: str, numel: int) -> bool:
    return numel > 0 and (name.startswith("model.") or (name.startswith("optim.") and numel > 1))


def _pick(tensor: torch.Tensor, device: torch.device) -> tuple[np.ndarray, torch.Tensor]:
    """Positions of this rank's samples in the flattened global tensor, and in the local one, on its
    device.
    """
    offsets, shape = local_box(tensor)
    positions = _positions(tensor.numel()) if counts_here(tensor) else np.empty(0, np.int64)
    if not tensor.dim():
        return positions, torch.from_numpy(positions).to(device)
    places = [
        at - begin
        for at, begin in zip(np.unravel_index(positions, tensor.shape), offsets, strict=True)
    ]
    inside = np.all(
        [(at >= 0) & (at < size) for at, size in zip(places, shape, strict=True)], axis=0
    )
    local = (
        np.ravel_multi_index([at[inside] for at in places], shape)
        if inside.any()
        else np.empty(0, np.int64)
    )
    return positions[inside], torch.from_numpy(local).to(device)


def _positions(numel: int) -> np.ndarray:
    return np.unique(np.arange(SAMPLES) * (numel - 1) // (SAMPLES - 1))


def _take(local: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Bytes ``[n, itemsize]`` of elements, on the device. Taken as integers: not every dtype can be
    gathered.
    """
    values = (
        local.resolve_conj()
        .resolve_neg()
        .view(_BITS.get(local.itemsize, local.dtype))
        .take(positions)
    )
    return values.view(torch.uint8).reshape(len(positions), -1)


def _to_host(values: list[torch.Tensor]) -> list[np.ndarray]:
    """``[n, itemsize]`` bytes of each, with one copy from each device."""
    host: list[np.ndarray] = [np.empty(0)] * len(values)
    for device in {value.device for value in values}:
        where = [at for at, value in enumerate(values) if value.device == device]
        flat = torch.cat([values[at].reshape(-1) for at in where]).cpu().numpy()
        ends = np.cumsum([values[at].numel() for at in where])
        for at, data in zip(where, np.split(flat, ends[:-1]), strict=True):
            host[at] = data.reshape(tuple(values[at].shape))
    return host


def _hash(name: str, indices: np.ndarray, data: np.ndarray) -> int:
    """Sum of the hashes of elements: xxh3_64 of position and bytes, seeded with the hash of the
    name.
    """
    seed = xxhash.xxh3_64_intdigest(name.encode())
    records = np.concatenate([indices.astype("<i8")[:, None].view(np.uint8), data], axis=1)
    raw, width = records.tobytes(), records.shape[1]
    digest = xxhash.xxh3_64_intdigest
    return sum(digest(raw[at : at + width], seed) for at in range(0, len(raw), width))


def bit_sum(name: str, block: torch.Tensor, offsets: Sequence[int]) -> int:
    """Sum over a block of the tensor ``name``, as an int64. ``offsets`` are the first index of each
    dimension.
    """
    values = block.detach().resolve_conj().resolve_neg()
    values = (
        torch.view_as_real(values) if values.is_complex() else values.reshape(values.shape or (1,))
    )
    total, weights = torch.zeros((), dtype=torch.int64, device=values.device), []
    for dim, size in enumerate(values.shape):
        first, seed = (
            offsets[dim] if dim < len(offsets) else 0,
            xxhash.xxh3_64_intdigest(f"{dim}.{name}".encode()),
        )
        weights.append(_odd(torch.arange(first, first + size, device=values.device), seed >> 1))
    of_columns = weights.pop() if len(weights) > 1 else torch.ones_like(weights[0][:1])
    of_rows = weights[0]
    for each in weights[1:]:
        of_rows = (of_rows[:, None] * each).flatten()
    n_rows = max(
        1, (1 << 24 if values.is_cuda else 1 << 19) // max(1, len(of_columns))
    )  # widened at a time
    matrix = values.reshape(len(of_rows), len(of_columns))
    for rows, weight in zip(matrix.split(n_rows), of_rows.split(n_rows), strict=True):
        words = rows.contiguous().view(_BITS[rows.itemsize]).to(torch.int64)
        total += ((words * of_columns).sum(-1) * weight).sum()
    return int(total)


def _odd(index: torch.Tensor, seed: int) -> torch.Tensor:
    mixed = (index ^ seed) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1
