"""Load a Hugging Face folder into a sharded model: every rank reads the bytes of its own rows, and no others.

Everything that can be wrong with the folder is found on all ranks before a parameter changes: from its headers, its
index and the sizes of its files, and by comparing the copies of tied weights where there are several. Then weights are
read straight into the parameters (`hf_io`). Only a file that cannot be read any more, or has become shorter since, can
stop this half-way; the error says on every rank that the model is now half loaded.

Cost: one read of the weights, spread over the ranks; beside the model, a chunk of memory. Weights that no rank can
address alone are read by all of them: shards that are not rows in blocks of rows, transposes and conversions that are
not slices a tensor (and what it is converted with) at a time.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ..utils.remote import FETCH_FIRST, require_local
from .dcp_staging import changing_weights
from .hf_io import WeightReader
from .hf_keys import FileTensor, Span, element_map, leave_no_gap, stored_tensors, unsharded_class
from .hf_layout import Place
from .hf_shards import Plan, fill_block, local_of_whole, overlap, plan_tensors, row_blocks, whole_part

# Buffers that old releases of transformers saved and that every model computes for itself.
_OBSOLETE_KEYS = (r"rotary_emb\.inv_freq",)


def load_hf(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> list[str]:
    """Load the weights of a Hugging Face folder; every rank of ``group`` calls this.

    Files of one or many parts and of any floating-point dtype do; values are cast to the dtype of the parameter. A tied
    weight may be stored under any of its names. The base-model prefix (``model.``, ``transformer.``) may be absent from
    the file or from the model, as in transformers.

    Args:
        model: any transformers model, sharded by `fully_shard` or not, with its memory allocated.
        path: a local folder with ``model.safetensors`` or ``model.safetensors.index.json``.
        group: control group of CPU tensors (gloo); None takes the default group.
        allow_missing: patterns (``fnmatch``) of file keys that need not be there, e.g. ``"score.*"`` of a new critic.
        allow_unexpected: patterns of file keys that may be there and are left alone, e.g. ``"lm_head.*"``.

    Returns:
        ``state_dict`` keys that were missing, with permission: their values are as they were.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``).
        CheckpointNotFoundError: there is no such folder, or no safetensors weights in it.
        CheckpointCorruptError: a file is missing, truncated or not safetensors.
        CheckpointMismatchError: a tensor is missing, unexpected, of another shape or kind of dtype, or given twice with
            different values for a weight that the model ties.
        PeerError: only other ranks found a problem.
        OSError: a file cannot be read.

        Nothing has changed, unless the message says that the model is now half loaded: then a file broke (OSError) or
        became shorter (CheckpointCorruptError) while it was read, and the model must be loaded again before it is used.
    """
    folder = require_local(path, "loading", FETCH_FIRST)
    rank, world_size = get_rank(group), get_world_size(group)
    with WeightReader(folder) as reader:
        with all_ranks_succeed(f"checking {folder}", group):
            places = reader.layout()
            stored, tied = stored_tensors(model)
            state = stored | {alias: stored[key] for alias, key in tied.items()}
            plan = plan_tensors(model, state, rank, world_size)
            found = _match(model, folder, plan.tensors, places, allow_unexpected)
            chosen, copies, missing = _choose(folder, plan.tensors, found, tied, allow_missing)
            _check_plan(model, folder, plan, state, chosen, tied)
            _compare_copies(reader, folder, plan.tensors, chosen, copies, rank, world_size)
        loading = all_ranks_succeed(f"reading {folder}", group)
        with loading, changing_weights(model), _half_loaded(folder), torch.no_grad():
            _read_direct(reader, plan, chosen)
            _read_blocks(reader, plan, chosen, state, tied)
            for tensors in plan.opaque:
                if tensors[0].key in chosen:
                    _read_opaque(reader, model, tensors, chosen, state)
    return sorted(missing & stored.keys())


@contextmanager
def _half_loaded(folder: Path) -> Iterator[None]:
    """Say of errors in the block what they leave behind."""
    problem = f"{folder} could not be read to its end; the model is now half loaded and must be loaded again"
    try:
        yield
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{problem}: {error}") from error
    except OSError as error:
        raise OSError(error.errno, f"{problem}: {error.strerror or error}") from error


def _match(
    model: PreTrainedModel,
    folder: Path,
    tensors: Sequence[FileTensor],
    places: Mapping[str, Place],
    allow_unexpected: Sequence[str],
) -> dict[str, Place]:
    """Find each wanted file tensor in the folder, as far as it is there; refuse wrong shapes, dtypes and strangers."""
    prefix = f"{model.base_model_prefix}."
    found, used = {}, set()
    for tensor in tensors:
        other = tensor.key.removeprefix(prefix) if tensor.key.startswith(prefix) else prefix + tensor.key
        name = next((name for name in (tensor.key, other) if name in places), None)
        if name is None:
            continue
        place = found[tensor.key] = places[name]
        used.add(name)
        if place.shape != tensor.shape:
            raise CheckpointMismatchError(
                f"{folder}: {name} has shape {list(place.shape)}, the model needs {list(tensor.shape)}"
            )
        if place.dtype != tensor.dtype and not (place.dtype.is_floating_point and tensor.dtype.is_floating_point):
            raise CheckpointMismatchError(f"{folder}: {name} has dtype {place.dtype}, the model needs {tensor.dtype}")
    ignored = (*_OBSOLETE_KEYS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    strange = [
        name
        for name in sorted(places.keys() - used)
        if not any(fnmatchcase(name, pattern) for pattern in allow_unexpected)
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if strange:
        raise CheckpointMismatchError(
            f"{folder}: unexpected tensor {strange[0]} ({len(strange)} in all) has no place in "
            f"{unsharded_class(model).__name__}; allow_unexpected={list(allow_unexpected)}"
        )
    return found


def _choose(
    folder: Path,
    tensors: Sequence[FileTensor],
    found: Mapping[str, Place],
    tied: Mapping[str, str],
    allow_missing: Sequence[str],
) -> tuple[dict[str, Place], dict[str, list[Place]], set[str]]:
    """Decide which file tensor fills what when a tied weight has several names, and refuse what is missing.

    Returns:
        File key -> place of what is to be loaded; file key -> places of further copies of it; and the ``state_dict``
        keys for which the folder has nothing.
    """
    chosen: dict[str, Place] = {}
    copies: dict[str, list[Place]] = {}
    first: dict[Any, str] = {}
    for tensor in sorted(tensors, key=lambda tensor: any(source in tied for source in tensor.sources)):
        if tensor.key in found:
            original = first.setdefault(_identity(tensor, tied), tensor.key)
            if original == tensor.key:
                chosen[tensor.key] = found[tensor.key]
            else:
                copies.setdefault(original, []).append(found[tensor.key])
    absent = [tensor for tensor in tensors if tensor.key not in found and _identity(tensor, tied) not in first]
    filled = {source for tensor in tensors if tensor.key in chosen for source in tensor.sources}
    for tensor in absent:
        permitted = any(fnmatchcase(tensor.key, pattern) for pattern in allow_missing)
        if not permitted or not filled.isdisjoint(tensor.sources):
            raise CheckpointMismatchError(
                f"{folder}: tensor {tensor.key} of shape {list(tensor.shape)} is missing ({len(absent)} in all; "
                f"{len(found)} were found); allow_missing={list(allow_missing)}"
            )
    return chosen, copies, {source for tensor in absent for source in tensor.sources}


def _identity(tensor: FileTensor, tied: Mapping[str, str]) -> Any:
    """What a file tensor fills: equal for two names of one tied weight."""
    if tensor.spans is None:
        return tensor.key
    return tuple(replace(span, source=tied.get(span.source, span.source)) for span in tensor.spans)


def _check_plan(
    model: PreTrainedModel,
    folder: Path,
    plan: Plan,
    state: Mapping[str, torch.Tensor],
    chosen: Mapping[str, Place],
    tied: Mapping[str, str],
) -> None:
    """Refuse what could only be found out while parameters change, or not even then."""
    filled: dict[str, list[Span]] = {}
    for tensor in plan.tensors:
        for span in (tensor.spans or ()) if tensor.key in chosen else ():
            filled.setdefault(tied.get(span.source, span.source), []).append(span)
    for source, spans in filled.items():
        if not leave_no_gap(spans, state[source].numel()):
            raise CheckpointMismatchError(
                f"{folder}: files of {unsharded_class(model).__name__} do not hold all elements of {source}; "
                "it cannot be loaded from them"
            )
    for tensor, span in plan.direct:
        if tensor.key in chosen and not plan.parts[span.source].data.is_contiguous():
            raise CheckpointMismatchError(f"{span.source} is not contiguous in memory; make it so before loading")
    for tensors in plan.opaque:
        present = [tensor.key for tensor in tensors if tensor.key in chosen]
        if not present:
            continue
        if absent := next((tensor.key for tensor in tensors if tensor.key not in chosen), None):
            raise CheckpointMismatchError(
                f"{folder}: tensor {absent} is missing; it can only be loaded together with {present[0]}"
            )
        element_map(model, {source: state[source].shape for source in _sources(tensors)}, tensors)


def _compare_copies(
    reader: WeightReader,
    folder: Path,
    tensors: Sequence[FileTensor],
    chosen: Mapping[str, Place],
    copies: Mapping[str, Sequence[Place]],
    rank: int,
    world_size: int,
) -> None:
    """Refuse a folder whose copies of a tied weight differ; every rank compares an equal share of them."""
    for tensor in tensors:
        for copy in copies.get(tensor.key, ()):
            first, last = (tensor.numel * number // world_size for number in (rank, rank + 1))
            if not reader.same(chosen[tensor.key], copy, first, last, tensor.dtype):
                raise CheckpointMismatchError(
                    f"{folder}: the model ties {tensor.key}, but the folder has another tensor for one of its uses; "
                    "build the model with tie_word_embeddings=False"
                )


def _read_direct(reader: WeightReader, plan: Plan, chosen: Mapping[str, Place]) -> None:
    """Read this rank's elements of all that it can address alone."""
    for tensor, span in plan.direct:
        held = overlap(span, plan.parts[span.source]) if tensor.key in chosen else None
        if held is not None:
            reader.read(chosen[tensor.key], *held)


