"""Read a DCP folder's ``.metadata`` without running it, and check that the files it speaks of are there in full.

Torch unpickles ``.metadata`` as it comes, which runs whatever code somebody put in. Here only the handful of types
that torch itself writes there can be made; anything else is an error that names it.
"""

import os
import pickle
import stat
from pathlib import Path, PurePath
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from ..utils.errors import CheckpointCorruptError, CheckpointNotFoundError

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size", "bfloat16", "bool", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
        "int16", "int32", "int64", "int8", "uint8", "complex64",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # what Python 3.13 calls it
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointCorruptError(
                f".metadata asks for {module}.{name}, which no checkpoint needs; it was not run"
            )
        return super().find_class(module, name)


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The metadata of the DCP folder ``path``, after checking that every file it names is there and long enough.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is not a DCP folder.
        CheckpointCorruptError: the metadata cannot be read, asks for a forbidden type, or a file is missing or short.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"checkpoint folder {folder} does not exist")
    if not (folder / ".metadata").is_file():
        found = sorted(entry.name for entry in folder.iterdir())[:8]
        raise CheckpointNotFoundError(f"{folder} is not a DCP checkpoint: no .metadata, only {found}")
    try:
        with open(folder / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError) as error:
        if isinstance(error, CheckpointCorruptError):
            raise
        raise CheckpointCorruptError(f"{folder}/.metadata cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not metadata.state_dict_metadata or not metadata.storage_data:
        raise CheckpointCorruptError(f"{folder}/.metadata describes no tensors")
    _check_files(folder, metadata)
    return metadata


def _check_files(folder: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        name = info.relative_path
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise CheckpointCorruptError(f"{folder}/.metadata points outside the folder: {name!r}")
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
    for name, end in ends.items():
        try:
            status = os.stat(folder / name)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{folder} is incomplete: {name} is missing") from None
        if not stat.S_ISREG(status.st_mode) or status.st_size < end:
            raise CheckpointCorruptError(f"{folder}/{name} has {status.st_size} bytes; .metadata needs {end}")


def tensor_entry(metadata: Metadata, name: str) -> TensorStorageMetadata | None:
    """What the metadata says of the tensor ``name``; None when it has no such key or the key holds bytes."""
    entry = metadata.state_dict_metadata.get(name)
    return entry if isinstance(entry, TensorStorageMetadata) else None


class CheckedReader(FileSystemReader):
    """Torch's reader over metadata that `read_metadata` has already read and checked."""

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata) -> None:
        super().__init__(path)
        self._checked = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked metadata; nothing is unpickled again."""
        if self._checked.storage_meta is None:
            self._checked.storage_meta = StorageMeta()
        self._checked.storage_meta.load_id = self.load_id
        return self._checked
