"""Read tensors of weight files one by one: safetensors, ``torch.save`` files, parameters built from
several pieces.
"""

import codecs
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ...engine.hf.name_mapping import loaded_elements, plan_loading
from ...engine.hf.quantized import refuse_quantized
from ...engine.hf.safetensors_layout import TensorSlot
from ...engine.hf.tensor_origins import FileTensor
from ...engine.hf.weight_files import WeightReader
from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ...utils.plain_values import map_plain
from .checkpoint import Architecture
from .stored_tensors import slot_tensor

_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
_ARRAYS: Sequence[Any] = (
    *(np.ndarray, np.dtype, type(np.dtype(np.uint32)), codecs.encode),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
)
"""Types in the state of numpy's generator, which trainers save unchanged."""


def read_file(path: Path) -> Any:
    """Map a ``torch.save`` file of tensors, DTensors, numbers, strings, arrays and containers.

    Raises:
        CheckpointCorruptError: the file is missing, damaged, or asks for a type that could run
            code, which is named.
    """
    try:
        with _quiet_meshes():
            return map_plain(path, *_ARRAYS)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{path} is missing") from error


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Silence torch's warning that a DTensor's mesh has no process group, because none is needed."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def require_tensor(where: str | Path, name: Any, value: Any) -> None:
    """Raise `CheckpointCorruptError` unless ``value``, called ``name`` in the file ``where``, is a
    tensor of rows.
    """
    if not isinstance(name, str):
        raise CheckpointCorruptError(f"{where}: an entry is called {name!r}; expected a string")
    if not isinstance(value, torch.Tensor):
        raise CheckpointCorruptError(
            f"{where}: {name} is a {type(value).__name__}; expected a tensor"
        )
    local = value.to_local() if isinstance(value, DTensor) else value
    kind = "quantized tensor" if local.is_quantized else "tensor on the meta device, without values"
    if local.layout is not torch.strided:
        kind = f"{str(local.layout).removeprefix('torch.')} tensor"
    elif not (local.is_meta or local.is_quantized):
        return
    raise CheckpointCorruptError(f"{where}: {name} is a {kind}; expected a dense tensor of numbers")


def shared_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name of a tensor -> earlier name of a tensor in the same memory, so that tied tensors are
    stored once.
    """
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = (
            local.untyped_storage().data_ptr(),
            local.storage_offset(),
            tuple(local.shape),
            local.stride(),
        )
        if local.numel() and first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def read_bin(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Tensors of a ``torch.save`` file in its order, and the aliases of tensors that share memory."""
    state = read_file(path)
    if not isinstance(state, dict):
        raise CheckpointCorruptError(f"{path} is not the state_dict of a model")
    for name, value in state.items():
        require_tensor(path, name, value)
    tied = shared_names(state)
    return {name: LazyTensor.of(tensor) for name, tensor in state.items() if name not in tied}, tied


def read_model_folder(
    folder: Path, architecture: Architecture, files: ExitStack
) -> dict[str, LazyTensor]:
    """Tensors of a Hugging Face folder under the names of the model's ``state_dict``, as
    ``from_pretrained`` does.
    """
    reader = files.enter_context(WeightReader(folder))
    slots = reader.layout()
    refuse_quantized(folder, slots)
    model, shapes = architecture.model, {name: slot.shape for name, slot in slots.items()}
    plan = plan_loading(model, shapes)
    tied = {*architecture.aliases, *architecture.aliases.values()}
    if missing := sorted(plan.missing - plan.optional - tied):
        raise CheckpointMismatchError(f"{folder} lacks {missing[0]!r} ({len(missing)} missing)")
    if plan.unexpected:
        name = sorted(plan.unexpected)[0]
        raise CheckpointMismatchError(
            f"{folder} has {name!r}, which its model does not ({len(plan.unexpected)} such)"
        )
    return {
        key: _filled(reader, architecture, slots, key, fill) for key, fill in plan.filled.items()
    }


def strip_module(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Remove the prefix ``module.`` of DistributedDataParallel, if all names have it."""
    prefix = "module." if all(name.startswith("module.") for name in tensors) else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def without_tied_copies(
    tensors: Mapping[str, LazyTensor], aliases: Mapping[str, str]
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Tied tensors under their first names, and the pairs of ``aliases`` (alias -> first name) that
    occur.

    Raises:
        CheckpointMismatchError: the copies of a tied tensor have different values.
    """
    found = {aliases.get(name, name): tensor for name, tensor in tensors.items()}
    found |= {name: tensor for name, tensor in tensors.items() if name not in aliases}
    for alias, name in aliases.items():
        if alias in tensors and name in tensors and not same_values(tensors[alias], tensors[name]):
            raise CheckpointMismatchError(
                f"{alias} and {name} have different values, but the config ties them; set "
                "tie_word_embeddings to false"
            )
    return found, {alias: name for alias, name in aliases.items() if name in found}


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pairs = zip(one.blocks(), other.blocks(), strict=True)
    return all(
        torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        for (_, a), (_, b) in pairs
    )


def _filled(
    reader: WeightReader,
    architecture: Architecture,
    slots: Mapping[str, TensorSlot],
    key: str,
    fill: FileTensor,
) -> LazyTensor:
    """Source of a tensor of the model: one tensor of the folder as it is, or pieces of several."""
    parts = {source: slot_tensor(reader, slots[source]) for source in fill.sources}
    dtype = next(iter(parts.values())).dtype
    if fill.spans is not None and len(fill.spans) == 1:
        (span,) = fill.spans
        part = parts[span.source]
        if (
            span.contiguous
            and span.offset == 0
            and part.numel == span.numel
            and part.shape == fill.shape
        ):
            return part

    def assemble() -> torch.Tensor:
        whole = {
            name: torch.cat([values.reshape(-1) for _, values in part.blocks()])
            for name, part in parts.items()
        }
        if fill.spans is None:
            shapes = {name: part.shape for name, part in parts.items()}
            elements = loaded_elements(architecture.model, shapes, [key])[key]
            return torch.cat(list(whole.values()))[elements]
        found = torch.empty(fill.numel, dtype=dtype)
        for span in fill.spans:
            values = whole[span.source].as_strided(span.shape, span.stride, span.offset)
            found[span.at : span.at + span.numel] = values.reshape(-1)
        return found.view(fill.shape)

    return LazyTensor.read_at_once(fill.shape, dtype, assemble)
