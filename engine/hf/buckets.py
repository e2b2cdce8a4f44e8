"""Gather the file tensors of a sharded model on rank 0, one bucket at a time, to send them to
inference servers.

All ranks cut the file tensors into the same buckets. Of each bucket a rank casts its own rows and
sends them to rank 0, which receives them at their place. Nothing is gathered on another rank, and
nothing is written.

Memory: one bucket on rank 0, which the caller provides, and the rows of one bucket on the other
ranks. In addition, on rank 0, `_STRIDED_BYTES` if tensor parallelism cuts columns, because their
elements are not side by side in a file. Tensors that transformers converts by more than slices are
gathered whole on all ranks, as in `save_hf`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    control_group,
    gather_objects,
    get_group_ranks,
    get_rank,
)
from ...utils.heartbeat import beat
from ..api import HFExportOptions
from ..lora.adapters import plain_view
from ..memory.tensors import bytes_of
from .name_mapping import element_map
from .save import ExportPlan, plan_export
from .shard_ranges import MergedWeights, own_share, whole_tensor
from .tensor_origins import FileTensor, sources_of

_STRIDED_BYTES = 64 << 20
"""Memory for received rows that go to several places."""


@dataclass(frozen=True)
class Bucket:
    """Whole file tensors whose bytes are side by side. Wide dtypes come first, so that every tensor
    is aligned.
    """

    number: int
    tensors: tuple[FileTensor, ...]

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Tensor name -> its first byte."""
        found = {}
        end = 0
        for tensor in self.tensors:
            found[tensor.key] = end
            end += tensor.nbytes
        return found

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class _Rows(NamedTuple):
    """Rows of one rank in a bucket, in bytes."""

    offset: int  # of the first row
    count: int
    length: int  # of a row
    # from the beginning of a row to the next
    pitch: int

    @property
    def nbytes(self) -> int:
        return self.count * self.length

    def of(self, data: Tensor) -> Tensor:
        """The rows in the bytes of a bucket, ``[count, length]``."""
        shape = (self.count, self.length)
        return data[self.offset :].as_strided(shape, (self.pitch, 1))


class _Pending(NamedTuple):
    """Rows on their way to rank 0."""

    received: Any  # the work of gloo
    rows: _Rows
    # their memory, unless it is their place in the bucket
    apart: Tensor | None


def cut_buckets(tensors: Sequence[FileTensor], limit_bytes: int) -> list[Bucket]:
    """Cut ``tensors`` into buckets of at most ``limit_bytes``, in order. A larger tensor fills a
    bucket alone.
    """
    cuts = []
    size = 0
    for tensor in tensors:
        if not cuts or size + tensor.nbytes > limit_bytes:
            cuts.append([])
            size = 0
        cuts[-1].append(tensor)
        size += tensor.nbytes

    buckets = []
    for number, cut in enumerate(cuts):
        cut.sort(key=lambda tensor: -tensor.dtype.itemsize)
        buckets.append(Bucket(number, tuple(cut)))
    return buckets


