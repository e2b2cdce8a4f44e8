"""Names in a model and names in its files: `file_tensors` for a save, `plan_loading` for a load.

Tied weights are stored once, prefixes may be absent, and transformers renames, fuses and splits
weights (Qwen3-MoE keeps one ``experts.gate_up_proj``, its files one ``gate_proj`` and ``up_proj``
per expert). The rules differ from release to release, so none is repeated here: transformers'
functions behind ``save_pretrained`` and `from_pretrained` run on the meta device, and `Origins`
traces them. A conversion that cannot be traced runs again on element numbers (`element_map`,
`loaded_elements`), and is refused if it does more than rearrange elements.

Cost: no tensor memory, 50 microseconds (save) or 200 (load) per file tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...utils.compat.torch_private import buffers_of, parameters_of, replace_members
from ...utils.compat.transformers_private import (
    conversions_of,
    drop_tolerated_keys,
    has_adapters,
    keys_not_saved,
    load_state,
    revert_weight_conversion,
)
from ...utils.errors import CheckpointMismatchError
from ..training.unsharded import unsharded_class, unsharded_view
from .tensor_origins import FileTensor, Origins, Span

_MOST_RUNS = 4096
"""A tensor made of more runs of file elements is not split into spans: `loaded_elements` finds its
elements.
"""


def stored_tensors(
    model: PreTrainedModel, *, on_meta: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The live (sharded) tensors that files store, by ``state_dict`` key, and tied key left out ->
    key stored instead.

    CheckpointMismatchError if tensors share memory but are not declared as tied, if there are
    adapters or quantized weights, or if an entry is no tensor with memory (``on_meta`` allows
    tensors without).
    """
    if getattr(model, "hf_quantizer", None) is not None or has_adapters(model):
        raise CheckpointMismatchError(
            f"{unsharded_class(model).__name__} is quantized or carries adapters; expected plain "
            "weights"
        )
    state = model.state_dict()
    if strange := next(
        (key for key, value in state.items() if not isinstance(value, torch.Tensor)), None
    ):
        raise CheckpointMismatchError(
            f"state_dict entry {strange} is a {type(state[strange]).__name__}, not a tensor"
        )
    if not on_meta and (
        empty := next((key for key, value in state.items() if value.is_meta), None)
    ):
        raise CheckpointMismatchError(
            f"{empty} is on the meta device; give it memory with to_empty() first"
        )
    for key in keys_not_saved(model):
        state.pop(key, None)
    owners: dict[int, list[str]] = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for key, value in named:
            if key in state:
                owners.setdefault(id(value), []).append(key)
    left_out: dict[str, str] = {}
    for keys in owners.values():
        # The rule of transformers: leave out declared targets in the order of names, as long as one
        # key remains.
        targets = [key for key in sorted(keys) if key in model.all_tied_weights_keys][
            : len(keys) - 1
        ]
        kept = [key for key in keys if key not in targets]
        if len(kept) > 1:
            raise CheckpointMismatchError(
                f"{kept} share memory, but the model declares only "
                f"{sorted(model.all_tied_weights_keys)} as tied"
            )
        left_out |= dict.fromkeys(targets, kept[0])
    return {key: value for key, value in state.items() if key not in left_out}, left_out


def file_tensors(
    model: PreTrainedModel,
    stored: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[FileTensor]:
    """The tensors that ``save_pretrained`` of the unsharded model would write, in its order.

    ``stored`` comes from `stored_tensors`, and ``dtypes`` from `file_dtypes`. Without dtypes each
    tensor keeps its own.
    """
    probes = {
        key: torch.empty(
            value.shape, dtype=value.dtype if dtypes is None else dtypes[key], device="meta"
        )
        for key, value in stored.items()
    }
    origins = Origins(probes)
    with origins, torch.no_grad():
        results = revert_weight_conversion(unsharded_view(model), dict(probes))
    return [origins.describe(key, tensor) for key, tensor in results.items()]


def element_map(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], tensors: Sequence[FileTensor]
) -> dict[str, torch.Tensor]:
    """Find the elements of file tensors by converting element numbers. Takes 8 bytes per element.

    ``shapes`` (``state_dict`` key -> shape) has exactly the sources of ``tensors``. The int64
    numbers count their elements, flattened and concatenated in this order. CheckpointMismatchError
    if the conversion does more than rearrange elements.
    """
    numbers, end = _element_numbers(shapes)
    with torch.no_grad():
        results = revert_weight_conversion(unsharded_view(model), numbers)
    found = {
        tensor.key: tuple(results[tensor.key].shape) for tensor in tensors if tensor.key in results
    }
    seen = torch.zeros(end, dtype=torch.bool)
    maps = {key: results[key].reshape(-1) for key in found}
    for indices in maps.values():
        seen[indices[(indices >= 0) & (indices < end)].long()] = True
    rearranged = all(indices.dtype == torch.int64 for indices in maps.values())
    pure = (
        rearranged and bool(seen.all()) and sum(indices.numel() for indices in maps.values()) == end
    )
    if not pure or found != {tensor.key: tensor.shape for tensor in tensors}:
        raise _more_than_rearranged(shapes, str(sorted(results)))
    return maps


def _element_numbers(shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, torch.Tensor], int]:
    numbers, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + math.prod(shape)
        numbers[key] = torch.arange(start, end, dtype=torch.int64).view(tuple(shape))
    return numbers, end


def _more_than_rearranged(
    shapes: Mapping[str, Sequence[int]], made: str
) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"transformers converts {sorted(shapes)} to {made} by more than rearranging elements; "
        "such weights can be neither exported nor imported in shards"
    )


