"""Read stored tensors from the files of a DCP folder.

`TensorReader` reads values straight into the tensors that receive them. Planning finds where the
values lie in a file. If the bytes before them are exactly those that torch writes here for this
shape and dtype (see `archive_of`), the values follow directly, and no archive is parsed. Files are
read in the order of their bytes by several threads, with preadv(2) into the tensors themselves,
many small ones per call. Nothing is faster from the page cache, and a failing disk is an `OSError`,
while a memory map would end the process. Tensors on a device, and those that are not contiguous, go
through blocks of a few megabytes per thread.

`read_archives` reads other archives (another version of torch, a strided tensor). They are parsed
as a whole with ``weights_only``, so that no code in them runs, and compared with ``.metadata``.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from ...utils.distributed import get_rank
from ...utils.errors import CheckpointCorruptError, CheckpointNotFoundError
from ...utils.heartbeat import beat
from ...utils.plain_values import load_plain
from ...utils.processes import reading_threads
from ..memory.host_blocks import HostBlocks
from ..memory.tensors import Box, bytes_of, memory_of
from .format import (
    Destination,
    FolderLayout,
    Overlap,
    PathLike,
    StoredTensor,
    archive_of,
)

BLOCK_BYTES = 8 << 20
"""Bytes per read."""

_GAP_BYTES = 16 << 10
"""Largest gap between two values that are read in one call. Reading the gap is cheaper than another
call.
"""
_MAX_BUFFERS = 1024
"""Most buffers of one preadv: IOV_MAX of Linux."""


class TensorReader:
    """Reads stored tensors (full name -> destination) of a folder. No tensor changes before `read`
    is called.

    ``names`` are the tensors that `read` fills. The others are stored in another way (see
    `read_archives`).

    Raises:
        CheckpointNotFoundError: this rank does not see a file.
        CheckpointCorruptError: a file is shorter than ``.metadata`` needs.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        folder: PathLike,
        layout: FolderLayout,
        destinations: Mapping[str, Destination],
    ) -> None:
        self.folder = Path(folder)
        self.names = set(destinations)
        self._identities: dict[str, tuple[int, ...]] = {}
        self._reads: dict[str, list[_Read]] = {}

        # Find the values in each file.
        files = list(layout.files)
        chunks = _chunks_wanted(layout, destinations)
        for number, chunks_of_file in groupby(chunks, key=lambda chunk: chunk.file):
            name = files[number]
            reads = []
            with _open_checked(self.folder / name, layout.files[name]) as file:
                self._identities[name] = _identity(os.fstat(file.fileno()))
                for chunk in chunks_of_file:
                    read = _find(file, chunk)
                    if read is None:
                        self.names.discard(chunk.name)
                    else:
                        reads.append(read)
            self._reads[name] = reads

        # A tensor is left out as a whole if one chunk is stored in another way.
        for name, reads in list(self._reads.items()):
            kept = [read for read in reads if read.name in self.names]
            if kept:
                self._reads[name] = kept
            else:
                del self._reads[name]

    def check_unchanged(self) -> None:
        """Raise `CheckpointCorruptError` if a file has changed since the plan was made."""
        for name in self._reads:
            self._check_identity(name)

    def read(self) -> None:
        """Read everything, and check that no file has changed meanwhile.

        Raises CheckpointCorruptError if one has, and OSError if one cannot be read. The tensors
        cannot be trusted then.
        """
        # File after file, so that each is checked when its last byte has been read.
        n_threads = reading_threads()
        with ThreadPoolExecutor(n_threads, thread_name_prefix="reading") as pool:
            for name, reads in self._reads.items():
                with open(self.folder / name, "rb", buffering=0) as file:
                    read_share = partial(_read_all, file, _stream_for(reads))
                    list(pool.map(read_share, _shares(reads, n_threads)))
                self._check_identity(name)

    def _check_identity(self, name: str) -> None:
        try:
            found = _identity(os.stat(self.folder / name))
        except FileNotFoundError:
            found = None
        if found != self._identities[name]:
            raise CheckpointCorruptError(
                f"{self.folder}/{name} changed, or was replaced, after it was checked; leave a "
                "folder alone while it is loaded"
            )


