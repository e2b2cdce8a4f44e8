"""The bytes of a DCP folder, as torch writes them: archives of tensors in ``.distcp`` files, and
``.metadata``.

Archives: a ``.distcp`` file is a sequence of archives of `torch.save` (zip, not compressed). The
bytes around the values are the same for all tensors of a shape and a dtype. Torch makes them once
without values (`skip_data`). So tensors are written and found in a file without building or parsing
an archive, whatever format this version of torch uses. Zip's CRC32 of the values, and the id that
torch derives from it, stay as torch leaves them when it skips the data. ``torch.load`` looks at
neither, and files have digests.

``.metadata``: torch unpickles it as it is, which can run any code. Here a restricted unpickler
makes only the few types that torch itself writes there, and any other type is an error that names
it. Torch's loader also ignores parts of a tensor that no chunk covers. Here the chunks of a tensor
must tile it exactly, the bytes of each chunk must be in a file, and each file must exist and be
long enough. The result, a `FolderLayout`, is kept in arrays, without a Python object for each of
the chunks that a thousand ranks have written.
"""

import copyreg
import gc
import math
import os
import pickle
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePath
from reprlib import repr as brief
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data
from torch.utils.serialization import config as serialization_config

from ...utils.compat.torch_private import StorageInfo
from ...utils.errors import CheckpointCorruptError, CheckpointNotFoundError
from ...utils.files import StrPath
from ...utils.plain_values import DAMAGE
from ..memory.tensors import Box

PathLike = StrPath
Tensors = Mapping[str, Tensor]
"""Tensors by name."""


@dataclass(frozen=True)
class Archive:
    """The archive of a contiguous CPU tensor: the bytes before and after its values. Others have
    another prefix.
    """

    prefix: bytes
    data_bytes: int
    suffix: bytes

    @property
    def bytes(self) -> int:
        """Number of bytes of the whole archive."""
        return len(self.prefix) + self.data_bytes + len(self.suffix)


_SETTINGS = {"save.storage_alignment": 64, "save.compute_crc32": True}
"""Torch's defaults. A user may have set others, but all ranks must agree, because rank 0 plans
where each writes.
"""


@lru_cache(maxsize=4096)
def archive_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Archive:
    """The archive of a CPU tensor of this shape and dtype, whatever torch's settings are. About 0.1
    ms.

    Takes no memory: the storage is never touched. `torch.empty` would fill it in deterministic
    mode.
    """
    # The memory of the tensor is never touched: torch skips the values.
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device="cpu")
    strides = torch.empty(shape, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage, 0, shape, strides)
    sink = _Sink()
    with skip_data(), cast(Any, serialization_config).patch(_SETTINGS):
        torch.save(tensor, cast(IO[bytes], sink))
    prefix = b"".join(sink.prefix)
    suffix = b"".join(sink.suffix)
    return Archive(prefix, sink.data_bytes, suffix)


class _Sink:
    """A file that keeps the bytes before and after the one range that is skipped."""

    def __init__(self) -> None:
        self.prefix: list[bytes] = []
        self.suffix: list[bytes] = []
        self.data_bytes = 0

    def write(self, data: bytes) -> int:
        side = self.suffix if self.data_bytes else self.prefix
        side.append(bytes(data))
        return len(data)

    def seek(
        self,
        offset: int,
        whence: int,
    ) -> None:
        self.data_bytes += offset

    def flush(self) -> None:
        """Called by torch."""


class Overlap(NamedTuple):
    """The intersection of a box and a chunk."""

    chunk: int  # number of the chunk
    chunk_sizes: tuple[int, ...]  # shape of the whole chunk
    in_chunk: Box  # the intersection, relative to the chunk
    offsets: tuple[int, ...]  # first index of the intersection in the box


