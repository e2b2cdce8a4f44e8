"""Trace which tensor elements a conversion of transformers uses, on the meta device.

`Origins`, a dispatch mode, notes where the bytes of the results would come from. Chunks, slices,
transposes, stacks and concatenations become `Span`s, which a rank can write or read for its own
shard alone. Other results get no spans.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...utils.compat.torch_private import (
    TorchDispatchMode,
    storage_id,
    tree_leaves,
    writes_in_place,
)
from ...utils.errors import CheckpointMismatchError
from ..memory.tensors import row_major
from .safetensors_layout import TensorSpec


@dataclass(frozen=True)
class Span:
    """A strided block of one model tensor that fills consecutive elements of a file tensor."""

    # ``state_dict`` key of the model tensor
    source: str
    # first element, in the flattened model tensor
    offset: int
    # shape of the block, in the order of the file
    shape: tuple[int, ...]
    # its strides, in elements of the flattened model tensor
    stride: tuple[int, ...]
    # the first element that it fills, in the flattened file tensor
    at: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the block is one run of elements of the model tensor, in order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                # an empty block is contiguous
                return self.numel == 0
            expected *= size
        return True

    @property
    def last(self) -> int:
        """The highest element of the block in the flattened model tensor."""
        return self.offset + _distance(self.shape, self.stride)


def _distance(shape: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element of a strided block to its last."""
    distance = 0
    for size, step in zip(shape, stride, strict=True):
        distance += (size - 1) * step
    return distance


@dataclass(frozen=True)
class FileTensor(TensorSpec):
    """A tensor of a Hugging Face file and the model tensors that it is made of."""

    # the ``state_dict`` keys of these model tensors
    sources: tuple[str, ...]
    # the blocks that fill it, in file order. None: only `element_map` knows
    spans: tuple[Span, ...] | None


def sources_of(tensors: Iterable[FileTensor]) -> list[str]:
    """The keys of all model tensors that these file tensors are made of, sorted."""
    return sorted({source for tensor in tensors for source in tensor.sources})


