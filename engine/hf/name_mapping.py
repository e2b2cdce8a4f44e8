"""Which elements of which model tensors make up each tensor of a Hugging Face file.

File keys are not always ``state_dict`` keys: tied weights are stored once, and transformers 5 renames, fuses and
splits weights of some architectures (Qwen3-MoE keeps one ``experts.gate_up_proj``, its files one ``gate_proj`` and
``up_proj`` per expert). This module asks transformers itself: `revert_weight_conversion`, the function behind
``save_pretrained``, is run on tensors of the meta device, and a dispatch mode notes where the bytes of its results
would have come from. Chunks, slices, transposes, stacks and concatenations become `Span`s, each of which a rank can
write or read for its own shard alone. A conversion that cannot be traced becomes a tensor without spans; `element_map`
then finds its elements by running the same conversion on element numbers, and refuses anything that is not a pure
rearrangement.

Cost: no tensor memory; about 50 microseconds a file tensor.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ...utils.compat.torch_private import (
    TorchDispatchMode,
    storage_id,
    tree_leaves,
    writes_in_place,
)
from ...utils.compat.transformers_private import has_adapters, keys_not_saved, revert_weight_conversion
from ...utils.errors import CheckpointMismatchError
from ..training.unsharded import unsharded_class, unsharded_view
from .safetensors_layout import TensorSpec


@dataclass(frozen=True)
class Span:
    """A strided block of one model tensor that fills consecutive elements of a file tensor.

    Attributes:
        source: ``state_dict`` key of the model tensor.
        offset: first element, in the flattened model tensor.
        shape: shape of the block, in the order of the file.
        stride: its strides, in elements of the flattened model tensor.
        at: the first element it fills, in the flattened file tensor.
    """

    source: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the block is one run of elements of the model tensor, in order."""
        return _without_holes(zip(reversed(self.shape), reversed(self.stride), strict=True))

    @property
    def last(self) -> int:
        """The block's highest element in the flattened model tensor."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def within_rows(self, row_elements: int) -> bool:
        """Whether ranks that hold whole rows of so many elements can each read or write their part of the block."""
        return self.contiguous or self.offset // row_elements == self.last // row_elements


def _without_holes(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether a view with these ``(size, stride)``, smallest stride first, covers a range, each element once."""
    dims, expected = [(size, stride) for size, stride in dims if size != 1], 1
    for size, stride in dims:
        if stride != expected:
            return not all(size for size, _ in dims)  # nothing has no holes
        expected *= size
    return True


@dataclass(frozen=True)
class FileTensor(TensorSpec):
    """A tensor of a Hugging Face file, and what it is made of.

    Attributes:
        sources: the ``state_dict`` keys it is made of.
        spans: the blocks of them that fill it, in the order of the file; None when only `element_map` can tell.
    """

    sources: tuple[str, ...]
    spans: tuple[Span, ...] | None