@dataclass(frozen=True, eq=False)
class Chunks:
    """The boxes (``[n, dims]`` int64) in which a tensor is stored. They tile it. Tensors cut alike
    share them.
    """

    offsets: np.ndarray
    sizes: np.ndarray

    def overlaps(self, box: Box) -> list[Overlap]:
        """The intersections of ``box`` with all chunks. An empty list for an empty box."""
        if 0 in box.sizes:
            return []
        # Begin and end of the intersection of the box with each chunk.
        first = np.array(box.offsets, np.int64)
        end = first + np.array(box.sizes, np.int64)
        begins = np.maximum(self.offsets, first)
        ends = np.minimum(self.offsets + self.sizes, end)

        # Chunks that the box meets in every dimension.
        found = []
        for chunk in np.flatnonzero((begins < ends).all(1)):
            begin = begins[chunk]
            in_chunk = Box(
                _tuple_of(begin - self.offsets[chunk]),
                _tuple_of(ends[chunk] - begin),
            )
            chunk_sizes = _tuple_of(self.sizes[chunk])
            offsets = _tuple_of(begin - first)
            found.append(Overlap(int(chunk), chunk_sizes, in_chunk, offsets))
        return found


def _tuple_of(row: np.ndarray) -> tuple[int, ...]:
    return tuple(row.tolist())


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a folder. The arrays are ``[n]`` int64, for its ``n`` chunks."""

    shape: torch.Size  # of the whole tensor
    dtype: torch.dtype
    chunks: Chunks
    files: np.ndarray  # position of each chunk's file in `FolderLayout.files`
    begins: np.ndarray  # first byte of each chunk's archive in the file
    lengths: np.ndarray  # bytes of each chunk's archive


@dataclass(frozen=True, eq=False)
class FolderLayout:
    """Everything that a folder stores."""

    files: dict[str, int]  # name of each data file -> the bytes that it must have at least
    tensors: dict[str, StoredTensor]  # by full name
    objects: dict[str, StorageInfo]  # file and range of the archive of each value that is no tensor

    def names(self) -> set[str]:
        """Full names of tensors and objects."""
        return self.tensors.keys() | self.objects.keys()


class Destination(NamedTuple):
    """A box of a stored tensor, and the tensor that receives it: of any device and strides, with
    the stored dtype.
    """

    box: Box
    tensor: Tensor

    def like(self) -> "Destination":
        """The same box with fresh host memory."""
        memory = torch.empty(self.box.sizes, dtype=self.tensor.dtype, device="cpu")
        return Destination(self.box, memory)


_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(
        self,
        module: str,
        name: str,
    ) -> Any:
        if module == "pathlib._local":  # what Python 3.13 calls it
            module = "pathlib"
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointCorruptError(
                f"it asks for {module}.{name}, which no checkpoint needs; it was not run"
            )
        # Newer versions of torch store more properties than this one reads.
        found = super().find_class(module, name)
        if found is TensorProperties:
            return _StoredProperties
        return found


_N_PROPERTIES = 5
"""Number of fields of a tensor's properties that every supported version of torch reads."""


