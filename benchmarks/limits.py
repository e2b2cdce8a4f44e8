"""Limits of any save and load: a copy into warm memory, a raw write with fsync, a read from the
page cache.

All three move the bytes of this rank's shard between the live tensors, one flat buffer that is
kept, and a file (or this rank's part of a shared file). The buffer is as large as the shard, so
that a write reads it from memory, as a real save does. The page cache is never dropped, because
that needs root. Reads are therefore called cached reads: they find bytes that were written a moment
ago.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 30  # Linux moves at most 2 GiB per call
_ALIGNMENT = 64

# Moves a part of the memory to or from a file at an offset, and returns how many bytes it moved.
_Call = Callable[[int, memoryview, int], int]


class WarmBuffer:
    """Host memory that is kept for copies of some tensors, pinned if they are on a GPU.

    Attributes:
        n_bytes: total size of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Sizes are rounded up, so that each part is aligned for any dtype.
        self.n_bytes = 0
        sizes = []
        for tensor in tensors:
            self.n_bytes += tensor.nbytes
            n_units = math.ceil(tensor.nbytes / _ALIGNMENT)
            sizes.append(n_units * _ALIGNMENT)

        # One flat buffer. Each tensor has its own part, seen in its own dtype and shape.
        n_bytes = sum(sizes)
        pinned = any(tensor.is_cuda for tensor in tensors)
        self._flat = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._tensors = list(tensors)
        self._kept = []
        parts = self._flat.split(sizes)
        for tensor, part in zip(tensors, parts, strict=True):
            data = part[: tensor.nbytes]
            kept = data.view(tensor.dtype)
            self._kept.append(kept.view(tensor.shape))

    def copy(self) -> None:
        """Copy the tensors into the buffer: the least that a snapshot does while training waits."""
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            kept.copy_(tensor, non_blocking=tensor.is_cuda)

        # Copies into pinned memory return before they are done.
        if self._flat.is_pinned():
            torch.cuda.synchronize()

    def write(
        self,
        path: Path,
        offset: int = 0,
    ) -> None:
        """Write the buffer to ``path`` from ``offset`` on, and fsync."""
        # Other ranks may be writing to the same file, so that it is not truncated.
        flags = os.O_WRONLY | os.O_CREAT
        fd = os.open(path, flags, 0o644)
        try:
            self._move(os.pwrite, fd, offset)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(
        self,
        path: Path,
        offset: int = 0,
    ) -> None:
        """Read the same number of bytes back."""
        # From the page cache, if the file was written a moment ago.
        with open(path, "rb", buffering=0) as file:
            self._move(_pread_into, file.fileno(), offset)

    def _move(
        self,
        call: _Call,
        fd: int,
        offset: int,
    ) -> None:
        # A call may move less than it was given, so that this repeats until all bytes are moved.
        whole = self._flat.numpy().data
        rest = whole[: self.n_bytes]
        while rest:
            chunk = rest[:_CHUNK_BYTES]
            moved = call(fd, chunk, offset)
            if moved == 0:
                n_left = len(rest)
                raise RuntimeError(f"the file ends at byte {offset}; it was to have {n_left} more")
            rest = rest[moved:]
            offset += moved


def _pread_into(
    fd: int,
    view: memoryview,
    offset: int,
) -> int:
    return os.preadv(fd, [view], offset)
