"""Save a sharded model as a Hugging Face folder, on a disk or at a URL.

All ranks compute the same layout of the files, and rank 0 creates them at full size. Every rank
then writes its elements at their offsets, cast in chunks, and fsyncs. Elements that several ranks
hold are written once, an equal share by each. The files equal those of ``save_pretrained`` byte for
byte.

Cost: one write of the weights, spread over the ranks. Extra memory is one chunk per rank. Nothing
is gathered on any mesh, except adapters, and tensors that transformers converts by more than
slices, which no common architecture has.
"""

import heapq
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...utils.atomic_folder import staged_folder
from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    all_ranks_succeed_slowly,
    gather_objects,
    get_group_ranks,
    get_rank,
    get_world_size,
    rank_zero_decides,
)
from ...utils.errors import CheckpointMismatchError, CheckpointWriteError
from ...utils.files import StrPath, as_write_error
from ...utils.logging import get_logger
from ...utils.manifest import FileEntry, file_entries
from ...utils.pieces import join_digests, require_whole
from ...utils.remote import RemoteFolder, local_folder, without_secrets
from ..api import HFExportOptions
from ..lora.adapters import plain_adapters, plain_view, transformers_model
from ..memory.offloaded import require_onloaded
from ..memory.tensors import named_tensors
from ..training.unsharded import unsharded_class, unsharded_view
from . import upload
from .dtypes import file_dtypes, unknown_keys
from .name_mapping import element_map, file_tensors, stored_tensors
from .safetensors_layout import (
    INDEX_NAME,
    MAX_SHARD_SIZE_BYTES,
    Layout,
    WeightFile,
    plan_layout,
)
from .shard_ranges import (
    MergedWeights,
    TransferPlan,
    equal_share,
    own_share,
    plan_transfers,
    whole_tensor,
)
from .sidecars import write_sidecars
from .tensor_origins import sources_of
from .weight_files import WeightWriter

logger = get_logger(__name__)

# Size limit of a file if the number of files follows the number of ranks.
_MAX_SHARE_BYTES = 5 * 10**9