class WeightGatherer:
    """The weights of a sharded model, merged with its adapters, in buckets. Every rank of ``group``
    creates one.

        gatherer = WeightGatherer(model, options, limit_bytes=1 << 30, group=group)
        for bucket in gatherer.buckets:
            gatherer.gather(bucket, memory[: bucket.nbytes] if rank == 0 else None)

    Args:
        model: see `save_hf`.
        options: only its dtype matters.
        limit_bytes: largest bucket, unless a single tensor is larger.
        group: control group.

    Attributes:
        buckets: all file tensors, in the order of the files. The same on all ranks.
        on_gpu: whether weights of this rank are on a GPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: HFExportOptions,
        limit_bytes: int,
        group: RankGroup,
    ) -> None:
        with all_ranks_succeed("preparing to send weights", group):
            self._plan = plan_export(model, options, get_group_ranks(group))
        self._merged = MergedWeights(model, group)
        self._model = plain_view(model)
        self._group = group

        # the last tensors without spans, and on rank 0 their values, which several buckets may need
        self._together: Sequence[FileTensor] = ()
        self._converted: Mapping[str, Tensor] = {}

        self.buckets = cut_buckets(_in_file_order(self._plan), limit_bytes)
        self.on_gpu = any(part.data.is_cuda for part in self._plan.transfers.parts.values())

    @torch.no_grad()
    def gather(self, bucket: Bucket, target: Tensor | None) -> None:
        """Fill ``target``, ``[bucket.nbytes]`` uint8 on the CPU of rank 0. None on other ranks. All
        ranks call it.

        Raises on all ranks if a rank cannot prepare its rows. A broken connection raises the error
        of gloo.
        """
        with all_ranks_succeed(f"preparing {bucket.tensors[0].key} to be sent", self._group):
            own = list(self._own_rows(bucket, target))

        # Tensors without spans are gathered whole, and rank 0 puts them into the bucket.
        for together in self._plan.transfers.unmapped:
            for tensor in bucket.tensors:
                if tensor not in together:
                    continue
                self._convert(together)
                if target is not None:
                    place = target[bucket.offsets[tensor.key] :][: tensor.nbytes]
                    place.copy_(bytes_of(self._converted[tensor.key]))

        # All others are sent row by row, as many as each rank announces.
        by_rank = gather_objects([rows for rows, _ in own], self._group)
        if target is None:
            self._send([bytes_of(values) for _, values in own])
        else:
            self._receive(by_rank, target)
        beat()

    def _own_rows(
        self,
        bucket: Bucket,
        target: Tensor | None,
    ) -> Iterator[tuple[_Rows, Tensor]]:
        """The rows that this rank sends. Rank 0 puts its rows into ``target`` instead."""
        parts = self._plan.transfers.parts
        for tensor in bucket.tensors:
            first = bucket.offsets[tensor.key]
            size = tensor.dtype.itemsize
            for span in tensor.spans or ():
                part = self._merged.part(span.source, parts[span.source])
                for at, values, pitch in own_share(span, part):
                    # Rows without elements between them are one row.
                    count = len(values)
                    length = values.numel() // count
                    if length == pitch:
                        count = 1
                        length = values.numel()
                    rows = _Rows(first + at * size, count, length * size, pitch * size)

                    if target is None:
                        yield rows, _host_copy(values, tensor.dtype)
                        continue

                    # Rank 0 has no messages for itself.
                    if count == 1:
                        place = target[rows.offset : rows.offset + rows.length]
                        place = place.view(tensor.dtype)
                        place.view(values.shape).copy_(values)
                    else:
                        shape = (count, length)
                        place = target[first : first + tensor.nbytes]
                        place = place.view(tensor.dtype)[at:]
                        place = place.as_strided(shape, (pitch, 1))
                        place.copy_(values.reshape(shape))

    def _convert(self, together: Sequence[FileTensor]) -> None:
        """Gather the sources of tensors without spans and convert them. A collective."""
        if self._together is together:
            return
        stored = self._plan.stored
        sources = sources_of(together)
        shapes = {source: stored[source].shape for source in sources}
        gathered = {source: whole_tensor(stored[source], self._group) for source in sources}

        # All ranks convert, because an error on one of them must end the others too.
        with all_ranks_succeed(f"converting {together[0].key}", self._group):
            wholes = [self._merged.whole(source, tensor) for source, tensor in gathered.items()]
            flat = torch.cat([whole.reshape(-1) for whole in wholes])
            elements = element_map(self._model, shapes, together)
            converted = {}
            for tensor in together:
                converted[tensor.key] = flat[elements[tensor.key]].to(tensor.dtype)
            self._together = together
            self._converted = converted if get_rank(self._group) == 0 else {}

    def _send(self, messages: Sequence[Tensor]) -> None:
        group = control_group(self._group)
        # All are begun before the first wait, in the order in which rank 0 expects them.
        begun = [dist.isend(data, group=group, group_dst=0) for data in messages]
        for sent in begun:
            assert sent is not None
            sent.wait()

    def _receive(
        self,
        by_rank: Sequence[Sequence[_Rows]],
        target: Tensor,
    ) -> None:
        group = control_group(self._group)
        pending = []
        held = 0  # bytes of rows apart

        def finish() -> None:
            for received, rows, apart in pending:
                received.wait()
                if apart is not None:
                    rows.of(target).copy_(apart.view(rows.count, rows.length))
            pending.clear()

        for rank, theirs in enumerate(by_rank):
            for rows in theirs:
                # One row is received at its place. Others are spread when all of them are here.
                apart = None
                place = target[rows.offset : rows.offset + rows.length]
                if rows.count > 1:
                    held += rows.nbytes
                    if held > _STRIDED_BYTES:
                        finish()
                        held = rows.nbytes
                    apart = torch.empty(rows.nbytes, dtype=torch.uint8)
                    place = apart
                received = dist.irecv(place, group=group, group_src=rank)
                pending.append(_Pending(received, rows, apart))
        finish()


def _in_file_order(plan: ExportPlan) -> list[FileTensor]:
    """All file tensors. Tensors that are gathered whole come last."""
    by_key = {tensor.key: tensor for tensor in plan.transfers.tensors}
    ordered = [by_key[key] for key in plan.layout.slots]
    traced = [tensor for tensor in ordered if tensor.spans is not None]
    return [*traced, *chain.from_iterable(plan.transfers.unmapped)]


def _host_copy(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` in this dtype, side by side in host memory. Not a copy if they are like this
    already.
    """
    if values.device.type == "cpu":
        return values.to(dtype).contiguous()
    copied = torch.empty(
        values.shape,
        dtype=dtype,
        device="cpu",
        pin_memory=values.is_cuda,
    )
    return copied.copy_(values)
