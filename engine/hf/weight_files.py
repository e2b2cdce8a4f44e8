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
from torch import Tensor

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
        self._folder = folder
        self._watch = watch
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
            fd = os.open(self._folder / file.name, flags, 0o666)
            self._fds[file.name] = fd
            os.ftruncate(fd, file.total_bytes)

        header = memoryview(file.header)
        for offset in range(0, len(header), PIECE_BYTES):
            data = header[offset : offset + PIECE_BYTES]
            piece = Piece(offset, len(data), 0, 1)
            self._note(file.name, piece, data)

    def write(
        self,
        slot: TensorSlot,
        at: int,
        values: Tensor,
        pitch: int | None = None,
    ) -> None:
        """Write ``values`` (any strides, dtype and device) from element ``at`` of the tensor at
        ``slot``.

        With ``pitch``, each row of ``values`` goes that many elements after the one before.
        """
        itemsize = slot.dtype.itemsize
        run, step = _run_and_pitch(values, pitch)
        run *= itemsize
        step *= itemsize
        start = slot.offset + at * itemsize
        # bytes, without those between the runs
        done = 0

        for data in self._bytes(values, slot.dtype, run):
            while data:
                row, begin = divmod(done, run)

                # The rest of a run that was begun, as many whole runs as there are, or the begin
                # of one.
                rows = 1
                if begin == 0:
                    rows = max(1, len(data) // run)
                part = data[: rows * run - begin]
                offset = start + row * step + begin
                piece = Piece(offset, len(part), 0, 1)
                if rows > 1:
                    piece = Piece(offset, run, step, rows)

                self._note(slot.file, piece, part)
                if self._watch is not None:
                    self._watch(slot, piece, part)
                data = data[len(part) :]
                done += len(part)

    def _bytes(
        self,
        values: Tensor,
        dtype: torch.dtype,
        run: int,
    ) -> Iterator[memoryview]:
        """The bytes of ``values`` as ``dtype``, cut where runs end if several runs fit into one
        result.
        """
        device = values.device
        blocks = self._blocks.setdefault(device, HostBlocks(WRITE_BYTES, device))

        most_bytes = WRITE_BYTES
        if 0 < run < WRITE_BYTES:
            most_bytes -= WRITE_BYTES % run
        chunks = _chunks_of(values, most_bytes // dtype.itemsize)

        # Chunks in a row that need a cast or a copy share a block.
        as_it_is = partial(_is_in_memory, dtype=dtype)
        for in_memory, some in groupby(chunks, as_it_is):
            if in_memory:
                yield from map(_bytes_of, some)
            else:
                yield from blocks.pack(some, dtype)

    def _note(
        self,
        file: str,
        piece: Piece,
        data: memoryview,
    ) -> None:
        self.digests.setdefault(file, []).append((piece, piece_digest(data)))
        if self._folder is not None:
            self.put(file, piece, data)

    def put(
        self,
        file: str,
        piece: Piece,
        data: memoryview,
    ) -> None:
        """Write the bytes of a piece, without a digest. The file was created, here or by another
        rank.
        """
        if file not in self._fds:
            assert self._folder is not None, "a writer without a folder has no files"
            self._fds[file] = os.open(self._folder / file, os.O_WRONLY)
        fd = self._fds[file]
        offset = piece.offset
        for begin in range(0, piece.n_bytes, piece.run):
            _write_all(fd, data[begin : begin + piece.run], offset)
            offset += piece.step

    def sync(self) -> None:
        """Bring everything that was written to stable storage."""
        for fd in self._fds.values():
            os.fsync(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    rest = data
    end = offset
    while rest:
        written = os.pwrite(fd, rest, end)
        rest = rest[written:]
        end += written

    # Small writes are left to the kernel, which gathers them.
    if end - offset >= WRITE_BYTES // 4:
        start_writeback(fd, offset, end - offset)
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
        file = open(self._folder / name, "rb")  # noqa: SIM115
        self._files[name] = file
        return file

    def read(
        self,
        slot: TensorSlot,
        at: int,
        target: Tensor,
        pitch: int | None = None,
    ) -> None:
        """Fill ``target`` (any strides, dtype and device) with values from element ``at`` of the
        tensor at ``slot``.

        With ``pitch``, each row of ``target`` is that many elements after the one before. Short
        rows are read together with the elements between them.
        """
        run, step = _run_and_pitch(target, pitch)
        if run < target.numel():
            self._read_rows(slot, at, target, step)
        elif run:
            self._read_run(slot, at, target)

    def _read_rows(
        self,
        slot: TensorSlot,
        at: int,
        target: Tensor,
        step: int,
    ) -> None:
        run = target[0].numel()
        itemsize = slot.dtype.itemsize
        n_rows = 1
        if run * itemsize < LONG_BYTES:
            n_rows = max(1, READ_BYTES // itemsize // step)

        for first in range(0, len(target), n_rows):
            rows = target[first : first + n_rows]
            begin = at + first * step
            if len(rows) == 1:
                self._read_run(slot, begin, rows)
                continue

            # Rows with the elements between them, of which a strided view leaves the rows.
            size = (len(rows) - 1) * step + run
            staged = torch.empty(size, dtype=slot.dtype, device="cpu")
            self._read_run(slot, begin, staged)
            strides = (step, *row_major(rows.shape[1:]))
            rows.copy_(staged.as_strided(rows.shape, strides))

    def _read_run(
        self,
        slot: TensorSlot,
        at: int,
        target: Tensor,
    ) -> None:
        for piece in _chunks_of(target, READ_BYTES // slot.dtype.itemsize):
            if _is_in_memory(piece, slot.dtype):
                self._fill(piece, slot, at)
            elif piece.is_cuda or not self._copy_mapped(piece, slot, at):
                self._copy_read(piece, slot, at)
            at += piece.numel()
            beat()

    def same(
        self,
        one: TensorSlot,
        other: TensorSlot,
        first: int,
        last: int,
        dtype: torch.dtype,
    ) -> bool:
        """Whether elements ``[first, last)`` of two tensors are equal bit for bit as ``dtype``."""
        most = READ_BYTES // 4 // dtype.itemsize
        for at in range(first, last, most):
            size = min(most, last - at)
            ours, theirs = torch.empty(2, size, dtype=dtype, device="cpu")
            self.read(one, at, ours)
            self.read(other, at, theirs)
            if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                return False
        return True

    def _copy_read(
        self,
        piece: Tensor,
        slot: TensorSlot,
        at: int,
    ) -> None:
        """Fill ``piece`` through a block. On a GPU, the copy follows the order of its stream."""
        device = piece.device
        blocks = self._blocks.setdefault(device, HostBlocks(READ_BYTES, device))
        values = blocks.take(piece.numel() * slot.dtype.itemsize)
        self._fill(values, slot, at)
        blocks.copy(piece, values.view(slot.dtype).view(piece.shape))

    def _copy_mapped(
        self,
        piece: Tensor,
        slot: TensorSlot,
        at: int,
    ) -> bool:
        """Fill ``piece`` from a mapped window. False if that is not possible."""
        fd = self._files[slot.file].fileno()
        itemsize = slot.dtype.itemsize
        start = slot.offset + at * itemsize
        n_bytes = piece.numel() * itemsize
        # An odd header leaves values askew.
        if start % itemsize:
            return False
        window = map_window(fd, start, n_bytes)
        if window is None:
            return False

        values = torch.frombuffer(window, dtype=slot.dtype)
        piece.copy_(values.view(piece.shape))
        # The last page of a file goes on with zeros, which may have been copied.
        return os.fstat(fd).st_size >= start + n_bytes

    def _fill(
        self,
        values: Tensor,
        slot: TensorSlot,
        at: int,
    ) -> None:
        fd = self._files[slot.file].fileno()
        offset = slot.offset + at * slot.dtype.itemsize
        rest = _bytes_of(values)
        while rest:
            count = os.preadv(fd, [rest], offset)
            if count == 0:
                raise CheckpointCorruptError(
                    f"{self._folder / slot.file} ends at byte {offset}; it became shorter"
                )
            rest = rest[count:]
            offset += count


def _run_and_pitch(values: Tensor, pitch: int | None) -> tuple[int, int]:
    """Elements that are side by side in the file, and from the beginning of such a run to the next
    one.
    """
    whole = values.numel()
    if pitch is None or not whole:
        return whole, whole
    row = values[0].numel()
    if row == pitch:
        return whole, whole
    return row, pitch


def _is_in_memory(values: Tensor, dtype: torch.dtype) -> bool:
    return values.dtype == dtype and values.device.type == "cpu" and values.is_contiguous()


def _bytes_of(values: Tensor) -> memoryview:
    return memory_of(bytes_of(values))


def _chunks_of(values: Tensor, most: int) -> Iterator[Tensor]:
    """Cut a tensor in row-major order into pieces of at most ``most`` elements, without a copy."""
    if values.numel() <= most:
        yield values
        return
    if values.is_contiguous():
        yield from values.view(-1).split(most)
        return

    # Rows as long as they fit, or one row in parts.
    n_rows = most * values.shape[0] // values.numel()
    for rows in values.split(max(n_rows, 1)):
        if len(rows) == 1:
            rows = rows[0]
        yield from _chunks_of(rows, most)
