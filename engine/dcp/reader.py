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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

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
        self, folder: PathLike, layout: FolderLayout, destinations: Mapping[str, Destination]
    ) -> None:
        self.folder = Path(folder)
        self._identities: dict[str, tuple[int, ...]] = {}
        self._reads: dict[str, list[_Read]] = {}
        self.names = set(destinations)
        files = list(layout.files)
        for number, wanted in groupby(
            _chunks_wanted(layout, destinations), key=lambda chunk: chunk.file
        ):
            name = files[number]
            with _open_checked(self.folder / name, layout.files[name]) as file:
                self._identities[name] = _identity(os.fstat(file.fileno()))
                found = [(chunk.name, _find(file, chunk)) for chunk in wanted]
            self.names -= {name for name, read in found if read is None}
            self._reads[name] = [read for _, read in found if read is not None]
        kept = {
            name: [read for read in reads if read.name in self.names]
            for name, reads in self._reads.items()
        }
        self._reads = {name: reads for name, reads in kept.items() if reads}

    def check_unchanged(self) -> None:
        """Raise `CheckpointCorruptError` if a file has changed since the plan was made."""
        for name in self._reads:
            self._check_identity(name)

    def read(self) -> None:
        """Read everything, and check that no file has changed meanwhile.

        Raises CheckpointCorruptError if one has, and OSError if one cannot be read. The tensors
        cannot be trusted then.
        """
        n_threads = reading_threads()
        with ThreadPoolExecutor(n_threads, thread_name_prefix="reading") as pool:
            for name, reads in self._reads.items():
                with open(self.folder / name, "rb", buffering=0) as file:
                    list(
                        pool.map(
                            partial(_read_all, file, _stream_for(reads)), _shares(reads, n_threads)
                        )
                    )
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
def _open_checked(path: Path, n_bytes: int) -> Iterator[IO[bytes]]:
    with visible_here(path), open(path, "rb", buffering=0) as file:
        if (found := os.fstat(file.fileno()).st_size) < n_bytes:
            raise CheckpointCorruptError(f"{path} has {found} bytes; it needs {n_bytes}")
        yield file


class _WantedChunk(NamedTuple):
    """The needed part of a stored chunk, and the receiving tensor."""

    file: int  # position of the file
    begin: int  # first byte of the archive
    name: str
    stored: StoredTensor
    overlap: Overlap
    target: torch.Tensor


