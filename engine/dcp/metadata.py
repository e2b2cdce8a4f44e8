"""DCP metadata of untrusted folders: a restricted unpickler for ``.metadata``, and checks that it is complete.

Torch unpickles ``.metadata`` as it comes, which runs whatever code somebody put in. Here only the handful of types
that torch itself writes there can be made; anything else is an error that names it. Torch's loader also leaves what no
chunk covers as it was, without a word; here the chunks of every tensor must tile it exactly, each must have its bytes
in a file, and each file must be there and long enough.
"""

import copyreg
import math
import os
import pickle
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePath
from reprlib import repr as brief
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...utils.compat.torch_private import StorageInfo
from ...utils.errors import CheckpointCorruptError, CheckpointNotFoundError
from ...utils.garbage import no_collection
from .layout import Chunks, FolderLayout, StoredObject, StoredTensor

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
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # what Python 3.13 calls it
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointCorruptError(f"it asks for {module}.{name}, which no checkpoint needs; it was not run")
        found = super().find_class(module, name)
        return _StoredProperties if found is TensorProperties else found


class _StoredProperties(TensorProperties):
    """Reads the properties that torch 2.15 stores, strides included, on older versions too."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:_N_PROPERTIES])


_N_PROPERTIES = 5
"""Fields of a tensor's properties that every supported version of torch reads."""


def stored_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """The fields of a tensor's properties that ``.metadata`` keeps.

    torch 2.15 adds strides. They are left out because they differ between the shards of a tensor, because torch before
    2.15 cannot read them, and because files hold contiguous values.
    """
    return properties.__getstate__()[:_N_PROPERTIES]


def pickle_metadata(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``, which every supported version of torch reads."""
    stream = BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduce_properties}
    pickler.dump(metadata)
    return stream.getvalue()


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    make, its_type, *_ = properties.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return make, its_type, stored_properties(properties)


def read_layout(path: str | os.PathLike[str]) -> FolderLayout:
    """The layout of the DCP folder ``path``, checked against itself and against the files it names.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is not a DCP folder.
        CheckpointCorruptError: the metadata is damaged or asks for a forbidden type, the chunks of a tensor do not tile
            it, or a file is missing or short.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"checkpoint folder {folder} does not exist")
    if not (folder / ".metadata").is_file():
        found = sorted(entry.name for entry in folder.iterdir())[:8]
        raise CheckpointNotFoundError(f"{folder} is not a DCP checkpoint: no .metadata, only {found}")
    data = (folder / ".metadata").read_bytes()
    try:
        layout = parse_metadata(data)
        _check_files(folder, layout)
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{folder}/.metadata: {error}") from error
    except _DAMAGE as error:
        raise CheckpointCorruptError(f"{folder}/.metadata cannot be read: {type(error).__name__}: {error}") from error
    return layout


@lru_cache(maxsize=4)
def parse_metadata(data: bytes) -> FolderLayout:
    """Parse the bytes of ``.metadata``. The result is cached, because a restore needs it three times."""
    with no_collection():
        metadata = _MetadataUnpickler(BytesIO(data)).load()
        if not isinstance(metadata, Metadata) or not metadata.state_dict_metadata or not metadata.storage_data:
            raise CheckpointCorruptError("it describes no tensors")
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            if info.relative_path not in ends:
                _check_inside(info.relative_path)
            _check_range(info)
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        files = {name: number for number, name in enumerate(ends)}
        chunks: dict[Any, Chunks] = {}
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, StoredObject] = {}
        for name, entry in metadata.state_dict_metadata.items():
            infos = _check_stored(name, entry, metadata.storage_data)
            if isinstance(entry, TensorStorageMetadata):
                tensors[name] = _stored_tensor(entry, infos, files, chunks)
            else:
                objects[name] = StoredObject(infos[0].relative_path, infos[0].offset, infos[0].length)
        return FolderLayout(ends, tensors, objects)


