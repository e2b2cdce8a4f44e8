"""Load a Hugging Face folder into a sharded model: every rank reads the bytes of its own part.

All checks come first, on all ranks: headers, index, file sizes, names, shapes, and copies of tied
weights. Then weights are read straight into the parameters. Only a file that can no longer be read,
or became shorter, can stop this.

Cost: one read of the weights, spread over the ranks. Extra memory is one chunk. All ranks read the
tensors that an export would gather.
"""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...utils.compat.transformers_private import set_conversions
from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    get_group_ranks,
    get_rank,
    get_world_size,
)
from ...utils.errors import CheckpointMismatchError
from ...utils.files import StrPath, half_loaded
from ...utils.remote import FETCH_FIRST, require_local
from ..memory.offloaded import require_onloaded
from ..memory.tensors import is_expanded, local_box, local_tensor
from ..memory.weight_changes import changing_weights
from ..model_folder import read_raw_config
from ..training.unsharded import unsharded_class, unsharded_view
from .name_mapping import LoadPlan, invert_fills, loaded_elements, plan_loading, stored_tensors
from .refused_weights import refuse_other_weights, refuse_quantized
from .safetensors_layout import Slots
from .shard_ranges import TransferPlan, equal_share, overlap, plan_transfers
from .tensor_origins import FileTensor, sources_of
from .weight_files import WeightReader


