"""Write a Hugging Face folder in one process, from tensors that are read block by block. Used to
convert checkpoints.

The files equal the files that `save` writes for the same model. Memory is one block (see
`LazyTensor`). A conversion of transformers that is not slices needs all tensors that it joins.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...utils.errors import CheckpointMismatchError
from ..api import HFExportOptions
from ..memory.lazy_tensor import LazyTensor
from .dtypes import file_dtypes
from .name_mapping import element_map, file_tensors, stored_tensors
from .safetensors_layout import MAX_SHARD_SIZE_BYTES, plan_layout
from .shard_ranges import overlap, plan_transfers, rows_part
from .sidecars import write_sidecars
from .tensor_origins import FileTensor, Span
from .weight_files import WeightWriter


@torch.no_grad()
def write_lazily(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    folder: str | os.PathLike[str],
    options: HFExportOptions,
    seen: Callable[[str, int, torch.Tensor], None] = lambda name, first, values: None,
) -> None:
    """Write and fsync the files that ``save_pretrained`` of ``model`` would write for ``tensors``,
    block by block.

    Args:
        model: model on the meta device. Its parameters and buffers take the dtypes of ``tensors``.
        tensors: ``state_dict`` key -> values. A tied tensor may have any of its names.
            CheckpointMismatchError if they do not fit the model, or safetensors cannot hold them.
        folder: an empty folder that exists.
        options: see `HFExportOptions`.
        seen: called for every block with the key, the index of the block's first element and its
            values.
    """
    folder = Path(folder)
    stored, tied = stored_tensors(model, on_meta=True)
    sources = _match(model, stored, tied, tensors)
    for key, tensor in chain(model.named_parameters(), model.named_buffers()):
        if key in sources:  # config.json takes its dtype from them
            tensor.data = torch.empty(tensor.shape, dtype=sources[key].dtype, device="meta")
    stored, _ = stored_tensors(model, on_meta=True)
    dtypes = file_dtypes(model, stored, options.dtype)
    sources = {key: tensor.to(dtypes[key]) for key, tensor in sources.items()}
    planned = file_tensors(model, stored, dtypes)
    layout = plan_layout(
        planned, options.max_shard_size_bytes or MAX_SHARD_SIZE_BYTES, model.num_parameters()
    )
    transfers = plan_transfers(planned, stored, [0])
    slots = layout.slots
    wanted: dict[str, list[tuple[FileTensor, Span]]] = {key: [] for key in stored}
    for file_tensor, span in transfers.direct:
        wanted[span.source].append((file_tensor, span))

    def read(key: str) -> Iterator[tuple[int, torch.Tensor]]:
        for first, values in sources[key].blocks():
            seen(key, first, values)
            yield first, values

    with WeightWriter(folder) as files:
        for file in layout.files:
            files.create(file)
        write_sidecars(model, folder, options, layout)
        for key, source in sources.items():
            for first, values in read(key):
                part = rows_part(values, first // source.row_elements, source.shape)
                for file_tensor, span in wanted[key]:
                    for rows in overlap(span, part):
                        files.write(slots[file_tensor.key], *rows)
                values = part = rows = None  # freed before the next block is read
        for together in transfers.unmapped:
            keys = sorted({key for tensor in together for key in tensor.sources})
            flat = torch.cat([values.reshape(-1) for key in keys for _, values in read(key)])
            elements = element_map(
                model, {key: torch.Size(sources[key].shape) for key in keys}, together
            )
            for tensor in together:
                files.write(slots[tensor.key], 0, flat[elements[tensor.key]])
        files.sync()


def _match(
    model: PreTrainedModel,
    stored: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
) -> dict[str, LazyTensor]:
    found = {tied.get(key, key): tensor for key, tensor in tensors.items()}
    found |= {key: tensor for key, tensor in tensors.items() if key in stored}
    name = type(model).__name__
    if missing := sorted(stored.keys() - found.keys()):
        raise CheckpointMismatchError(
            f"{name} needs {missing[0]!r}, which is not there ({len(missing)} missing)"
        )
    if unknown := sorted(found.keys() - model.state_dict().keys()):
        raise CheckpointMismatchError(
            f"{unknown[0]!r} is no tensor of {name} ({len(unknown)} unknown)"
        )
    for key, tensor in stored.items():
        if tuple(tensor.shape) != found[key].shape:
            raise CheckpointMismatchError(
                f"{key} has shape {list(found[key].shape)}; {name} needs {list(tensor.shape)}: is "
                "it of another config?"
            )
    return {key: found[key] for key in stored}
