"""Which elements of a file this rank holds, and which tensors have to be seen as a whole instead.

FSDP2 shards dim 0, so a shard is a run of consecutive elements of the flattened tensor, and therefore of a file.
Nothing here takes that for granted: `local_part` looks at the placements and answers None for every other layout
(another dim, several sharded mesh dims, strided or partial shards). A `Plan` says which file tensors each rank can
handle alone, from its own shards, and which must be gathered.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from .hf_keys import FileTensor, Span, file_tensors


@dataclass(frozen=True)
class LocalPart:
    """The elements ``[start, stop)`` of a flattened tensor that this rank holds.

    Attributes:
        data: the live local tensor (any shape, any device), with ``stop - start`` elements in row-major order.
        start: first element.
        stop: one after the last element.
        row_elements: elements that always stay together on one rank; the whole tensor when it is replicated.
        primary: whether this rank is the one of its replicas that writes.
    """

    data: torch.Tensor
    start: int
    stop: int
    row_elements: int
    primary: bool


def local_part(tensor: torch.Tensor, rank: int) -> LocalPart | None:
    """This rank's part of ``tensor``; None when it is not one run of elements (the same answer on every rank).

    Args:
        tensor: from the ``state_dict`` of a model: a DTensor, or a plain tensor that every rank has in full.
        rank: this rank; rank 0 is the primary of plain tensors.
    """
    if not isinstance(tensor, DTensor):
        return LocalPart(tensor.detach(), 0, tensor.numel(), max(tensor.numel(), 1), rank == 0)
    local, mesh, coordinate = tensor.to_local().detach(), tensor.device_mesh, tensor.device_mesh.get_coordinate()
    sharded = [dim for dim, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if len(sharded) > 1 or any(type(p) not in (Replicate, Shard) for p in tensor.placements):
        return None
    # A rank outside of the mesh holds nothing.
    primary = coordinate is not None and all(c == 0 for dim, c in enumerate(coordinate) if dim not in sharded)
    if not sharded:
        return LocalPart(local, 0, local.numel(), max(tensor.numel(), 1), primary)
    if tensor.placements[sharded[0]] != Shard(0):
        return None
    rows, row_elements = tensor.shape[0], math.prod(tensor.shape[1:])
    # DTensor cuts as torch.chunk does: equal parts, the last ones shorter or empty.
    part_rows = -(-rows // mesh.size(sharded[0]))
    first = rows if coordinate is None else min(coordinate[sharded[0]] * part_rows, rows)
    count = 0 if coordinate is None else min(part_rows, rows - first)
    assert local.numel() == count * row_elements, f"{tensor.placements} on {mesh} left {tuple(local.shape)} here"
    return LocalPart(local, first * row_elements, (first + count) * row_elements, max(row_elements, 1), primary)


def overlap(span: Span, part: LocalPart) -> tuple[int, torch.Tensor] | None:
    """What this rank holds of a span: the element of the file tensor where it starts, and a view of the live values.

    The span must be one that ranks can handle alone: a run of elements, or inside of one row.
    """
    if span.contiguous:
        start, stop = max(span.offset, part.start), min(span.offset + span.numel, part.stop)
        if start >= stop:
            return None
        return span.at + start - span.offset, part.data.reshape(-1)[start - part.start : stop - part.start]
    if not part.start <= span.offset < part.stop:
        return None
    flat = part.data.reshape(-1)
    offset = flat.storage_offset() + span.offset - part.start
    return span.at, flat.as_strided(span.shape, span.stride, offset)


@dataclass(frozen=True)
class Plan:
    """How this rank gets at the elements of every file tensor. The split is the same on every rank.

    Attributes:
        tensors: every file tensor, in file order.
        parts: ``state_dict`` key -> what this rank holds, for the sources of ``direct``.
        direct: the file tensors whose elements each rank addresses in its own shards.
        whole: groups of file tensors (nearly always none) whose sources must be seen as a whole, one group at a time;
            a source belongs to one group only, and to no direct tensor.
    """

    tensors: Sequence[FileTensor]
    parts: Mapping[str, LocalPart]
    direct: Sequence[FileTensor]
    whole: Sequence[Sequence[FileTensor]]


def plan_tensors(
    model: PreTrainedModel, stored: Mapping[str, torch.Tensor], rank: int, dtype: torch.dtype | None = None
) -> Plan:
    """Plan the export or import of ``stored`` (from `stored_tensors`); ``dtype`` is that of `file_tensors`."""
    tensors = file_tensors(model, stored, dtype)
    parts = {key: part for key, tensor in stored.items() if (part := local_part(tensor, rank)) is not None}
    groups: list[tuple[set[str], list[FileTensor]]] = []
    entangled = {source for tensor in tensors if not _is_direct(tensor, parts) for source in tensor.sources}
    while more := {
        source
        for tensor in tensors
        if not entangled.isdisjoint(tensor.sources)
        for source in tensor.sources
        if source not in entangled
    }:
        entangled |= more
    for tensor in tensors:
        if entangled.isdisjoint(tensor.sources):
            continue
        touched = [group for group in groups if not group[0].isdisjoint(tensor.sources)]
        merged = (set(tensor.sources).union(*(g[0] for g in touched)), [t for g in touched for t in g[1]] + [tensor])
        groups = [group for group in groups if group not in touched] + [merged]
    direct = [tensor for tensor in tensors if entangled.isdisjoint(tensor.sources)]
    return Plan(tensors, parts, direct, [group[1] for group in groups])


def _is_direct(tensor: FileTensor, parts: Mapping[str, LocalPart]) -> bool:
    if tensor.spans is None:
        return False
    for span in tensor.spans:
        part = parts.get(span.source)
        if part is None:
            return False
        one_row = span.offset // part.row_elements == span.last // part.row_elements
        if not (span.contiguous or one_row):
            return False
    return True


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor on the CPU, in memory of its own. A collective of the tensor's mesh."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    full = full.detach().cpu()
    shares_memory = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return full.clone() if shares_memory else full


def local_of_whole(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of ``whole`` that belongs where ``tensor`` keeps its local data. No communication."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
