"""Where stored tensors lie in a DCP folder: `FolderLayout`, parsed from ``.metadata`` of untrusted folders.

Torch unpickles ``.metadata`` as it is, which can run any code. Here a restricted unpickler makes only the few types
that torch itself writes there, and any other type is an error that names it. Torch's loader also ignores parts of a
tensor that no chunk covers. Here the chunks of a tensor must tile it exactly, the bytes of each chunk must be in a
file, and each file must exist and be long enough.

The layout is kept in arrays, without a Python object for each of the chunks that a thousand ranks have written.
"""

import copyreg
import math
import os
import pickle
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePath
from reprlib import repr as brief
from typing import Any, NamedTuple

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
from ..memory.tensors import Box

PathLike = str | os.PathLike[str]


class Overlap(NamedTuple):
    """The intersection of a box and a chunk.

    Attributes:
        chunk: number of the chunk.
        chunk_sizes: shape of the whole chunk.
        in_chunk: the intersection, relative to the chunk.
        offsets: first index of the intersection in the box.
    """

    chunk: int
    chunk_sizes: tuple[int, ...]
    in_chunk: Box
    offsets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chunks:
    """The boxes in which a tensor is stored. They tile the tensor. Tensors that are cut the same way share one object.

    Attributes:
        offsets: ``[n, dims]`` int64.
        sizes: ``[n, dims]`` int64.
    """

    offsets: np.ndarray
    sizes: np.ndarray

    def overlaps(self, box: Box) -> list[Overlap]:
        """The intersections of ``box`` with all chunks. An empty list for an empty box."""
        if 0 in box.sizes:
            return []
        begins = np.maximum(self.offsets, np.array(box.offsets, np.int64))
        ends = np.minimum(self.offsets + self.sizes, np.array(box.offsets, np.int64) + np.array(box.sizes, np.int64))
        return [
            Overlap(
                int(chunk),
                tuple(self.sizes[chunk].tolist()),
                Box(
                    tuple((begins[chunk] - self.offsets[chunk]).tolist()),
                    tuple((ends[chunk] - begins[chunk]).tolist()),
                ),
                tuple((begins[chunk] - np.array(box.offsets, np.int64)).tolist()),
            )
            for chunk in np.flatnonzero((begins < ends).all(1))
        ]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a folder.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of its values.
        chunks: how the tensor is cut.
        files: ``[n]`` int64, position of each chunk's file in `FolderLayout.files`.
        begins: ``[n]`` int64, first byte of each chunk's archive in the file.
        lengths: ``[n]`` int64, bytes of each chunk's archive.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: Chunks
    files: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray


class StoredObject(NamedTuple):
    """The place of a value that is not a tensor: file, first byte and length of an archive of `torch.save`."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True, eq=False)
class FolderLayout:
    """Everything that a folder stores.

    Attributes:
        files: name of each data file -> the bytes that it must have at least.
        tensors: full name -> tensor.
        objects: full name -> place of a value that is not a tensor.
    """

    files: dict[str, int]
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]

    def names(self) -> set[str]:
        """Full names of tensors and objects."""
        return self.tensors.keys() | self.objects.keys()


class Destination(NamedTuple):
    """A box of a stored tensor, and the tensor that receives it.

    Attributes:
        box: the box in the whole stored tensor.
        tensor: has the shape of the box and the stored dtype, on any device, with any strides.
    """

    box: Box
    tensor: torch.Tensor

    def like(self) -> "Destination":
        """The same box with fresh host memory."""
        return Destination(self.box, torch.empty(self.box.sizes, dtype=self.tensor.dtype, device="cpu"))


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
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
    """Reads the properties that torch 2.15 stores (with strides) on older versions too."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:_N_PROPERTIES])


_N_PROPERTIES = 5
"""Number of fields of a tensor's properties that every supported version of torch reads."""


def stored_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """The fields of a tensor's properties that ``.metadata`` keeps.

    torch 2.15 adds strides. They are left out because they differ between the shards of a tensor, because torch before
    2.15 cannot read them, and because files hold contiguous values. No tensor counts as pinned, because only staged
    copies of CUDA tensors are, and a snapshot of them has the bytes of a blocking save.
    """
    return replace(properties, pin_memory=False).__getstate__()[:_N_PROPERTIES]


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


def read_layout(path: PathLike) -> FolderLayout:
    """Read the layout of a DCP folder, and check it against itself and against the files.

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
    """Parse the bytes of ``.metadata``. The result is cached, because the checks before a restore need it too."""
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
    pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError, LookupError,
    MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors raised by unpickling and using damaged bytes."""


def _check_stored(name: Any, entry: Any, stored: dict[MetadataIndex, StorageInfo]) -> list[StorageInfo]:
    """Places of the chunks of an entry. Each chunk must have enough bytes in a file.

    So no metadata can announce a tensor that takes more memory than the folder takes space.
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
    """Check that the chunks tile a tensor: in bounds, disjoint, and with as many elements as the tensor.

    A thousand shards of rows take about a millisecond.

    Raises:
        CheckpointCorruptError: the chunks do not tile the tensor. The message names the chunk.
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
    """Whether the chunks are whole rows, one after the other. This is the usual case and needs no further check."""
    if not shape or min(shape) < 0:
        return False
    at, rest = 0, (0,) * (len(shape) - 1)
    for chunk in chunks:
        if chunk.offsets != (at, *rest) or chunk.sizes[1:] != shape[1:] or chunk.sizes[0] < 0:
            return False
        at += chunk.sizes[0]
    return at == shape[0]


def _overlap(begins: np.ndarray, ends: np.ndarray) -> tuple[list[int], list[int]] | None:
    """First indices of two boxes (rows of ``[n, dims]``) that overlap. A sweep along one dimension."""
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
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise CheckpointCorruptError(f"it points outside the folder: {name!r}")


def _check_range(info: StorageInfo) -> None:
    name = info.relative_path
    if not (type(info.offset) is type(info.length) is int) or info.offset < 0 or info.length < 0:
        raise CheckpointCorruptError(f"it places something at {info.offset} of {name}, {info.length} bytes long")
    if info.transform_descriptors:
        raise CheckpointCorruptError(f"{name} was written through {info.transform_descriptors}, unknown here")


def _check_files(folder: Path, layout: FolderLayout) -> None:
    for name, end in layout.files.items():
        try:
            status = os.stat(folder / name)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"the folder is incomplete: {name} is missing") from None
        if not stat.S_ISREG(status.st_mode) or status.st_size < end:
            raise CheckpointCorruptError(f"{name} has {status.st_size} bytes; it needs {end}")
