"""Write a Hugging Face folder in one process, from tensors that are read block by block. Used to
convert checkpoints.

The files equal the files that `save` writes for the same model. Memory is one block (see
`LazyTensor`). A conversion of transformers that is not slices needs all tensors that it joins.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...utils.errors import CheckpointMismatchError
from ..api import HFExportOptions
from ..memory.lazy_tensor import LazyTensor
from .dtypes import file_dtypes
from .name_mapping import element_map, file_tensors, stored_tensors
from .safetensors_layout import MAX_SHARD_SIZE_BYTES, plan_layout
from .shard_ranges import overlap, plan_transfers, rows_part
from .sidecars import write_sidecars
from .tensor_origins import sources_of
from .weight_files import WeightWriter


@torch.no_grad()
def write_lazily(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    folder: Path,
    options: HFExportOptions,
    seen: Callable[[str, int, Tensor], object],
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
    stored, tied = stored_tensors(model, on_meta=True)
    sources = _match(model, stored, tied, tensors)

    # config.json takes its dtype from the parameters.
    for key, tensor in chain(model.named_parameters(), model.named_buffers()):
        if key in sources:
            dtype = sources[key].dtype
            tensor.data = torch.empty(tensor.shape, dtype=dtype, device="meta")

    # The places of all tensors, as `save` plans them for one rank.
    stored, _ = stored_tensors(model, on_meta=True)
    dtypes = file_dtypes(model, stored, options.dtype)
    for key, tensor in sources.items():
        sources[key] = tensor.to(dtypes[key])
    planned = file_tensors(model, stored, dtypes)
    limit = options.max_shard_size_bytes or MAX_SHARD_SIZE_BYTES
    layout = plan_layout(planned, limit, model.num_parameters())
    slots = layout.slots
    transfers = plan_transfers(planned, stored, [0])

    # The spans of each source, because a source is read once.
    wanted = {}
    for file_tensor, span in transfers.direct:
        slot = slots[file_tensor.key]
        wanted.setdefault(span.source, []).append((slot, span))

    def read(key: str) -> Iterator[tuple[int, Tensor]]:
        for first, values in sources[key].blocks():
            seen(key, first, values)
            yield first, values

    with WeightWriter(folder) as files:
        for file in layout.files:
            files.create(file)
        write_sidecars(model, folder, options, layout)

        # All places of a block are written while it is in memory.
        for key, source in sources.items():
            for first, values in read(key):
                row = first // source.row_elements
                part = rows_part(values, row, source.shape)
                for slot, span in wanted.get(key, ()):
                    for rows in overlap(span, part):
                        files.write(slot, *rows)
                # They are freed before the next block is read.
                values = part = rows = None

        # Conversions that are not slices need all their sources at once.
        for together in transfers.unmapped:
            keys = sources_of(together)
            shapes = {key: torch.Size(sources[key].shape) for key in keys}
            blocks = chain.from_iterable(read(key) for key in keys)
            flat = torch.cat([values.reshape(-1) for _, values in blocks])
            elements = element_map(model, shapes, together)
            for tensor in together:
                files.write(slots[tensor.key], 0, flat[elements[tensor.key]])
        files.sync()


def _match(
    model: PreTrainedModel,
    stored: Mapping[str, Tensor],
    tied: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
) -> dict[str, LazyTensor]:
    # A tensor may have any of its names. The name that is stored has precedence.
    found = {}
    for key, tensor in tensors.items():
        found[tied.get(key, key)] = tensor
    for key in stored.keys() & tensors.keys():
        found[key] = tensors[key]

    # Names come before shapes: all that the model stores, and no others.
    name = type(model).__name__
    missing = sorted(stored.keys() - found.keys())
    if missing:
        raise CheckpointMismatchError(
            f"{name} needs {missing[0]!r}, which is not there ({len(missing)} missing)"
        )
    known = model.state_dict()
    unknown = sorted(found.keys() - known.keys())
    if unknown:
        raise CheckpointMismatchError(
            f"{unknown[0]!r} is no tensor of {name} ({len(unknown)} unknown)"
        )
    for key, tensor in stored.items():
        shape = found[key].shape
        if shape != tuple(tensor.shape):
            raise CheckpointMismatchError(
                f"{key} has shape {list(shape)}; {name} needs {list(tensor.shape)}: "
                "is it of another config?"
            )
        dtype = found[key].dtype
        may_cast = dtype.is_floating_point and tensor.dtype.is_floating_point
        if dtype != tensor.dtype and not may_cast:
            raise CheckpointMismatchError(f"{key} has dtype {dtype}; {name} needs {tensor.dtype}")
    return {key: found[key] for key in stored}
