"""Limits of any save and load: a copy into warm memory, a raw write with fsync, a read from the
page cache.

All three move the bytes of this rank's shard between the live tensors, one flat buffer that is
kept, and a file (or this rank's part of a shared file). The buffer is as large as the shard, so
that a write reads it from memory, as a real save does. The page cache is never dropped, because
that needs root. Reads are therefore called cached reads: they find bytes that were written a moment
ago.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_CHUNK_BYTES = 1 << 30  # Linux moves at most 2 GiB per call
_ALIGNMENT = 64


class WarmBuffer:
    """Host memory that is kept for copies of some tensors, pinned if they are on a GPU.

    Attributes:
        n_bytes: total size of the tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.n_bytes = sum(tensor.nbytes for tensor in tensors)
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        pinned = any(tensor.is_cuda for tensor in tensors)
        self._flat = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        parts = self._flat.split(sizes)
        self._pairs = [
            (tensor, part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            for tensor, part in zip(tensors, parts, strict=True)
        ]

    def copy(self) -> None:
        """Copy the tensors into the buffer: the least work of a snapshot before training can go on."""
        for tensor, kept in self._pairs:
            kept.copy_(tensor, non_blocking=tensor.is_cuda)
        if self._flat.is_pinned():
            torch.cuda.synchronize()

    def write(self, path: Path, offset: int = 0) -> None:
        """Write the buffer to ``path`` from ``offset`` on, and fsync."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            self._move(os.pwrite, fd, offset)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, offset: int = 0) -> None:
        """Read the same number of bytes back."""
        fd = os.open(path, os.O_RDONLY)
        try:
            self._move(lambda fd, view, at: os.preadv(fd, [view], at), fd, offset)
        finally:
            os.close(fd)

    def _move(self, call: Callable[[int, memoryview, int], int], fd: int, offset: int) -> None:
        rest = self._flat.numpy().data[: self.n_bytes]
        while rest:
            moved = call(fd, rest[:_CHUNK_BYTES], offset)
            if moved == 0:
                raise RuntimeError(
                    f"the file ends at byte {offset}; it was to have {len(rest)} more"
                )
            rest, offset = rest[moved:], offset + moved
