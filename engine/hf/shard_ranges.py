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
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.distributed import gather_numbers
from ..lora.adapters import Adapter, plain_adapters
from ..memory.tensors import Box, copy_number, local_box, local_tensor, row_major
from .tensor_origins import FileTensor, Span


@dataclass(frozen=True)
class LocalPart:
    """The block of a model tensor that this rank holds."""

    data: torch.Tensor  # the live values of the block, with any strides
    box: Box  # where it is in the tensor
    shape: tuple[int, ...]  # of the whole tensor
    replica: int = (
        0  # number of this rank among those that hold the block. Each writes an equal share
    )
    replicas: int = 1  # number of ranks that hold the block

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next in each dimension of the whole tensor."""
        return row_major(self.shape)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """First and last element of the block in the flattened whole tensor. The last is before the
        first if empty.
        """
        first, last = (
            sum(map(mul, ends, self.strides)) for ends in (self.box.offsets, self.box.last)
        )
        return (first, last) if self.data.numel() else (0, -1)


def local_part(tensor: torch.Tensor, ranks: Sequence[int]) -> LocalPart:
    """This rank's part of a DTensor, or of a plain tensor that all ``ranks`` of the default group
    have.
    """
    return LocalPart(
        local_tensor(tensor).detach(),
        local_box(tensor),
        tuple(tensor.shape),
        *copy_number(tensor, ranks),
    )


def rows_part(values: torch.Tensor, first: int, shape: Sequence[int]) -> LocalPart:
    """A part with ``values``, the rows from ``first`` on of a tensor with this ``shape``."""
    return LocalPart(
        values, Box((first, *[0] * values.ndim)[: values.ndim], tuple(values.shape)), tuple(shape)
    )


class FileRows(NamedTuple):
    """Runs of elements of a file tensor, at equal distances."""

    at: int  # the first element
    values: torch.Tensor  # a view of live values: each of its rows fills a run
    pitch: int  # elements from the beginning of a run to the beginning of the next


class _Walk(NamedTuple):
    """A dimension of a block: ``size`` elements along dimension ``dim`` of the model tensor."""

    size: int
    dim: int
    jump: int  # from an element to the next, along ``dim`` of the model tensor
    step: int  # from an element to the next, in the flattened file tensor


class _Block(NamedTuple):
    """Elements of a span at the crossings of its walks."""

    index: tuple[int, ...]  # of the first element, in the model tensor
    at: int  # the first element, in the flattened file tensor
    walks: tuple[_Walk, ...]  # in the order of the file

    def narrow(self, walk: _Walk, first: int, size: int) -> "_Block":
        """The same block with ``size`` elements of a walk, from its element ``first`` on."""
        index = tuple(
            at + (dim == walk.dim) * first * walk.jump for dim, at in enumerate(self.index)
        )
        narrowed = (one if one is not walk else _Walk(size, *walk[1:]) for one in self.walks)
        return _Block(
            index, self.at + first * walk.step, tuple(one for one in narrowed if one.size > 1)
        )


def overlap(span: Span, part: LocalPart) -> Iterator[FileRows]:
    """The elements of ``span`` that are in ``part``: their places in the file, with views of the
    live values.
    """
    first, last = part.reach
    if span.numel and span.offset <= last and first <= span.last:  # seldom so for experts
        for block in _straight_blocks(span, part.shape, part.strides):
            for held in _held(block, part):
                yield from _file_rows(held, part)


def own_share(span: Span, part: LocalPart) -> Iterator[FileRows]:
    """This rank's share of the `overlap`, which all replicas hold: an equal part for each."""
    for at, values, pitch in overlap(span, part):
        first, last = (
            len(values) * number // part.replicas for number in (part.replica, part.replica + 1)
        )
        if first < last:
            yield FileRows(at + first * pitch, values[first:last], pitch)