class Origins(TorchDispatchMode):
    """Dispatch mode that records which of ``probes`` the results of a conversion are made of, on
    the meta device.

    Views keep their storage and are not recorded. For a copy (`clone`) or a join (`cat`, `stack`)
    the tensors that fill the new storage are recorded, and for other operators only the names of
    their inputs.
    """

    def __init__(self, probes: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.roots: dict[int, str] = {}
        self.pieces: dict[int, list[_JoinedPart]] = {}
        self.inputs: dict[int, set[str]] = {}
        # a storage's address must not be used again
        self.alive: list[Any] = []
        for key, probe in probes.items():
            self.add(key, probe)

    def add(self, key: str, probe: Tensor) -> None:
        """Register ``probe`` as the tensor named ``key``."""
        self.roots[storage_id(probe)] = key
        self.inputs[storage_id(probe)] = {key}
        self.alive.append(probe)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        for made in tree_leaves(result):
            if not isinstance(made, Tensor):
                continue
            if writes_in_place(func) or storage_id(made) not in self.inputs:
                self._note(func, made, used, args)
        return result

    def _note(
        self,
        func: Any,
        made: Tensor,
        used: list[Tensor],
        args: Any,
    ) -> None:
        storage = storage_id(made)
        self.alive += [made, *used]
        names = set()
        for tensor in (made, *used):
            names |= self.inputs.get(storage_id(tensor), set())
        self.inputs[storage] = names

        # After a write in place the elements are no longer the probe's own.
        self.roots.pop(storage, None)
        self.pieces.pop(storage, None)

        # Only copies and joins are traced. A join has its dimension as the second argument.
        aten = torch.ops.aten
        traced = (aten.cat.default, aten.stack.default, aten.clone.default)
        if func not in traced or not made.is_contiguous():
            return
        dim = 0
        if func is not aten.clone.default and len(args) > 1:
            dim = args[1] % made.dim()
        if len(used) * math.prod(made.shape[:dim]) > _MOST_PIECES:
            return
        if func is aten.stack.default:
            used = [tensor.unsqueeze(dim) for tensor in used]
        self.pieces[storage] = _joined(used, dim)

    def describe(self, key: str, tensor: Tensor) -> FileTensor:
        """The file tensor ``key`` for the result ``tensor`` of the conversion. Its sources are
        names of probes.
        """
        storage = storage_id(tensor)
        sources = tuple(sorted(self.inputs.get(storage, ())))
        if not sources:
            raise CheckpointMismatchError(
                f"transformers makes {key} of no tensor that it was given; it cannot be stored"
            )
        spans = self._spans(tensor, 0)
        return FileTensor(
            key,
            tuple(tensor.shape),
            tensor.dtype,
            block=storage,
            block_bytes=tensor.untyped_storage().nbytes(),
            sources=sources,
            spans=None if spans is None else tuple(spans),
        )

    def _spans(self, view: Tensor, at: int) -> list[Span] | None:
        storage = storage_id(view)
        source = self.roots.get(storage)
        if source is not None:
            offset = int(view.storage_offset())
            return [Span(source, offset, tuple(view.shape), tuple(view.stride()), at)]

        # The parts of a join may be joins themselves.
        if storage not in self.pieces:
            return None
        parts = _shown(view, self.pieces[storage])
        if parts is None:
            return None
        spans = []
        for part in parts:
            inner = self._spans(part, at)
            if inner is None:
                return None
            spans += inner
            at += part.numel()
        return spans


# A tensor joined of more pieces is not traced: `element_map` finds its elements.
_MOST_PIECES = 4096


class _JoinedPart(NamedTuple):
    # first element of the joined storage that it fills
    start: int
    # its elements, in row-major order
    tensor: Tensor

    @property
    def stop(self) -> int:
        """One after the last element."""
        return self.start + self.tensor.numel()


def _joined(parts: Sequence[Tensor], dim: int) -> list[_JoinedPart]:
    """The pieces that fill the storage of ``torch.cat(parts, dim)``."""
    pieces = []
    start = 0
    for row in product(*map(range, parts[0].shape[:dim])):
        for part in parts:
            piece = _JoinedPart(start, part[row])
            pieces.append(piece)
            start = piece.stop
    return pieces


def _shown(
    view: Tensor,
    pieces: Sequence[_JoinedPart],
    by_rows: bool = True,
) -> list[Tensor] | None:
    """The views of ``pieces`` that make up a view of their joined storage, in row-major order. None
    if no views do.
    """
    if view.numel() == 0:
        return []
    start = int(view.storage_offset())
    stop = start + _distance(view.shape, view.stride()) + 1
    first = bisect_right(pieces, start, key=attrgetter("start")) - 1

    # The view is inside of one piece.
    piece = pieces[first]
    if stop <= piece.stop:
        inside = _view_through_copy(view, start - piece.start, piece.tensor)
        return None if inside is None else [inside]

    # Each row may be inside of one piece.
    parts = []
    if not view.is_contiguous():
        if not by_rows or len(view) > _MOST_PIECES:
            return None
        for row in view:
            shown = _shown(row, pieces, by_rows=False)
            if shown is None:
                return None
            parts += shown
        return parts

    # The view is a run of whole pieces, except the first and the last.
    for piece in pieces[first:]:
        if piece.start >= stop:
            break
        low = max(start, piece.start) - piece.start
        high = min(stop, piece.stop) - piece.start
        if high - low == piece.tensor.numel():
            parts.append(piece.tensor)
        elif piece.tensor.is_contiguous():
            parts.append(piece.tensor.reshape(-1)[low:high])
        else:
            return None
    return parts


def _view_through_copy(
    view: Tensor,
    rest: int,
    copied: Tensor,
) -> Tensor | None:
    """The view of ``copied`` like ``view``, which is from element ``rest`` of its contiguous copy,
    if there is one.
    """
    offset = int(copied.storage_offset())
    if copied.is_contiguous():
        return copied.as_strided(view.shape, view.stride(), offset + rest)

    # For a dimension with this stride in the copy: its stride in the original, and its size from
    # the first element of the view on.
    stride_of = {}
    room = {}
    for dim, step in enumerate(row_major(copied.shape)):
        if copied.shape[dim] > 1:
            index, rest = divmod(rest, step)
            offset += index * copied.stride(dim)
            stride_of[step] = copied.stride(dim)
            room[step] = copied.shape[dim] - index

    # Each dimension of the view must go along one of them, and none twice.
    walked = set()
    for size, step in zip(view.shape, view.stride(), strict=True):
        if size > 1:
            if step in walked or size > room.get(step, 0):
                return None
            walked.add(step)
    strides = [stride_of.get(step, 0) for step in view.stride()]
    return copied.as_strided(view.shape, strides, offset)
