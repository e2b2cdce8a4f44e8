"""Which elements of a file this rank holds, and which tensors need an all-gather instead.

FSDP2 shards dim 0, so a shard is a run of consecutive elements of the flattened tensor, and therefore of a file.
This is not assumed: `local_part` checks the placements and returns None for every other layout (another dim, several
sharded mesh dims, strided or partial shards). A `TransferPlan` splits the elements of the file tensors into those that
each rank reads or writes from its own shard and those that must be gathered: in blocks of rows where possible, else a
tensor at a time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ...utils.compat.torch_private import made_sharded
from ..memory.tensors import local_box
from .name_mapping import FileTensor, Span

BLOCK_BYTES = 64 << 20
"""About how much of a tensor that needs an all-gather is gathered, or read, at a time."""


@dataclass(frozen=True)
class LocalPart:
    """The elements ``[start, stop)`` of a flattened tensor that this rank holds.

    Attributes:
        data: the live local tensor (any shape, any device), with ``stop - start`` elements in row-major order.
        start: first element.
        stop: one after the last element.
        row_elements: elements that always stay together on one rank; the whole tensor when it is replicated.
        replica: number of this rank among those that hold these elements; each writes an equal share of them.
        replicas: number of ranks that hold these elements.
    """

    data: torch.Tensor
    start: int
    stop: int
    row_elements: int
    replica: int = 0
    replicas: int = 1


def local_part(tensor: torch.Tensor, rank: int, world_size: int) -> LocalPart | None:
    """This rank's part of ``tensor``; None, on every rank alike, when the parts are not runs of elements.

    Args:
        tensor: from the ``state_dict`` of a model: a DTensor, or a plain tensor that every rank has in full.
        rank: this rank.
        world_size: number of ranks.
    """
    if not isinstance(tensor, DTensor):
        return LocalPart(tensor.detach(), 0, tensor.numel(), max(tensor.numel(), 1), rank, world_size)
    local, mesh = tensor.to_local().detach(), tensor.device_mesh
    sharded = [dim for dim, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if len(sharded) > 1 or any(type(p) not in (Replicate, Shard) for p in tensor.placements):
        return None
    if sharded and tensor.placements[sharded[0]] != Shard(0):
        return None
    row_elements = math.prod(tensor.shape[1:]) if sharded else tensor.numel()
    together = max(row_elements, 1)
    if mesh.get_coordinate() is None:  # a rank outside of the mesh holds nothing
        return LocalPart(local, 0, 0, together)
    box = local_box(tensor)
    assert local.shape == box.sizes, f"{tensor.placements} on {mesh} left {tuple(local.shape)} here"
    start = box.offsets[0] * row_elements if sharded else 0
    replica, replicas = _replica_of(mesh, [dim for dim in range(mesh.ndim) if dim not in sharded])
    return LocalPart(local, start, start + local.numel(), together, replica, replicas)


def _replica_of(mesh: DeviceMesh, dims: Sequence[int]) -> tuple[int, int]:
    """This rank's number among those that differ from it in these mesh dims only, and how many there are."""
    number, count = 0, 1
    for dim in dims:
        number, count = number * mesh.size(dim) + mesh.get_local_rank(dim), count * mesh.size(dim)
    return number, count