class _StoredProperties(TensorProperties):
    """Reads the properties that torch 2.15 stores (with strides) on older versions too."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:_N_PROPERTIES])


def stored_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """The fields of a tensor's properties that ``.metadata`` keeps.

    torch 2.15 adds strides. They are left out because they differ between the shards of a tensor,
    because torch before 2.15 cannot read them, and because files hold contiguous values. No tensor
    counts as pinned, because only staged copies of CUDA tensors are, and a snapshot of them has the
    bytes of a blocking save.
    """
    return replace(properties, pin_memory=False).__getstate__()[:_N_PROPERTIES]


def pickle_metadata(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``, which every supported version of torch reads."""
    stream = BytesIO()
    # Only the properties of tensors are not pickled as they are.
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduce_properties}
    pickler.dump(metadata)
    return stream.getvalue()


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    make, its_type, *_ = properties.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return make, its_type, stored_properties(properties)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector in all threads during the block.

    It runs more often as objects pile up: unpickling the ``.metadata`` of 1,024 ranks (160,000
    chunks) takes five times as long with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_layout(path: PathLike) -> FolderLayout:
    """Read the layout of a DCP folder, and check it against itself and against the files.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is not a DCP folder.
        CheckpointCorruptError: the metadata is damaged or asks for a forbidden type, the chunks of
            a tensor do not tile it, or a file is missing or short.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"checkpoint folder {folder} does not exist")
    if not (folder / ".metadata").is_file():
        found = sorted(entry.name for entry in folder.iterdir())[:8]
        raise CheckpointNotFoundError(
            f"{folder} is not a DCP checkpoint: no .metadata, only {found}"
        )

    # Every error of a damaged file becomes one that names it.
    data = (folder / ".metadata").read_bytes()
    try:
        layout = parse_metadata(data)
        _check_files(folder, layout)
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{folder}/.metadata: {error}") from error
    except (*DAMAGE, ImportError) as error:  # ImportError: a damaged name of a type
        raise CheckpointCorruptError(
            f"{folder}/.metadata cannot be read: {type(error).__name__}: {error}"
        ) from error
    return layout


@lru_cache(maxsize=4)
def parse_metadata(data: bytes) -> FolderLayout:
    """Parse the bytes of ``.metadata``. The result is cached, because the checks before a restore
    need it too.
    """
    with no_collection():
        metadata = _MetadataUnpickler(BytesIO(data)).load()
        is_metadata = isinstance(metadata, Metadata)
        if not (is_metadata and metadata.state_dict_metadata and metadata.storage_data):
            raise CheckpointCorruptError("it describes no tensors")
        ends = _find_ends(metadata.storage_data.values())

        # Tensors that are cut alike share their chunks.
        files = {name: number for number, name in enumerate(ends)}
        chunks: dict[Any, Chunks] = {}
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, StorageInfo] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(name, str):
                raise CheckpointCorruptError(
                    f"it has an entry under {brief(name)}; expected a name"
                )
            if isinstance(entry, TensorStorageMetadata):
                tensors[name] = _stored_tensor(name, entry, metadata.storage_data, files, chunks)
            elif isinstance(entry, BytesStorageMetadata):
                objects[name] = _stored_at(metadata.storage_data, name)
            else:
                raise CheckpointCorruptError(
                    f"{name!r} is a {type(entry).__name__}; expected a tensor or bytes"
                )
        return FolderLayout(ends, tensors, objects)


def _find_ends(places: Iterable[StorageInfo]) -> dict[str, int]:
    """Name of each data file -> the bytes that it must have at least."""
    ends: dict[str, int] = {}
    # The metadata may not lead out of the folder.
    for place in places:
        name = place.relative_path
        begin = place.offset
        length = place.length
        if name not in ends:
            path = PurePath(name)
            if path.is_absolute() or ".." in path.parts:
                raise CheckpointCorruptError(f"it points outside the folder: {name!r}")
        are_numbers = type(begin) is type(length) is int
        if not are_numbers or begin < 0 or length < 0:
            raise CheckpointCorruptError(
                f"it places something at {begin} of {name}, {length} bytes long"
            )
        if place.transform_descriptors:
            raise CheckpointCorruptError(
                f"{name} was written through {place.transform_descriptors}, unknown here"
            )
        ends[name] = max(ends.get(name, 0), begin + length)
    return ends


def _stored_tensor(
    name: str,
    entry: TensorStorageMetadata,
    stored: Mapping[MetadataIndex, StorageInfo],
    files: Mapping[str, int],
    chunks: dict[Any, Chunks],
) -> StoredTensor:
    shape = entry.size
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, torch.Size):
        raise CheckpointCorruptError(f"{name!r} has dtype {brief(dtype)} and size {brief(shape)}")

    # Tensors that are cut alike are checked once.
    boxes = tuple((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
    cut = (shape, boxes)
    if cut not in chunks:
        chunks[cut] = check_coverage(name, entry)

    # Each chunk has its bytes in a file, so no metadata can announce a tensor larger than the
    # folder.
    places = []
    for chunk in entry.chunks:
        n_bytes = math.prod(chunk.sizes) * dtype.itemsize
        place = _stored_at(stored, name, chunk.offsets, n_bytes)
        places.append([files[place.relative_path], place.offset, place.length])
    rows = np.array(places, np.int64).reshape(-1, 3)
    columns = rows.T.copy()
    return StoredTensor(shape, dtype, chunks[cut], *columns)


def _stored_at(
    stored: Mapping[MetadataIndex, StorageInfo],
    name: str,
    offsets: torch.Size | None = None,
    n_bytes: int = 0,
) -> StorageInfo:
    place = stored.get(MetadataIndex(name, offsets))
    at = list(offsets or ())
    if place is None:
        raise CheckpointCorruptError(f"no file holds {name!r} at {at}")
    if place.length < n_bytes:
        raise CheckpointCorruptError(
            f"{name!r} at {at} has {place.length} bytes in a file; it needs {n_bytes}"
        )
    return place


def check_coverage(
    name: str,
    entry: TensorStorageMetadata,
) -> Chunks:
    """The chunks of a tensor, which must tile it: in bounds, disjoint, and with as many elements as
    the tensor.

    Raises CheckpointCorruptError, which names a chunk, if they do not.
    """
    # Arrays: a row for each chunk.
    for chunk in entry.chunks:
        if not isinstance(chunk.offsets, torch.Size) or not isinstance(chunk.sizes, torch.Size):
            raise CheckpointCorruptError(
                f"{name!r} has a chunk whose place is not given as torch.Size"
            )
    rows = (len(entry.chunks), len(entry.size))
    begins = np.array([chunk.offsets for chunk in entry.chunks], np.int64).reshape(rows)
    sizes = np.array([chunk.sizes for chunk in entry.chunks], np.int64).reshape(rows)
    ends = begins + sizes

    # All chunks are in bounds.
    shape = tuple(entry.size)
    is_outside = begins < 0
    is_outside |= ends < begins
    is_outside |= ends > np.array(shape, np.int64)
    outside = is_outside.any(1)
    if outside.any():
        at = outside.argmax()
        raise CheckpointCorruptError(
            f"{name!r} has a chunk from {begins[at]} to {ends[at]}, outside of {list(shape)}"
        )

    # The chunks have as many elements as the tensor. Numbers of Python do not overflow.
    volumes = [math.prod(chunk.sizes) for chunk in entry.chunks]
    if sum(volumes) != math.prod(shape):
        raise CheckpointCorruptError(
            f"the chunks of {name!r} do not cover it: {sum(volumes)} elements, not {shape}"
        )

    # The chunks are disjoint, so they tile the tensor.
    if shape:
        filled = np.array(volumes) > 0
        clash = _overlap(begins[filled], ends[filled])
        if clash is not None:
            raise CheckpointCorruptError(
                f"the chunks of {name!r} that begin at {clash[0]} and {clash[1]} overlap"
            )
    return Chunks(begins, sizes)


def _overlap(
    begins: np.ndarray,
    ends: np.ndarray,
) -> tuple[list[int], list[int]] | None:
    """First indices of two boxes (rows of ``[n, dims]``) that overlap, found in one sweep."""
    # Along the dimension with most cuts, a box has the fewest neighbours.
    n_cuts = [len(np.unique(begins_along)) for begins_along in begins.T]
    along = n_cuts.index(max(n_cuts))
    order = np.argsort(begins[:, along], kind="stable")
    begins = begins[order]
    ends = ends[order]

    # The first box that begins behind each box. Only boxes before it may overlap.
    stops = np.searchsorted(begins[:, along], ends[:, along])
    for at in np.flatnonzero(stops > np.arange(len(stops)) + 1):
        others = slice(at + 1, stops[at])
        begin_before_end = begins[others] < ends[at]
        end_after_begin = ends[others] > begins[at]
        common = (begin_before_end & end_after_begin).all(1)
        if common.any():
            other = begins[others][common.argmax()]
            return begins[at].tolist(), other.tolist()
    return None


def _check_files(
    folder: Path,
    layout: FolderLayout,
) -> None:
    for name, end in layout.files.items():
        try:
            status = os.stat(folder / name)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"the folder is incomplete: {name} is missing") from None
        # A folder or a device under this name has no bytes to read.
        if not stat.S_ISREG(status.st_mode) or status.st_size < end:
            raise CheckpointCorruptError(f"{name} has {status.st_size} bytes; it needs {end}")


def rank_key(rank: int) -> str:
    """The key of a rank's own values: ``rank_00001``."""
    return f"rank_{rank:05d}"