def load_hf(
    model: PreTrainedModel,
    path: StrPath,
    *,
    group: RankGroup = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> list[str]:
    """Load the weights of a Hugging Face folder. Every rank of ``group`` calls this.

        load_hf(model, "exports/step_100")
        load_hf(critic, path, allow_missing=["score.*"], allow_unexpected=["lm_head.*"])

    The result and the names are the same as with `from_pretrained`: the prefix of the base model
    may be absent on either side, tensors may be fused, split or renamed, and other parts of a
    multimodal model are ignored. A tied weight may have any of its names. Values of any
    floating-point dtype are cast to the dtype of the parameter. A later export names tensors as the
    folder does.

    Args:
        model: any transformers model, sharded by `fully_shard` or not, with its memory allocated.
        path: a local folder with ``model.safetensors`` or ``model.safetensors.index.json``.
        group: control group of CPU tensors (gloo). None takes the default group.
        allow_missing: patterns (``fnmatch``) of ``state_dict`` keys that the folder need not have.
        allow_unexpected: patterns of tensors to ignore, under the names that they would have in the
            model.

    Returns:
        The ``state_dict`` keys that were missing, with permission. They keep their values.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``), or its weights are quantized.
        CheckpointNotFoundError: there is no such folder, or it has no safetensors weights.
        CheckpointCorruptError: a file is missing, truncated or not safetensors.
        CheckpointMismatchError: a tensor is missing, unexpected, of another shape or kind of dtype,
            or two copies of a tied weight differ.
        PeerError: only other ranks found a problem.
        OSError: a file cannot be read.

        The model is unchanged, unless the message says that it is half loaded: a file broke
        (OSError) or became shorter (CheckpointCorruptError) during the read. Then load the model
        again before you use it.
    """
    folder = require_local(path, "loading", FETCH_FIRST)
    with WeightReader(folder) as reader:
        with all_ranks_succeed(f"checking {folder}", group):
            require_onloaded(model)
            refuse_other_weights(folder)
            slots = reader.layout()
            refuse_quantized(folder, slots)
            shapes = {name: slot.shape for name, slot in slots.items()}
            stored, tied = stored_tensors(model)

            # The layout of the folder, and the plan that turns it into the model.
            try:
                loading = plan_loading(model, shapes)
                chosen, copies = _choose(loading, tied)
                missing = _missing(model, loading, stored, chosen, allow_missing)
                _refuse_unexpected(model, folder, loading, allow_unexpected)
                state = model.state_dict()
                fills = invert_fills(chosen, shapes)
                transfers = plan_transfers(fills, state, get_group_ranks(group))
                _check_plan(model, transfers, slots)
                _compare_copies(reader, slots, copies, group)
            except CheckpointMismatchError as error:
                raise CheckpointMismatchError(f"{folder}: {error}") from error

        # All ranks have come so far before anything is changed.
        reading = all_ranks_succeed(f"reading {folder}", group)
        with reading, changing_weights(model), half_loaded(folder), torch.no_grad():
            for tensor, span in transfers.direct:
                for rows in overlap(span, transfers.parts[span.source]):
                    reader.read(slots[tensor.key], *rows)
            for tensors in transfers.unmapped:
                _read_unmapped(reader, model, tensors, slots, state)

    # An export reverts these, as after `from_pretrained`.
    set_conversions(model, loading.conversions)
    return missing


def names_as_in(
    folder: Path,
    model: PreTrainedModel,
    group: RankGroup,
) -> set[str]:
    """The ``state_dict`` keys whose values on this rank are bit for bit the values that `load_hf`
    would read.

    Changes nothing, and does not communicate. Cost: one read of this rank's part. Tensors that a
    load converts by more than slices are left out. CheckpointError or OSError if the folder cannot
    be read, or does not fit the model.
    """
    with WeightReader(folder) as reader:
        slots = reader.layout()
        shapes = {name: slot.shape for name, slot in slots.items()}
        loading = plan_loading(model, shapes)
        _, tied = stored_tensors(model)
        chosen, _ = _choose(loading, tied)
        fills = invert_fills(chosen, shapes)
        transfers = plan_transfers(fills, model.state_dict(), get_group_ranks(group))

        # One difference is enough: the other spans of such a tensor are not read.
        others = set(sources_of(chain.from_iterable(transfers.unmapped)))
        for tensor, span in transfers.direct:
            if span.source in others:
                continue
            for at, live, pitch in overlap(span, transfers.parts[span.source]):
                there = torch.empty_like(live, memory_format=torch.contiguous_format)
                reader.read(slots[tensor.key], at, there, pitch)
                if not torch.equal(there.view(torch.uint8), live.contiguous().view(torch.uint8)):
                    others.add(span.source)
    return chosen.keys() - others


def _choose(
    loading: LoadPlan, tied: Mapping[str, str]
) -> tuple[dict[str, FileTensor], list[tuple[FileTensor, FileTensor]]]:
    """Choose one file tensor for each tied weight that the folder stores under several names.

    Returns ``state_dict`` key -> chosen tensor, and pairs of a chosen tensor and another one for
    the same key.
    """
    chosen = {}
    copies = []

    # The name that files usually have comes first.
    for key in sorted(loading.filled, key=lambda key: key in tied):
        name = tied.get(key, key)
        tensor = loading.filled[key]
        first = chosen.setdefault(name, tensor)
        if first is not tensor:
            copies.append((first, tensor))
    return chosen, copies


def _missing(
    model: PreTrainedModel,
    loading: LoadPlan,
    stored: Mapping[str, Tensor],
    chosen: Mapping[str, FileTensor],
    allow_missing: Sequence[str],
) -> list[str]:
    """The missing keys. Raises if one may not be missing, and is not computed by the model."""
    computed = loading.optional & {name for name, _ in unsharded_view(model).named_buffers()}
    missing = sorted(stored.keys() - chosen.keys())
    needed = [key for key in missing if key not in computed]
    needed = [key for key in needed if not _matches(key, allow_missing)]
    if needed:
        raise CheckpointMismatchError(
            f"tensor {needed[0]} of shape {list(stored[needed[0]].shape)} is missing "
            f"({len(needed)} in all; {len(loading.filled)} were found); "
            f"allow_missing={list(allow_missing)}"
        )
    return missing


def _refuse_unexpected(
    model: PreTrainedModel,
    folder: Path,
    loading: LoadPlan,
    allow_unexpected: Sequence[str],
) -> None:
    # If the folder is of a multimodal model, and the model is its language model, the other modules
    # have no place in it.
    partial = "text_config" in read_raw_config(folder) and not model.config.sub_configs
    names = [*loading.filled, *sources_of(loading.filled.values())]
    used = {".".join(name.split(".")[:depth]) for name in names for depth in (1, 2)}

    unexpected = []
    for name in sorted(loading.unexpected):
        elsewhere = partial and _in_other_module(name, used)
        if not elsewhere and not _matches(name, allow_unexpected):
            unexpected.append(name)
    if unexpected:
        raise CheckpointMismatchError(
            f"unexpected tensor {unexpected[0]} ({len(unexpected)} in all) has no place in "
            f"{unsharded_class(model).__name__}; allow_unexpected={list(allow_unexpected)}"
        )
    if loading.unused:
        name = min(loading.unused)
        raise CheckpointMismatchError(
            f"tensor {name} ({len(loading.unused)} such) fills what another one fills too"
        )


def _in_other_module(name: str, used: Collection[str]) -> bool:
    """Whether neither the first component of ``name`` nor the first two are in use."""
    first, *rest = name.split(".")
    if not rest:
        return False
    if first not in used:
        return True
    return len(rest) > 1 and f"{first}.{rest[0]}" not in used


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_plan(
    model: PreTrainedModel,
    transfers: TransferPlan,
    slots: Slots,
) -> None:
    """Refuse dtypes, memory layouts and conversions that would fail during the load, or give wrong
    values.
    """
    for tensor in transfers.tensors:
        dtype = slots[tensor.key].dtype
        may_cast = dtype.is_floating_point and tensor.dtype.is_floating_point
        if dtype != tensor.dtype and not may_cast:
            raise CheckpointMismatchError(
                f"{tensor.key} has dtype {dtype}, the model needs {tensor.dtype}"
            )

    # Elements that share memory would be written over each other.
    for _, span in transfers.direct:
        if is_expanded(transfers.parts[span.source].data):
            raise CheckpointMismatchError(
                f"several elements of {span.source} are the same memory; give it memory of its "
                "own before loading"
            )
    for tensors in transfers.unmapped:
        _elements(model, tensors)


def _elements(
    model: PreTrainedModel,
    tensors: Sequence[FileTensor],
) -> dict[str, Tensor]:
    shapes = {tensor.key: tensor.shape for tensor in tensors}
    return loaded_elements(model, shapes, sources_of(tensors))


def _compare_copies(
    reader: WeightReader,
    slots: Slots,
    copies: Sequence[tuple[FileTensor, FileTensor]],
    group: RankGroup,
) -> None:
    """Refuse a folder whose copies of a tied weight differ. Every rank compares an equal share."""
    for tensor, copy in copies:
        first, last = equal_share(tensor.numel, get_rank(group), get_world_size(group))
        ours = slots[tensor.sources[0]]
        theirs = slots[copy.sources[0]]
        if not reader.same(ours, theirs, first, last, tensor.dtype):
            raise CheckpointMismatchError(
                f"the model ties {tensor.key}, but the folder has another tensor for one of its "
                "uses; build the model with tie_word_embeddings=False"
            )


def _read_unmapped(
    reader: WeightReader,
    model: PreTrainedModel,
    tensors: Sequence[FileTensor],
    slots: Slots,
    state: Mapping[str, Tensor],
) -> None:
    elements = _elements(model, tensors)
    sources = sources_of(tensors)
    dtype = reduce(torch.promote_types, (state[source].dtype for source in sources))

    # All values, in the order in which the elements are counted.
    sizes = [tensor.numel for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype, device="cpu")
    for tensor, values in zip(tensors, flat.split(sizes), strict=True):
        reader.read(slots[tensor.key], 0, values)

    # Each rank keeps its block. The numbers of a tensor, 8 bytes per element, go with it.
    for source in sources:
        target = local_tensor(state[source]).detach()
        box = local_box(state[source])
        target.copy_(box.of(flat[elements.pop(source)]))
