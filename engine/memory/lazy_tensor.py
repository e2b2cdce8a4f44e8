"""Tensors that are read a block of rows at a time, so that a conversion between formats need not
fit into memory.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
"""Approximate size of the part of a tensor that is in memory. At least one row."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not in memory.

    ``rows(first, last)`` returns rows ``[first, last)`` on the CPU, ``[last - first, *shape[1:]]``,
    or the value as ``[]`` if there are no dimensions. The result may be a view of a mapped file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "LazyTensor":
        """Wrap a tensor that is in memory or mapped."""

        def rows(first: int, last: int) -> Tensor:
            return tensor[first:last] if tensor.ndim else tensor

        return cls(tuple(tensor.shape), tensor.dtype, rows)

    @classmethod
    def read_at_once(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[], Tensor],
    ) -> "LazyTensor":
        """Wrap a tensor that can only be read as a whole. It is kept while its blocks are read in
        order.
        """
        kept: list[Tensor] = []

        def rows(first: int, last: int) -> Tensor:
            if not kept:
                kept.append(read())
            whole = kept[0]
            # The last block is the end of the reading.
            if not shape or last >= shape[0]:
                kept.clear()
            if not shape:
                return whole
            return whole[first:last]

        return cls(shape, dtype, rows)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the values."""
        return self.numel * self.dtype.itemsize

    @property
    def row_elements(self) -> int:
        """Elements per row, at least 1."""
        return max(math.prod(self.shape[1:]), 1)

    def to(self, dtype: torch.dtype) -> "LazyTensor":
        """The same values as ``dtype``."""
        if dtype == self.dtype:
            return self

        def rows(first: int, last: int) -> Tensor:
            return self.rows(first, last).to(dtype)

        return LazyTensor(self.shape, dtype, rows)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First element and values of consecutive blocks of rows, contiguous, of about
        `BLOCK_BYTES` each.
        """
        if not self.numel:
            return
        for first, last in self.row_blocks(BLOCK_BYTES):
            values = self.rows(first, last)
            yield first * self.row_elements, values.contiguous()

    def row_blocks(self, n_bytes: int) -> Iterator[tuple[int, int]]:
        """First row, and one after the last, of consecutive blocks of about ``n_bytes``, at least
        one row. A scalar is one block.
        """
        n_rows = 1
        if self.shape:
            n_rows = self.shape[0]

        row_bytes = self.row_elements * self.dtype.itemsize
        step = max(1, n_bytes // row_bytes)
        for first in range(0, n_rows, step):
            last = min(first + step, n_rows)
            yield first, last
