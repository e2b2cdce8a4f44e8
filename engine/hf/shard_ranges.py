"""The elements of a file that each rank holds.

A rank holds a block of each model tensor: rows under FSDP2, rows or columns under tensor
parallelism, experts under expert parallelism. In a file such a block is made of runs of elements at
equal distances, which the rank reads or writes itself. Only conversions that are not slices need
whole tensors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from operator import attrgetter, mul, sub
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...utils.distributed import RankGroup, gather_numbers
from ..lora.adapters import Adapter, plain_adapters
from ..memory.tensors import Box, copy_number, local_box, local_tensor, row_major
from .tensor_origins import FileTensor, Span


@dataclass(frozen=True)
class LocalPart:
    """The block of a model tensor that this rank holds."""

    # the live values of the block, with any strides
    data: Tensor
    box: Box  # where it is in the tensor
    shape: tuple[int, ...]  # of the whole tensor
    # number of this rank among those that hold the block. Each writes an equal share
    replica: int = 0
    # number of ranks that hold the block
    replicas: int = 1

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next in each dimension of the whole tensor."""
        return row_major(self.shape)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """First and last element of the block in the flattened whole tensor. The last is before the
        first if empty.
        """
        if not self.data.numel():
            return 0, -1
        first = _place(self.box.offsets, self.strides)
        last = _place(self.box.last, self.strides)
        return first, last


def local_part(tensor: Tensor, ranks: Sequence[int]) -> LocalPart:
    """This rank's part of a DTensor, or of a plain tensor that all ``ranks`` of the default group
    have.
    """
    return LocalPart(
        local_tensor(tensor).detach(),
        local_box(tensor),
        tuple(tensor.shape),
        *copy_number(tensor, ranks),
    )


def rows_part(
    values: Tensor,
    first: int,
    shape: Sequence[int],
) -> LocalPart:
    """A part with ``values``, the rows from ``first`` on of a tensor with this ``shape``."""
    offsets = [0] * values.ndim
    if offsets:
        offsets[0] = first
    return LocalPart(
        data=values,
        box=Box(tuple(offsets), tuple(values.shape)),
        shape=tuple(shape),
    )


def _place(index: Sequence[int], strides: Sequence[int]) -> int:
    """Place of an element in memory with these strides."""
    return sum(map(mul, index, strides))


class FileRows(NamedTuple):
    """Runs of elements of a file tensor, at equal distances."""

    at: int  # the first element
    # a view of live values: each of its rows fills a run
    values: Tensor
    # elements from the beginning of a run to the beginning of the next
    pitch: int


class _Walk(NamedTuple):
    """A dimension of a block: ``size`` elements along dimension ``dim`` of the model tensor."""

    size: int
    dim: int
    # from an element to the next, along ``dim`` of the model tensor
    jump: int
    # from an element to the next, in the flattened file tensor
    step: int


class _Block(NamedTuple):
    """Elements of a span at the crossings of its walks."""

    # of the first element, in the model tensor
    index: tuple[int, ...]
    # the first element, in the flattened file tensor
    at: int
    walks: tuple[_Walk, ...]  # in the order of the file

    def narrow(
        self,
        walk: _Walk,
        first: int,
        size: int,
    ) -> "_Block":
        """The same block with ``size`` elements of a walk, from its element ``first`` on."""
        index = list(self.index)
        index[walk.dim] += first * walk.jump
        at = self.at + first * walk.step

        # A walk of one element is none.
        narrowed = walk._replace(size=size)
        walks = [narrowed if one is walk else one for one in self.walks]
        walks = [one for one in walks if one.size > 1]
        return _Block(tuple(index), at, tuple(walks))


def overlap(span: Span, part: LocalPart) -> Iterator[FileRows]:
    """The elements of ``span`` that are in ``part``: their places in the file, with views of the
    live values.
    """
    first, last = part.reach

    # Most spans of experts are in no part of this rank.
    if not span.numel or last < span.offset or span.last < first:
        return
    for block in _straight_blocks(span, part.shape, part.strides):
        for held in _held(block, part):
            yield from _file_rows(held, part)


