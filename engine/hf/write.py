"""Write the files of an export: every rank writes its own rows straight into the final safetensors files.

All ranks compute the same layout (`safetensors_layout`, `name_mapping`). Rank 0 makes the files at full size; every
rank then writes the elements it holds at their offsets, cast to the export dtype in chunks (`file_io`), and fsyncs.
What several ranks hold is written once, in equal shares. The files equal those of ``save_pretrained`` of the unsharded
model, byte for byte.

Cost: one write of the weights, spread over the ranks; beside the model, a chunk of memory. What needs an all-gather is
gathered: shards that are not rows in blocks of rows, transposes and conversions that are not slices a tensor (and what
it is converted with) at a time.
"""

import heapq
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ...utils.errors import CheckpointMismatchError
from ...utils.files import fsync_file, walk_files, write_durably
from ...utils.write_errors import as_write_error
from ..api import HFExportOptions
from ..lora.layers import plain_adapters, plain_view, transformers_model
from ..training.unsharded import unsharded_class
from .dtypes import file_dtypes, unknown_keys
from .file_io import WeightWriter
from .merge import MergedWeights
from .name_mapping import Span, element_map, file_tensors, stored_tensors
from .safetensors_layout import (
    INDEX_NAME,
    MAX_SHARD_SIZE_BYTES,
    Layout,
    TensorSlot,
    WeightFile,
    encode_index,
    plan_layout,
)
from .shard_ranges import (
    LocalPart,
    TransferPlan,
    gathered_block,
    overlap,
    own_share,
    plan_transfers,
    row_blocks,
    whole_tensor,
)
from .sidecars import write_sidecars

_MAX_SHARE_BYTES = 5 * 10**9
"""Most that a file has where each rank sees to one."""


@dataclass(frozen=True)
class ExportPlan:
    """Which elements go where in which files. The layout is the same on every rank, the rest is of this one.

    Attributes:
        stored: ``state_dict`` key -> live (sharded) tensor.
        transfers: how this rank gets at the elements of every file tensor.
        layout: the weight files.
    """

    stored: dict[str, torch.Tensor]
    transfers: TransferPlan
    layout: Layout


@torch.no_grad()
def exportable_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """`stored_tensors` of a model with or without adapters, under the names of its architecture.

    Raises:
        CheckpointMismatchError: a file of the architecture has no place for something that is trained.
    """
    inside = {id(param) for param in transformers_model(model).parameters()}
    if beside := [name for name, param in model.named_parameters() if id(param) not in inside]:
        raise CheckpointMismatchError(
            f"{beside[0]} ({len(beside)} such) is beside the layers of the model, as the prompts of PEFT are, so that "
            "no weight can take it in; save it with PEFT's save_pretrained"
        )
    adapted, model = plain_adapters(model), plain_view(model)
    stored, left_out = stored_tensors(model)
    if tied := sorted(adapted.keys() & left_out.keys()):
        raise CheckpointMismatchError(
            f"{tied[0]} has an adapter and is tied to {left_out[tied[0]]}, so that a file has no place for the sum; "
            "train adapters of other layers"
        )
    if unknown := unknown_keys(model, [key for key, _ in model.named_parameters() if key in stored]):
        raise CheckpointMismatchError(
            f"{unsharded_class(model).__name__} has no parameter {unknown[0]} ({len(unknown)} such), so nothing would "
            "load it again; take out what was added to the model, or merge it into the weights"
        )
    return stored