def save_hf(
    model: PreTrainedModel,
    path: StrPath,
    *,
    group: RankGroup = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: StrPath | None = None,
    max_shard_size_bytes: int | None = None,
    staging_folder: StrPath | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` loads. Every rank of ``group`` calls this.

    The folder becomes visible complete and durable, or not at all. At a URL (any fsspec backend)
    the files are written to a staging folder and then uploaded, ``config.json`` last, because
    nothing loads a model without it.

        save_hf(model, "exports/step_100", dtype=torch.bfloat16, tokenizer=tokenizer)
        save_hf(model, "s3://bucket/run/step_100", staging_folder="/local/disk")

    Args:
        model: any transformers model, sharded by `fully_shard` or not. With LoRA adapters, or as a
            ``PeftModel``, the merged weights W + s B A are written.
        path: the folder to create, or a URL. A ``file://`` URL is a folder.
        group: control group of CPU tensors (gloo). None takes the default group.
        dtype: see `HFExportOptions`, as for the other options below.
        tokenizer: saved with the weights.
        processor: saved with the weights.
        base_model_path: local folder whose other files are copied.
        max_shard_size_bytes: larger weights are split over several files.
        staging_folder: folder for the files of an export to a URL before the upload.

    Raises:
        ConfigError: an option is out of range, the URL cannot be used, a package for it is not
            installed, or a rank does not see the staging folder.
        CheckpointExistsError: ``path`` exists and is not empty, or there is a model at the URL.
        CheckpointMismatchError: the file format of the architecture cannot hold the weights: it
            does not know a tensor of that name, the weights are quantized, or they have adapters
            that cannot be merged.
        CheckpointNotFoundError: ``base_model_path`` is not a folder.
        CheckpointWriteError: this rank could not write, or the staging folder lacks room.
        PeerError: another rank failed.
    """
    options = HFExportOptions(
        dtype,
        tokenizer,
        processor,
        base_model_path,
        max_shard_size_bytes,
        staging_folder,
    )
    export_hf(model, path, options, group=group)


def export_hf(
    model: PreTrainedModel,
    path: StrPath,
    options: HFExportOptions,
    *,
    group: RankGroup,
    finish: Callable[[], None] | None = None,
) -> None:
    """`save_hf` with its options in one object.

    ``finish`` is called on every rank when the weights are read and nothing is visible yet.
    """
    folder = local_folder(path)
    if folder is None:
        _export_to_url(model, os.fspath(path), options, group, finish)
        return
    with staged_folder(folder, group) as staging:
        write_hf(model, staging, options, group=group)
        if finish is not None:
            finish()


def _export_to_url(
    model: PreTrainedModel,
    url: str,
    options: HFExportOptions,
    group: RankGroup,
    finish: Callable[[], None] | None,
) -> None:
    started = time.monotonic()
    with all_ranks_succeed(f"preparing {without_secrets(url)}", group):
        remote = RemoteFolder(url, setting="path", error=CheckpointWriteError)
        ranks = get_group_ranks(group)
        plan = plan_export(model, options, ranks, share_bytes=upload.MIN_FILE_BYTES)
    layout = plan.layout
    with upload.staging_folder(
        remote.url, layout.total_bytes, options.staging_folder, group
    ) as staging:
        # What would be written over is refused before the weights are written.
        weights = [file.name for file in layout.files]
        if layout.index is not None:
            weights.append(INDEX_NAME)
        rank_zero_decides(partial(upload.require_absent, remote, weights), group)

        entries = _write_planned(plan, model, staging, options, WeightWriter(staging), group)
        with all_ranks_succeed(f"finishing {remote.url}", group):
            if finish is not None:
                finish()
        rank_zero_decides(partial(upload.begin, remote, staging), group)

        # Each rank uploads the files that it describes.
        names = [entry.name for entry in entries]
        put = partial(upload.put_files, remote, staging, names)
        all_ranks_succeed_slowly(f"uploading to {remote.url}", put, group)
        rank_zero_decides(partial(upload.commit_upload, remote, staging), group)

    logger.info(
        "exported to %s: %d bytes of weights in %.1f s",
        remote.url,
        layout.total_bytes,
        time.monotonic() - started,
    )


def _open_writer(folder: Path, _: Layout) -> WeightWriter:
    return WeightWriter(folder)


def write_hf(
    model: PreTrainedModel,
    folder: Path,
    options: HFExportOptions,
    *,
    group: RankGroup = None,
    share_bytes: int | None = None,
    open_writer: Callable[[Path, Layout], WeightWriter] = _open_writer,
) -> list[FileEntry]:
    """Write and fsync the files of `save_hf` in an empty folder that every rank sees and that the
    caller commits.

    Returns entries for a manifest. Every file is described by exactly one rank, which may also
    upload it. The commit must fsync the directories. For ``share_bytes`` see `plan_export`. Every
    rank passes its bytes of the weights to the writer that it opens with ``open_writer``, a
    collective. If that writes no files, only rank 0 needs the folder.
    """
    with all_ranks_succeed(f"preparing {folder}", group):
        plan = plan_export(model, options, get_group_ranks(group), share_bytes=share_bytes)
    writer = open_writer(folder, plan.layout)
    return _write_planned(plan, model, folder, options, writer, group)


@dataclass(frozen=True)
class ExportPlan:
    """The place of every element in the files. The layout is the same on all ranks, the transfers
    are this rank's.
    """

    # ``state_dict`` key -> live (sharded) tensor
    stored: dict[str, Tensor]
    # how this rank gets the elements of every file tensor
    transfers: TransferPlan
    layout: Layout  # the weight files


def plan_export(
    model: PreTrainedModel,
    options: HFExportOptions,
    ranks: Sequence[int],
    *,
    share_bytes: int | None = None,
) -> ExportPlan:
    """Plan an export by ``ranks`` of the default group, without communication. The write adds
    adapters to the base.

    If ``share_bytes`` is given and ``options`` do not limit the files, a file is about as large as
    a rank's share, so that each rank has one to upload, but between ``share_bytes`` and 5 GB. Else
    files are as large as those of ``save_pretrained``.
    """
    stored = exportable_tensors(model)
    model = plain_view(model)
    tensors = file_tensors(model, stored, file_dtypes(model, stored, options.dtype))
    limit = options.max_shard_size_bytes
    if limit is None and share_bytes is not None:
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        share = -(-n_bytes // len(ranks))
        limit = min(max(share, share_bytes), _MAX_SHARE_BYTES)
    layout = plan_layout(tensors, limit or MAX_SHARD_SIZE_BYTES, model.num_parameters())
    return ExportPlan(stored, plan_transfers(tensors, stored, ranks), layout)


@torch.no_grad()
def exportable_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """`stored_tensors` of a model with or without adapters. CheckpointMismatchError if files cannot
    hold a tensor.
    """
    require_onloaded(model)

    # Trained prompts are in no layer.
    inside = {id(param) for param in transformers_model(model).parameters()}
    beside = [name for name, param in model.named_parameters() if id(param) not in inside]
    if beside:
        raise CheckpointMismatchError(
            f"{beside[0]} ({len(beside)} such) is beside the layers of the model, as the prompts "
            "of PEFT are, so that no weight can take it in; save it with PEFT's save_pretrained"
        )

    # A file has one place for a tied weight, and an adapter may be at one of its uses.
    adapted = plain_adapters(model)
    model = unsharded_view(plain_view(model))
    stored, left_out = stored_tensors(model)
    other_use = left_out | {kept: key for key, kept in left_out.items()}
    tied = sorted(adapted.keys() & other_use.keys())
    if tied:
        raise CheckpointMismatchError(
            f"{tied[0]} has an adapter and is tied to {other_use[tied[0]]}, so that a file has no "
            "place for the sum; train adapters of other layers"
        )

    # An adapter without a weight in the files would be left out without a word.
    lost = sorted(adapted.keys() - stored.keys())
    if lost:
        raise CheckpointMismatchError(
            f"{lost[0]} ({len(lost)} such) has an adapter, but the state_dict of "
            f"{unsharded_class(model).__name__} has no weight of this name, so that the export "
            "would lack the adapter; take out the module that renames the weight, or export "
            "model.merge_and_unload()"
        )

    parameters = [key for key, _ in model.named_parameters() if key in stored]
    unknown = unknown_keys(model, parameters)
    if unknown:
        raise CheckpointMismatchError(
            f"{unsharded_class(model).__name__} has no parameter {unknown[0]} ({len(unknown)} "
            "such), so nothing would load it again; take out what was added to the model, or "
            "merge it into the weights"
        )
    return stored


def deal_files(files: Sequence[WeightFile], world_size: int) -> list[list[WeightFile]]:
    """The files of each rank, about equal in bytes. A few files go to ranks that are far apart, on
    different nodes.
    """
    count = min(len(files), world_size)
    dealt: list[list[WeightFile]] = [[] for _ in range(world_size)]

    # The largest file that is left goes to the rank with the fewest bytes, the first in a heap of
    # (bytes, rank).
    loads = [(0, number * world_size // count) for number in range(count)]
    for file in sorted(files, key=lambda file: -file.total_bytes):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + file.total_bytes, rank))
        dealt[rank].append(file)
    return dealt


def _write_planned(
    plan: ExportPlan,
    model: PreTrainedModel,
    folder: Path,
    options: HFExportOptions,
    files: WeightWriter,
    group: RankGroup,
) -> list[FileEntry]:
    rank = get_rank(group)
    layout = plan.layout
    transfers = plan.transfers
    merged = MergedWeights(model, group)
    model = plain_view(model)
    slots = layout.slots
    small_files = []
    with files:
        # Rank 0 creates all files at their full size, and every rank writes into them.
        with all_ranks_succeed(f"creating {folder}", group), as_write_error(folder):
            if rank == 0:
                for file in layout.files:
                    files.create(file)
        with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
            if rank == 0:
                small_files = file_entries(folder, write_sidecars(model, folder, options, layout))
            for tensor, span in transfers.direct:
                part = merged.part(span.source, transfers.parts[span.source])
                for share in own_share(span, part):
                    files.write(slots[tensor.key], *share)
            if not transfers.unmapped:
                files.sync()
        if transfers.unmapped:
            _write_gathered(files, folder, model, plan, merged, group)
    return _describe(layout, files, group) + small_files


def _describe(
    layout: Layout,
    files: WeightWriter,
    group: RankGroup,
) -> list[FileEntry]:
    """The entries of this rank's share of the weight files. All ranks exchange the digests of their
    pieces.
    """
    by_rank = gather_objects(files.digests, group)
    dealt = deal_files(layout.files, len(by_rank))
    entries = []
    for file in dealt[get_rank(group)]:
        written = sorted(part for digests in by_rank for part in digests.get(file.name, ()))
        pieces = tuple(piece for piece, _ in written)
        require_whole(pieces, file.total_bytes)
        digest = join_digests(digest for _, digest in written)
        entries.append(FileEntry(file.name, file.total_bytes, digest, pieces))
    return entries


def _write_gathered(
    files: WeightWriter,
    folder: Path,
    model: PreTrainedModel,
    plan: ExportPlan,
    merged: MergedWeights,
    group: RankGroup,
) -> None:
    """Gather the tensors that need it, write an equal share of each on every rank, and sync all
    files.
    """
    stored = plan.stored
    slots = plan.layout.slots
    for tensors in plan.transfers.unmapped:
        sources = sources_of(tensors)
        shapes = {source: stored[source].shape for source in sources}
        gathered = {source: whole_tensor(stored[source], group) for source in sources}
        with (
            all_ranks_succeed(f"writing {tensors[0].key} to {folder}", group),
            as_write_error(folder),
        ):
            wholes = [merged.whole(source, tensor) for source, tensor in gathered.items()]
            flat = torch.cat([whole.reshape(-1) for whole in wholes])
            elements = element_map(model, shapes, tensors)
            for tensor in tensors:
                first, last = equal_share(tensor.numel, get_rank(group), get_world_size(group))
                own = elements[tensor.key][first:last]
                files.write(slots[tensor.key], first, flat[own])
    with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
        files.sync()


def full_state_dict(model: torch.nn.Module, *, group: RankGroup = None) -> dict[str, Tensor]:
    """Gather the whole model on the CPU of rank 0, one tensor at a time. Every rank of ``group``
    calls this.

        state = full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")

    Returns:
        On rank 0, ``state_dict`` keys -> whole tensors in new memory, which tied tensors share.
        ``{}`` on other ranks.
    """
    require_onloaded(model)
    gathered = {}
    first = {}
    owners = dict(named_tensors(unsharded_view(model)))
    for key, tensor in model.state_dict().items():
        # A tied tensor is gathered under its first name.
        twin = first.setdefault(id(owners.get(key, tensor)), key)
        whole = whole_tensor(tensor) if twin == key else None
        if get_rank(group) == 0:
            gathered[key] = gathered[twin] if whole is None else whole
    return gathered