def own_share(span: Span, part: LocalPart) -> Iterator[FileRows]:
    """This rank's share of the `overlap`, which all replicas hold: an equal part for each."""
    for at, values, pitch in overlap(span, part):
        first, last = equal_share(len(values), part.replica, part.replicas)
        if first < last:
            yield FileRows(at + first * pitch, values[first:last], pitch)


def equal_share(
    count: int,
    number: int,
    shares: int,
) -> tuple[int, int]:
    """First and last (excluded) of ``count`` things in share ``number`` of ``shares``."""
    return count * number // shares, count * (number + 1) // shares


class _Axis(NamedTuple):
    """A dimension of a strided view: of a span in the flattened model tensor, or of live values."""

    size: int
    # from an element to the next, in the model tensor or in memory
    stride: int
    # from an element to the next, in the flattened file tensor
    step: int


class _Rest(NamedTuple):
    """A part of a span that is still to be cut into blocks."""

    # first element, in the flattened model tensor
    offset: int
    # first element, in the flattened file tensor
    at: int
    axes: Sequence[_Axis]


def _straight_blocks(
    span: Span,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Iterator[_Block]:
    """Cut a span into blocks whose walks stay in one dimension of the model tensor, as they usually
    do.
    """
    axes = map(_Axis, span.shape, span.stride, row_major(span.shape))
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    todo = [_Rest(span.offset, span.at, list(axes))]
    while todo:
        rest = todo.pop()
        begin = [rest.offset // stride % size for size, stride in zip(shape, strides, strict=True)]

        # Each axis becomes a walk, as long as the last index stays in its dimension.
        reach = begin.copy()
        walks = []
        for number, one in enumerate(rest.axes):
            if one.size == 1:
                continue

            # The walk goes along the outermost dimension whose stride is not above its own.
            dim = next((dim for dim in dims if strides[dim] <= one.stride), 0)
            jump, between = divmod(one.stride, strides[dim])
            reach[dim] += jump * (one.size - 1)
            if between or reach[dim] >= shape[dim]:
                todo += _cut(rest, number, begin[dim], shape[dim], jump, bool(between))
                break
            walks.append(_Walk(one.size, dim, jump, one.step))
        else:
            yield _Block(tuple(begin), rest.at, tuple(walks))


def _cut(
    rest: _Rest,
    number: int,
    begin: int,
    length: int,
    jump: int,
    between: bool,
) -> Iterator[_Rest]:
    """Cut a part of a span, because its axis ``number`` leaves a dimension of the tensor.

    Args:
        begin: first index in the dimension of the tensor.
        length: size of the dimension of the tensor.
        jump: from an element to the next, along the dimension of the tensor.
        between: whether the next element is elsewhere in other dimensions too.
    """
    one = rest.axes[number]
    per_row = length // jump
    divides = not between and jump * per_row == length
    if divides and begin < jump and one.size > per_row:
        # Whole rows become two axes.
        n_rows = one.size // per_row
        size = n_rows * per_row
        inner = [
            _Axis(n_rows, one.stride * per_row, one.step * per_row),
            one._replace(size=per_row),
        ]
    else:
        # The rest of this row, or half of the axis.
        size = (length - 1 - begin) // jump + 1
        if between or size >= one.size:
            size = one.size // 2
        inner = [one._replace(size=size)]

    before = rest.axes[:number]
    after = rest.axes[number + 1 :]
    yield rest._replace(axes=[*before, *inner, *after])
    if size < one.size:
        others = one._replace(size=one.size - size)
        yield _Rest(
            rest.offset + size * one.stride,
            rest.at + size * one.step,
            [*before, others, *after],
        )


def _held(block: _Block, part: LocalPart) -> Iterator[_Block]:
    """The elements of a block that are in a part, as blocks."""
    for dim, (low, size) in enumerate(zip(*part.box, strict=True)):
        high = low + size
        along = [walk for walk in block.walks if walk.dim == dim and walk.jump]
        first = block.index[dim]
        last = first
        for walk in along:
            last += walk.jump * (walk.size - 1)
        if last < low or first >= high:
            return
        if low <= first and last < high:
            continue

        # With several walks, no range of one is right for every element of the others.
        along.sort(key=attrgetter("jump"))
        walk = along.pop()
        if along:
            for number in range(walk.size):
                yield from _held(block.narrow(walk, number, 1), part)
            return

        begin = max(0, -((first - low) // walk.jump))
        end = min(walk.size, (high - 1 - first) // walk.jump + 1)
        if begin >= end:
            return
        block = block.narrow(walk, begin, end - begin)
    yield block


def _file_rows(block: _Block, part: LocalPart) -> Iterator[FileRows]:
    """The runs of a block in the file. They are rows of a few matrices, usually of one."""
    strides = part.data.stride()
    inside = tuple(map(sub, block.index, part.box.offsets))
    offset = int(part.data.storage_offset())
    offset += _place(inside, strides)
    outer = []
    for walk in block.walks:
        stride = walk.jump * strides[walk.dim]
        outer.append(_Axis(walk.size, stride, walk.step))

    # The inner walks whose elements are side by side in the file make a run.
    run = 1
    inner = []
    while outer and outer[-1].step == run:
        run *= outer[-1].size
        inner.insert(0, outer.pop())

    if not outer:
        values = _view(part.data, inner or [_Axis(1, 1, 1)], offset)
        if values.is_contiguous():
            values = values.reshape(-1)
        yield FileRows(block.at, values, run // len(values))
        return

    # The innermost of the other walks gives the rows of a matrix, its outer walks one matrix each.
    rows = outer.pop()
    strides = [axis.stride for axis in outer]
    steps = [axis.step for axis in outer]
    for numbers in product(*(range(axis.size) for axis in outer)):
        at = block.at + _place(numbers, steps)
        begin = offset + _place(numbers, strides)
        values = _view(part.data, [rows, *inner], begin)
        yield FileRows(at, values, rows.step)


def _view(
    data: Tensor,
    axes: Sequence[_Axis],
    offset: int,
) -> Tensor:
    sizes = [axis.size for axis in axes]
    strides = [axis.stride for axis in axes]
    return data.as_strided(sizes, strides, offset)


@dataclass(frozen=True)
class TransferPlan:
    """How this rank gets the elements of every file tensor, to write or to read them.

    Each element is in the same one of ``direct`` and ``unmapped`` on every rank.
    """

    # every file tensor, in file order
    tensors: Sequence[FileTensor]
    # ``state_dict`` key -> this rank's part
    parts: Mapping[str, LocalPart]
    # spans that each rank reads or writes in its own part
    direct: Sequence[tuple[FileTensor, Span]]
    # file tensors without spans (rare), whose sources are converted together
    unmapped: Sequence[Sequence[FileTensor]]


@torch.no_grad()
def plan_transfers(
    tensors: Sequence[FileTensor],
    stored: Mapping[str, Tensor],
    ranks: Sequence[int],
) -> TransferPlan:
    """Plan how this rank gets the elements of ``tensors``, which are made from (or fill) the
    tensors ``stored``.

    ``ranks`` are those that hold ``stored``, in the default group.

    Raises:
        ConfigError: a rank holds no block of a tensor (see `local_box`).
    """
    direct = [(tensor, span) for tensor in tensors for span in tensor.spans or ()]

    # A source of several tensors is converted once, with all of them: sources -> tensors.
    groups = {}
    for tensor in tensors:
        if tensor.spans is not None:
            continue
        sources = frozenset(tensor.sources)
        together = []
        for known in list(groups):
            if not known.isdisjoint(tensor.sources):
                sources |= known
                together += groups.pop(known)
        groups[sources] = [*together, tensor]

    parts = {key: local_part(tensor, ranks) for key, tensor in stored.items()}
    return TransferPlan(tensors, parts, direct, list(groups.values()))


def whole_tensor(tensor: Tensor, group: RankGroup = None) -> Tensor:
    """Copy the whole tensor to new memory on the CPU.

    A collective over the mesh of the tensor, or over ``group``: gloo, with all ranks of the mesh.
    """
    if not isinstance(tensor, DTensor):
        full = local = tensor
    elif group is not None:
        return _gather_over(tensor, group)
    else:
        local = tensor.to_local()
        full = tensor.full_tensor()
    full = full.detach().cpu()

    # A tensor on the CPU that no mesh divides is still the live one.
    if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        return full.clone()
    return full


def _gather_over(tensor: DTensor, group: dist.ProcessGroup) -> Tensor:
    """`DTensor.full_tensor` without the groups of the mesh, which training uses. Any mesh, one
    broadcast per shard.

    It does not use DTensor's caches either, which mistake one mesh for another and keep its group
    forever.
    """
    local = tensor.to_local().detach().cpu()
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    # The first rank that has a block sends it.
    offsets, sizes = local_box(tensor)
    holders = {}
    for rank, gathered in enumerate(gather_numbers([*offsets, *sizes], group)):
        numbers = tuple(map(int, gathered))
        box = Box(numbers[: tensor.ndim], numbers[tensor.ndim :])
        holders.setdefault(box, rank)
    n_found = sum(math.prod(box.sizes) for box in holders)
    assert n_found == tensor.numel(), (
        f"the ranks of the group hold {n_found} of {tensor.numel()} elements"
    )

    for box, rank in holders.items():
        if not math.prod(box.sizes):
            continue
        if rank == dist.get_rank(group):
            part = local.contiguous()
        else:
            part = torch.empty(box.sizes, dtype=tensor.dtype, device="cpu")
        dist.broadcast(part, group=group, group_src=rank)
        box.of(whole).copy_(part)
    return whole


class MergedWeights:
    """Weights plus their adapters, W + s B A, computed for the rows that a rank is about to write.

    The constructor gathers A and B, which are small. It is a collective, see `whole_tensor`. Extra
    memory: a copy of one rank's part of one tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        group: RankGroup = None,
    ) -> None:
        self._adapters: dict[str, list[Adapter]] = {}
        for key, adapters in plain_adapters(model).items():
            self._adapters[key] = [
                replace(one, a=whole_tensor(one.a, group), b=whole_tensor(one.b, group))
                for one in adapters
            ]

        # a part as it was given, and merged: spans of one part follow each other
        self._last: tuple[LocalPart, LocalPart] | None = None

    def part(
        self,
        key: str,
        part: LocalPart,
    ) -> LocalPart:
        """``part`` of the tensor ``key`` in the plain model, plus its adapters."""
        if key not in self._adapters or not part.data.numel():
            return part
        if self._last is None or self._last[0] is not part:
            merged = self._added(key, part.data, part.box)
            self._last = part, replace(part, data=merged)
        return self._last[1]

    def whole(self, key: str, tensor: Tensor) -> Tensor:
        """The gathered ``tensor`` of this key, plus its adapters."""
        if key not in self._adapters:
            return tensor
        return self._added(key, tensor, local_box(tensor))

    def _added(
        self,
        key: str,
        values: Tensor,
        box: Box,
    ) -> Tensor:
        dtype = torch.promote_types(values.dtype, torch.float32)
        merged = values.to(dtype, copy=True)
        first, column = box.offsets
        rows, columns = box.sizes
        for adapter in self._adapters[key]:
            a = adapter.a.to(values.device)
            b = adapter.b.to(values.device)
            delta = adapter.rows(first, first + rows, a, b)
            merged += delta[:, column : column + columns]
        return merged
