"""Export a sharded model as a Hugging Face folder, on a disk (`write`) or at a URL (`upload`)."""

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.atomic_folder import staged_folder
from ...utils.distributed import get_rank
from ...utils.remote import local_folder
from ..api import HFExportOptions
from .shard_ranges import whole_tensor
from .upload import export_to_url
from .write import write_hf


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
    staging_folder: str | os.PathLike[str] | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` loads; it becomes visible complete and durable, or not at all.

    At a URL (``s3://bucket/run/step_9``, any fsspec backend) the same files are written to a staging folder, then
    uploaded, ``config.json`` last, without which nothing loads the others (see `upload`). A ``file://`` URL is a
    folder.

    Every rank of ``group`` calls this.

    Args:
        model: any transformers model, sharded by `fully_shard` or not. With LoRA adapters, or a ``PeftModel``, the
            weights are written merged: W + s B A (see `merge`).
        path: the folder to create, or a URL.
        group: control group of CPU tensors (gloo); None takes the default group.
        gather_group: for a `staged_model`, over which to gather what needs an all-gather; None: its mesh.
        dtype: see `HFExportOptions`, as for the arguments below.
        tokenizer: saved beside the weights.
        processor: saved beside the weights.
        base_model_path: local folder whose other files are copied.
        max_shard_size_bytes: weights above this are split over several files.
        staging_folder: where an export to a URL is written before it is uploaded.

    Raises:
        ConfigError: an option is out of range; the URL cannot be used, or a package for it is not installed; a rank
            does not see the staging folder.
        CheckpointExistsError: ``path`` exists and is not empty, or there is a model at the URL.
        CheckpointMismatchError: the weights cannot be expressed in the architecture's file format: it does not know a
            tensor of that name, they are quantized, or have adapters that cannot be merged.
        CheckpointNotFoundError: ``base_model_path`` is not a folder.
        CheckpointWriteError: this rank could not write, or the staging folder lacks room.
        PeerError: another rank failed.
    """
    options = HFExportOptions(dtype, tokenizer, processor, base_model_path, max_shard_size_bytes, staging_folder)
    export_hf(model, path, options, group=group, gather_group=gather_group)


def export_hf(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    options: HFExportOptions,
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
) -> None:
    """`save_hf` with its options in one object."""
    if (folder := local_folder(path)) is None:
        export_to_url(model, os.fspath(path), options, group=group, gather_group=gather_group)
        return
    with staged_folder(folder, group) as staging:
        write_hf(model, staging, options, group=group, gather_group=gather_group)


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