def _read_blocks(
    reader: WeightReader,
    plan: Plan,
    chosen: Mapping[str, Place],
    state: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
) -> None:
    """Read what no rank can address alone, a block after the other, and keep this rank's part of each."""
    wanted: dict[str, list[tuple[FileTensor, Span]]] = {}
    for source, spans in plan.gathered.items():
        wanted.setdefault(tied.get(source, source), []).extend(pair for pair in spans if pair[0].key in chosen)
    for source, spans in wanted.items():
        tensor = state[source]
        assert isinstance(tensor, DTensor), "a plain tensor is on every rank as a whole"
        for first, last in row_blocks(tensor, [span for _, span in spans]) if spans else ():
            values = torch.empty((last - first, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")  # spans fill it
            block = whole_part(values, first)
            for file_tensor, span in spans:
                if held := overlap(span, block):
                    reader.read(chosen[file_tensor.key], *held)
            fill_block(tensor, first, last, values)


def _read_opaque(
    reader: WeightReader,
    model: PreTrainedModel,
    tensors: Sequence[FileTensor],
    chosen: Mapping[str, Place],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Read some tensors in full, put the model tensors together, and keep this rank's part of each."""
    sources = _sources(tensors)
    elements = element_map(model, {source: state[source].shape for source in sources}, tensors)
    dtype = reduce(torch.promote_types, (state[source].dtype for source in sources))
    flat = torch.empty(sum(state[source].numel() for source in sources), dtype=dtype, device="cpu")
    for tensor in tensors:
        values = torch.empty(tensor.numel, dtype=dtype, device="cpu")
        reader.read(chosen[tensor.key], 0, values)
        flat[elements.pop(tensor.key)] = values
    for source, values in zip(sources, flat.split([state[source].numel() for source in sources]), strict=True):
        live = state[source]
        local = live.to_local() if isinstance(live, DTensor) else live
        local.detach().copy_(local_of_whole(live, values.view(live.shape)))


def _sources(tensors: Sequence[FileTensor]) -> list[str]:
    return sorted({source for tensor in tensors for source in tensor.sources})