def stored_tensors(model: PreTrainedModel, *, on_meta: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that a file stores of a model, by ``state_dict`` key, and the tied keys it leaves out.

    Args:
        model: any transformers model.
        on_meta: whether it may be without memory.

    Returns:
        The (sharded) tensors, aliases of the live ones, and a mapping of every left-out key to the key that is stored.

    Raises:
        CheckpointMismatchError: tensors share memory without being declared as tied, adapters or quantized weights are
            present, or an entry of the ``state_dict`` is not a tensor with memory.
    """
    if getattr(model, "hf_quantizer", None) is not None or has_adapters(model):
        raise CheckpointMismatchError(
            f"{unsharded_class(model).__name__} is quantized or carries adapters; expected plain weights"
        )
    state = model.state_dict()
    if strange := next((key for key, value in state.items() if not isinstance(value, torch.Tensor)), None):
        raise CheckpointMismatchError(f"state_dict entry {strange} is a {type(state[strange]).__name__}, not a tensor")
    if not on_meta and (empty := next((key for key, value in state.items() if value.is_meta), None)):
        raise CheckpointMismatchError(f"{empty} is on the meta device; give it memory with to_empty() first")
    for key in keys_not_saved(model):
        state.pop(key, None)
    owners: dict[int, list[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for key, value in named:
            if key in state:
                owners.setdefault(id(value), []).append(key)
    left_out: dict[str, str] = {}
    for keys in owners.values():
        # As in transformers: declared targets go, by name, as long as one key remains.
        targets = [key for key in sorted(keys) if key in model.all_tied_weights_keys][: len(keys) - 1]
        kept = [key for key in keys if key not in targets]
        if len(kept) > 1:
            raise CheckpointMismatchError(
                f"{kept} share memory, but the model declares only {sorted(model.all_tied_weights_keys)} as tied"
            )
        left_out |= dict.fromkeys(targets, kept[0])
    return {key: value for key, value in state.items() if key not in left_out}, left_out


def file_tensors(
    model: PreTrainedModel, stored: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] | None = None
) -> list[FileTensor]:
    """The tensors that ``save_pretrained`` of the unsharded model would write, in its order.

    Args:
        model: any transformers model, sharded or not.
        stored: its tensors, from `stored_tensors`.
        dtypes: what each of ``stored`` is stored as (`file_dtypes`); None keeps each as it is.
    """
    probes = {
        key: torch.empty(value.shape, dtype=value.dtype if dtypes is None else dtypes[key], device="meta")
        for key, value in stored.items()
    }
    origins = Origins(probes)
    with origins, torch.no_grad():
        results = revert_weight_conversion(unsharded_view(model), dict(probes))
    return [origins.describe(key, tensor) for key, tensor in results.items()]


class Origins(TorchDispatchMode):
    """Traces which elements the storages that a conversion makes on the meta device are copied from.

    Views keep their storage and are not recorded. Of a copy (`clone`) or a join (`cat`, `stack`) the tensors that fill
    the new storage are recorded; of any other operator that makes a storage, only its inputs.

    Args:
        probes: name -> the tensor on the meta device that a conversion is given for it; more with `add`.
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
        """Take ``probe`` for the tensor named ``key``."""
        self.roots[storage_id(probe)] = key
        self.inputs[storage_id(probe)] = {key}
        self.alive.append(probe)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (writes_in_place(func) or storage_id(tensor) not in self.inputs):
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
        joined = func in (aten.cat.default, aten.stack.default, aten.clone.default) and made.is_contiguous()
        if joined and len(used) * math.prod(made.shape[:dim]) <= _MOST_PIECES:
            self.pieces[storage] = _joined(used, dim)

    def describe(self, key: str, tensor: torch.Tensor) -> FileTensor:
        """The file tensor ``key`` that is the result ``tensor`` of the conversion; its sources are names of probes."""
        storage = storage_id(tensor)
        sources = tuple(sorted(self.inputs.get(storage, ())))
        if not sources:
            raise CheckpointMismatchError(
                f"transformers makes {key} of no tensor that it was given; it cannot be stored"
            )
        found = self._spans(tensor, 0)
        spans = None if found is None else tuple(found)
        nbytes = tensor.untyped_storage().nbytes()
        return FileTensor(key, tuple(tensor.shape), tensor.dtype, storage, nbytes, sources, spans)

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


_MOST_PIECES = 4096
"""Most pieces that a tensor may be joined of; beyond that only `element_map` finds its elements."""


class _JoinedPart(NamedTuple):
    """One input of a join.

    Attributes:
        start: first element of the joined storage that it fills.
        tensor: its elements, in row-major order.
    """

    start: int
    tensor: torch.Tensor

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


def _shown(view: torch.Tensor, pieces: Sequence[_JoinedPart], by_rows: bool = True) -> list[torch.Tensor] | None:
    """The views of ``pieces`` that a view of their joined storage consists of, in row-major order; None if there are
    none such."""
    if view.numel() == 0:
        return []
    start = int(view.storage_offset())
    stop = start + 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
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
        parts.append(piece.tensor if high - low == piece.tensor.numel() else piece.tensor.reshape(-1)[low:high])
    return parts


def _view_through_copy(view: torch.Tensor, rest: int, copied: torch.Tensor) -> torch.Tensor | None:
    """The view of ``copied`` with the elements of ``view``, a view from element ``rest`` on of a contiguous copy of it;
    None if the dims do not correspond."""
    offset = int(copied.storage_offset())
    if copied.is_contiguous():
        return copied.as_strided(view.shape, view.stride(), offset + rest)
    stride_of, room = {}, {}  # by the stride that a dim has in the copy: its stride in the original, its rest length
    for dim, step in enumerate(torch.empty(copied.shape, device="meta").stride()):
        if copied.shape[dim] > 1:
            index, rest = divmod(rest, step)
            offset += index * copied.stride(dim)
            stride_of[step], room[step] = copied.stride(dim), copied.shape[dim] - index
    walked = [(step, size) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1]
    if len(dict(walked)) < len(walked) or any(size > room.get(step, 0) for step, size in walked):
        return None
    return copied.as_strided(view.shape, [stride_of.get(step, 0) for step in view.stride()], offset)


def element_map(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], tensors: Sequence[FileTensor]
) -> dict[str, torch.Tensor]:
    """Find the elements of file tensors by converting element numbers; 8 bytes an element.

    Args:
        model: the model.
        shapes: ``state_dict`` key -> shape of every source of ``tensors``, and nothing else. The sources, flattened and
            concatenated in this order, are what the numbers count.
        tensors: file tensors that, together, are made of exactly these sources.

    Returns:
        File key -> int64 ``[numel]``, for each element of the flattened file tensor its number.

    Raises:
        CheckpointMismatchError: the conversion does more than rearrange elements, or makes other tensors.
    """
    numbers, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + shape.numel()
        numbers[key] = torch.arange(start, end, dtype=torch.int64).view(shape)
    with torch.no_grad():
        results = revert_weight_conversion(unsharded_view(model), numbers)
    found = {tensor.key: tuple(results[tensor.key].shape) for tensor in tensors if tensor.key in results}
    seen = torch.zeros(end, dtype=torch.bool)
    maps = {key: results[key].reshape(-1) for key in found}
    for indices in maps.values():
        seen[indices[(indices >= 0) & (indices < end)].long()] = True
    rearranged = all(indices.dtype == torch.int64 for indices in maps.values())
    pure = rearranged and bool(seen.all()) and sum(indices.numel() for indices in maps.values()) == end
    if not pure or found != {tensor.key: tensor.shape for tensor in tensors}:
        raise CheckpointMismatchError(
            f"transformers converts {sorted(shapes)} to {sorted(results)} by more than rearranging elements; "
            "such weights can be neither exported nor imported in shards"
        )
    return maps
