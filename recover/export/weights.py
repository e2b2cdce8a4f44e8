"""Weights under the names of a model: those of a Hugging Face folder, and tied ones once."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.hf.name_mapping import loaded_elements, plan_loading
from ...engine.hf.refused_weights import refuse_other_weights, refuse_quantized
from ...engine.hf.tensor_origins import FileTensor
from ...engine.hf.weight_files import WeightReader
from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointMismatchError
from .architecture import Architecture
from .stored_tensors import Tensors, slot_tensor


class ModelWeights(NamedTuple):
    """The weights of one model, without their values in memory."""

    tensors: Tensors  # parameter or buffer -> values. A tied tensor appears once
    aliases: dict[str, str]  # alias of a tied tensor -> its name in ``tensors``


def read_model_folder(
    folder: Path,
    architecture: Architecture,
    files: ExitStack,
) -> Tensors:
    """Tensors of a Hugging Face folder under the names of the model's ``state_dict``, as
    ``from_pretrained`` does.
    """
    refuse_other_weights(folder)
    reader = files.enter_context(WeightReader(folder))
    slots = reader.layout()
    refuse_quantized(folder, slots)

    # transformers decides what each tensor of the folder is for.
    shapes = {name: slot.shape for name, slot in slots.items()}
    plan = plan_loading(architecture.model, shapes)
    aliases = architecture.aliases
    tied = {*aliases, *aliases.values()}
    missing = sorted(plan.missing - plan.optional - tied)
    if missing:
        raise CheckpointMismatchError(f"{folder} lacks {missing[0]!r} ({len(missing)} missing)")
    unexpected = sorted(plan.unexpected)
    if unexpected:
        raise CheckpointMismatchError(
            f"{folder} has {unexpected[0]!r}, which its model does not ({len(unexpected)} such)"
        )
    if plan.unused:
        raise CheckpointMismatchError(
            f"{folder} has {min(plan.unused)!r}, which fills what another tensor fills too "
            f"({len(plan.unused)} such)"
        )

    # What fills a tensor of the model may be a tensor of the folder, or pieces of several.
    found: Tensors = {}
    for key, fill in plan.filled.items():
        parts: Tensors = {}
        for source in fill.sources:
            parts[source] = slot_tensor(reader, slots[source])
        part = _only_part(fill, parts)
        if part is None:
            part = _joined(architecture, key, fill, parts)
        found[key] = part
    return found


def strip_module(tensors: Tensors) -> Tensors:
    """Remove the prefix ``module.`` of DistributedDataParallel, if all names have it."""
    prefix = "module."
    if not all(name.startswith(prefix) for name in tensors):
        return tensors
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def without_tied_copies(
    tensors: Tensors,
    aliases: Mapping[str, str],
) -> ModelWeights:
    """Tied tensors under their first names, and the pairs of ``aliases`` (alias -> first name) that
    occur.

    Raises:
        CheckpointMismatchError: the copies of a tied tensor have different values.
    """
    # A tensor under its first name wins over its aliases.
    found: Tensors = {}
    for name, tensor in tensors.items():
        first = aliases.get(name, name)
        found.setdefault(first, tensors.get(first, tensor))

    # The aliases that are there, whose copies must be equal.
    occurring: dict[str, str] = {}
    for alias, first in aliases.items():
        if first not in found:
            continue
        occurring[alias] = first
        copy = tensors.get(alias, found[first])
        if copy is not found[first] and not same_values(copy, found[first]):
            raise CheckpointMismatchError(
                f"{alias} and {first} have different values, but the config ties them; set "
                "tie_word_embeddings to false"
            )
    return ModelWeights(found, occurring)


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype:
        return False
    pairs = zip(one.blocks(), other.blocks(), strict=True)
    for (_, values), (_, others) in pairs:
        bits = values.view(-1).view(torch.uint8)
        other_bits = others.view(-1).view(torch.uint8)
        if not torch.equal(bits, other_bits):
            return False
    return True


def _only_part(fill: FileTensor, parts: Tensors) -> LazyTensor | None:
    """The tensor of the folder that is the tensor of the model as it is. None if there is none."""
    if fill.spans is None or len(fill.spans) != 1:
        return None
    span = fill.spans[0]
    part = parts[span.source]
    if not span.contiguous:
        return None
    if span.offset != 0 or span.numel != part.numel:
        return None
    if part.shape != fill.shape:
        return None
    return part


def _joined(
    architecture: Architecture,
    key: str,
    fill: FileTensor,
    parts: Tensors,
) -> LazyTensor:
    """Tensor ``key`` of the model, from ``parts``, tensors of the folder by their names there."""
    # No value is rounded, whatever the dtypes of the others.
    dtype = reduce(torch.promote_types, (part.dtype for part in parts.values()))
    shapes = {name: part.shape for name, part in parts.items()}

    def assemble() -> Tensor:
        flat: dict[str, Tensor] = {}
        for name, part in parts.items():
            blocks = [values.reshape(-1) for _, values in part.blocks()]
            flat[name] = torch.cat(blocks).to(dtype)

        # Without spans only transformers knows which element goes where.
        if fill.spans is None:
            elements = loaded_elements(architecture.model, shapes, [key])
            whole = torch.cat(list(flat.values()))
            return whole[elements[key]]

        found = torch.empty(fill.numel, dtype=dtype)
        for span in fill.spans:
            source = flat[span.source]
            values = source.as_strided(span.shape, span.stride, span.offset)
            end = span.at + span.numel
            found[span.at : end] = values.reshape(-1)
        return found.view(fill.shape)

    return LazyTensor.read_at_once(fill.shape, dtype, assemble)
