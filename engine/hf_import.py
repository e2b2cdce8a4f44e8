"""Load a Hugging Face folder into a sharded model: every rank reads the bytes of its own rows, and no others.

Everything that can be wrong with the folder is found from its headers, on all ranks, before a weight is read; all
weights are read into staging memory before a parameter changes. A load that raises has changed nothing. Weights are
read with ``pread`` into memory of their own: nothing stays mapped to the files.

Cost: one read of the weights, spread over the ranks; beside the model, at most one copy of the rank's own shard (half
of that for 16-bit files and 32-bit parameters).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..utils.distributed import all_ranks_succeed, get_rank
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ..utils.heartbeat import beat
from .hf_keys import FileTensor, element_map, stored_tensors, unsharded_class
from .hf_layout import Place, read_layout
from .hf_shards import Plan, local_of_whole, overlap, plan_tensors

CHUNK_BYTES = 16 << 20
"""Most memory that reading takes beside the staging memory."""

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
        CheckpointNotFoundError: there is no such folder, or no safetensors weights in it.
        CheckpointCorruptError: a file is missing, truncated or not safetensors.
        CheckpointMismatchError: a tensor is missing, unexpected, of another shape or kind of dtype, or given twice with
            different values for a weight that the model ties.
        PeerError: only other ranks found a problem.
    """
    folder, rank = Path(path), get_rank(group)
    with all_ranks_succeed(f"checking {folder}", group):
        places = read_layout(folder)
        stored, tied = stored_tensors(model)
        state = stored | {alias: stored[key] for alias, key in tied.items()}
        plan = plan_tensors(model, state, rank)
        found = _match(model, folder, plan.tensors, places, allow_unexpected)
        chosen, copies, missing = _choose(folder, plan.tensors, found, tied, allow_missing)
    with all_ranks_succeed(f"reading {folder}", group), _Reader(folder) as reader:
        staged = _stage_direct(reader, plan, chosen, copies)
        for tensors in plan.whole:
            staged += _stage_whole(reader, model, tensors, chosen, state)
    with torch.no_grad():
        while staged:
            piece = staged.pop()
            piece.target.copy_(piece.values.view(piece.target.shape))
    return sorted(missing & stored.keys())


@dataclass(frozen=True)
class _Piece:
    """Values that have been read, the live elements they are for, and where in their file tensor they start."""

    target: torch.Tensor
    values: torch.Tensor
    at: int = 0


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


def _stage_direct(
    reader: "_Reader", plan: Plan, chosen: Mapping[str, Place], copies: Mapping[str, Sequence[Place]]
) -> list[_Piece]:
    """Read this rank's elements of every tensor that it can address alone."""
    staged: list[_Piece] = []
    for tensor in plan.direct:
        if tensor.key not in chosen:
            continue
        for span in tensor.spans or ():
            part = plan.parts[span.source]
            if not part.data.is_contiguous():
                raise CheckpointMismatchError(f"{span.source} is not contiguous in memory; make it so before loading")
            if held := overlap(span, part):
                at, target = held
                piece = _Piece(target, reader.read(chosen[tensor.key], at, target.numel(), target.dtype), at)
                for copy in copies.get(tensor.key, ()):
                    reader.compare(tensor.key, copy, piece)
                staged.append(piece)
    return staged


def _stage_whole(
    reader: "_Reader",
    model: PreTrainedModel,
    tensors: Sequence[FileTensor],
    chosen: Mapping[str, Place],
    state: Mapping[str, torch.Tensor],
) -> list[_Piece]:
    """Read some tensors in full, put the model tensors together, and keep this rank's part of each."""
    present = [tensor for tensor in tensors if tensor.key in chosen]
    if not present:
        return []
    if len(present) < len(tensors):
        absent = next(tensor.key for tensor in tensors if tensor.key not in chosen)
        raise CheckpointMismatchError(
            f"tensor {absent} is missing; it can only be loaded together with {present[0].key}"
        )
    sources = sorted({source for tensor in tensors for source in tensor.sources})
    dtype = reduce(torch.promote_types, (state[source].dtype for source in sources))
    elements = element_map(model, {source: state[source].shape for source in sources}, tensors)
    flat = torch.empty(sum(state[source].numel() for source in sources), dtype=dtype)
    for tensor in tensors:
        flat[elements[tensor.key]] = reader.read(chosen[tensor.key], 0, tensor.numel, dtype).to(dtype)
    staged = []
    for source, whole in zip(sources, flat.split([state[source].numel() for source in sources]), strict=True):
        live = state[source]
        values = local_of_whole(live, whole.view(live.shape).to(live.dtype)).clone()
        staged.append(_Piece((live.to_local() if isinstance(live, DTensor) else live).detach(), values))
    return staged


class _Reader:
    """Reads elements of tensors from the safetensors files of a folder, which stay open meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def read(self, place: Place, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements from ``at`` on, flat, on the CPU, in the smaller of the file's dtype and ``dtype``."""
        if place.dtype.itemsize <= dtype.itemsize:
            values = torch.empty(numel, dtype=place.dtype)
            self._fill(values, place, at)
            return values
        values, most = torch.empty(numel, dtype=dtype), CHUNK_BYTES // place.dtype.itemsize
        for start in range(0, numel, most):
            chunk = torch.empty(min(most, numel - start), dtype=place.dtype)
            self._fill(chunk, place, at + start)
            values[start : start + most] = chunk
        return values

    def compare(self, key: str, copy: Place, piece: _Piece) -> None:
        """Raise CheckpointMismatchError unless another copy of a tied weight has the values of ``piece``."""
        most = CHUNK_BYTES // copy.dtype.itemsize
        for start in range(0, piece.values.numel(), most):
            ours = piece.values[start : start + most].to(piece.target.dtype)
            other = self.read(copy, piece.at + start, ours.numel(), piece.target.dtype).to(piece.target.dtype)
            if not torch.equal(ours.view(torch.uint8), other.view(torch.uint8)):
                raise CheckpointMismatchError(
                    f"{self._folder}: the model ties {key}, but the folder has another tensor for one of its uses; "
                    "build the model with tie_word_embeddings=False"
                )

    def _fill(self, values: torch.Tensor, place: Place, at: int) -> None:
        if place.file not in self._fds:
            self._fds[place.file] = os.open(self._folder / place.file, os.O_RDONLY)
        offset = place.offset + at * place.dtype.itemsize
        rest = values.view(torch.uint8).numpy().data
        while rest:
            count = os.preadv(self._fds[place.file], [rest], offset)
            if count == 0:
                raise CheckpointCorruptError(f"{self._folder / place.file} ends at byte {offset}; it became shorter")
            rest, offset = rest[count:], offset + count
            beat()
