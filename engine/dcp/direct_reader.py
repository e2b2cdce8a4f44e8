"""Copy stored tensors from their files straight to where they belong.

Planning finds out where in a file the values lie: if what is before them is, byte for byte, what torch here writes
before a tensor of that shape and dtype (see `tensor_framing`), they begin right behind it, and no archive is parsed.
Anything else (another version of torch, a strided tensor) is left to `CheckedReader`.

Files are read in the order of their bytes, by as many threads as `reading_threads` says, with read(2) into the tensors
themselves: nothing is faster from the page cache, and a disk that fails is an `OSError`, where a memory map would end
the process. What goes to a device, or not side by side, goes through blocks of a few megabytes a thread (`HostBlocks`).
"""

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import Metadata, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...utils.cores import reading_threads
from ...utils.errors import CheckpointCorruptError
from ...utils.heartbeat import beat
from ..compat.torch_private import StorageInfo
from ..host_blocks import HostBlocks
from ..tensors import bytes_of
from .metadata import tensor_entry
from .tensor_framing import archive_of

BLOCK_BYTES = 8 << 20
"""What is read at once."""


@dataclass(frozen=True)
class Part:
    """A box of a stored tensor, and the tensor it goes to.

    Attributes:
        chunk: the box: offsets and sizes in the whole tensor.
        tensor: of these sizes and the stored dtype, on any device, with any strides.
    """

    chunk: ChunkStorageMetadata
    tensor: torch.Tensor

    def like(self) -> "Part":
        """The same box, into fresh host memory."""
        return Part(self.chunk, torch.empty(self.chunk.sizes, dtype=self.tensor.dtype, device="cpu"))

    def split_rows(self) -> Iterator["Part"]:
        """Boxes of whole rows of it, each of about `BLOCK_BYTES`."""
        n_rows = len(self.tensor) if self.tensor.ndim else 1
        step = max(1, n_rows * BLOCK_BYTES // max(1, self.tensor.nbytes))
        for row in range(0, n_rows, step) if self.tensor.ndim else ():
            tensor = self.tensor[row : row + step]
            offsets = torch.Size([self.chunk.offsets[0] + row, *self.chunk.offsets[1:]])
            yield Part(ChunkStorageMetadata(offsets, tensor.shape), tensor)
        if not self.tensor.ndim:
            yield self

    def read_items(self, name: str, metadata: Metadata) -> list[ReadItem]:
        """What of the stored tensor ``name`` has to be read."""
        entry = tensor_entry(metadata, name)
        assert entry is not None, f"{name} was checked to be a tensor"
        if not self.tensor.numel():
            return []
        offsets, sizes = self.chunk.offsets, self.chunk.sizes
        for number, chunk in enumerate(entry.chunks):
            if chunk.offsets == offsets and chunk.sizes == sizes:  # as it is at the same world size: no search
                start = torch.Size([0] * len(sizes))
                at = MetadataIndex(name, offsets, number)
                return [ReadItem(LoadItemType.TENSOR, at, start, at, start, sizes)]
        return create_read_items_for_chunk_list(name, entry, [self.chunk])


@dataclass(frozen=True)
class _Piece:
    """A box of a stored tensor, and the tensor that takes it.

    Attributes:
        name: of the tensor.
        at: where in the file the values begin.
        stored: shape of what is stored.
        box: ``(begin, length)`` in every dimension.
        target: of the lengths of the box.
    """

    name: str
    at: int
    stored: torch.Size
    box: tuple[tuple[int, int], ...]
    target: torch.Tensor

    def copy(self, file: IO[bytes], blocks: HostBlocks) -> None:
        """Read the values."""
        before = _elements_before(self.stored, self.box)
        lazy = self.target.is_conj() or self.target.is_neg()  # its bytes are not its values
        if before is not None and self.target.is_contiguous() and not lazy:
            self._copy_run(file, self.at + before * self.target.itemsize, blocks)
        else:
            self._copy_rows(file, blocks)

    def _copy_run(self, file: IO[bytes], begin: int, blocks: HostBlocks) -> None:
        for at, values in _split(bytes_of(self.target)):
            if values.is_cpu:
                _read(file, begin + at, values)
            else:
                blocks.copy(values, _read(file, begin + at, blocks.take(len(values))))

    def _copy_rows(self, file: IO[bytes], blocks: HostBlocks) -> None:
        """Read whole rows as they are stored, at least one at a time, and take the part that is wanted."""
        if not self.box:
            value = _read(file, self.at, blocks.take(self.target.itemsize))
            blocks.copy(self.target, value.view(self.target.dtype).view(()))
            return
        first, n_rows = self.box[0]
        row_bytes = math.prod(self.stored[1:]) * self.target.itemsize
        step = max(1, BLOCK_BYTES // row_bytes)
        for row in range(0, n_rows, step):
            target = self.target[row : row + step]
            data = _read(file, self.at + (first + row) * row_bytes, blocks.take(len(target) * row_bytes))
            rows = data.view(target.dtype).view(len(target), *self.stored[1:])
            for dim, (begin, length) in enumerate(self.box[1:], 1):
                rows = rows.narrow(dim, begin, length)
            blocks.copy(target, rows)


def _split(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Blocks of ``[n]`` uint8, and where they begin."""
    for at in range(0, len(values), BLOCK_BYTES):
        yield at, values[at : at + BLOCK_BYTES]


def _elements_before(shape: torch.Size, box: tuple[tuple[int, int], ...]) -> int | None:
    """How many elements are stored before a box whose elements are stored side by side; None when they are not."""
    before, stride, partial = 0, 1, False
    for size, (begin, length) in zip(reversed(shape), reversed(box), strict=True):
        if partial and length != 1:
            return None
        before, stride, partial = before + begin * stride, stride * size, partial or length != size
    return before


class Placing:
    """What was found in a folder to be copied into tensors; none of them changes before `place` is called.

    Args:
        folder: DCP folder.
        metadata: of it, checked.
        parts: name -> what is wanted of the tensor that is stored under it.

    Attributes:
        names: of the tensors that `place` fills. The others are stored in another way.

    Raises:
        OSError: a file cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], metadata: Metadata, parts: Mapping[str, Part]) -> None:
        self._folder = Path(folder)
        self._identities: dict[str, tuple[int, ...]] = {}
        pieces: dict[str, list[_Piece]] = {}
        self.names = set(parts)
        items = [item for name, part in parts.items() for item in part.read_items(name, metadata)]
        reads = [(metadata.storage_data[item.storage_index], item) for item in items]
        reads.sort(key=lambda read: (read[0].relative_path, read[0].offset))
        for name, reads_of_file in groupby(reads, key=lambda read: read[0].relative_path):
            pieces[name] = []
            with open(self._folder / name, "rb", buffering=0) as file:
                self._identities[name] = _identity(os.fstat(file.fileno()))
                for info, item in reads_of_file:
                    fqn = item.storage_index.fqn
                    if (piece := _find(file, info, item, metadata, parts[fqn].tensor)) is None:
                        self.names.discard(fqn)
                    else:
                        pieces[name].append(piece)
        kept = {name: [piece for piece in found if piece.name in self.names] for name, found in pieces.items()}
        self._pieces = {name: found for name, found in kept.items() if found}

    def check_unchanged(self) -> None:
        """Raise `CheckpointCorruptError` unless the files are those that were planned with."""
        for name in self._pieces:
            self._check_identity(name)

    def place(self) -> None:
        """Copy everything, and see that no file has changed meanwhile.

        Raises:
            CheckpointCorruptError: one has. The tensors hold what is not to be trusted.
            OSError: a file cannot be read; likewise, and it says so.
        """
        n_threads = reading_threads()
        with ThreadPoolExecutor(n_threads, thread_name_prefix="placing") as pool:
            for name, pieces in self._pieces.items():
                try:
                    with open(self._folder / name, "rb", buffering=0) as file:
                        list(pool.map(partial(_copy_pieces, file), _shares(pieces, n_threads)))
                except (OSError, CheckpointCorruptError) as error:
                    problem = f"{self._folder} could not be read to its end; what is loaded is half of it: load again"
                    if isinstance(error, CheckpointCorruptError):
                        raise CheckpointCorruptError(f"{problem}. {error}") from error
                    raise OSError(error.errno, f"{problem}. {error.strerror}", str(self._folder / name)) from error
                self._check_identity(name)

    def _check_identity(self, name: str) -> None:
        try:
            found = _identity(os.stat(self._folder / name))
        except FileNotFoundError:
            found = None
        if found != self._identities[name]:
            raise CheckpointCorruptError(
                f"{self._folder}/{name} changed, or was replaced, after it was checked; leave a folder alone while it "
                "is loaded"
            )


def _find(
    file: IO[bytes], info: StorageInfo, item: ReadItem, metadata: Metadata, target: torch.Tensor
) -> _Piece | None:
    """Where the values of ``item`` lie in ``file``, if torch here would have written what surrounds them."""
    entry = tensor_entry(metadata, item.storage_index.fqn)
    assert entry is not None and item.storage_index.index is not None
    stored = entry.chunks[item.storage_index.index].sizes
    archive = archive_of(tuple(stored), entry.properties.dtype)
    if info.length != archive.bytes or os.pread(file.fileno(), len(archive.prefix), info.offset) != archive.prefix:
        return None
    if item.lengths != target.shape:
        for dim, (begin, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
    box = tuple(zip(item.storage_offsets, item.lengths, strict=True))
    return _Piece(item.storage_index.fqn, info.offset + len(archive.prefix), stored, box, target)


def _shares(pieces: list[_Piece], n: int) -> list[list[_Piece]]:
    """At most ``n`` runs of pieces, with about as many bytes each."""
    shares: list[list[_Piece]] = [[] for _ in range(n)]
    total, before = sum(piece.target.nbytes for piece in pieces), 0
    for piece in pieces:
        shares[min(before * n // max(1, total), n - 1)].append(piece)
        before += piece.target.nbytes
    return [share for share in shares if share]


@torch.no_grad()  # which every thread has to say for itself
def _copy_pieces(file: IO[bytes], pieces: list[_Piece]) -> None:
    device = next((piece.target.device for piece in pieces if piece.target.is_cuda), torch.device("cpu"))
    blocks = HostBlocks(BLOCK_BYTES, device)
    # A new thread is on device 0, where pinning memory would make every rank a context.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for piece in pieces:
            piece.copy(file, blocks)
        blocks.settle()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What is another when a file was replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(file: IO[bytes], begin: int, into: torch.Tensor) -> torch.Tensor:
    """Fill ``[n]`` uint8 on the CPU with the bytes from ``begin`` on."""
    view, at = memoryview(cast(Any, into.numpy())), 0
    while at < len(view):
        count = os.preadv(file.fileno(), [view[at:]], begin + at)
        if not count:
            raise CheckpointCorruptError(
                f"{file.name} ends at {begin + at}, although it was longer when it was checked"
            )
        at += count
    beat()
    return into