def overlap(span: Span, part: LocalPart) -> tuple[int, torch.Tensor] | None:
    """Intersect a span with this rank's part: the first element of the file tensor, and a view of the live values.

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


def own_share(held: tuple[int, torch.Tensor], part: LocalPart) -> tuple[int, torch.Tensor]:
    """This rank's share of an `overlap`, which every replica holds: an equal part for each."""
    at, values = held
    rows, row_elements = values.shape[0], math.prod(values.shape[1:])
    first, last = (rows * number // part.replicas for number in (part.replica, part.replica + 1))
    return at + first * row_elements, values[first:last]


@dataclass(frozen=True)
class TransferPlan:
    """How this rank gets at the elements of every file tensor, to write or to read them.

    Which elements are under ``direct``, ``gathered`` and ``unmapped`` is the same on every rank.

    Attributes:
        tensors: every file tensor, in file order.
        parts: ``state_dict`` key -> what this rank holds, for the sources of ``direct``.
        direct: the spans whose elements each rank reads or writes in its own shard.
        gathered: source -> the spans of it that need an all-gather (nearly always none).
        unmapped: lists of file tensors without spans (rarer still) whose sources must be converted together.
    """

    tensors: Sequence[FileTensor]
    parts: Mapping[str, LocalPart]
    direct: Sequence[tuple[FileTensor, Span]]
    gathered: Mapping[str, Sequence[tuple[FileTensor, Span]]]
    unmapped: Sequence[Sequence[FileTensor]]


@torch.no_grad()
def plan_transfers(
    tensors: Sequence[FileTensor], stored: Mapping[str, torch.Tensor], rank: int, world_size: int
) -> TransferPlan:
    """Plan how this rank gets at the elements of ``tensors``, which are made of (or fill) the tensors ``stored``."""
    found = {key: local_part(tensor, rank, world_size) for key, tensor in stored.items()}
    parts = {key: part for key, part in found.items() if part is not None}
    direct: list[tuple[FileTensor, Span]] = []
    gathered: dict[str, list[tuple[FileTensor, Span]]] = {}
    groups: list[tuple[set[str], list[FileTensor]]] = []
    for tensor in tensors:
        for span in tensor.spans or ():
            part = parts.get(span.source)
            if part is not None and span.within_rows(part.row_elements):
                direct.append((tensor, span))
            else:
                gathered.setdefault(span.source, []).append((tensor, span))
        if tensor.spans is None:
            touched = [group for group in groups if not group[0].isdisjoint(tensor.sources)]
            merged = (
                set(tensor.sources).union(*(sources for sources, _ in touched)),
                [other for _, others in touched for other in others] + [tensor],
            )
            groups = [group for group in groups if group not in touched] + [merged]
    return TransferPlan(tensors, parts, direct, gathered, [group for _, group in groups])


def row_blocks(tensor: DTensor, spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Blocks of rows ``[first, last)`` of about `BLOCK_BYTES` in which ``tensor`` is gathered, or read.

    The whole tensor is one block when its rows are not on every rank (dim 0 is sharded), or when a span needs several
    of them at once (a transpose).
    """
    rows, row_elements = tensor.shape[0], max(math.prod(tensor.shape[1:]), 1)
    by_columns = all(type(p) is Replicate or (type(p) is Shard and p.dim > 0) for p in tensor.placements)
    if not by_columns or not all(span.within_rows(row_elements) for span in spans):
        return [(0, rows)]
    step = max(BLOCK_BYTES // (row_elements * tensor.element_size()), 1)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def gathered_block(tensor: DTensor, first: int, last: int, group: dist.ProcessGroup | None = None) -> LocalPart:
    """A block of `row_blocks`, whole, on the CPU of every rank. A collective; see `whole_tensor`."""
    mesh = tensor.device_mesh
    replica, replicas = _replica_of(mesh, range(mesh.ndim))
    if (first, last) != (0, tensor.shape[0]):
        shape = torch.Size((last - first, *tensor.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        tensor = made_sharded(tensor.to_local()[first:last], mesh, tensor.placements, shape, stride)
    return replace(whole_part(whole_tensor(tensor, group), first), replica=replica, replicas=replicas)


def whole_part(values: torch.Tensor, first: int) -> LocalPart:
    """All of ``values``, which are the rows of a tensor from ``first`` on."""
    row_elements = math.prod(values.shape[1:])
    start = first * row_elements
    return LocalPart(values, start, start + values.numel(), max(row_elements, 1))


def fill_block(tensor: DTensor, first: int, last: int, values: torch.Tensor) -> None:
    """Put a block of `row_blocks`, ``values`` on the CPU, where ``tensor`` keeps its part of it. No communication."""
    local = tensor.to_local().detach()
    rows = local if (first, last) == (0, tensor.shape[0]) else local[first:last]
    rows.copy_(local_of_whole(tensor, values))


def whole_tensor(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All of a tensor on the CPU, in memory of its own. A collective of the tensor's mesh, or of ``group``: gloo, over
    the ranks of a mesh of one dimension."""
    if isinstance(tensor, DTensor) and group is not None:
        return _gather_over(tensor, group)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    full = full.detach().cpu()
    shares_memory = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return full.clone() if shares_memory else full


def _gather_over(tensor: DTensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`DTensor.full_tensor` without its caches, which take a mesh for another one and keep its group for good."""
    (placement,), local = tensor.placements, tensor.to_local().detach().cpu()
    if not isinstance(placement, Shard):
        return local.clone()
    shape, parts = list(tensor.shape), []
    length, n_ranks = shape[placement.dim], dist.get_world_size(group)
    each = -(-length // n_ranks)
    for rank in range(n_ranks):
        shape[placement.dim] = max(min(each, length - rank * each), 0)
        own = rank == dist.get_rank(group)
        parts.append(local.contiguous() if own else torch.empty(shape, dtype=local.dtype, device="cpu"))
        if parts[-1].numel():
            dist.broadcast(parts[-1], group=group, group_src=rank)
    return torch.cat(parts, placement.dim)


def local_of_whole(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of ``whole`` that belongs where ``tensor`` keeps its local data. No communication."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
