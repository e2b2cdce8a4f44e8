"""Which elements of a folder's tensors fill each tensor of a model: transformers' own loading, on the meta device.

`from_pretrained` renames, prefixes, splits, fuses and ignores tensors by rules that differ from release to release and
from architecture to architecture. None of them is repeated here: the function behind `from_pretrained` is run on a twin
of the model without memory and on stand-ins for the tensors of the folder, and `Origins` notes what it makes of which.
Its result is inverted into `FileTensor`s, whose spans say where each run of elements of a file goes, so that a rank can
read what belongs into its own shard. Conversions that cannot be traced are found by loading element numbers
(`loaded_elements`), and refused unless they are pure rearrangements.

Cost: no tensor memory; about 0.2 ms a file tensor, as in `from_pretrained`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...utils.compat.torch_private import buffers_of, parameters_of, replace_members
from ...utils.compat.transformers_private import conversions_of, drop_tolerated_keys, load_state
from ...utils.errors import CheckpointMismatchError
from ..training.unsharded import unsharded_view
from .name_mapping import FileTensor, Origins, Span

_MOST_RUNS = 4096
"""Most runs of file elements that a tensor may be made of; beyond that `loaded_elements` finds its elements."""


@dataclass(frozen=True)
class LoadPlan:
    """What `from_pretrained` would do with the tensors of a folder.

    Attributes:
        filled: ``state_dict`` key -> what fills it: a `FileTensor` of the model tensor, whose sources are tensors of
            the folder and whose spans are blocks of them.
        missing: ``state_dict`` keys for which there is nothing.
        optional: those of them that transformers does not miss.
        unexpected: tensors of the folder, under the names they would have in the model, that it would report.
        unused: tensors of the folder that would be loaded over others.
        conversions: the conversions that applied; ``save_pretrained`` reverts these.
    """

    filled: dict[str, FileTensor]
    missing: set[str]
    optional: set[str]
    unexpected: set[str]
    unused: set[str]
    conversions: list[Any]


def plan_loading(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> LoadPlan:
    """Plan what `from_pretrained` would do with tensors of these names and shapes.

    Args:
        model: any transformers model, sharded or not; it is not changed.
        shapes: name in the folder -> shape.

    Raises:
        CheckpointMismatchError: a tensor has another shape than the model's, or cannot be converted.
    """
    origins, taken = Origins({}), set()

    def probe(key: str, dtype: torch.dtype | None) -> torch.Tensor:
        taken.add(key)
        stand_in = torch.empty(tuple(shapes[key]), dtype=dtype, device="meta")
        origins.add(key, stand_in)
        return stand_in

    twin = _twin(model)
    with origins:
        info = _load_twin(twin, shapes, probe)
    state, missing = twin.state_dict(), set(info.missing_keys)
    drop_tolerated_keys(twin, info)
    filled = {key: origins.describe(key, tensor) for key, tensor in state.items() if key not in missing}
    used = {source for tensor in filled.values() for source in tensor.sources}
    return LoadPlan(
        filled=filled,
        missing=missing,
        optional=missing - set(info.missing_keys),
        unexpected=set(info.unexpected_keys),
        unused=taken - used,
        conversions=conversions_of(twin),
    )


def loaded_elements(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]], keys: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Find the elements of model tensors by loading element numbers; 8 bytes an element.

    Args:
        model: the model.
        shapes: name in the folder -> shape of all tensors that fill ``keys``. Flattened and concatenated in this order,
            they are what the numbers count.
        keys: ``state_dict`` keys.

    Returns:
        Key -> int64, of the shape of the model tensor, for each of its elements the number.

    Raises:
        CheckpointMismatchError: the conversion does more than rearrange elements.
    """
    numbers, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + torch.Size(shape).numel()
        numbers[key] = torch.arange(start, end, dtype=torch.int64).view(tuple(shape))
    twin = _twin(model)
    _load_twin(twin, shapes, lambda key, _: numbers[key])
    state = twin.state_dict()
    for key in keys:
        elements = state[key]
        known = not elements.is_meta and elements.dtype == torch.int64
        if not known or (elements.numel() and not 0 <= int(elements.min()) <= int(elements.max()) < end):
            raise CheckpointMismatchError(
                f"transformers converts {sorted(shapes)} to {key} by more than rearranging elements; such weights "
                "can be neither exported nor imported in shards"
            )
    return {key: state[key] for key in keys}


