"""Tensors that are not stored as this version of torch stores them contiguously: each archive is parsed as a whole.

Archives of other versions of torch, or of strided tensors. They are read with ``weights_only``, so that nothing in them
is run, and must hold what ``.metadata`` announced.
"""

import os
from collections.abc import Mapping
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import IO, Any

import torch

from ...utils.errors import CheckpointCorruptError
from ...utils.heartbeat import beat
from ...utils.safe_torch import load_plain
from ..memory.tensors import Box
from .direct_reader import Destination, TensorReader
from .layout import FolderLayout


def read_now(folder: str | os.PathLike[str], layout: FolderLayout, destinations: Mapping[str, Destination]) -> None:
    """Read tensors, however they are stored, into memory that nothing else uses yet; raises as `read_archives`."""
    reader = TensorReader(folder, layout, destinations)
    reader.read()
    read_archives(folder, layout, {name: destinations[name] for name in destinations.keys() - reader.names})


def read_archives(
    folder: str | os.PathLike[str], layout: FolderLayout, destinations: Mapping[str, Destination]
) -> None:
    """Fill tensors from the archives they are stored in; takes the memory of one archive at a time.

    Args:
        folder: DCP folder.
        layout: of the folder, checked.
        destinations: full name of a stored tensor -> which box of it goes where.

    Raises:
        CheckpointCorruptError: an archive cannot be read, or is not of the dtype and shape in ``.metadata``.
        OSError: a file cannot be read.
    """
    files = list(layout.files)
    for name, destination in destinations.items():
        stored, label = layout.tensors[name], f"{folder}: {name}"
        for overlap in stored.chunks.overlaps(destination.box):
            beat()
            with open(Path(folder) / files[stored.files[overlap.chunk]], "rb") as file:
                begin, length = int(stored.begins[overlap.chunk]), int(stored.lengths[overlap.chunk])
                archive: Any = _FileWindow(file, begin, length)
                value = load_plain(archive, label)
            _check_announced(label, value, overlap.chunk_sizes, stored.dtype)
            source = _narrow(value, overlap.in_chunk)
            _narrow(destination.tensor, Box(overlap.offsets, overlap.in_chunk.sizes)).copy_(source)


def read_object(folder: str | os.PathLike[str], layout: FolderLayout, name: str) -> Any:
    """What is stored under ``name`` and is not a tensor.

    Raises:
        CheckpointCorruptError: it is damaged, or could only be read by running code.
        OSError: the file cannot be read.
    """
    place = layout.objects[name]
    with open(Path(folder) / place.file, "rb") as file:
        archive: Any = _FileWindow(file, place.begin, place.length)
        return load_plain(archive, f"{folder}: {name}")


def _check_announced(label: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype != dtype:
        found = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CheckpointCorruptError(f"{label} holds {found}; .metadata announces {list(shape)} {dtype}")


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _FileWindow(RawIOBase):
    """``length`` bytes of an open file from ``start`` on, as a file of their own.

    Torch's view of that kind cannot seek from its end.
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._at = max(0, offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._length}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return count