@dataclass(frozen=True)
class LoadPlan:
    """Result of `from_pretrained` for the tensors of a folder."""

    filled: dict[
        str, FileTensor
    ]  # ``state_dict`` key -> what fills it: sources and spans are of the folder
    missing: set[str]  # ``state_dict`` keys that nothing fills
    optional: set[str]  # missing keys that transformers tolerates
    unexpected: set[str]  # tensors that transformers would report, under their names in the model
    unused: set[str]  # tensors of the folder that would be loaded over others
    conversions: list[Any]  # the conversions that applied, as ``save_pretrained`` reverts them


def plan_loading(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> LoadPlan:
    """Plan what `from_pretrained` would do with tensors of these names and shapes (name in the
    folder -> shape).

    Raises CheckpointMismatchError if a tensor has another shape than the model's, or cannot be
    converted. The model, sharded or not, is not changed.
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
    filled = {
        key: origins.describe(key, tensor) for key, tensor in state.items() if key not in missing
    }
    unused = taken - {source for tensor in filled.values() for source in tensor.sources}
    optional, unexpected = missing - set(info.missing_keys), set(info.unexpected_keys)
    return LoadPlan(filled, missing, optional, unexpected, unused, conversions_of(twin))


def loaded_elements(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]], keys: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Find the elements of the model tensors ``keys`` by loading element numbers. Takes 8 bytes per
    element.

    ``shapes`` (name in the folder -> shape) has all tensors that fill ``keys``. The result has the
    shapes of the model tensors, and the numbers count as in `element_map`.
    """
    numbers, end = _element_numbers(shapes)
    twin = _twin(model)
    _load_twin(twin, shapes, lambda key, _: numbers[key])
    state = twin.state_dict()
    for key in keys:
        elements = state[key]
        known = not elements.is_meta and elements.dtype == torch.int64
        if not known or (
            elements.numel() and not 0 <= int(elements.min()) <= int(elements.max()) < end
        ):
            raise _more_than_rearranged(shapes, key)
    return {key: state[key] for key in keys}


class _StandIn:
    """Replaces a tensor of a file: transformers indexes it, then moves and casts it."""

    def __init__(
        self, key: str, materialize: Callable[[str, torch.dtype | None], torch.Tensor]
    ) -> None:
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
    """Load stand-ins into a twin as `from_pretrained` loads a folder, and return the report of
    transformers.
    """
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        info = load_state(twin, {key: _StandIn(key, materialize) for key in shapes})
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    for key, found, wanted in sorted(info.mismatched_keys):
        raise CheckpointMismatchError(
            f"{key} has shape {list(found)}, the model needs {list(wanted)}"
        )
    for key, error in info.conversion_errors.items():
        reason, name = error.strip().splitlines()[-1], type(twin).__name__
        raise CheckpointMismatchError(
            f"transformers cannot make {key} of {name} from the tensors it found: {reason}"
        )
    return info


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules with parameters and buffers on the meta device, whole and not tied."""
    twin = unsharded_view(model)
    for module in twin.modules():
        parameters = {
            name: param
            if param is None
            else nn.Parameter(_memoryless(param), requires_grad=param.is_floating_point())
            for name, param in parameters_of(module).items()
        }
        buffers = {
            name: None if found is None else _memoryless(found)
            for name, found in buffers_of(module).items()
        }
        replace_members(module, parameters=parameters, buffers=buffers)
    return twin


def _memoryless(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def invert_fills(
    filled: Mapping[str, FileTensor], shapes: Mapping[str, Sequence[int]]
) -> list[FileTensor]:
    """Invert `LoadPlan.filled`: a `FileTensor` for each tensor of ``shapes`` that fills something,
    in this order.

    Its spans are the blocks of model tensors that it fills. If one without spans fills a model
    tensor, none with spans fills the same.
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
    inverted = []
    for source in (source for source in shapes if source in fed):
        found = (
            None if source in blind else tuple(sorted(spans.get(source, ()), key=attrgetter("at")))
        )
        shape, dtype = tuple(shapes[source]), next(iter(fed[source].values()))
        inverted.append(
            FileTensor(source, shape, dtype, source, 0, tuple(sorted(fed[source])), found)
        )
    return inverted


def _runs_of_files(spans: Sequence[Span], key: str) -> list[tuple[str, Span]] | None:
    """Turn blocks of files that fill runs of ``key`` into runs of files that fill blocks of
    ``key``. None: too many.
    """
    runs: list[tuple[str, Span]] = []
    for span in spans:
        steps = torch.empty(span.shape, device="meta").stride()
        dims = [dim for dim in zip(span.stride, span.shape, steps, strict=True) if dim[1] != 1]
        dims.sort(key=itemgetter(0), reverse=True)
        inner, expected = len(dims), 1
        while inner and dims[inner - 1][0] == expected:
            inner -= 1
            expected *= dims[inner][1]
        outer, (_, shape, stride) = (
            dims[:inner],
            zip(*dims[inner:], strict=True) if dims[inner:] else ((), (), ()),
        )
        if math.prod(size for _, size, _ in outer) + len(runs) > _MOST_RUNS:
            return None
        for index in product(*(range(size) for _, size, _ in outer)):
            at = span.offset + sum(i * step for i, (step, _, _) in zip(index, outer, strict=True))
            offset = span.at + sum(i * step for i, (_, _, step) in zip(index, outer, strict=True))
            runs.append((span.source, Span(key, offset, shape, stride, at)))
    return runs