def _straight_blocks(span: Span, shape: Sequence[int], strides: Sequence[int]) -> Iterator[_Block]:
    """Cut a span into blocks whose walks stay in one dimension of the model tensor, as they usually
    do.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    todo = [
        (
            span.offset,
            span.at,
            list(zip(span.shape, span.stride, row_major(span.shape), strict=True)),
        )
    ]
    while todo:
        offset, at, rest = todo.pop()
        index = tuple(offset // stride % size for size, stride in zip(shape, strides, strict=True))
        reach, walks = list(index), list[_Walk]()
        for number, (size, stride, step) in enumerate(rest):
            if size == 1:
                continue
            dim = next((dim for dim in dims if strides[dim] <= stride), 0)
            jump, between = divmod(stride, strides[dim])
            if between or reach[dim] + jump * (size - 1) >= shape[dim]:
                per_row = shape[dim] // jump
                if (
                    not between
                    and jump * per_row == shape[dim]
                    and index[dim] < jump
                    and size > per_row
                ):
                    cut = size - size % per_row  # whole rows
                    inner = [
                        (cut // per_row, stride * per_row, step * per_row),
                        (per_row, stride, step),
                    ]
                else:
                    left = (shape[dim] - 1 - index[dim]) // jump + 1  # in this row
                    cut = size // 2 if between or left >= size else left
                    inner = [(cut, stride, step)]
                todo.append((offset, at, [*rest[:number], *inner, *rest[number + 1 :]]))
                if cut < size:
                    others = [*rest[:number], (size - cut, stride, step), *rest[number + 1 :]]
                    todo.append((offset + cut * stride, at + cut * step, others))
                break
            reach[dim] += jump * (size - 1)
            walks.append(_Walk(size, dim, jump, step))
        else:
            yield _Block(index, at, tuple(walks))


def _held(block: _Block, part: LocalPart) -> Iterator[_Block]:
    """The elements of a block that are in a part, as blocks."""
    for dim, (low, size) in enumerate(zip(*part.box, strict=True)):
        along = sorted(
            (walk for walk in block.walks if walk.dim == dim and walk.jump), key=attrgetter("jump")
        )
        first = block.index[dim]
        last = first + sum(walk.jump * (walk.size - 1) for walk in along)
        if last < low or first >= low + size:
            return
        if low <= first and last < low + size:
            continue
        walk = along.pop()
        if along:  # no range of the walk is right for every element of the others
            for number in range(walk.size):
                yield from _held(block.narrow(walk, number, 1), part)
            return
        begin = max(0, -((first - low) // walk.jump))
        end = min(walk.size, (low + size - 1 - first) // walk.jump + 1)
        if begin >= end:
            return
        block = block.narrow(walk, begin, end - begin)
    yield block


def _file_rows(block: _Block, part: LocalPart) -> Iterator[FileRows]:
    """The runs of a block in the file. They are rows of a few matrices, usually of one."""
    strides = part.data.stride()
    offset = part.data.storage_offset() + sum(
        map(mul, map(sub, block.index, part.box.offsets), strides)
    )
    outer = [(walk.size, walk.jump * strides[walk.dim], walk.step) for walk in block.walks]
    run, inner = 1, list[tuple[int, int]]()
    while outer and outer[-1][2] == run:
        size, stride, _ = outer.pop()
        run, inner = run * size, [(size, stride), *inner]
    if not outer:
        sizes, steps = zip(*inner or [(1, 1)], strict=True)
        values = part.data.as_strided(sizes, steps, offset)
        values = values.reshape(-1) if values.is_contiguous() else values
        yield FileRows(block.at, values, run // len(values))
        return
    *outer, (rows, stride, pitch) = outer
    sizes, steps = zip((rows, stride), *inner, strict=True)
    for numbers in product(*(range(size) for size, *_ in outer)):
        begin = offset + sum(
            number * stride for number, (_, stride, _) in zip(numbers, outer, strict=True)
        )
        at = block.at + sum(
            number * step for number, (*_, step) in zip(numbers, outer, strict=True)
        )
        yield FileRows(at, part.data.as_strided(sizes, steps, begin), pitch)


@dataclass(frozen=True)
class TransferPlan:
    """How this rank gets the elements of every file tensor, to write or to read them.

    Each element is in the same one of ``direct`` and ``unmapped`` on every rank.
    """

    tensors: Sequence[FileTensor]  # every file tensor, in file order
    parts: Mapping[str, LocalPart]  # ``state_dict`` key -> this rank's part
    direct: Sequence[
        tuple[FileTensor, Span]
    ]  # spans that each rank reads or writes in its own part
    unmapped: Sequence[
        Sequence[FileTensor]
    ]  # file tensors without spans (rare), whose sources are converted together


@torch.no_grad()
def plan_transfers(
    tensors: Sequence[FileTensor], stored: Mapping[str, torch.Tensor], ranks: Sequence[int]
) -> TransferPlan:
    """Plan how this rank gets the elements of ``tensors``, which are made from (or fill) the
    tensors ``stored``.

    ``ranks`` are those that hold ``stored``, in the default group.

    Raises:
        ConfigError: a rank holds no block of a tensor (see `local_box`).
    """
    direct = [(tensor, span) for tensor in tensors for span in tensor.spans or ()]
    groups: list[tuple[set[str], list[FileTensor]]] = []
    for tensor in (tensor for tensor in tensors if tensor.spans is None):
        touched = [group for group in groups if not group[0].isdisjoint(tensor.sources)]
        merged = (
            set(tensor.sources).union(*(sources for sources, _ in touched)),
            [other for _, others in touched for other in others] + [tensor],
        )
        groups = [group for group in groups if group not in touched] + [merged]
    parts = {key: local_part(tensor, ranks) for key, tensor in stored.items()}
    return TransferPlan(tensors, parts, direct, [group for _, group in groups])


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
    """`DTensor.full_tensor` without the groups of the mesh, which training uses. Any mesh, one
    broadcast per shard.

    It does not use DTensor's caches either, which mistake one mesh for another and keep its group
    forever.
    """
    local, whole = (
        tensor.to_local().detach().cpu(),
        torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"),
    )
    offsets, sizes = local_box(tensor)
    holders: dict[Box, int] = {}  # block -> the first rank that has it
    for rank, numbers in enumerate(gather_numbers([*offsets, *sizes], group)):
        numbers = tuple(map(int, numbers))
        holders.setdefault(Box(numbers[: tensor.ndim], numbers[tensor.ndim :]), rank)
    n_found = sum(math.prod(box.sizes) for box in holders)
    assert n_found == tensor.numel(), (
        f"the ranks of the group hold {n_found} of {tensor.numel()} elements"
    )
    for box, rank in holders.items():
        if math.prod(box.sizes):
            own = rank == dist.get_rank(group)
            part = (
                local.contiguous()
                if own
                else torch.empty(box.sizes, dtype=tensor.dtype, device="cpu")
            )
            dist.broadcast(part, group=group, group_src=rank)
            box.of(whole).copy_(part)
    return whole


class MergedWeights:
    """Weights plus their adapters, W + s B A, computed for the rows that a rank is about to write.

    The constructor gathers A and B, which are small. It is a collective, see `whole_tensor`. Extra
    memory: a copy of one rank's part of one tensor.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._adapters: Mapping[str, list[tuple[Adapter, torch.Tensor, torch.Tensor]]] = {
            key: [(one, whole_tensor(one.a, group), whole_tensor(one.b, group)) for one in adapters]
            for key, adapters in plain_adapters(model).items()
        }
        self._last: tuple[str, LocalPart, LocalPart] | None = None

    def part(self, key: str, part: LocalPart) -> LocalPart:
        """``part`` of the tensor ``key`` in the plain model, plus its adapters."""
        if key not in self._adapters or not part.data.numel():
            return part
        if self._last is None or self._last[0] != key or self._last[1] is not part:
            self._last = key, part, replace(part, data=self._added(key, part.data, part.box))
        return self._last[2]

    def whole(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """``values``, the whole tensor ``key``, plus its adapters."""
        return self._added(key, values, local_box(values)) if key in self._adapters else values

    def _added(self, key: str, values: torch.Tensor, box: Box) -> torch.Tensor:
        merged = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
        (first, column), (rows, columns) = box
        for adapter, a, b in self._adapters[key]:
            delta = adapter.rows(first, first + rows, a.to(values.device), b.to(values.device))
            merged += delta[:, column : column + columns]
        return merged
