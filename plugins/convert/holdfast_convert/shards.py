"""Assemble a tensor from what each rank has saved of it.

The file name says which rank wrote the file, and a wrong name would put its rows in the wrong
place. So the coordinate in each DTensor's mesh is compared with the rank in the name, and each
shard's size with the size that FSDP cuts.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.engine.memory.lazy_tensor import LazyTensor
from holdfast.recover.export.weights import same_values
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError

Indices = tuple[int, ...]


def from_ranks(name: str, parts: Sequence[Tensor]) -> LazyTensor:
    """Assemble a tensor from the parts of all ranks: DTensors on a mesh, or the same plain tensor
    everywhere.

    ``name`` is for messages. ``parts`` are in the order of the ranks in the file names.

    Raises:
        CheckpointCorruptError: a part belongs to another rank, or does not have the size that FSDP
            cuts.
        CheckpointMismatchError: the parts are cut in a way that cannot be assembled without process
            groups.
    """
    sharded = [part for part in parts if isinstance(part, DTensor)]
    if len(sharded) == len(parts):
        try:
            return _from_shards(name, sharded)
        except AttributeError as error:  # a mesh as another version of torch pickles it
            raise CheckpointMismatchError(
                f"{name} was saved by a version of torch whose DTensors torch {torch.__version__} "
                f"cannot read: {error}"
            ) from error
    if sharded:
        raise CheckpointCorruptError(f"{name} is a DTensor on some ranks only")

    # Plain tensors are the same on each rank, or they are shards of which nothing is known.
    whole = LazyTensor.of(parts[0])
    for part in parts[1:]:
        if not same_values(whole, LazyTensor.of(part)):
            raise CheckpointMismatchError(
                f"{name} is a plain tensor {list(whole.shape)} that differs by rank: flat shards, "
                "as FSDP1 keeps them, say nothing of which parameter they are of. Save it with "
                "FSDP2, or as a full state dict"
            )
    return whole


def _from_shards(name: str, parts: Sequence[DTensor]) -> LazyTensor:
    """Assemble a grid of blocks, one per coordinate along each sharded dim. Of replicas the first
    is used.
    """
    first = parts[0]
    shape = tuple(first.shape)
    mesh = first.device_mesh.mesh
    _require_grid(name, parts)

    # Dim of the tensor -> dim of the mesh along which it is cut, and the boundaries of the cuts.
    cut_along: dict[int, int] = {}
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(first.placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            cut_along[dim] = mesh_dim
            cuts[dim] = _cuts(shape[dim], mesh.shape[mesh_dim])

    # Replicas begin at the same place, and the first one is kept.
    blocks: dict[Indices, Tensor] = {}
    for coordinate in product(*(range(size) for size in mesh.shape)):
        rank = int(mesh[coordinate])
        part = parts[rank]
        _require_own(name, rank, part, first, coordinate)

        # Begin and size of the block of this coordinate in the tensor.
        begins = [0] * len(shape)
        sizes = list(shape)
        for dim, bounds in cuts.items():
            at = coordinate[cut_along[dim]]
            begins[dim] = bounds[at]
            sizes[dim] = bounds[at + 1] - bounds[at]

        local = part.to_local()
        if list(local.shape) != sizes or local.dtype != first.dtype:
            raise CheckpointCorruptError(
                f"the shard of rank {rank} of {name} is {list(local.shape)} {local.dtype}; "
                f"expected {sizes} {first.dtype}, as FSDP cuts {list(shape)}. Were files of "
                "ranks renamed?"
            )
        blocks.setdefault(tuple(begins), local)
    return _from_blocks(shape, first.dtype, blocks)


def _require_grid(name: str, parts: Sequence[DTensor]) -> None:
    """Check that the parts are blocks of a grid on all ranks: shards of different dims."""
    placements = parts[0].placements
    mesh = parts[0].device_mesh.mesh
    # Compared by the exact types, because subclasses of Shard cut in other ways.
    dims = [placement.dim for placement in placements if type(placement) is Shard]
    are_known = all(type(placement) in (Shard, Replicate) for placement in placements)
    if not are_known or len(set(dims)) < len(dims):
        raise CheckpointMismatchError(
            f"{name} is placed as {placements}; expected shards of different dims, and replicas. "
            "Save it as a full state dict, or in torch.distributed.checkpoint's format"
        )
    ranks = sorted(mesh.flatten().tolist())
    if ranks != list(range(len(parts))):
        raise CheckpointMismatchError(
            f"{name} is on a mesh of {mesh.numel()} ranks; {len(parts)} ranks saved theirs"
        )


def _cuts(length: int, count: int) -> list[int]:
    """Boundaries of ``count`` shards from ``torch.chunk``, as FSDP2 makes them. The last shards may
    be empty.
    """
    chunk = -(-length // count)  # rounded up
    return [min(number * chunk, length) for number in range(count + 1)]


def _require_own(
    name: str,
    rank: int,
    part: DTensor,
    first: DTensor,
    coordinate: Indices,
) -> None:
    """Refuse a part of another tensor than on rank 0, or of another rank according to its mesh."""
    mesh = part.device_mesh
    same_mesh = torch.equal(mesh.mesh, first.device_mesh.mesh)
    same_cut = part.shape == first.shape and part.placements == first.placements
    if not same_mesh or not same_cut:
        raise CheckpointCorruptError(
            f"ranks 0 and {rank} do not have parts of the same tensor {name}"
        )
    # The mesh was pickled by the rank that saved the part.
    own = mesh.get_coordinate()
    if own is not None and tuple(own) != coordinate:
        raise CheckpointCorruptError(
            f"the file of rank {rank} holds {name} of rank "
            f"{int(mesh.mesh[tuple(own)])}: its name is not the one that verl gave "
            "it. Put the files of the ranks back under their names"
        )


def _from_blocks(shape: Indices, dtype: torch.dtype, blocks: dict[Indices, Tensor]) -> LazyTensor:
    """A tensor of adjacent blocks, given by their first indices."""

    def rows(first: int, last: int) -> Tensor:
        if not shape:
            return next(iter(blocks.values()))
        found = torch.empty((last - first, *shape[1:]), dtype=dtype)
        for begin, block in blocks.items():
            # The rows that the block has of those that are asked for.
            low = max(first, begin[0])
            high = min(last, begin[0] + block.shape[0])
            if low >= high:
                continue
            target = found[low - first : high - first]
            for dim in range(1, len(shape)):
                target = target.narrow(dim, begin[dim], block.shape[dim])
            target.copy_(block[low - begin[0] : high - begin[0]])
        return found

    return LazyTensor(shape, dtype, rows)
