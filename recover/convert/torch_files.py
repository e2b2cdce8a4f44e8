"""Files of ``torch.save`` that hold training states: read by an allow-list, mapped, shards put together lazily."""

import codecs
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...engine.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ...utils.safe_torch import map_plain

_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
_ARRAYS: Sequence[Any] = (
    *(np.ndarray, np.dtype, type(np.dtype(np.uint32)), codecs.encode),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
)
"""What the state of numpy's generator asks for, which trainers save as it is: arrays of numbers."""


def read_file(path: Path) -> Any:
    """What ``torch.save`` wrote, mapped: tensors, DTensors, numbers, strings, arrays and containers of them.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or asks for a type that could run code, which is named.
    """
    try:
        with _quiet_meshes():
            return map_plain(path, *_ARRAYS)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{path} is missing") from error


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Without torch's warning that there is no process group for the mesh of a DTensor: none is wanted."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def from_ranks(name: str, parts: Sequence[torch.Tensor]) -> LazyTensor:
    """The whole of a tensor that each rank saved its part of: DTensors on a mesh, or the same plain tensor on all.

    Args:
        name: for messages.
        parts: in the order of the ranks.

    Raises:
        CheckpointCorruptError: the parts do not make a whole.
        CheckpointMismatchError: they are cut in a way that cannot be put together without its process groups.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        if any(isinstance(part, DTensor) or not _equal(first, part) for part in parts[1:]):
            raise CheckpointMismatchError(
                f"{name} is a plain tensor {list(first.shape)} that differs by rank: flat shards, as FSDP1 keeps them, "
                "say nothing of which parameter they are of. Save it with FSDP2, or as a full state dict"
            )
        return LazyTensor.of(first)
    if not all(isinstance(part, DTensor) for part in parts):
        raise CheckpointCorruptError(f"{name} is a DTensor on some ranks only")
    return _from_shards(name, [part for part in parts if isinstance(part, DTensor)])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and _same_bits(one, other)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _from_shards(name: str, parts: Sequence[DTensor]) -> LazyTensor:
    """A grid of blocks: along each dim that a mesh dim shards, one a coordinate; of replicas the first counts."""
    first = parts[0]
    placements, mesh = first.placements, first.device_mesh.mesh
    dims = [placement.dim for placement in placements if type(placement) is Shard]
    if any(type(placement) not in (Shard, Replicate) for placement in placements) or len(set(dims)) < len(dims):
        raise CheckpointMismatchError(
            f"{name} is placed as {placements}; expected shards of different dims, and replicas. Save it as a full "
            "state dict, or in torch.distributed.checkpoint's format"
        )
    if mesh.numel() != len(parts):
        raise CheckpointMismatchError(f"{name} is on a mesh of {mesh.numel()} ranks; {len(parts)} ranks saved theirs")
    coordinates = [range(size) if type(p) is Shard else (0,) for size, p in zip(mesh.shape, placements, strict=True)]
    blocks: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate in product(*coordinates):
        place = {p.dim: at for p, at in zip(placements, coordinate, strict=True) if isinstance(p, Shard)}
        local = parts[int(mesh[coordinate])].to_local()
        blocks[tuple(place.get(dim, 0) for dim in range(first.ndim))] = local
    return _from_grid(name, tuple(first.shape), first.dtype, blocks)


def _from_grid(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, blocks: Mapping[tuple[int, ...], torch.Tensor]
) -> LazyTensor:
    """A tensor of blocks that stand side by side; ``blocks`` goes by their coordinates in the grid."""
    begins: list[list[int]] = []
    for dim in range(len(shape)):
        along = {at[dim]: block.shape[dim] for at, block in sorted(blocks.items(), reverse=True)}
        edges = [sum(along[before] for before in range(at)) for at in range(len(along) + 1)]
        if edges[-1] != shape[dim]:
            raise CheckpointCorruptError(
                f"the shards of {name} have {edges[-1]} of its {shape[dim]} entries in dim {dim}"
            )
        begins.append(edges)
    for at, block in blocks.items():
        sizes = tuple(begins[dim][at[dim] + 1] - begins[dim][at[dim]] for dim in range(len(shape)))
        if tuple(block.shape) != sizes or block.dtype != dtype:
            raise CheckpointCorruptError(
                f"a shard of {name} is {list(block.shape)} {block.dtype}; expected {list(sizes)}"
            )

    def rows(first: int, last: int) -> torch.Tensor:
        if not shape:
            return next(iter(blocks.values()))
        found = torch.empty((last - first, *shape[1:]), dtype=dtype)
        for at, block in blocks.items():
            start = begins[0][at[0]]
            low, high = max(first, start), min(last, start + block.shape[0])
            if low < high:
                target = found[low - first : high - first]
                for dim in range(1, len(shape)):
                    target = target.narrow(dim, begins[dim][at[dim]], block.shape[dim])
                target.copy_(block[low - start : high - start])
        return found

    return LazyTensor(shape, dtype, rows)


def shared_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name of a tensor that is the same memory as an earlier one -> that one's name: what was tied is stored once."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape), local.stride()
        if local.numel() and first.setdefault(key, name) != name:
            found[name] = first[key]
    return found
