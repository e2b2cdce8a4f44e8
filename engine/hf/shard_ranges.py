"""The elements of a file that each rank holds, and the tensors that need an all-gather instead.

FSDP2 shards dim 0, so a shard is a run of consecutive elements of the flattened tensor, and therefore of a file. Other
layouts (another dim, several sharded mesh dims, strided or partial shards) need an all-gather: in blocks of rows if
possible, else a tensor at a time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ...utils.compat.torch_private import made_sharded
from ...utils.distributed import gather_numbers
from ..lora.adapters import Adapter, plain_adapters
from ..memory.tensors import local_box
from .tensor_origins import FileTensor, Span

BLOCK_BYTES = 64 << 20
"""Approximate size of a block of a tensor that is gathered, or read, as a whole."""


@dataclass(frozen=True)
class LocalPart:
    """The elements ``[start, stop)`` of a flattened tensor that this rank holds."""

    data: torch.Tensor  # the live local tensor (any shape and device): ``stop - start`` elements in row-major order
    start: int  # first element
    stop: int  # one after the last element
    row_elements: int  # elements that stay together on one rank. The whole tensor if it is replicated
    replica: int = 0  # number of this rank among those that hold these elements. Each writes an equal share
    replicas: int = 1  # number of ranks that hold these elements


def local_part(tensor: torch.Tensor, rank: int, world_size: int) -> LocalPart | None:
    """This rank's part of a DTensor, or of a plain tensor that all ranks have. None on all ranks if it is no run."""
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
    """This rank's number among the ranks that differ from it only in these mesh dims, and how many these are."""
    number, count = 0, 1
    for dim in dims:
        number, count = number * mesh.size(dim) + mesh.get_local_rank(dim), count * mesh.size(dim)
    return number, count