def _stored_tensor(
    entry: TensorStorageMetadata, infos: Sequence[StorageInfo], files: Mapping[str, int], chunks: dict[Any, Chunks]
) -> StoredTensor:
    cut = entry.size, tuple((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
    if cut not in chunks:
        shape = len(entry.chunks), len(entry.size)
        offsets = np.array([chunk.offsets for chunk in entry.chunks], np.int64).reshape(shape)
        sizes = np.array([chunk.sizes for chunk in entry.chunks], np.int64).reshape(shape)
        chunks[cut] = Chunks(offsets, sizes)
    return StoredTensor(
        entry.size,
        entry.properties.dtype,
        chunks[cut],
        np.array([files[info.relative_path] for info in infos], np.int64),
        np.array([info.offset for info in infos], np.int64),
        np.array([info.length for info in infos], np.int64),
    )


_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What unpickling and then using damaged bytes raises."""


def _check_stored(name: Any, entry: Any, stored: dict[MetadataIndex, StorageInfo]) -> list[StorageInfo]:
    """Where the chunks of the entry ``name`` lie; raises unless each has as many bytes as it needs at least.

    So nobody can announce a tensor that takes more memory than the folder takes space.
    """
    if not isinstance(name, str):
        raise CheckpointCorruptError(f"it has an entry under {brief(name)}; expected a name")
    if isinstance(entry, BytesStorageMetadata):
        needed = [(MetadataIndex(name), 0)]
    elif isinstance(entry, TensorStorageMetadata):
        if not isinstance(entry.properties.dtype, torch.dtype) or not isinstance(entry.size, torch.Size):
            dtype, size = brief(entry.properties.dtype), brief(entry.size)
            raise CheckpointCorruptError(f"{name!r} has dtype {dtype} and size {size}")
        check_coverage(name, entry)
        itemsize = entry.properties.dtype.itemsize
        needed = [(MetadataIndex(name, chunk.offsets), math.prod(chunk.sizes) * itemsize) for chunk in entry.chunks]
    else:
        raise CheckpointCorruptError(f"{name!r} is a {type(entry).__name__}; expected a tensor or bytes")
    infos = []
    for index, n_bytes in needed:
        info = stored.get(index)
        if info is None:
            raise CheckpointCorruptError(f"no file holds {name!r} at {list(index.offset or ())}")
        if info.length < n_bytes:
            raise CheckpointCorruptError(
                f"{name!r} at {list(index.offset or ())} has {info.length} bytes in a file; it needs {n_bytes}"
            )
        infos.append(info)
    return infos


def check_coverage(name: str, entry: TensorStorageMetadata) -> None:
    """See that the chunks of a tensor tile it: in bounds, disjoint, and with as many elements as it has.

    A thousand shards of rows cost about a millisecond.

    Raises:
        CheckpointCorruptError: naming what is wrong.
    """
    if not all(isinstance(c.offsets, torch.Size) and isinstance(c.sizes, torch.Size) for c in entry.chunks):
        raise CheckpointCorruptError(f"{name!r} has a chunk whose place is not given as torch.Size")
    shape, n_dims = tuple(entry.size), len(entry.size)
    if _stacked(shape, entry.chunks):
        return
    begins = np.array([chunk.offsets for chunk in entry.chunks], np.int64).reshape(len(entry.chunks), n_dims)
    ends = begins + np.array([chunk.sizes for chunk in entry.chunks], np.int64).reshape(len(entry.chunks), n_dims)
    outside = ((begins < 0) | (ends < begins) | (ends > np.array(shape, np.int64))).any(1)
    if outside.any():
        at = outside.argmax()
        raise CheckpointCorruptError(f"{name!r} has a chunk from {begins[at]} to {ends[at]}, outside of {list(shape)}")
    volumes = [math.prod(chunk.sizes) for chunk in entry.chunks]
    if sum(volumes) != math.prod(shape):
        raise CheckpointCorruptError(f"the chunks of {name!r} do not cover it: {sum(volumes)} elements, not {shape}")
    filled = np.array(volumes) > 0
    if n_dims and (clash := _overlap(begins[filled], ends[filled])):
        raise CheckpointCorruptError(f"the chunks of {name!r} that begin at {clash[0]} and {clash[1]} overlap")


def _stacked(shape: tuple[int, ...], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the chunks are whole rows one behind the other, as they mostly are: no more to check."""
    if not shape or min(shape) < 0:
        return False
    at, rest = 0, (0,) * (len(shape) - 1)
    for chunk in chunks:
        if chunk.offsets != (at, *rest) or chunk.sizes[1:] != shape[1:] or chunk.sizes[0] < 0:
            return False
        at += chunk.sizes[0]
    return at == shape[0]


def _overlap(begins: np.ndarray, ends: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Where two of the boxes (rows of ``[n, dims]``) begin that have a point in common; a sweep along one dimension."""
    along = max(range(begins.shape[1]), key=lambda dim: len(np.unique(begins[:, dim])))  # most cuts, fewest neighbours
    order = np.argsort(begins[:, along], kind="stable")
    begins, ends = begins[order], ends[order]
    stops = np.searchsorted(begins[:, along], ends[:, along])  # of each box: the first that begins behind it
    for at in np.flatnonzero(stops > np.arange(len(stops)) + 1):
        others = slice(at + 1, stops[at])
        common = ((begins[others] < ends[at]) & (begins[at] < ends[others])).all(1)
        if common.any():
            return begins[at].tolist(), begins[others][common.argmax()].tolist()
    return None


def _check_inside(name: str) -> None:
    """Raise unless a file is one of the folder."""
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise CheckpointCorruptError(f"it points outside the folder: {name!r}")


def _check_range(info: StorageInfo) -> None:
    """Raise unless a chunk is a range of a file, as it is."""
    name = info.relative_path
    if not (type(info.offset) is type(info.length) is int) or info.offset < 0 or info.length < 0:
        raise CheckpointCorruptError(f"it places something at {info.offset} of {name}, {info.length} bytes long")
    if info.transform_descriptors:
        raise CheckpointCorruptError(f"{name} was written through {info.transform_descriptors}, unknown here")


def _check_files(folder: Path, layout: FolderLayout) -> None:
    """Raise unless every file is there, and long enough for what is in it."""
    for name, end in layout.files.items():
        try:
            status = os.stat(folder / name)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"the folder is incomplete: {name} is missing") from None
        if not stat.S_ISREG(status.st_mode) or status.st_size < end:
            raise CheckpointCorruptError(f"{name} has {status.st_size} bytes; it needs {end}")
