"""Export a sharded model as a Hugging Face folder: every rank writes its own rows straight into the final files.

All ranks compute the same layout (`hf_layout`, `hf_keys`). Rank 0 makes the files at full size; every rank then
writes the elements it holds at their offsets, cast to the export dtype in chunks of `CHUNK_BYTES`, and fsyncs. A
folder becomes visible under its name only when all ranks have succeeded. The files equal those of ``save_pretrained``
of the unsharded model, byte for byte.

Cost: one write of the weights, spread over the ranks; beside the model, a chunk of memory. Tensors that cannot be
addressed this way (shards that are not rows, conversions that are not slices) are gathered one group at a time.
"""

import copy
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ..utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ..utils.errors import CheckpointNotFoundError
from ..utils.files import fsync_file, walk_files, write_durably
from ..utils.heartbeat import beat
from ..utils.logging import get_logger
from ..utils.manifest import MANIFEST_NAME
from ..utils.staging import as_write_error, staged_folder
from .hf_keys import FileTensor, element_map, file_dtype, stored_tensors, unsharded_view
from .hf_layout import (
    INDEX_NAME,
    MAX_SHARD_SIZE_BYTES,
    Layout,
    Place,
    TensorSpec,
    WeightFile,
    encode_index,
    plan_layout,
)
from .hf_shards import Plan, overlap, plan_tensors, whole_tensor

logger = get_logger(__name__)

