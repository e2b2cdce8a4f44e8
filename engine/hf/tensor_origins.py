"""Trace which tensor elements a conversion of transformers uses, on the meta device.

`Origins`, a dispatch mode, notes where the bytes of the results would come from. Chunks, slices,
transposes, stacks and concatenations become `Span`s, which a rank can write or read for its own
shard alone. Other results get no spans.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ...utils.compat.torch_private import (
    TorchDispatchMode,
    storage_id,
    tree_leaves,
    writes_in_place,
)
from ...utils.errors import CheckpointMismatchError
from .safetensors_layout import TensorSpec


@dataclass(frozen=True)
class Span:
    """A strided block of one model tensor that fills consecutive elements of a file tensor."""

    source: str  # ``state_dict`` key of the model tensor
    offset: int  # first element, in the flattened model tensor
    shape: tuple[int, ...]  # shape of the block, in the order of the file
    stride: tuple[int, ...]  # its strides, in elements of the flattened model tensor
    at: int  # the first element that it fills, in the flattened file tensor

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
                return self.numel == 0  # an empty block is contiguous
            expected *= size
        return True

    @property
    def last(self) -> int:
        """The highest element of the block in the flattened model tensor."""
        return self.offset + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
        )


@dataclass(frozen=True)
class FileTensor(TensorSpec):
    """A tensor of a Hugging Face file and the model tensors that it is made of."""

    sources: tuple[str, ...]  # the ``state_dict`` keys of these model tensors
    spans: (
        tuple[Span, ...] | None
    )  # the blocks that fill it, in file order. None: only `element_map` knows


class Origins(TorchDispatchMode):
    """Dispatch mode that records which of ``probes`` the results of a conversion are made of, on
    the meta device.

    Views keep their storage and are not recorded. For a copy (`clone`) or a join (`cat`, `stack`)
    the tensors that fill the new storage are recorded, and for other operators only the names of
    their inputs.
    """

    def __init__(self, probes: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.roots: dict[int, str] = {}
        self.pieces: dict[int, list[_JoinedPart]] = {}
        self.inputs: dict[int, set[str]] = {}
        self.alive: list[Any] = []  # a storage's address must not be used again
        for key, probe in probes.items():
            self.add(key, probe)

    def add(self, key: str, probe: torch.Tensor) -> None:
        """Register ``probe`` as the tensor named ``key``."""
        self.roots[storage_id(probe)] = key
        self.inputs[storage_id(probe)] = {key}
        self.alive.append(probe)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (
                writes_in_place(func) or storage_id(tensor) not in self.inputs
            ):
                self._note(func, tensor, used, args)
        return result

    def _note(self, func: Any, made: torch.Tensor, used: list[torch.Tensor], args: Any) -> None:
        storage, aten = storage_id(made), torch.ops.aten
        self.alive += [made, *used]
        known = (self.inputs.get(storage_id(tensor), set()) for tensor in (made, *used))
        self.inputs[storage] = set().union(*known)
        self.roots.pop(storage, None)  # written in place: no longer the probe's own elements
        self.pieces.pop(storage, None)
        dim = args[1] % made.dim() if len(args) > 1 and isinstance(args[1], int) else 0
        if func is aten.stack.default:
            used = [tensor.unsqueeze(dim) for tensor in used]
        elif func is aten.clone.default:
            dim = 0
        joined = (
            func in (aten.cat.default, aten.stack.default, aten.clone.default)
            and made.is_contiguous()
        )
        if joined and len(used) * math.prod(made.shape[:dim]) <= _MOST_PIECES:
            self.pieces[storage] = _joined(used, dim)

    def describe(self, key: str, tensor: torch.Tensor) -> FileTensor:
        """The file tensor ``key`` for the result ``tensor`` of the conversion. Its sources are
        names of probes.
        """
        storage = storage_id(tensor)
        sources = tuple(sorted(self.inputs.get(storage, ())))
        if not sources:
            raise CheckpointMismatchError(
                f"transformers makes {key} of no tensor that it was given; it cannot be stored"
            )
        spans, nbytes = self._spans(tensor, 0), tensor.untyped_storage().nbytes()
        found = None if spans is None else tuple(spans)
        return FileTensor(key, tuple(tensor.shape), tensor.dtype, storage, nbytes, sources, found)

    def _spans(self, view: torch.Tensor, at: int) -> list[Span] | None:
        storage = storage_id(view)
        if storage in self.roots:
            shape, stride = tuple(view.shape), tuple(view.stride())
            return [Span(self.roots[storage], int(view.storage_offset()), shape, stride, at)]
        parts = _shown(view, self.pieces[storage]) if storage in self.pieces else None
        if parts is None:
            return None
        spans: list[Span] = []
        for part in parts:
            inner = self._spans(part, at)
            if inner is None:
                return None
            spans, at = spans + inner, at + part.numel()
        return spans


_MOST_PIECES = (
    4096  # a tensor joined of more pieces is not traced: `element_map` finds its elements
)


class _JoinedPart(NamedTuple):
    start: int  # first element of the joined storage that it fills
    tensor: torch.Tensor  # its elements, in row-major order

    @property
    def stop(self) -> int:
        """One after the last element."""
        return self.start + self.tensor.numel()


def _joined(parts: Sequence[torch.Tensor], dim: int) -> list[_JoinedPart]:
    """The pieces that fill the storage of ``torch.cat(parts, dim)``."""
    pieces, start = [], 0
    for row in product(*map(range, parts[0].shape[:dim])):
        for part in parts:
            pieces.append(_JoinedPart(start, part[row]))
            start = pieces[-1].stop
    return pieces


def _shown(
    view: torch.Tensor, pieces: Sequence[_JoinedPart], by_rows: bool = True
) -> list[torch.Tensor] | None:
    """The views of ``pieces`` that make up a view of their joined storage, in row-major order. None
    if no views do.
    """
    if view.numel() == 0:
        return []
    start = int(view.storage_offset())
    stop = (
        start
        + 1
        + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    )
    first = bisect_right(pieces, start, key=attrgetter("start")) - 1
    if stop <= pieces[first].stop:
        inside = _view_through_copy(view, start - pieces[first].start, pieces[first].tensor)
        return None if inside is None else [inside]
    parts: list[torch.Tensor] = []
    if not view.is_contiguous():
        for row in view if by_rows and len(view) <= _MOST_PIECES else ():
            if (shown := _shown(row, pieces, by_rows=False)) is None:
                return None
            parts += shown
        return parts or None
    for piece in takewhile(lambda piece: piece.start < stop, pieces[first:]):
        low, high = max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
        if high - low < piece.tensor.numel() and not piece.tensor.is_contiguous():
            return None
        parts.append(
            piece.tensor
            if high - low == piece.tensor.numel()
            else piece.tensor.reshape(-1)[low:high]
        )
    return parts


def _view_through_copy(view: torch.Tensor, rest: int, copied: torch.Tensor) -> torch.Tensor | None:
    """The view of ``copied`` like ``view``, which is from element ``rest`` of its contiguous copy,
    if there is one.
    """
    offset = int(copied.storage_offset())
    if copied.is_contiguous():
        return copied.as_strided(view.shape, view.stride(), offset + rest)
    stride_of, room = (
        {},
        {},
    )  # by the stride that a dim has in the copy: its stride in the original, its rest length
    for dim, step in enumerate(torch.empty(copied.shape, device="meta").stride()):
        if copied.shape[dim] > 1:
            index, rest = divmod(rest, step)
            offset += index * copied.stride(dim)
            stride_of[step], room[step] = copied.stride(dim), copied.shape[dim] - index
    walked = [
        (step, size) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1
    ]
    if len(dict(walked)) < len(walked) or any(size > room.get(step, 0) for step, size in walked):
        return None
    return copied.as_strided(view.shape, [stride_of.get(step, 0) for step in view.stride()], offset)