@contextmanager
def visible_here(path: PathLike) -> Iterator[None]:
    """Raise `CheckpointNotFoundError` if a block uses a file that rank 0 sees, and this rank does
    not see it.
    """
    try:
        yield
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"rank {get_rank()} does not see {path}, which rank 0 sees; all ranks need the same "
            "folder under the same path"
        ) from None


@contextmanager
def _open_checked(
    path: Path,
    n_bytes: int,
) -> Iterator[IO[bytes]]:
    with visible_here(path), open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if found < n_bytes:
            raise CheckpointCorruptError(f"{path} has {found} bytes; it needs {n_bytes}")
        yield file


class _WantedChunk(NamedTuple):
    """The needed part of a stored chunk, and the receiving tensor."""

    file: int  # position of the file
    begin: int  # first byte of the archive
    name: str
    stored: StoredTensor
    overlap: Overlap
    target: Tensor


def _chunks_wanted(
    layout: FolderLayout,
    destinations: Mapping[str, Destination],
) -> list[_WantedChunk]:
    # Hundreds of tensors are cut in a few ways.
    overlaps = {}
    found = []
    for name, (box, target) in destinations.items():
        stored = layout.tensors[name]
        cut = (id(stored.chunks), box)
        if cut not in overlaps:
            overlaps[cut] = stored.chunks.overlaps(box)
        for overlap in overlaps[cut]:
            file = int(stored.files[overlap.chunk])
            begin = int(stored.begins[overlap.chunk])
            found.append(_WantedChunk(file, begin, name, stored, overlap, target))
    return sorted(found, key=lambda chunk: (chunk.file, chunk.begin))