def overlap(span: Span, part: LocalPart) -> tuple[int, torch.Tensor] | None:
    """Intersect a span with a part: first element of the file tensor, and a view of the live values.

    The span must fulfil `Span.within_rows`: a run of elements, or inside one row.
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


def own_share(span: Span, part: LocalPart) -> tuple[int, torch.Tensor] | None:
    """This rank's share of the `overlap`, which all replicas hold: an equal part for each."""
    if (held := overlap(span, part)) is None:
        return None
    at, values = held
    rows, row_elements = values.shape[0], math.prod(values.shape[1:])
    first, last = (rows * number // part.replicas for number in (part.replica, part.replica + 1))
    return at + first * row_elements, values[first:last]


@dataclass(frozen=True)
class TransferPlan:
    """How this rank gets the elements of every file tensor, to write or to read them.

    Each element is in the same one of ``direct``, ``gathered`` and ``unmapped`` on every rank.
    """

    tensors: Sequence[FileTensor]  # every file tensor, in file order
    parts: Mapping[str, LocalPart]  # ``state_dict`` key -> this rank's part, for the sources of ``direct``
    direct: Sequence[tuple[FileTensor, Span]]  # spans that each rank reads or writes in its own shard
    gathered: Mapping[str, Sequence[tuple[FileTensor, Span]]]  # source -> spans that need an all-gather (rare)
    unmapped: Sequence[Sequence[FileTensor]]  # file tensors without spans (rarer), whose sources are converted together


@torch.no_grad()
def plan_transfers(
    tensors: Sequence[FileTensor], stored: Mapping[str, torch.Tensor], rank: int, world_size: int
) -> TransferPlan:
    """Plan how this rank gets the elements of ``tensors``, which are made from (or fill) the tensors ``stored``."""
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
    """Blocks of rows ``[first, last)`` of about `BLOCK_BYTES`, to gather or to read ``tensor``.

    The whole tensor is one block if its rows are not on every rank (dim 0 is sharded), or if a span needs several rows
    at once (a transpose).
    """
    rows, row_elements = tensor.shape[0], max(math.prod(tensor.shape[1:]), 1)
    by_columns = all(type(p) is Replicate or (type(p) is Shard and p.dim > 0) for p in tensor.placements)
    if not by_columns or not all(span.within_rows(row_elements) for span in spans):
        return [(0, rows)]
    step = max(BLOCK_BYTES // (row_elements * tensor.element_size()), 1)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def gathered_block(tensor: DTensor, first: int, last: int, group: dist.ProcessGroup | None = None) -> LocalPart:
    """A block of `row_blocks` as a whole on the CPU of every rank. A collective, see `whole_tensor`."""
    mesh = tensor.device_mesh
    replica, replicas = _replica_of(mesh, range(mesh.ndim))
    if (first, last) != (0, tensor.shape[0]):
        shape = torch.Size((last - first, *tensor.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        tensor = made_sharded(tensor.to_local()[first:last], mesh, tensor.placements, shape, stride)
    return replace(whole_part(whole_tensor(tensor, group), first), replica=replica, replicas=replicas)


def whole_part(values: torch.Tensor, first: int) -> LocalPart:
    """A part with all of ``values``: the rows of a tensor from ``first`` on."""
    row_elements = math.prod(values.shape[1:])
    start = first * row_elements
    return LocalPart(values, start, start + values.numel(), max(row_elements, 1))


def fill_block(tensor: DTensor, first: int, last: int, values: torch.Tensor) -> None:
    """Copy this rank's part of a block of `row_blocks` (``values``, on the CPU) into ``tensor``."""
    local = tensor.to_local().detach()
    rows = local if (first, last) == (0, tensor.shape[0]) else local[first:last]
    rows.copy_(local_of_whole(tensor, values))


def whole_tensor(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Copy the whole tensor to new memory on the CPU.

    A collective over the mesh of the tensor, or over ``group``: gloo, with all ranks of the mesh.
    """
    if isinstance(tensor, DTensor) and group is not None:
        return _gather_over(tensor, group)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    full = full.detach().cpu()
    shares_memory = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return full.clone() if shares_memory else full


def _gather_over(tensor: DTensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`DTensor.full_tensor` without the groups of the mesh, which training uses. Any mesh, one broadcast per shard.

    It does not use DTensor's caches either, which mistake one mesh for another and keep its group forever.
    """
    local, whole = tensor.to_local().detach().cpu(), torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    offsets, sizes = local_box(tensor)
    holders: dict[tuple[int, ...], int] = {}  # offsets and sizes of a shard -> the first rank that has it
    for rank, box in enumerate(gather_numbers([*offsets, *sizes], group)):
        holders.setdefault(tuple(map(int, box)), rank)
    n_found = sum(math.prod(box[tensor.ndim :]) for box in holders)
    assert n_found == tensor.numel(), f"the ranks of the group hold {n_found} of {tensor.numel()} elements"
    for box, rank in holders.items():
        if math.prod(sizes := box[tensor.ndim :]):
            own = rank == dist.get_rank(group)
            part = local.contiguous() if own else torch.empty(sizes, dtype=tensor.dtype, device="cpu")
            dist.broadcast(part, group=group, group_src=rank)
            whole[tuple(slice(at, at + size) for at, size in zip(box[: tensor.ndim], sizes, strict=True))] = part
    return whole


def local_of_whole(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of ``whole`` that ``tensor`` keeps on this rank."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()


class MergedWeights:
    """Weights plus their adapters, W + s B A, computed for the rows that a rank is about to write.

    The constructor gathers A and B, which are small. It is a collective, see `whole_tensor`. Extra memory: a copy of
    one rank's part of one tensor.
    """

    def __init__(self, model: nn.Module, gather_group: dist.ProcessGroup | None = None) -> None:
        self._adapters: Mapping[str, list[tuple[Adapter, torch.Tensor, torch.Tensor]]] = {
            key: [(one, whole_tensor(one.a, gather_group), whole_tensor(one.b, gather_group)) for one in adapters]
            for key, adapters in plain_adapters(model).items()
        }
        self._last: tuple[str, LocalPart, LocalPart] | None = None

    def part(self, key: str, part: LocalPart, columns: int) -> LocalPart:
        """``part``, whole rows of ``columns`` elements of the tensor ``key`` in the plain model, plus its adapters."""
        if key not in self._adapters or part.start == part.stop:
            return part
        if self._last is None or self._last[0] != key or self._last[1] is not part:
            merged = self._added(key, part.data.reshape(-1, columns), part.start // columns)
            self._last = key, part, replace(part, data=merged)
        return self._last[2]

    def whole(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """``values``, the whole tensor ``key``, plus its adapters."""
        return self._added(key, values, 0) if key in self._adapters else values

    def _added(self, key: str, rows: torch.Tensor, first: int) -> torch.Tensor:
        merged = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        for adapter, a, b in self._adapters[key]:
            merged += adapter.rows(first, first + len(rows), a.to(rows.device), b.to(rows.device))
        return merged
