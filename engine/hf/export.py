"""Export a sharded model as a Hugging Face folder: every rank writes its own rows straight into the final files.

All ranks compute the same layout (`safetensors_layout`, `name_mapping`). Rank 0 makes the files at full size; every
rank then writes the elements it holds at their offsets, cast to the export dtype in chunks (`file_io`), and fsyncs.
What several ranks hold is written once, in equal shares. A folder becomes visible under its name only when all ranks
have succeeded. The files equal those of ``save_pretrained`` of the unsharded model, byte for byte.

Cost: one write of the weights, spread over the ranks; beside the model, a chunk of memory. What needs an all-gather is
gathered: shards that are not rows in blocks of rows, transposes and conversions that are not slices a tensor (and what
it is converted with) at a time.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...utils.atomic_folder import as_write_error, staged_folder
from ...utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ...utils.files import fsync_file, walk_files, write_durably
from ...utils.logging import get_logger
from ...utils.remote import local_folder
from .file_io import WeightWriter
from .name_mapping import Span, element_map, stored_tensors
from .safetensors_layout import INDEX_NAME, MAX_SHARD_SIZE_BYTES, Place, encode_index
from .shard_ranges import (
    LocalPart,
    Plan,
    gathered_block,
    overlap,
    own_share,
    plan_tensors,
    row_blocks,
    whole_tensor,
)
from .sidecars import write_sidecars
from .upload import export_to_url

logger = get_logger(__name__)


def save_hf(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: str | os.PathLike[str] | None = None,
    max_shard_size_bytes: int | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` loads; it becomes visible complete and durable, or not at all.

    At a URL (``s3://bucket/run/step_9``, any fsspec backend) the same files are streamed, each by one rank; the last of
    them is ``config.json``, without which nothing loads the others (see `upload`). A ``file://`` URL is a folder.

    Every rank of ``group`` calls this.

    Args:
        model: any transformers model, sharded by `fully_shard` or not.
        path: the folder to create, or a URL.
        group: control group of CPU tensors (gloo); None takes the default group.
        gather_group: for a `staged_model`, over which to gather what needs an all-gather; None: its mesh.
        dtype: what floating-point weights are stored as; None keeps each as it is.
        tokenizer: saved beside the weights, chat template included.
        processor: likewise.
        base_model_path: local folder whose files that are neither weights nor written already are copied.
        max_shard_size_bytes: weights above this are split over several files. None is where ``save_pretrained`` starts
            a second one; at a URL it is less, because a file has one writer (`export_to_url`).

    Raises:
        ConfigError: the URL cannot be used, or a package for it is not installed.
        CheckpointExistsError: ``path`` exists, or there is a model at the URL.
        CheckpointMismatchError: the weights cannot be expressed in the architecture's file format.
        CheckpointNotFoundError: ``base_model_path`` is not a folder.
        CheckpointWriteError: this rank could not write.
        PeerError: another rank failed.
    """
    options: dict[str, Any] = {
        "group": group,
        "gather_group": gather_group,
        "dtype": dtype,
        "tokenizer": tokenizer,
        "processor": processor,
        "base_model_path": base_model_path,
        "max_shard_size_bytes": max_shard_size_bytes,
    }
    if (folder := local_folder(path)) is None:
        export_to_url(model, os.fspath(path), **options)
        return
    with staged_folder(folder, group) as staging:
        write_hf(model, staging, **options)


def write_hf(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: str | os.PathLike[str] | None = None,
    max_shard_size_bytes: int | None = None,
) -> list[str]:
    """What `save_hf` does between making a staging folder and committing it.

    Args:
        folder: an empty folder that exists and that every rank sees. The other arguments are those of `save_hf`.

    Returns:
        The files this rank answers for (to seal in a manifest): every file of the folder is named by exactly one rank.
        When this returns, all ranks have written and fsynced all of them; folders are left to the commit.

    Raises:
        See `save_hf`. Files may be left in ``folder``.
    """
    folder, rank, world_size = Path(folder), get_rank(group), get_world_size(group)
    with WeightWriter(folder) as files:
        with all_ranks_succeed(f"preparing {folder}", group), as_write_error(folder):
            stored, _ = stored_tensors(model)
            plan = plan_tensors(model, stored, rank, world_size, dtype)
            layout = plan.layout(max_shard_size_bytes or MAX_SHARD_SIZE_BYTES, model.num_parameters())
            for file in layout.files if rank == 0 else ():
                files.create(file)
        places, weights = layout.places, [file.name for file in layout.files]
        small_files: list[str] = []
        with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
            if rank == 0:
                write_sidecars(model, folder, dtype, tokenizer, processor, base_model_path)
                small_files = [name for name in walk_files(folder) if name not in weights]
                for name in small_files:
                    fsync_file(folder / name)
                if layout.index is not None:
                    write_durably(folder / INDEX_NAME, encode_index(layout.index))
                    small_files.append(INDEX_NAME)
            for tensor, span in plan.direct:
                _write_share(files, places[tensor.key], span, plan.parts[span.source])
            if not (plan.gathered or plan.unmapped):
                files.sync()
        if plan.gathered or plan.unmapped:
            _write_gathered(files, folder, model, plan, stored, places, group, gather_group)
    return weights[rank::world_size] + small_files


def full_state_dict(model: torch.nn.Module, *, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """The whole model on the CPU of rank 0, gathered one tensor at a time.

    Every rank of ``group`` calls this. Ranks other than 0 drop each tensor before the next is gathered.

    Returns:
        On rank 0, ``state_dict`` keys -> whole tensors in memory of their own, tied ones sharing it; elsewhere ``{}``.
    """
    gathered: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    state = model.state_dict()
    owners = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for key, tensor in state.items():
        twin = first.setdefault(id(owners.get(key, tensor)), key)
        whole = whole_tensor(tensor) if twin == key else None
        if get_rank(group) == 0:
            gathered[key] = gathered[twin] if whole is None else whole
    return gathered


def _write_share(files: WeightWriter, place: Place, span: Span, part: LocalPart) -> None:
    """Write what this rank answers for of a span. No communication."""
    held = overlap(span, part)
    if held is not None:
        files.write(place, *own_share(held, part))


def _write_gathered(
    files: WeightWriter,
    folder: Path,
    model: PreTrainedModel,
    plan: Plan,
    stored: Mapping[str, torch.Tensor],
    places: Mapping[str, Place],
    group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
) -> None:
    """Write what ranks have to see as a whole first, each an equal share of it, and sync everything."""
    for source, wanted in plan.gathered.items():
        tensor = stored[source]
        assert isinstance(tensor, DTensor), "a plain tensor is on every rank as a whole"
        for first, last in row_blocks(tensor, [span for _, span in wanted]):
            block = gathered_block(tensor, first, last, gather_group)
            with all_ranks_succeed(f"writing {source} to {folder}", group), as_write_error(folder):
                for file_tensor, span in wanted:
                    _write_share(files, places[file_tensor.key], span, block)
    rank, world_size = get_rank(group), get_world_size(group)
    for tensors in plan.unmapped:
        sources = sorted({source for tensor in tensors for source in tensor.sources})
        flat = torch.cat([whole_tensor(stored[source], gather_group).reshape(-1) for source in sources])
        with all_ranks_succeed(f"writing {tensors[0].key} to {folder}", group), as_write_error(folder):
            elements = element_map(model, {source: stored[source].shape for source in sources}, tensors)
            for tensor in tensors:
                first, last = (tensor.numel * number // world_size for number in (rank, rank + 1))
                files.write(places[tensor.key], first, flat[elements[tensor.key][first:last]])
    with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
        files.sync()