class _StandIn:
    """Stands for a tensor of a file: transformers indexes it, then moves and casts it."""

    def __init__(self, key: str, materialize: Callable[[str, torch.dtype | None], torch.Tensor]) -> None:
        self._key, self._materialize = key, materialize

    def __getitem__(self, _: object) -> "_StandIn":
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._materialize(self._key, dtype)


@torch.no_grad()
def _load_twin(
    twin: PreTrainedModel,
    shapes: Mapping[str, Sequence[int]],
    materialize: Callable[[str, torch.dtype | None], torch.Tensor],
) -> Any:
    """Load stand-ins into a twin as `from_pretrained` loads a folder.

    Returns:
        transformers' account of what was missing or unexpected.
    """
    with _no_progress_bar():
        info = load_state(twin, {key: _StandIn(key, materialize) for key in shapes})
    for key, found, wanted in sorted(info.mismatched_keys):
        raise CheckpointMismatchError(f"{key} has shape {list(found)}, the model needs {list(wanted)}")
    for key, error in info.conversion_errors.items():
        reason, name = error.strip().splitlines()[-1], type(twin).__name__
        raise CheckpointMismatchError(f"transformers cannot make {key} of {name} from the tensors it found: {reason}")
    return info


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules with parameters and buffers on the meta device, whole and none of them tied."""
    twin = unsharded_view(model)
    for module in twin.modules():
        parameters = {
            name: param if param is None else nn.Parameter(_memoryless(param), requires_grad=param.is_floating_point())
            for name, param in parameters_of(module).items()
        }
        buffers = {
            name: buffer if buffer is None else _memoryless(buffer) for name, buffer in buffers_of(module).items()
        }
        replace_members(module, parameters=parameters, buffers=buffers)
    return twin


def _memoryless(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def invert_fills(filled: Mapping[str, FileTensor], shapes: Mapping[str, Sequence[int]]) -> list[FileTensor]:
    """Invert `LoadPlan.filled`: for each tensor of the folder, the blocks of model tensors that it fills.

    Returns:
        A `FileTensor` for each that fills something, in the order of ``shapes``. A model tensor that is filled by one
        without spans is filled by none with spans.
    """
    spans: dict[str, list[Span]] = {}
    fed: dict[str, dict[str, torch.dtype]] = {}  # source -> the model tensors that it fills
    unmapped = set()
    for key, tensor in filled.items():
        for source in tensor.sources:
            fed.setdefault(source, {})[key] = tensor.dtype
        runs = None if tensor.spans is None else _runs_of_files(tensor.spans, key)
        if runs is None:
            unmapped.add(key)
        for source, run in runs or ():
            spans.setdefault(source, []).append(run)
    blind: set[str] = set()
    while more := {source for source, keys in fed.items() if not unmapped.isdisjoint(keys)} - blind:
        blind |= more
        unmapped |= {key for source in more for key in fed[source]}
    return [
        FileTensor(
            source,
            tuple(shapes[source]),
            next(iter(fed[source].values())),
            source,
            0,
            tuple(sorted(fed[source])),
            None if source in blind else tuple(sorted(spans.get(source, ()), key=attrgetter("at"))),
        )
        for source in shapes
        if source in fed
    ]


def _runs_of_files(spans: Sequence[Span], key: str) -> list[tuple[str, Span]] | None:
    """Strided blocks of file tensors that fill consecutive elements of ``key``, as runs of elements of the file that
    fill strided blocks of ``key``; None if these are too many."""
    runs: list[tuple[str, Span]] = []
    for span in spans:
        steps = torch.empty(span.shape, device="meta").stride()
        dims = [dim for dim in zip(span.stride, span.shape, steps, strict=True) if dim[1] != 1]
        dims.sort(key=itemgetter(0), reverse=True)
        inner = len(dims)
        expected = 1
        while inner and dims[inner - 1][0] == expected:
            inner -= 1
            expected *= dims[inner][1]
        outer, (_, shape, stride) = dims[:inner], zip(*dims[inner:], strict=True) if dims[inner:] else ((), (), ())
        if math.prod(size for _, size, _ in outer) + len(runs) > _MOST_RUNS:
            return None
        for index in product(*(range(size) for _, size, _ in outer)):
            at = span.offset + sum(i * step for i, (step, _, _) in zip(index, outer, strict=True))
            offset = span.at + sum(i * step for i, (_, _, step) in zip(index, outer, strict=True))
            runs.append((span.source, Span(key, offset, shape, stride, at)))
    return runs
