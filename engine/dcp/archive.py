"""Archives of `torch.save`. A ``.distcp`` file is a sequence of them (zip, not compressed).

- Archives written here: the bytes around the values are the same for all tensors of a shape and a dtype. Torch makes
  them once without values (`skip_data`). So tensors are written and found in a file without building or parsing an
  archive, whatever format this version of torch uses. Zip's CRC32 of the values, and the id that torch derives from it,
  stay as torch leaves them when it skips the data. ``torch.load`` looks at neither, and files have digests.
- Other archives (other versions of torch, strided tensors) are parsed as a whole with ``weights_only``, so that no code
  in them runs, and compared with ``.metadata``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data
from torch.utils.serialization import config as serialization_config

from ...utils.errors import CheckpointCorruptError
from ...utils.heartbeat import beat
from ...utils.safe_torch import load_plain
from ..memory.tensors import Box
from .metadata import Destination, FolderLayout, PathLike


@dataclass(frozen=True)
class Archive:
    """The archive of a contiguous CPU tensor: the bytes before and after its values. Others have another prefix."""

    prefix: bytes
    data_bytes: int
    suffix: bytes

    @property
    def bytes(self) -> int:
        """Number of bytes of the whole archive."""
        return len(self.prefix) + self.data_bytes + len(self.suffix)


_SETTINGS = {"save.storage_alignment": 64, "save.compute_crc32": True}
"""Torch's defaults. A user may have set others, but all ranks must agree, because rank 0 plans where each writes."""


@lru_cache(maxsize=4096)
def archive_of(shape: tuple[int, ...], dtype: torch.dtype) -> Archive:
    """The archive of a CPU tensor of this shape and dtype, whatever torch's settings are. About 0.1 ms.

    Takes no memory: the storage is never touched. `torch.empty` would fill it in deterministic mode.
    """
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device="cpu")
    strides = torch.empty(shape, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)
    sink = _Sink()
    with skip_data(), cast(Any, serialization_config).patch(_SETTINGS):
        torch.save(tensor, cast(IO[bytes], sink))
    return Archive(b"".join(sink.prefix), sink.data_bytes, b"".join(sink.suffix))


class _Sink:
    """A file that keeps the bytes before and after the one range that is skipped."""

    def __init__(self) -> None:
        self.prefix: list[bytes] = []
        self.suffix: list[bytes] = []
        self.data_bytes = 0

    def write(self, data: bytes) -> int:
        (self.suffix if self.data_bytes else self.prefix).append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        self.data_bytes += offset

    def flush(self) -> None:
        """Called by torch."""


def read_archives(folder: PathLike, layout: FolderLayout, destinations: Mapping[str, Destination]) -> None:
    """Fill tensors from archives that are parsed as a whole. Takes the memory of one archive at a time.

    Args:
        folder: DCP folder.
        layout: layout of the folder, checked.
        destinations: full name of a stored tensor -> the box to read, and the tensor that receives it.

    Raises:
        CheckpointCorruptError: an archive cannot be read, or has another dtype or shape than ``.metadata`` says.
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


def read_object(folder: PathLike, layout: FolderLayout, name: str) -> Any:
    """Read a stored value that is not a tensor.

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
    """A range of an open file, as a file. Torch's own class for this cannot seek from its end."""

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
