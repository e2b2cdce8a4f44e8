"""Write a Hugging Face folder in one process, from tensors that are read block by block. Used to convert checkpoints.

The files equal the files that `save` writes for the same model. Memory is one block (see `LazyTensor`). A conversion of
transformers that is not slices needs all tensors that it joins.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...utils.errors import CheckpointMismatchError
from ...utils.files import fsync_file, walk_files, write_durably
from ..api import HFExportOptions
from ..memory.lazy_tensor import LazyTensor
from .dtypes import file_dtypes
from .file_io import WeightWriter
from .name_mapping import element_map, file_tensors, stored_tensors
from .origins import FileTensor, Span
from .safetensors_layout import INDEX_NAME, MAX_SHARD_SIZE_BYTES, TensorSlot, encode_index, plan_layout
from .shard_ranges import overlap, plan_transfers, whole_part
from .sidecars import write_sidecars


@torch.no_grad()
def write_lazily(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    folder: str | os.PathLike[str],
    options: HFExportOptions,
    seen: Callable[[str, int, torch.Tensor], None] = lambda name, first, values: None,
) -> None:
    """Write ``tensors`` as ``save_pretrained`` of ``model`` with these values would, and fsync the files.

    Args:
        model: on the meta device. Its parameters and buffers take the dtypes of ``tensors``.
        tensors: ``state_dict`` key -> values. A tied tensor may have any of its names.
        folder: an empty folder that exists.
        options: see `HFExportOptions`.
        seen: called with the key, the first element and the values of every block that is written.

    Raises:
        CheckpointMismatchError: ``tensors`` do not fit the model, or its file format cannot hold them.
        OSError: the file system refused.
    """
    folder = Path(folder)
    stored, tied = stored_tensors(model, on_meta=True)
    sources = _match(model, stored, tied, tensors)
    _set_dtypes(model, sources)
    stored, _ = stored_tensors(model, on_meta=True)
    dtypes = file_dtypes(model, stored, options.dtype)
    sources = {key: tensor.to(dtypes[key]) for key, tensor in sources.items()}
    planned = file_tensors(model, stored, dtypes)
    layout = plan_layout(planned, options.max_shard_size_bytes or MAX_SHARD_SIZE_BYTES, model.num_parameters())
    transfers = plan_transfers(planned, stored, 0, 1)
    wanted: dict[str, list[tuple[FileTensor, Span]]] = {key: [] for key in stored}
    for file_tensor, span in transfers.direct:
        wanted[span.source].append((file_tensor, span))
    with WeightWriter(folder) as files:
        for file in layout.files:
            files.create(file)
        write_sidecars(model, folder, options)
        for name in set(walk_files(folder)) - {file.name for file in layout.files}:
            fsync_file(folder / name)
        if layout.index is not None:
            write_durably(folder / INDEX_NAME, encode_index(layout.index))
        for key in stored:
            _write_spans(files, layout.slots, key, sources[key], wanted[key], seen)
        for together in transfers.unmapped:
            _write_converted(files, layout.slots, model, sources, together, seen)
        files.sync()


def _match(
    model: PreTrainedModel,
    stored: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
) -> dict[str, LazyTensor]:
    """Map each stored ``state_dict`` key to its values. Raises unless names and shapes fit the model."""
    found = {tied.get(key, key): tensor for key, tensor in tensors.items()}
    found |= {key: tensor for key, tensor in tensors.items() if key in stored}
    name = type(model).__name__
    if missing := sorted(stored.keys() - found.keys()):
        raise CheckpointMismatchError(f"{name} needs {missing[0]!r}, which is not there ({len(missing)} missing)")
    unknown = sorted(found.keys() - model.state_dict().keys())
    if unknown:
        raise CheckpointMismatchError(f"{unknown[0]!r} is no tensor of {name} ({len(unknown)} unknown)")
    for key, tensor in stored.items():
        if tuple(tensor.shape) != found[key].shape:
            raise CheckpointMismatchError(
                f"{key} has shape {list(found[key].shape)}; {name} needs {list(tensor.shape)}: is it of another config?"
            )
    return {key: found[key] for key in stored}


def _set_dtypes(model: PreTrainedModel, sources: Mapping[str, LazyTensor]) -> None:
    """Give parameters and buffers on meta the dtypes of ``sources``, because config.json takes its dtype from them."""
    for named in (model.named_parameters(), model.named_buffers()):
        for key, tensor in named:
            if key in sources:
                tensor.data = torch.empty(tensor.shape, dtype=sources[key].dtype, device="meta")


def _write_spans(
    files: WeightWriter,
    slots: Mapping[str, TensorSlot],
    key: str,
    source: LazyTensor,
    wanted: list[tuple[FileTensor, Span]],
    seen: Callable[[str, int, torch.Tensor], None],
) -> None:
    by_rows = all(span.within_rows(source.row_elements) for _, span in wanted)
    blocks = source.blocks() if by_rows else iter([(0, torch.cat([values for _, values in source.blocks()]))])
    for first, values in blocks:
        seen(key, first, values)
        part = whole_part(values, first // source.row_elements)
        for file_tensor, span in wanted:
            if (held := overlap(span, part)) is not None:
                files.write(slots[file_tensor.key], *held)


def _write_converted(
    files: WeightWriter,
    slots: Mapping[str, TensorSlot],
    model: PreTrainedModel,
    sources: Mapping[str, LazyTensor],
    together: Sequence[FileTensor],
    seen: Callable[[str, int, torch.Tensor], None],
) -> None:
    keys = sorted({source for tensor in together for source in tensor.sources})
    pieces: list[torch.Tensor] = []
    for key in keys:
        for first, values in sources[key].blocks():
            seen(key, first, values)
            pieces.append(values.reshape(-1))
    flat = torch.cat(pieces)
    elements = element_map(model, {key: torch.Size(sources[key].shape) for key in keys}, together)
    for tensor in together:
        files.write(slots[tensor.key], 0, flat[elements[tensor.key]])
