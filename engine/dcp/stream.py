"""Write a DCP folder from tensors that are read block by block, in one process: what a conversion ends in.

The folder is one that stock ``dcp.load`` reads, on any number of ranks. Each tensor is one chunk; files end at about
`FILE_BYTES`, so that many ranks can read and verify them side by side. Memory: a block (see `LazyTensor`).
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...utils.compat.torch_private import CURRENT_DCP_VERSION, StorageInfo
from ...utils.files import DurableFile
from ...utils.manifest import FileEntry, write_entry
from ..memory.lazy_tensor import LazyTensor
from ..memory.tensors import bytes_of
from .metadata import pickle_metadata
from .tensor_framing import archive_of

FILE_BYTES = 4 << 30
"""Where a data file ends; a tensor is never cut."""

Keys = tuple[str | int, ...]
"""Keys that lead to a value in the nested state that is stored; its name is these, joined by dots."""


class Entry(NamedTuple):
    """A value of the folder: a tensor, or what torch stores as an object."""

    path: Keys
    value: LazyTensor | Any

    @property
    def name(self) -> str:
        """The name that torch gives to it."""
        return ".".join(map(str, self.path))


def write_entries(
    folder: str | os.PathLike[str],
    entries: Iterable[Entry],
    seen: Callable[[str, int, torch.Tensor], None] = lambda name, first, values: None,
) -> list[FileEntry]:
    """Write ``entries`` into the existing, empty ``folder`` and fsync the files.

    Args:
        folder: of no other rank.
        entries: at least one tensor.
        seen: called with the name, the first element, and the values of every block that is written.

    Returns:
        every file, as the manifest has it.

    Raises:
        OSError: the file system refused.
    """
    metadata = Metadata({}, {}, {}, None, CURRENT_DCP_VERSION)
    stored: dict[MetadataIndex, StorageInfo] = {}
    files: list[FileEntry] = []
    rest = iter(entries)
    following = next(rest, None)
    for number in count():
        if following is None:
            break
        with DurableFile(Path(folder) / f"__{number}_0.distcp") as file:
            while following is not None and file.bytes < FILE_BYTES:
                name, at = following.name, file.bytes
                metadata.planner_data[name] = following.path
                if isinstance(following.value, LazyTensor):
                    index, metadata.state_dict_metadata[name] = _describe(name, following.value)
                    for data in _framed(name, following.value, seen):
                        file.write(data)
                else:
                    index, metadata.state_dict_metadata[name] = MetadataIndex(name), BytesStorageMetadata()
                    file.write(_packed(following.value))
                stored[index] = StorageInfo(file.path.name, at, file.bytes - at)
                following = next(rest, None)
        files.append(FileEntry(file.path.name, file.bytes, file.digest))
    metadata.storage_data = stored
    return [*files, write_entry(folder, ".metadata", pickle_metadata(metadata))]


def _describe(name: str, tensor: LazyTensor) -> tuple[MetadataIndex, TensorStorageMetadata]:
    shape = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return MetadataIndex(name, chunk.offsets, 0), TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype), shape, [chunk]
    )


def _framed(name: str, tensor: LazyTensor, seen: Callable[[str, int, torch.Tensor], None]) -> Iterator[Any]:
    archive = archive_of(tensor.shape, tensor.dtype)
    yield archive.prefix
    for first, values in tensor.blocks():
        values = values.resolve_conj().resolve_neg()
        seen(name, first, values)
        yield memoryview(bytes_of(values).numpy().data)  # type: ignore[arg-type]
    yield archive.suffix


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