@dataclass(frozen=True)
class _Read:
    """A box of a stored chunk, whose values begin at byte ``at`` of the file, and the tensor that
    receives it.
    """

    name: str
    at: int
    chunk_sizes: tuple[int, ...]
    box: Box
    target: Tensor

    def contiguous_at(self) -> int | None:
        """First byte of the target in the file, if its bytes are contiguous in file and memory.
        None otherwise.
        """
        if self.target.is_conj() or self.target.is_neg():  # its bytes are not its values
            return None
        before = _elements_before(self.chunk_sizes, self.box)
        if before is None or not self.target.is_contiguous():
            return None
        return self.at + before * self.target.itemsize

    def copy_rows(
        self,
        file: IO[bytes],
        blocks: HostBlocks,
    ) -> None:
        """Read whole stored rows, at least one at a time, and copy the wanted part."""
        itemsize = self.target.itemsize
        # A number has no rows.
        if not self.chunk_sizes:
            value = _read_block(file, self.at, blocks.take(itemsize))
            number = value.view(self.target.dtype)
            blocks.copy(self.target, number.view(()))
            return

        # Rows are as wide as the chunk. The target may be narrower.
        width = self.chunk_sizes[1:]
        row_bytes = math.prod(width) * itemsize
        step = max(1, BLOCK_BYTES // row_bytes)
        for row in range(0, self.box.sizes[0], step):
            target = self.target[row : row + step]
            begin = self.at + (self.box.offsets[0] + row) * row_bytes
            data = _read_block(file, begin, blocks.take(len(target) * row_bytes))
            rows = data.view(target.dtype).view(len(target), *width)
            wanted = Box((0, *self.box.offsets[1:]), tuple(target.shape))
            blocks.copy(target, _narrow(rows, wanted))


def _find(
    file: IO[bytes],
    chunk: _WantedChunk,
) -> _Read | None:
    """Where the values of a chunk lie in ``file``. None if the archive is not one that torch writes
    here.
    """
    # The archive must be the one that torch writes here.
    overlap = chunk.overlap
    archive = archive_of(overlap.chunk_sizes, chunk.stored.dtype)
    if chunk.stored.lengths[overlap.chunk] != archive.bytes:
        return None
    found = os.pread(file.fileno(), len(archive.prefix), chunk.begin)
    if found != archive.prefix:
        return None

    # The values follow the prefix.
    target = chunk.target
    if overlap.in_chunk.sizes != target.shape:
        target = _narrow(target, Box(overlap.offsets, overlap.in_chunk.sizes))
    at = chunk.begin + len(archive.prefix)
    return _Read(chunk.name, at, overlap.chunk_sizes, overlap.in_chunk, target)


def _elements_before(
    shape: tuple[int, ...],
    box: Box,
) -> int | None:
    """Number of elements stored before a box, if the elements of the box are contiguous. None
    otherwise.
    """
    # From the last dimension, whose elements are next to each other, to the first.
    before = 0
    stride = 1
    is_partial = False  # a later dimension is not taken whole
    for dim in reversed(range(len(shape))):
        length = box.sizes[dim]
        if is_partial and length != 1:
            return None
        before += box.offsets[dim] * stride
        stride *= shape[dim]
        is_partial = is_partial or length != shape[dim]
    return before


def _shares(
    reads: list[_Read],
    n: int,
) -> list[list[_Read]]:
    # Neighbours in the file go to one thread, and all threads read about as much.
    shares: list[list[_Read]] = [[] for _ in range(n)]
    total = max(1, sum(read.target.nbytes for read in reads))
    before = 0
    for read in reads:
        number = min(before * n // total, n - 1)
        shares[number].append(read)
        before += read.target.nbytes
    return [share for share in shares if share]


def _stream_for(reads: list[_Read]) -> torch.cuda.Stream | None:
    """The caller's current stream on the device of the targets, which orders the load with its work
    before and after.

    None on the CPU.
    """
    for read in reads:
        if read.target.is_cuda:
            return torch.cuda.current_stream(read.target.device)
    return None


@torch.no_grad()  # the setting is per thread
def _read_all(
    file: IO[bytes],
    stream: torch.cuda.Stream | None,
    reads: list[_Read],
) -> None:
    device = torch.device("cpu")
    on_stream: AbstractContextManager[Any] = nullcontext()
    if stream is not None:
        device = stream.device
        on_stream = torch.cuda.stream(stream)
    blocks = HostBlocks(BLOCK_BYTES, device)

    # Contiguous host memory is filled by few calls.
    in_place = []
    others = []
    for read in reads:
        at = read.contiguous_at()
        if at is not None and read.target.is_cpu:
            in_place.append((at, bytes_of(read.target)))
        else:
            others.append((at, read))
    _read_into(file, in_place)

    # A new thread is on the default stream of device 0. There copies would overtake a step of
    # another stream that is still running, and pinning memory would make every rank a context.
    with on_stream:
        for at, read in others:
            if at is None:
                read.copy_rows(file, blocks)
                continue
            for begin, values in _blocks_of(at, bytes_of(read.target)):
                block = blocks.take(len(values))
                blocks.copy(values, _read_block(file, begin, block))
        blocks.drain()


def _blocks_of(
    begin: int,
    values: Tensor,
) -> Iterator[tuple[int, Tensor]]:
    """Cut ``[n]`` uint8 into blocks, each with its first byte in the file."""
    for at in range(0, len(values), BLOCK_BYTES):
        yield begin + at, values[at : at + BLOCK_BYTES]


def _read_into(
    file: IO[bytes],
    ranges: Iterable[tuple[int, Tensor]],
) -> None:
    """Fill host tensors (``[n]`` uint8), each from its place in the file, in the order of the file
    and in few calls.
    """
    between = memoryview(bytearray(_GAP_BYTES))  # read, but not wanted
    buffers: list[memoryview] = []
    begin = 0
    end = 0
    for at, values in (block for range_ in ranges for block in _blocks_of(*range_)):
        # A block that is too far away, or too much, begins another call.
        gap = at - end
        is_near = 0 <= gap <= _GAP_BYTES
        is_full = len(buffers) + 2 > _MAX_BUFFERS or at + len(values) - begin > BLOCK_BYTES
        if buffers and (is_full or not is_near):
            _preadv(file, begin, buffers)
            buffers = []

        if not buffers:
            begin = at
        elif gap:
            buffers.append(between[:gap])
        buffers.append(memory_of(values))
        end = at + len(values)
    if buffers:
        _preadv(file, begin, buffers)


def _read_block(
    file: IO[bytes],
    begin: int,
    into: Tensor,
) -> Tensor:
    _preadv(file, begin, [memory_of(into)])
    return into


def _preadv(
    file: IO[bytes],
    begin: int,
    buffers: list[memoryview],
) -> None:
    """Fill ``buffers`` in order with the bytes from ``begin`` on. The kernel may return fewer at a
    time.
    """
    while buffers:
        count = os.preadv(file.fileno(), buffers, begin)
        if not count:
            raise CheckpointCorruptError(
                f"{file.name} ends at {begin}, although it was longer when it was checked"
            )
        begin += count

        # Buffers that are full are dropped.
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    beat()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size and time of change: others once a file was replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_now(
    folder: PathLike,
    layout: FolderLayout,
    destinations: Mapping[str, Destination],
) -> None:
    """Read tensors, however they are stored, into memory that nothing else uses yet. Raises as
    `TensorReader` does.
    """
    # Directly, as far as that is possible.
    reader = TensorReader(folder, layout, destinations)
    reader.read()
    others = destinations.keys() - reader.names
    if others:
        read_archives(folder, layout, {name: destinations[name] for name in others})


def read_archives(
    folder: PathLike,
    layout: FolderLayout,
    destinations: Mapping[str, Destination],
) -> None:
    """Fill tensors from archives that are parsed as a whole. Takes the memory of one archive at a
    time.

    Raises OSError, and CheckpointCorruptError if an archive is damaged, or has another dtype or
    shape than ``.metadata`` says.
    """
    files = list(layout.files)
    for name, (box, tensor) in destinations.items():
        stored = layout.tensors[name]
        label = f"{folder}: {name}"
        for overlap in stored.chunks.overlaps(box):
            beat()
            number = overlap.chunk
            path = Path(folder) / files[stored.files[number]]
            begin = int(stored.begins[number])
            length = int(stored.lengths[number])
            value = _parse(path, begin, length, label)
            # A damaged archive may hold anything.
            found = _described(value)
            announced = f"{list(overlap.chunk_sizes)} {stored.dtype}"
            if found != announced:
                raise CheckpointCorruptError(
                    f"{label} holds {found}; .metadata announces {announced}"
                )
            target = _narrow(tensor, Box(overlap.offsets, overlap.in_chunk.sizes))
            target.copy_(_narrow(value, overlap.in_chunk))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return type(value).__name__


def read_object(
    folder: PathLike,
    layout: FolderLayout,
    name: str,
) -> Any:
    """Read a stored value that is not a tensor. Raises as `read_archives` does."""
    place = layout.objects[name]
    path = Path(folder) / place.relative_path
    return _parse(path, place.offset, place.length, f"{folder}: {name}")


def _parse(
    path: Path,
    begin: int,
    length: int,
    label: str,
) -> Any:
    with open(path, "rb") as file:
        archive = cast(IO[bytes], _FileWindow(file, begin, length))
        return load_plain(archive, label)


def _narrow(
    tensor: Tensor,
    box: Box,
) -> Tensor:
    for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _FileWindow(RawIOBase):
    """A range of an open file, as a file. Torch's own class for this cannot seek from its end."""

    def __init__(
        self,
        file: IO[bytes],
        start: int,
        length: int,
    ) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(
        self,
        offset: int,
        whence: int = SEEK_SET,
    ) -> int:
        origins = {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._length}
        self._at = max(0, offset + origins[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        left = max(0, self._length - self._at)
        count = self._file.readinto(memoryview(buffer)[:left])  # type: ignore[attr-defined]
        self._at += count
        return count