def _chunks_wanted(
    layout: FolderLayout, destinations: Mapping[str, Destination]
) -> list[_WantedChunk]:
    found: list[_WantedChunk] = []
    overlaps: dict[tuple[int, Box], list[Overlap]] = {}  # hundreds of tensors are cut in a few ways
    for name, (box, target) in destinations.items():
        stored = layout.tensors[name]
        cut = id(stored.chunks), box
        if cut not in overlaps:
            overlaps[cut] = stored.chunks.overlaps(box)
        for overlap in overlaps[cut]:
            place = int(stored.files[overlap.chunk]), int(stored.begins[overlap.chunk])
            found.append(_WantedChunk(*place, name, stored, overlap, target))
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
    target: torch.Tensor

    def contiguous_at(self) -> int | None:
        """First byte of the target in the file, if its bytes are contiguous in file and memory.
        None otherwise.
        """
        before = _elements_before(self.chunk_sizes, self.box)
        lazy = self.target.is_conj() or self.target.is_neg()  # its bytes are not its values
        if before is None or lazy or not self.target.is_contiguous():
            return None
        return self.at + before * self.target.itemsize

    def copy_rows(self, file: IO[bytes], blocks: HostBlocks) -> None:
        """Read whole stored rows, at least one at a time, and copy the wanted part."""
        if not self.chunk_sizes:
            value = _read_block(file, self.at, blocks.take(self.target.itemsize))
            blocks.copy(self.target, value.view(self.target.dtype).view(()))
            return
        first, n_rows = self.box.offsets[0], self.box.sizes[0]
        row_bytes = math.prod(self.chunk_sizes[1:]) * self.target.itemsize
        step = max(1, BLOCK_BYTES // row_bytes)
        for row in range(0, n_rows, step):
            target = self.target[row : row + step]
            data = _read_block(
                file, self.at + (first + row) * row_bytes, blocks.take(len(target) * row_bytes)
            )
            rows = data.view(target.dtype).view(len(target), *self.chunk_sizes[1:])
            blocks.copy(target, _narrow(rows, Box((0, *self.box.offsets[1:]), tuple(target.shape))))


def _find(file: IO[bytes], chunk: _WantedChunk) -> _Read | None:
    """Where the values of a chunk lie in ``file``. None if the archive is not one that torch writes
    here.
    """
    overlap, target = chunk.overlap, chunk.target
    archive = archive_of(overlap.chunk_sizes, chunk.stored.dtype)
    if chunk.stored.lengths[overlap.chunk] != archive.bytes:
        return None
    if os.pread(file.fileno(), len(archive.prefix), chunk.begin) != archive.prefix:
        return None
    if overlap.in_chunk.sizes != target.shape:
        target = _narrow(target, Box(overlap.offsets, overlap.in_chunk.sizes))
    return _Read(
        chunk.name, chunk.begin + len(archive.prefix), overlap.chunk_sizes, overlap.in_chunk, target
    )


def _elements_before(shape: tuple[int, ...], box: Box) -> int | None:
    """Number of elements stored before a box, if the elements of the box are contiguous. None
    otherwise.
    """
    before, stride, partial_dim = 0, 1, False
    for size, begin, length in zip(
        reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True
    ):
        if partial_dim and length != 1:
            return None
        before, stride, partial_dim = (
            before + begin * stride,
            stride * size,
            partial_dim or length != size,
        )
    return before


def _shares(reads: list[_Read], n: int) -> list[list[_Read]]:
    shares: list[list[_Read]] = [[] for _ in range(n)]
    total, before = sum(read.target.nbytes for read in reads), 0
    for read in reads:
        shares[min(before * n // max(1, total), n - 1)].append(read)
        before += read.target.nbytes
    return [share for share in shares if share]


def _stream_for(reads: list[_Read]) -> torch.cuda.Stream | None:
    """The caller's current stream on the device of the targets, which orders the load with its work
    before and after.

    None on the CPU.
    """
    device = next((read.target.device for read in reads if read.target.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


@torch.no_grad()  # the setting is per thread
def _read_all(file: IO[bytes], stream: torch.cuda.Stream | None, reads: list[_Read]) -> None:
    blocks = HostBlocks(BLOCK_BYTES, torch.device("cpu") if stream is None else stream.device)
    found = [(read, read.contiguous_at()) for read in reads]
    _read_into(
        file,
        [
            (at, bytes_of(read.target))
            for read, at in found
            if at is not None and read.target.is_cpu
        ],
    )
    # A new thread is on the default stream of device 0. There copies would overtake a step of
    # another stream that is still running, and pinning memory would make every rank a context.
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for read, at in found:
            if at is None:
                read.copy_rows(file, blocks)
            elif not read.target.is_cpu:
                for begin, values in _blocks_of(at, bytes_of(read.target)):
                    blocks.copy(values, _read_block(file, begin, blocks.take(len(values))))
        blocks.drain()


def _blocks_of(begin: int, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut ``[n]`` uint8 into blocks, each with its first byte in the file."""
    for at in range(0, len(values), BLOCK_BYTES):
        yield begin + at, values[at : at + BLOCK_BYTES]


def _read_into(file: IO[bytes], ranges: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Fill host tensors (``[n]`` uint8), each from its place in the file, in the order of the file
    and in few calls.
    """
    between = memoryview(bytearray(_GAP_BYTES))  # read, but not wanted
    buffers: list[memoryview] = []
    begin = end = 0
    for at, values in (block for range_ in ranges for block in _blocks_of(*range_)):
        gap = at - end
        full = len(buffers) + 2 > _MAX_BUFFERS or at + len(values) - begin > BLOCK_BYTES
        if buffers and (full or not 0 <= gap <= _GAP_BYTES):
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


def _read_block(file: IO[bytes], begin: int, into: torch.Tensor) -> torch.Tensor:
    _preadv(file, begin, [memory_of(into)])
    return into


def _preadv(file: IO[bytes], begin: int, buffers: list[memoryview]) -> None:
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
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    beat()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size and time of change. They differ once a file was replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_now(
    folder: PathLike, layout: FolderLayout, destinations: Mapping[str, Destination]
) -> None:
    """Read tensors, however they are stored, into memory that nothing else uses yet. Raises as
    `TensorReader` does.
    """
    reader = TensorReader(folder, layout, destinations)
    reader.read()
    if others := destinations.keys() - reader.names:
        read_archives(folder, layout, {name: destinations[name] for name in others})


def read_archives(
    folder: PathLike, layout: FolderLayout, destinations: Mapping[str, Destination]
) -> None:
    """Fill tensors from archives that are parsed as a whole. Takes the memory of one archive at a
    time.

    Raises OSError, and CheckpointCorruptError if an archive is damaged, or has another dtype or
    shape than ``.metadata`` says.
    """
    files = list(layout.files)
    for name, destination in destinations.items():
        stored, label = layout.tensors[name], f"{folder}: {name}"
        for overlap in stored.chunks.overlaps(destination.box):
            beat()
            path, begin = (
                Path(folder) / files[stored.files[overlap.chunk]],
                int(stored.begins[overlap.chunk]),
            )
            value = _parse(path, begin, int(stored.lengths[overlap.chunk]), label)
            shape, dtype = overlap.chunk_sizes, stored.dtype
            if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype != dtype:
                kind = type(value).__name__
                found = (
                    f"{list(value.shape)} {value.dtype}"
                    if isinstance(value, torch.Tensor)
                    else kind
                )
                raise CheckpointCorruptError(
                    f"{label} holds {found}; .metadata announces {list(shape)} {dtype}"
                )
            source = _narrow(value, overlap.in_chunk)
            _narrow(destination.tensor, Box(overlap.offsets, overlap.in_chunk.sizes)).copy_(source)


def read_object(folder: PathLike, layout: FolderLayout, name: str) -> Any:
    """Read a stored value that is not a tensor. Raises as `read_archives` does."""
    place = layout.objects[name]
    return _parse(
        Path(folder) / place.relative_path, place.offset, place.length, f"{folder}: {name}"
    )


def _parse(path: Path, begin: int, length: int, label: str) -> Any:
    with open(path, "rb") as file:
        return load_plain(cast(IO[bytes], _FileWindow(file, begin, length)), label)


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
        self._at = max(
            0, offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._length}[whence]
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return count