def plan_export(
    model: PreTrainedModel, options: HFExportOptions, rank: int, world_size: int, *, share_bytes: int | None = None
) -> ExportPlan:
    """Plan an export, without communication.

    Args:
        model: sharded or not; with adapters, the base is planned, to which they are added when it is written.
        options: ``dtype`` and ``max_shard_size_bytes`` are used.
        rank: this rank.
        world_size: number of ranks.
        share_bytes: unless ``options`` say otherwise, a file is about as large as a rank's share, so that each rank has
            one to see to, but between so many bytes and 5 GB. None: files are as large as ``save_pretrained``'s.

    Raises:
        CheckpointMismatchError: the weights cannot be expressed in the architecture's file format.
    """
    stored = exportable_tensors(model)
    model = plain_view(model)
    tensors = file_tensors(model, stored, file_dtypes(model, stored, options.dtype))
    limit = options.max_shard_size_bytes
    if limit is None and share_bytes is not None:
        share = -(-sum(tensor.nbytes for tensor in tensors) // world_size)
        limit = min(max(share, share_bytes), _MAX_SHARE_BYTES)
    layout = plan_layout(tensors, limit or MAX_SHARD_SIZE_BYTES, model.num_parameters())
    return ExportPlan(stored, plan_transfers(tensors, stored, rank, world_size), layout)


def deal_files(files: Sequence[WeightFile], world_size: int) -> list[list[WeightFile]]:
    """The files of each rank: about equal bytes; fewer files than ranks are spread evenly over them and the nodes."""
    count = min(len(files), world_size)
    loads = [(0, number * world_size // count) for number in range(count)]
    dealt: list[list[WeightFile]] = [[] for _ in range(world_size)]
    for file in sorted(files, key=lambda file: -file.total_bytes):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + file.total_bytes, rank))
        dealt[rank].append(file)
    return dealt


def write_hf(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    options: HFExportOptions,
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
    share_bytes: int | None = None,
) -> list[str]:
    """What `save_hf` does between making a staging folder and committing it.

    Args:
        folder: an empty folder that exists and that every rank sees.
        share_bytes: see `plan_export`. The other arguments are those of `save_hf`.

    Returns:
        The files this rank answers for (to describe in a manifest, to upload): every file of the folder is named by
        exactly one rank. When this returns, all ranks have written and fsynced all of them; the commit fsyncs
        directories.

    Raises:
        See `save_hf`. Files may be left in ``folder``.
    """
    with all_ranks_succeed(f"preparing {folder}", group):
        plan = plan_export(model, options, get_rank(group), get_world_size(group), share_bytes=share_bytes)
    return write_planned(plan, model, folder, options, group=group, gather_group=gather_group)


def write_planned(
    plan: ExportPlan,
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    options: HFExportOptions,
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """`write_hf` of what `plan_export` returned."""
    folder, rank, world_size = Path(folder), get_rank(group), get_world_size(group)
    layout, transfers = plan.layout, plan.transfers
    merged, model = MergedWeights(model, gather_group), plain_view(model)
    with WeightWriter(folder) as files:
        with all_ranks_succeed(f"creating {folder}", group), as_write_error(folder):
            for file in layout.files if rank == 0 else ():
                files.create(file)
        slots, weights = layout.slots, {file.name for file in layout.files}
        small_files: list[str] = []
        with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
            if rank == 0:
                write_sidecars(model, folder, options)
                small_files = [name for name in walk_files(folder) if name not in weights]
                for name in small_files:
                    fsync_file(folder / name)
                if layout.index is not None:
                    write_durably(folder / INDEX_NAME, encode_index(layout.index))
                    small_files.append(INDEX_NAME)
            for tensor, span in transfers.direct:
                columns = math.prod(plan.stored[span.source].shape[1:])
                part = merged.part(span.source, transfers.parts[span.source], columns)
                _write_share(files, slots[tensor.key], span, part)
            if not (transfers.gathered or transfers.unmapped):
                files.sync()
        if transfers.gathered or transfers.unmapped:
            _write_gathered(files, folder, model, plan, merged, group, gather_group)
    return [file.name for file in deal_files(layout.files, world_size)[rank]] + small_files


def _write_share(files: WeightWriter, slot: TensorSlot, span: Span, part: LocalPart) -> None:
    """Write what this rank answers for of a span. No communication."""
    held = overlap(span, part)
    if held is not None:
        files.write(slot, *own_share(held, part))


def _write_gathered(
    files: WeightWriter,
    folder: Path,
    model: PreTrainedModel,
    plan: ExportPlan,
    merged: MergedWeights,
    group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
) -> None:
    """Write what ranks have to see as a whole first, each an equal share of it, and sync everything."""
    stored, slots = plan.stored, plan.layout.slots
    for source, wanted in plan.transfers.gathered.items():
        tensor = stored[source]
        assert isinstance(tensor, DTensor), "a plain tensor is on every rank as a whole"
        for first, last in row_blocks(tensor, [span for _, span in wanted]):
            block = gathered_block(tensor, first, last, gather_group)
            block = merged.part(source, block, math.prod(tensor.shape[1:]))
            with all_ranks_succeed(f"writing {source} to {folder}", group), as_write_error(folder):
                for file_tensor, span in wanted:
                    _write_share(files, slots[file_tensor.key], span, block)
    rank, world_size = get_rank(group), get_world_size(group)
    for tensors in plan.transfers.unmapped:
        sources = sorted({source for tensor in tensors for source in tensor.sources})
        wholes = (merged.whole(source, whole_tensor(stored[source], gather_group)) for source in sources)
        flat = torch.cat([whole.reshape(-1) for whole in wholes])
        with all_ranks_succeed(f"writing {tensors[0].key} to {folder}", group), as_write_error(folder):
            elements = element_map(model, {source: stored[source].shape for source in sources}, tensors)
            for tensor in tensors:
                first, last = (tensor.numel * number // world_size for number in (rank, rank + 1))
                files.write(slots[tensor.key], first, flat[elements[tensor.key][first:last]])
    with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
        files.sync()
