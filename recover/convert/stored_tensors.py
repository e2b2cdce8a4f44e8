"""Tensors in DCP folders and safetensors files as `LazyTensor`, read a block of rows at a time."""

from contextlib import ExitStack
from pathlib import Path

import torch

from ...engine.dcp.format import Destination, FolderLayout
from ...engine.dcp.reader import TensorReader, read_now
from ...engine.hf.safetensors_layout import TensorSlot
from ...engine.hf.weight_files import WeightReader
from ...engine.memory.lazy_tensor import LazyTensor
from ...engine.memory.tensors import Box


def stored_tensor(folder: Path, layout: FolderLayout, name: str) -> LazyTensor:
    """A tensor of a DCP folder. One that another version of torch has written is read as a whole."""
    stored = layout.tensors[name]
    shape = tuple(stored.shape)

    def read(first: int, last: int) -> torch.Tensor:
        sizes = (last - first, *shape[1:]) if shape else ()
        values = torch.empty(sizes, dtype=stored.dtype)
        box = Box((first, *[0] * (len(shape) - 1)) if shape else (), sizes)
        read_now(folder, layout, {name: Destination(box, values)})
        return values

    planned = torch.empty(shape, dtype=stored.dtype, device="meta")
    if TensorReader(
        folder, layout, {name: Destination(Box((0,) * len(shape), shape), planned)}
    ).names:
        return LazyTensor(shape, stored.dtype, read)
    return LazyTensor.read_at_once(shape, stored.dtype, lambda: read(0, shape[0] if shape else 1))


def read_whole(tensor: LazyTensor) -> torch.Tensor:
    """All values of a tensor with at least one dimension."""
    return torch.cat([values for _, values in tensor.blocks()])


def stored_safetensors(folder: Path, files: ExitStack) -> dict[str, LazyTensor]:
    """Tensors of ``model.safetensors``, or of the files in its index, under their names in the
    files.
    """
    reader = files.enter_context(WeightReader(folder))
    return {name: slot_tensor(reader, slot) for name, slot in reader.layout().items()}


def slot_tensor(reader: WeightReader, slot: TensorSlot) -> LazyTensor:
    """A tensor of a safetensors file that ``reader`` has found."""

    def rows(first: int, last: int) -> torch.Tensor:
        values = torch.empty(
            (last - first, *slot.shape[1:]) if slot.shape else (), dtype=slot.dtype
        )
        reader.read(slot, first * tensor.row_elements if slot.shape else 0, values)
        return values

    tensor = LazyTensor(tuple(slot.shape), slot.dtype, rows)
    return tensor
