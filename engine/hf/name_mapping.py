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
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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
from ..memory.tensors import named_tensors
from ..training.unsharded import unsharded_class, unsharded_view
from .tensor_origins import FileTensor, Origins, Span, sources_of

_MOST_RUNS = 4096
"""A tensor made of more runs of file elements is not split into spans: `loaded_elements` finds its
elements.
"""


def stored_tensors(
    model: PreTrainedModel, *, on_meta: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The live (sharded) tensors that files store, by ``state_dict`` key, and tied key left out ->
    key stored instead.

    CheckpointMismatchError if it is no model of transformers, if tensors share memory but are not
    declared as tied, if there are adapters or quantized weights, or if an entry is no tensor with
    memory (``on_meta`` allows tensors without).
    """
    if not isinstance(model, PreTrainedModel):
        raise CheckpointMismatchError(
            f"a {type(model).__name__} is no model of transformers; pass the PreTrainedModel or "
            "PeftModel that is inside of it (`module` of DistributedDataParallel, `_orig_mod` "
            "of torch.compile)"
        )
    if getattr(model, "hf_quantizer", None) is not None or has_adapters(model):
        raise CheckpointMismatchError(
            f"{unsharded_class(model).__name__} is quantized or carries adapters; expected plain "
            "weights"
        )

    # All entries must be tensors with memory.
    state = model.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointMismatchError(
                f"state_dict entry {key} is a {type(value).__name__}, not a tensor"
            )
    for key, value in state.items():
        if value.is_meta and not on_meta:
            raise CheckpointMismatchError(
                f"{key} is on the meta device; give it memory with to_empty() first"
            )
    for key in keys_not_saved(model):
        state.pop(key, None)

    # All names of each tensor, as the state dict has them.
    owners = {}
    for key, value in named_tensors(unsharded_view(model)):
        if key in state:
            owners.setdefault(id(value), []).append(key)

    # The rule of transformers: leave out declared targets in the order of names, as long as one key
    # remains.
    left_out = {}
    for keys in owners.values():
        declared = [key for key in sorted(keys) if key in model.all_tied_weights_keys]
        targets = declared[: len(keys) - 1]
        kept = [key for key in keys if key not in targets]
        if len(kept) > 1:
            raise CheckpointMismatchError(
                f"{kept} share memory, but the model declares only "
                f"{sorted(model.all_tied_weights_keys)} as tied"
            )
        left_out |= dict.fromkeys(targets, kept[0])
    stored = {key: value for key, value in state.items() if key not in left_out}
    return stored, left_out


def file_tensors(
    model: PreTrainedModel,
    stored: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[FileTensor]:
    """The tensors that ``save_pretrained`` of the unsharded model would write, in its order.

    ``stored`` comes from `stored_tensors`, and ``dtypes`` from `file_dtypes`. Without dtypes each
    tensor keeps its own.
    """
    probes = {}
    for key, value in stored.items():
        dtype = value.dtype
        if dtypes is not None:
            dtype = dtypes[key]
        probes[key] = torch.empty(value.shape, dtype=dtype, device="meta")

    origins = Origins(probes)
    with origins, torch.no_grad():
        results = revert_weight_conversion(unsharded_view(model), dict(probes))
    return [origins.describe(key, tensor) for key, tensor in results.items()]


def element_map(
    model: PreTrainedModel,
    shapes: Mapping[str, torch.Size],
    tensors: Sequence[FileTensor],
) -> dict[str, Tensor]:
    """Find the elements of file tensors by converting element numbers. Takes 8 bytes per element.

    ``shapes`` (``state_dict`` key -> shape) has exactly the sources of ``tensors``. The int64
    numbers count their elements, flattened and concatenated in this order. CheckpointMismatchError
    if the conversion does more than rearrange elements.
    """
    numbers, end = _element_numbers(shapes)
    with torch.no_grad():
        results = revert_weight_conversion(unsharded_view(model), numbers)
    problem = _more_than_rearranged(shapes, str(sorted(results)))

    maps = {}
    n_elements = 0
    seen = torch.zeros(end, dtype=torch.bool)
    for tensor in tensors:
        made = results.get(tensor.key)
        if made is None or tuple(made.shape) != tensor.shape or made.dtype != torch.int64:
            raise problem
        indices = made.reshape(-1)
        inside = (indices >= 0) & (indices < end)
        seen[indices[inside]] = True
        n_elements += indices.numel()
        maps[tensor.key] = indices

    # The count is right and all were seen, so every element has one place.
    if n_elements != end or not seen.all():
        raise problem
    return maps


def _element_numbers(shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, Tensor], int]:
    numbers = {}
    end = 0
    for key, shape in shapes.items():
        start = end
        end += math.prod(shape)
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

    # ``state_dict`` key -> what fills it: sources and spans are of the folder
    filled: dict[str, FileTensor]
    # ``state_dict`` keys that nothing fills
    missing: set[str]
    # missing keys that transformers tolerates
    optional: set[str]
    # tensors that transformers would report, under their names in the model
    unexpected: set[str]
    # tensors of the folder that would be loaded over others
    unused: set[str]
    # the conversions that applied, as ``save_pretrained`` reverts them
    conversions: list[Any]


def plan_loading(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> LoadPlan:
    """Plan what `from_pretrained` would do with tensors of these names and shapes (name in the
    folder -> shape).

    Raises CheckpointMismatchError if a tensor has another shape than the model's, or cannot be
    converted. The model, sharded or not, is not changed.
    """
    origins = Origins({})
    taken = set()

    def probe(key: str, dtype: torch.dtype | None) -> Tensor:
        taken.add(key)
        stand_in = torch.empty(tuple(shapes[key]), dtype=dtype, device="meta")
        origins.add(key, stand_in)
        return stand_in

    # transformers takes stand-ins, which are traced, for the tensors of the folder.
    twin = _twin(model)
    with origins:
        info = _load_twin(twin, shapes, probe)
    missing = set(info.missing_keys)
    filled = {
        key: origins.describe(key, tensor)
        for key, tensor in twin.state_dict().items()
        if key not in missing
    }

    # This takes the keys that transformers tolerates out of the report.
    drop_tolerated_keys(twin, info)
    return LoadPlan(
        filled,
        missing,
        optional=missing - set(info.missing_keys),
        unexpected=set(info.unexpected_keys),
        unused=taken.difference(sources_of(filled.values())),
        conversions=conversions_of(twin),
    )


def loaded_elements(
    model: PreTrainedModel,
    shapes: Mapping[str, Sequence[int]],
    keys: Sequence[str],
) -> dict[str, Tensor]:
    """Find the elements of the model tensors ``keys`` by loading element numbers. Takes 8 bytes per
    element.

    ``shapes`` (name in the folder -> shape) has all tensors that fill ``keys``. The result has the
    shapes of the model tensors, and the numbers count as in `element_map`.
    """
    numbers, end = _element_numbers(shapes)

    # Tensors that are not loaded stay on meta.
    twin = _twin(model)
    _load_twin(twin, shapes, lambda key, _: numbers[key])
    state = twin.state_dict()
    for key in keys:
        elements = state[key]
        rearranged = elements.dtype == torch.int64 and not elements.is_meta
        if rearranged and elements.numel():
            rearranged = int(elements.min()) >= 0 and int(elements.max()) < end
        if not rearranged:
            raise _more_than_rearranged(shapes, key)
    return {key: state[key] for key in keys}


_Materialize = Callable[[str, torch.dtype | None], Tensor]
"""Name in the folder, and the dtype that transformers wants -> the tensor."""


class _StandIn:
    """Replaces a tensor of a file: transformers indexes it, then moves and casts it."""

    def __init__(self, key: str, materialize: _Materialize) -> None:
        self._key = key
        self._materialize = materialize

    def __getitem__(self, _: object) -> "_StandIn":
        return self

    def to(
        self,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return self._materialize(self._key, dtype)


@torch.no_grad()
def _load_twin(
    twin: PreTrainedModel,
    shapes: Mapping[str, Sequence[int]],
    materialize: _Materialize,
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
        reason = error.strip().splitlines()[-1]
        raise CheckpointMismatchError(
            f"transformers cannot make {key} of {type(twin).__name__} from the tensors it found: "
            f"{reason}"
        )
    return info


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules with parameters and buffers on the meta device, whole and not tied."""
    twin = unsharded_view(model)
    for module in twin.modules():
        parameters = dict(parameters_of(module))
        for name, param in parameters.items():
            if param is not None:
                trained = param.is_floating_point()
                parameters[name] = nn.Parameter(_memoryless(param), requires_grad=trained)

        buffers = dict(buffers_of(module))
        for name, found in buffers.items():
            if found is not None:
                buffers[name] = _memoryless(found)
        replace_members(module, parameters=parameters, buffers=buffers)
    return twin


def _memoryless(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def invert_fills(
    filled: Mapping[str, FileTensor], shapes: Mapping[str, Sequence[int]]
) -> list[FileTensor]:
    """Invert `LoadPlan.filled`: a `FileTensor` for each tensor of ``shapes`` that fills something,
    in this order.

    Its spans are the blocks of model tensors that it fills. If one without spans fills a model
    tensor, none with spans fills the same.
    """
    spans = {}
    # source -> the model tensors that it fills, with their dtypes
    fed = {}
    unmapped = set()

    for key, tensor in filled.items():
        for source in tensor.sources:
            fed.setdefault(source, {})[key] = tensor.dtype
        runs = None
        if tensor.spans is not None:
            runs = _runs_of_files(tensor.spans, key)
        if runs is None:
            unmapped.add(key)
            continue
        for source, run in runs:
            spans.setdefault(source, []).append(run)

    # A model tensor without spans makes its sources blind, and these all that they fill.
    blind = set()
    n_known = -1
    while n_known < len(unmapped):
        n_known = len(unmapped)
        for source, keys in fed.items():
            if not unmapped.isdisjoint(keys):
                blind.add(source)
                unmapped.update(keys)

    # The file tensors in the order of ``shapes``.
    inverted = []
    for source, shape in shapes.items():
        if source not in fed:
            continue
        found = None
        if source not in blind:
            found = tuple(sorted(spans.get(source, ()), key=attrgetter("at")))
        inverted.append(
            FileTensor(
                source,
                tuple(shape),
                dtype=next(iter(fed[source].values())),
                block=source,
                block_bytes=0,
                sources=tuple(sorted(fed[source])),
                spans=found,
            )
        )
    return inverted


class _Dim(NamedTuple):
    """A dimension of a block of a file."""

    # from an element to the next, in the file
    stride: int
    size: int
    # from an element to the next, in the run of the model tensor
    step: int


def _runs_of_files(spans: Sequence[Span], key: str) -> list[tuple[str, Span]] | None:
    """Turn blocks of files that fill runs of ``key`` into runs of files that fill blocks of
    ``key``. None: too many.
    """
    runs = []
    for span in spans:
        steps = torch.empty(span.shape, device="meta").stride()
        dims = list(map(_Dim, span.stride, span.shape, steps))
        dims = [dim for dim in dims if dim.size != 1]
        dims.sort(key=attrgetter("stride"), reverse=True)

        # The dimensions that are side by side in the file make a run.
        inner = []
        expected = 1
        while dims and dims[-1].stride == expected:
            expected *= dims[-1].size
            inner.insert(0, dims.pop())
        shape = tuple(dim.size for dim in inner)
        stride = tuple(dim.step for dim in inner)

        # There is a run for each element of the other dimensions.
        if math.prod(dim.size for dim in dims) + len(runs) > _MOST_RUNS:
            return None
        for index in product(*(range(dim.size) for dim in dims)):
            at = span.offset
            offset = span.at
            for number, dim in zip(index, dims, strict=True):
                at += number * dim.stride
                offset += number * dim.step
            runs.append((span.source, Span(key, offset, shape, stride, at)))
    return runs
