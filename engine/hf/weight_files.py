"""Read and write the bytes of weight files, between a disk and the live tensors of a model, with
bounded memory.

Writing: several processes write one file at the same time, each its own pieces, and digest them.
Values that need neither a cast nor a copy are written from where they are, others through blocks of
`WRITE_BYTES` (see `HostBlocks`). The kernel starts to write every piece at once, so that the disk
works while the next piece is prepared.

Reading: values that need no cast are read straight into the model. Others are cast from mapped
windows of `READ_BYTES`, which spares a copy (a sixth of the time of a load). Only a file that is
cut in the milliseconds of a cast raises a signal instead of an error (see `map_window`). Values for
a GPU, which casts by itself, and values of files that cannot be mapped (old kernel, some file
systems) are read into blocks.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader
from itertools import groupby
from pathlib import Path

import torch

from ...utils.errors import CheckpointCorruptError
from ...utils.files import map_window, start_writeback
from ...utils.heartbeat import beat
from ...utils.pieces import PIECE_BYTES, Piece, piece_digest
from ..memory.host_blocks import HostBlocks
from ..memory.tensors import bytes_of, memory_of, row_major
from .safetensors_layout import TensorSlot, WeightFile, read_layout

WRITE_BYTES = PIECE_BYTES
"""Size of a chunk that is cast or copied before its write: it should still be in the processor's
cache then.
"""

READ_BYTES = 16 << 20
"""Size of the part of a file that is mapped, or staged, at a time."""

LONG_BYTES = 64 << 10
"""Rows of this size are read one by one. Shorter ones are read with the elements between them,
which is faster.
"""


class WeightWriter:
    """Cuts weights into pieces, digests them, and writes them to the files of ``folder``.

    A context manager, which closes the files. Only `sync` makes them durable. Every written byte
    passes `create` or `write`, and nothing is read again.

    Args:
        folder: folder of the weight files. None: the files are not written, only digested.
        watch: gets each piece of `write`, as its tensor's slot, its place and its bytes. The bytes
            are valid until it returns.

    Attributes:
        digests: file name -> pieces of the file that this rank has written, with their digests.
    """

    def __init__(
        self,
        folder: Path | None,
        watch: Callable[[TensorSlot, Piece, memoryview], object] | None = None,
    ) -> None:
        self._folder, self._watch = folder, watch
        self._fds: dict[str, int] = {}
        self._blocks: dict[torch.device, HostBlocks] = {}
        self.digests: dict[str, list[tuple[Piece, bytes]]] = {}

    def __enter__(self) -> "WeightWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def create(self, file: WeightFile) -> None:
        """Create a file at its full size with only the header written. It must not exist
        (FileExistsError).
        """
        if self._folder is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            fd = self._fds[file.name] = os.open(self._folder / file.name, flags, 0o666)
            os.ftruncate(fd, file.total_bytes)
        for offset in range(0, len(file.header), PIECE_BYTES):
            data = memoryview(file.header)[offset : offset + PIECE_BYTES]
            self._note(file.name, Piece(offset, len(data), 0, 1), data)

    def write(
        self, slot: TensorSlot, at: int, values: torch.Tensor, pitch: int | None = None
    ) -> None:
        """Write ``values`` (any strides, dtype and device) from element ``at`` of the tensor at
        ``slot``.

        With ``pitch``, each row of ``values`` goes that many elements after the one before.
        """
        run, step = (n * slot.dtype.itemsize for n in _run_and_pitch(values, pitch))
        offset, done = slot.offset + at * slot.dtype.itemsize, 0
        for data in self._bytes(values, slot.dtype, run):
            while data:
                row, begin = divmod(done, run)
                rows = 1 if begin else max(1, len(data) // run)
                part = data[: rows * run - begin]
                piece = Piece(
                    offset + row * step + begin, len(part) // rows, step if rows > 1 else 0, rows
                )
                self._note(slot.file, piece, part)
                if self._watch is not None:
                    self._watch(slot, piece, part)
                data, done = data[len(part) :], done + len(part)

    def _bytes(self, values: torch.Tensor, dtype: torch.dtype, run: int) -> Iterator[memoryview]:
        """The bytes of ``values`` as ``dtype``, cut where runs end if several runs fit into one
        result.
        """
        blocks = self._blocks.setdefault(values.device, HostBlocks(WRITE_BYTES, values.device))
        most = (
            WRITE_BYTES - WRITE_BYTES % run if 0 < run < WRITE_BYTES else WRITE_BYTES
        ) // dtype.itemsize
        for as_it_is, chunks in groupby(
            _chunks_of(values, most), partial(_is_in_memory, dtype=dtype)
        ):
            convert = partial(map, _bytes_of) if as_it_is else partial(blocks.pack, dtype=dtype)
            yield from convert(chunks)

    def _note(self, file: str, piece: Piece, data: memoryview) -> None:
        self.digests.setdefault(file, []).append((piece, piece_digest(data)))
        if self._folder is not None:
            self.put(file, piece, data)

    def put(self, file: str, piece: Piece, data: memoryview) -> None:
        """Write the bytes of a piece, without a digest. The file was created, here or by another
        rank.
        """
        if file not in self._fds:
            assert self._folder is not None, "a writer without a folder has no files"
            self._fds[file] = os.open(self._folder / file, os.O_WRONLY)
        for row in range(piece.rows):
            _write_all(
                self._fds[file],
                data[row * piece.run :][: piece.run],
                piece.offset + row * piece.step,
            )

    def sync(self) -> None:
        """Bring everything that was written to stable storage."""
        for fd in self._fds.values():
            os.fsync(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    start, rest = offset, data
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written
    if offset - start >= WRITE_BYTES // 4:
        start_writeback(fd, start, offset - start)
    beat()


class WeightReader:
    """Safetensors files of ``folder``, open for reading after a call of `layout`. A context
    manager, to close them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BufferedReader] = {}
        self._blocks: dict[torch.device, HostBlocks] = {}

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        for blocks in self._blocks.values():
            blocks.drain()
        for file in self._files.values():
            file.close()

    def layout(self) -> dict[str, TensorSlot]:
        """Tensor name -> slot (`read_layout`). Values come from the same open files, even if others
        replace them.
        """
        return read_layout(self._folder, self._open)

    def _open(self, name: str) -> BufferedReader:
        self._files[name] = file = open(self._folder / name, "rb")  # noqa: SIM115
        return file

    def read(
        self, slot: TensorSlot, at: int, target: torch.Tensor, pitch: int | None = None
    ) -> None:
        """Fill ``target`` (any strides, dtype and device) with values from element ``at`` of the
        tensor at ``slot``.

        With ``pitch``, each row of ``target`` is that many elements after the one before. Short
        rows are read together with the elements between them.
        """
        run, step = _run_and_pitch(target, pitch)
        if run < target.numel():
            n_rows = (
                1
                if run * slot.dtype.itemsize >= LONG_BYTES
                else max(1, READ_BYTES // slot.dtype.itemsize // step)
            )
            for first in range(0, len(target), n_rows):
                rows, begin = target[first : first + n_rows], at + first * step
                if len(rows) == 1:
                    self.read(slot, begin, rows)
                else:
                    between = torch.empty(
                        (len(rows) - 1) * step + run, dtype=slot.dtype, device="cpu"
                    )
                    self.read(slot, begin, between)
                    rows.copy_(between.as_strided(rows.shape, (step, *row_major(rows.shape[1:]))))
            return
        for piece in (
            _chunks_of(target, READ_BYTES // slot.dtype.itemsize) if target.numel() else ()
        ):
            if _is_in_memory(piece, slot.dtype):
                self._fill(piece, slot, at)
            elif piece.is_cuda or not self._copy_mapped(piece, slot, at):
                self._copy_read(piece, slot, at)
            at += piece.numel()
            beat()

    def same(
        self, one: TensorSlot, other: TensorSlot, first: int, last: int, dtype: torch.dtype
    ) -> bool:
        """Whether elements ``[first, last)`` of two tensors are equal bit for bit as ``dtype``."""
        most = READ_BYTES // 4 // dtype.itemsize
        for at in range(first, last, most):
            ours, theirs = torch.empty(2, min(most, last - at), dtype=dtype, device="cpu")
            self.read(one, at, ours)
            self.read(other, at, theirs)
            if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                return False
        return True

    def _copy_read(self, piece: torch.Tensor, slot: TensorSlot, at: int) -> None:
        """Fill ``piece`` through a block. On a GPU, the copy follows the order of its stream."""
        blocks = self._blocks.setdefault(piece.device, HostBlocks(READ_BYTES, piece.device))
        values = blocks.take(piece.numel() * slot.dtype.itemsize)
        self._fill(values, slot, at)
        blocks.copy(piece, values.view(slot.dtype).view(piece.shape))

    def _copy_mapped(self, piece: torch.Tensor, slot: TensorSlot, at: int) -> bool:
        fd, start = self._files[slot.file].fileno(), slot.offset + at * slot.dtype.itemsize
        n_bytes = piece.numel() * slot.dtype.itemsize
        askew = start % slot.dtype.itemsize  # as an odd header leaves values
        if askew or (window := map_window(fd, start, n_bytes)) is None:
            return False
        piece.copy_(torch.frombuffer(window, dtype=slot.dtype).view(piece.shape))
        return os.fstat(fd).st_size >= start + n_bytes  # the last page of a file goes on with zeros

    def _fill(self, values: torch.Tensor, slot: TensorSlot, at: int) -> None:
        rest, offset = _bytes_of(values), slot.offset + at * slot.dtype.itemsize
        fd = self._files[slot.file].fileno()
        while rest:
            count = os.preadv(fd, [rest], offset)
            if count == 0:
                raise CheckpointCorruptError(
                    f"{self._folder / slot.file} ends at byte {offset}; it became shorter"
                )
            rest, offset = rest[count:], offset + count


def _run_and_pitch(values: torch.Tensor, pitch: int | None) -> tuple[int, int]:
    """Elements that are side by side in the file, and from the beginning of such a run to the next
    one.
    """
    row = values[0].numel() if pitch is not None and values.numel() else values.numel()
    return (values.numel(), values.numel()) if pitch in (None, row) else (row, pitch)  # type: ignore[return-value]


def _is_in_memory(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return values.dtype == dtype and values.device.type == "cpu" and values.is_contiguous()


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memory_of(bytes_of(values))


def _chunks_of(values: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Cut a tensor in row-major order into pieces of at most ``most`` elements, without a copy."""
    if values.numel() <= most:
        yield values
    elif values.is_contiguous():
        yield from values.view(-1).split(most)
    else:
        for row in values.split(max(most * values.shape[0] // values.numel(), 1)):
            yield from _chunks_of(row[0] if row.shape[0] == 1 else row, most)
