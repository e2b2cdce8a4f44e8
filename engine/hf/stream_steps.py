"""The order in which weight files are streamed: which rank owns a file, and in which steps it comes to be.

A `Plan` says what ranks can address alone and what they must gather; here that becomes, for every file, a sequence of
steps from its first byte to its last. All of it follows from what all ranks know alike. No tensor data.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from .name_mapping import FileTensor, Span
from .safetensors_layout import Place, WeightFile
from .shard_ranges import Plan, row_blocks


@dataclass(frozen=True)
class Run:
    """The bytes ``[start, stop)`` of a file, which ranks hold in their shards (or the owner knows: the header)."""

    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """Rows ``[first, last)`` of a model tensor, to be gathered."""

    source: str
    first: int
    last: int


@dataclass(frozen=True)
class Group:
    """File tensors without spans, whose sources are to be gathered and converted together: a number in the plan."""

    number: int


@dataclass(frozen=True)
class Gathered:
    """The bytes ``[start, stop)`` of a file, which are in what all ranks have to gather.

    Attributes:
        start: first byte.
        stop: one after the last.
        tensor: the file tensor they belong to.
        span: which elements of the rows they are; None for a tensor without spans, of which they are all.
        block: what to gather.
    """

    start: int
    stop: int
    tensor: FileTensor
    span: Span | None
    block: Rows | Group


Step = Run | Gathered


def deal_files(files: Sequence[WeightFile], world_size: int) -> list[list[WeightFile]]:
    """The files that each rank owns: about equal bytes; with few files the owners are far apart, on many machines."""
    count = min(len(files), world_size)
    loads = [(0, number * world_size // count) for number in range(count)]
    dealt: list[list[WeightFile]] = [[] for _ in range(world_size)]
    for file in sorted(files, key=lambda file: -file.total_bytes):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + file.total_bytes, rank))
        dealt[rank].append(file)
    return dealt


def plan_steps(
    files: Sequence[WeightFile], plan: Plan, stored: Mapping[str, torch.Tensor]
) -> dict[str, list[Run | Gathered]]:
    """For every file the steps that fill it from start to end; runs are as long as can be, see `cut`.

    Args:
        files: of the layout of ``plan``.
        plan: of any rank.
        stored: ``state_dict`` key -> tensor.
    """
    places = {key: place for file in files for key, place in file.places.items()}
    found: dict[str, list[Run | Gathered]] = {file.name: [Run(0, len(file.header))] for file in files}
    for tensor, span in plan.direct:
        found[places[tensor.key].file].append(Run(*_bytes(places[tensor.key], span.at, span.numel)))
    for source, wanted in plan.gathered.items():
        for tensor, span in wanted:
            found[places[tensor.key].file] += _gathered(places[tensor.key], source, stored[source], tensor, span)
    for number, tensors in enumerate(plan.unmapped):
        for tensor in tensors:
            place = places[tensor.key]
            found[place.file].append(Gathered(*_bytes(place, 0, tensor.numel), tensor, None, Group(number)))
    return {file.name: list(_joined(file, found[file.name])) for file in files}


def cut(steps: Sequence[Step], most: int) -> Iterator[Step]:
    """The same steps, with runs of at most ``most`` bytes."""
    for step in steps:
        if isinstance(step, Run):
            for start in range(step.start, step.stop, most):
                yield Run(start, min(start + most, step.stop))
        else:
            yield step


def _bytes(place: Place, at: int, numel: int) -> tuple[int, int]:
    start = place.offset + at * place.dtype.itemsize
    return start, start + numel * place.dtype.itemsize


def _gathered(place: Place, source: str, whole: torch.Tensor, tensor: FileTensor, span: Span) -> Iterator[Gathered]:
    """The steps of a span, one for each block of rows that it touches."""
    assert isinstance(whole, DTensor), "a plain tensor is on every rank as a whole"
    row_elements = max(whole.shape[1:].numel(), 1)
    for first, last in row_blocks(whole, [span]):
        start, stop, at = span.offset, span.offset + span.numel, span.at
        if span.contiguous:
            start, stop = max(start, first * row_elements), min(stop, last * row_elements)
            at += start - span.offset
        elif not first <= start // row_elements < last:  # it is inside of one row, or there is one block only
            continue
        if start < stop:
            yield Gathered(*_bytes(place, at, stop - start), tensor, span, Rows(source, first, last))


def _joined(file: WeightFile, steps: Sequence[Step]) -> Iterator[Step]:
    """The steps in the order of the file, runs that follow on each other as one."""
    run: Run | None = None
    end = 0
    for step in sorted((step for step in steps if step.start < step.stop), key=lambda step: step.start):
        assert step.start == end, f"{file.name}: nothing fills the bytes from {end} to {step.start}"
        end = step.stop
        if isinstance(step, Run):
            run = Run(step.start if run is None else run.start, step.stop)
            continue
        if run is not None:
            yield run
        run = None
        yield step
    if run is not None:
        yield run
    assert end == file.total_bytes, f"{file.name}: nothing fills the bytes from {end} to {file.total_bytes}"
