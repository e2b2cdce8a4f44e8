"""Tensors in DCP folders and safetensors files as `LazyTensor`, read a block of rows at a time."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engine.dcp.format import Destination, read_layout
from ...engine.dcp.reader import (
    TensorReader,
    read_now,
    read_object,
)
from ...engine.hf.safetensors_layout import TensorSlot
from ...engine.hf.weight_files import WeightReader
from ...engine.memory.lazy_tensor import LazyTensor
from ...engine.memory.tensors import Box

Tensors = dict[str, LazyTensor]
"""Name -> values, which are not in memory."""


class DCPFolder:
    """The contents of a torch.distributed.checkpoint folder, under the names in it.

    Attributes:
        path: the folder.
        layout: what its ``.metadata`` says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layout = read_layout(path)

    def names(self, prefix: str) -> list[str]:
        """Names that begin with ``prefix``, tensors first, in the order of the folder.

        `FolderLayout.names` is a set, whose order differs by process.
        """
        layout = self.layout
        stored = (*layout.tensors, *layout.objects)
        return [name for name in stored if name.startswith(prefix)]

    def tensor(self, name: str) -> LazyTensor:
        """A tensor. One that another version of torch has written is read as a whole."""
        stored = self.layout.tensors[name]
        shape = tuple(stored.shape)
        dtype = stored.dtype

        # Each of these reads the file anew, so that only the rows that are asked for are in memory.
        def read_box(box: Box) -> Tensor:
            values = torch.empty(box.sizes, dtype=dtype)
            read_now(
                self.path,
                self.layout,
                {name: Destination(box, values)},
            )
            return values

        def read_all() -> Tensor:
            return read_box(whole)

        def read_rows(first: int, last: int) -> Tensor:
            if not shape:
                return read_all()
            n_rows = last - first
            offsets = (first, *beginning[1:])
            rows = Box(offsets, (n_rows, *shape[1:]))
            return read_box(rows)

        # The plan of a reader lacks the tensors whose archives this version of torch would not
        # make: their rows cannot be found without parsing the archive.
        beginning = (0,) * len(shape)
        whole = Box(beginning, shape)
        on_meta = torch.empty(shape, dtype=dtype, device="meta")
        planned = Destination(whole, on_meta)
        plan = TensorReader(
            self.path,
            self.layout,
            {name: planned},
        )
        if not plan.names:
            return LazyTensor.read_at_once(shape, dtype, read_all)
        return LazyTensor(shape, dtype, read_rows)

    def whole_tensor(self, name: str) -> Tensor:
        """All values of a small tensor with at least one dimension."""
        return read_whole(self.tensor(name))

    def object(self, name: str) -> Any:
        """A plain value that is no tensor."""
        return read_object(self.path, self.layout, name)


def read_whole(tensor: LazyTensor) -> Tensor:
    """All values of a tensor with at least one dimension."""
    blocks = [values for _, values in tensor.blocks()]
    return torch.cat(blocks)


def stored_safetensors(folder: Path, files: ExitStack) -> Tensors:
    """Tensors of ``model.safetensors``, or of the files in its index, under their names in the
    files.
    """
    reader = files.enter_context(WeightReader(folder))
    slots = reader.layout()
    return {name: slot_tensor(reader, slot) for name, slot in slots.items()}


def slot_tensor(reader: WeightReader, slot: TensorSlot) -> LazyTensor:
    """A tensor of a safetensors file that ``reader`` has found."""
    shape = tuple(slot.shape)

    def read_rows(first: int, last: int) -> Tensor:
        # Rows of a tensor are contiguous in the file.
        sizes = shape
        begin = 0  # in elements
        if shape:
            sizes = (last - first, *shape[1:])
            begin = first * tensor.row_elements
        values = torch.empty(sizes, dtype=slot.dtype)
        reader.read(slot, begin, values)
        return values

    tensor = LazyTensor(shape, slot.dtype, read_rows)
    return tensor