CHUNK_BYTES = 16 << 20
"""Most memory that a cast or a copy from a device takes at a time."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")


def save_hf(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: str | os.PathLike[str] | None = None,
    max_shard_size_bytes: int = MAX_SHARD_SIZE_BYTES,
) -> None:
    """Write a folder that ``from_pretrained`` loads; it becomes visible complete and durable, or not at all.

    Every rank of ``group`` calls this.

    Args:
        model: any transformers model, sharded by `fully_shard` or not.
        path: the folder to create.
        group: control group of CPU tensors (gloo); None takes the default group.
        dtype: what floating-point weights are stored as; None keeps each as it is.
        tokenizer: saved beside the weights, chat template included.
        processor: likewise.
        base_model_path: local folder whose files that are neither weights nor written already are copied.
        max_shard_size_bytes: weights above this are split over several files.

    Raises:
        CheckpointExistsError: ``path`` exists.
        CheckpointMismatchError: the weights cannot be expressed in the architecture's file format.
        CheckpointNotFoundError: ``base_model_path`` is not a folder.
        CheckpointWriteError: this rank could not write.
        PeerError: another rank failed.
    """
    with staged_folder(path, group) as staging:
        write_hf(
            model,
            staging,
            group=group,
            dtype=dtype,
            tokenizer=tokenizer,
            processor=processor,
            base_model_path=base_model_path,
            max_shard_size_bytes=max_shard_size_bytes,
        )


def write_hf(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: str | os.PathLike[str] | None = None,
    max_shard_size_bytes: int = MAX_SHARD_SIZE_BYTES,
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
    folder, rank = Path(folder), get_rank(group)
    with all_ranks_succeed(f"planning {folder}", group):
        stored, _ = stored_tensors(model)
        plan = plan_tensors(model, stored, rank, dtype)
        layout = plan_layout(_specs(plan.tensors), max_shard_size_bytes, model.num_parameters())
    with all_ranks_succeed(f"preparing {folder}", group), as_write_error(folder):
        if rank == 0:
            _write_small_files(unsharded_view(model), folder, dtype, tokenizer, processor, base_model_path)
            _create_weight_files(folder, layout)
        small_files = list(walk_files(folder)) if rank == 0 else []
    places = layout.places
    with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
        _write_own_parts(folder, plan, places)
    for tensors in plan.whole:
        _write_whole(model, folder, tensors, stored, places, group)
    weights = [file.name for file in layout.files]
    mine = weights[rank :: get_world_size(group)]
    return mine + [name for name in small_files if name not in weights]


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


def _specs(tensors: Sequence[FileTensor]) -> list[TensorSpec]:
    return [TensorSpec(t.key, t.shape, t.dtype, t.block, t.block_bytes) for t in tensors]


def _write_small_files(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype | None,
    tokenizer: Any,
    processor: Any,
    base_model_path: str | os.PathLike[str] | None,
) -> None:
    """Write everything but the weights, as ``save_pretrained`` does, and fsync it."""
    config = copy.deepcopy(model.config)
    config.dtype = str(file_dtype(model.dtype, dtype)).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "use_cache"):
            part.use_cache = True  # training turns it off; servers want it
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    for part in (tokenizer, processor):
        if part is not None:
            part.save_pretrained(folder)
    if base_model_path is not None:
        _copy_base_files(Path(base_model_path), folder)
    for name in walk_files(folder):
        fsync_file(folder / name)


def _copy_base_files(base: Path, folder: Path) -> None:
    if not base.is_dir():
        raise CheckpointNotFoundError(f"base_model_path {base} is not a folder; expected a local model folder")
    for source in sorted(base.iterdir()):
        skipped = source.name.startswith(".") or source.name == MANIFEST_NAME or source.name.endswith(_WEIGHT_SUFFIXES)
        if source.is_file() and not skipped and not (folder / source.name).exists():
            shutil.copyfile(source, folder / source.name)


def _create_weight_files(folder: Path, layout: Layout) -> None:
    for file in layout.files:
        _create_weight_file(folder, file)
    if layout.index is not None:
        write_durably(folder / INDEX_NAME, encode_index(layout.index))


def _create_weight_file(folder: Path, file: WeightFile) -> None:
    with open(folder / file.name, "xb") as handle:
        handle.write(file.header)
        handle.truncate(file.total_bytes)
        handle.flush()
        os.fsync(handle.fileno())


def _write_own_parts(folder: Path, plan: Plan, places: Mapping[str, Place]) -> None:
    """Write, for every file tensor, the elements that this rank holds and answers for. No communication."""
    with _OpenFiles(folder) as files:
        for tensor in plan.direct:
            for span in tensor.spans or ():
                part = plan.parts[span.source]
                piece = overlap(span, part) if part.primary else None
                if piece is not None:
                    files.write(places[tensor.key], *piece)


def _write_whole(
    model: PreTrainedModel,
    folder: Path,
    tensors: Sequence[FileTensor],
    stored: Mapping[str, torch.Tensor],
    places: Mapping[str, Place],
    group: dist.ProcessGroup | None,
) -> None:
    """Gather the sources of some file tensors and let rank 0 write these."""
    sources = sorted({source for tensor in tensors for source in tensor.sources})
    gathered = []
    for source in sources:
        whole = whole_tensor(stored[source]).reshape(-1)
        gathered += [whole] if get_rank(group) == 0 else []
    with all_ranks_succeed(f"writing {tensors[0].key} to {folder}", group), as_write_error(folder):
        if get_rank(group) == 0:
            elements = element_map(model, {source: stored[source].shape for source in sources}, tensors)
            flat = torch.cat(gathered)
            with _OpenFiles(folder) as files:
                for tensor in tensors:
                    files.write(places[tensor.key], 0, flat[elements[tensor.key]])


class _OpenFiles:
    """Weight files of a folder, opened when first written to, fsynced and closed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}

    def __enter__(self) -> "_OpenFiles":
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            for fd in self._fds.values():
                if failed is None:
                    os.fsync(fd)
        finally:
            for fd in self._fds.values():
                os.close(fd)

    def write(self, place: Place, at: int, values: torch.Tensor) -> None:
        """Write ``values`` (any strides, dtype and device) from element ``at`` of the tensor at ``place``."""
        if place.file not in self._fds:
            self._fds[place.file] = os.open(self._folder / place.file, os.O_WRONLY)
        fd, offset = self._fds[place.file], place.offset + at * place.dtype.itemsize
        for chunk in _chunks(values, CHUNK_BYTES // max(values.element_size(), place.dtype.itemsize)):
            data = chunk.to("cpu", place.dtype).contiguous()
            rest = data.reshape(-1).view(torch.uint8).numpy().data
            while rest:
                written = os.pwrite(fd, rest, offset)
                rest, offset = rest[written:], offset + written
                beat()


def _chunks(values: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Cut a tensor, in row-major order, into pieces of at most ``most`` elements, without copying."""
    if values.numel() <= most:
        yield values
    elif values.is_contiguous():
        yield from values.view(-1).split(most)
    else:
        for row in values.split(max(most * values.shape[0] // values.numel(), 1)):
            yield from _chunks(row[0] if row.shape[0] == 1 else row, most)
