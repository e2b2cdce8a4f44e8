"""Sampled fingerprints of a training state: cheap enough for every snapshot, and the same at every world size.

Of every tensor up to 64 elements, evenly spread over the whole of it, are hashed with their name and position; the
hashes are added. Each rank adds those of its own shards, and the ranks' sums add up to the number that one rank alone
would have found. Two snapshots with an optimizer step between them that have the same fingerprint are copies of the
same buffers, whatever was meant.

Cost: one gather a tensor and one copy from the device; hashing takes a few hundred nanoseconds an element. 450 tensors
(150 parameters with AdamW, 28,800 elements) take about 11 ms of one CPU core.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ..memory.tensors import counts_here, local_box

SAMPLES = 64
PARTS = ("model", "optim")

_MODULUS = 2**64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, int | bool]:
    """This rank's share of the fingerprints of a state.

    Args:
        tensors: dotted name (``model.*`` or ``optim.*``; others are ignored) -> live or staged tensor. Of ``optim``
            only tensors with more than one element are taken: a step count would change the sum by itself. Of a tensor
            that several ranks hold whole, the first of them takes the samples.

    Returns:
        part -> sum of hashes modulo 2**64, and ``moved``: whether any sampled bit of the optimizer's tensors is set,
        which none is before the first step.
    """
    sampled = {name: tensor.detach() for name, tensor in tensors.items() if _is_sampled(name, tensor)}
    picks: dict[Any, _Pick] = {}  # many tensors are cut alike
    found: list[tuple[str, np.ndarray, torch.Tensor]] = []
    for name, tensor in sampled.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
        key = (tensor.shape, local.device, *layout)
        if key not in picks:
            picks[key] = _pick(tensor, local.device)
        if len(picks[key].positions):
            found.append((name, picks[key].positions, _take(local, picks[key].local)))
    sums: dict[str, int | bool] = dict.fromkeys(PARTS, 0) | {"moved": False}
    for (name, positions, _), data in zip(found, _to_host([values for *_, values in found]), strict=True):
        part = name.partition(".")[0]
        sums[part] = (sums[part] + _hash(name, positions, data)) % _MODULUS
        sums["moved"] = bool(sums["moved"]) or (part == "optim" and bool(data.any()))
    return sums


def combine_samples(ranks: Iterable[Mapping[str, int | bool]]) -> dict[str, str | bool]:
    """The fingerprints of the whole state, of every rank's `sample_state`: part -> 16 hex digits, and ``moved``."""
    ranks = list(ranks)
    parts = {part: f"{sum(int(rank[part]) for rank in ranks) % _MODULUS:016x}" for part in PARTS}
    return parts | {"moved": any(rank["moved"] for rank in ranks)}


class BlockSampler:
    """`sample_state` of whole tensors that pass by block by block, one process having all of them."""

    def __init__(self) -> None:
        self.sums: dict[str, int | bool] = dict.fromkeys(PARTS, 0) | {"moved": False}

    def add(self, name: str, numel: int, first: int, values: torch.Tensor) -> None:
        """Take the samples of one block.

        Args:
            name: dotted name of the tensor, as for `sample_state`.
            numel: elements of the whole tensor.
            first: the first one of the block.
            values: the block, contiguous, on the CPU.
        """
        part = name.partition(".")[0]
        if part not in PARTS or numel <= (part == "optim"):
            return
        positions = _positions(numel)
        positions = positions[(positions >= first) & (positions < first + values.numel())]
        if len(positions):
            data = _take(values, torch.from_numpy(positions - first)).numpy()
            self.sums[part] = (self.sums[part] + _hash(name, positions, data)) % _MODULUS
            self.sums["moved"] = bool(self.sums["moved"]) or (part == "optim" and bool(data.any()))


class _Pick(NamedTuple):
    """Which elements of a tensor this rank answers for.

    Attributes:
        positions: in the flattened global tensor, ascending.
        local: the same elements in the flattened local tensor, on its device.
    """

    positions: np.ndarray
    local: torch.Tensor


def _is_sampled(name: str, tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and (name.startswith("model.") or (name.startswith("optim.") and tensor.numel() > 1))


def _pick(tensor: torch.Tensor, device: torch.device) -> _Pick:
    offsets, shape = local_box(tensor)
    positions = _positions(tensor.numel()) if counts_here(tensor) else np.empty(0, np.int64)
    if not tensor.dim():
        return _Pick(positions, torch.from_numpy(positions).to(device))
    places = [at - begin for at, begin in zip(np.unravel_index(positions, tensor.shape), offsets, strict=True)]
    inside = np.all([(at >= 0) & (at < size) for at, size in zip(places, shape, strict=True)], axis=0)
    local = np.ravel_multi_index([at[inside] for at in places], shape) if inside.any() else np.empty(0, np.int64)
    return _Pick(positions[inside], torch.from_numpy(local).to(device))


def _positions(numel: int) -> np.ndarray:
    """Which elements of a flattened tensor are sampled, ascending."""
    return np.unique(np.arange(SAMPLES) * (numel - 1) // (SAMPLES - 1))


def _take(local: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Bytes ``[n, itemsize]`` of elements, on the device; as integers, because not every dtype can be gathered."""
    values = local.resolve_conj().resolve_neg().view(_BITS.get(local.itemsize, local.dtype)).take(positions)
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
    """Sum of the hashes of elements: xxh3_64 of position and bytes, seeded with that of the name."""
    seed = xxhash.xxh3_64_intdigest(name.encode())
    records = np.concatenate([indices.astype("<i8")[:, None].view(np.uint8), data], axis=1)
    raw, width = records.tobytes(), records.shape[1]
    digest = xxhash.xxh3_64_intdigest
    return sum(digest(raw[at : at + width], seed) for at in range(0, len(raw), width))
