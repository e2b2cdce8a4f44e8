"""Reusable blocks of host memory for copies between files and a device.

While the device copies to or from one block, the other is read from or written to the file. Both
are pinned, because a copy with pageable memory blocks the thread and goes through a pinned buffer
of CUDA. On the CPU, where a copy is complete when it returns, one block is enough.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class HostBlocks:
    """The blocks of one thread, for copies to or from ``device``.

    A block has ``n_bytes``, or more if a caller asks for more, and is allocated when needed.
    """

    def __init__(
        self,
        n_bytes: int,
        device: torch.device,
    ) -> None:
        # While one block is copied, the other is read from or written to the file.
        n_blocks = 1 if device.type == "cpu" else 2
        self._n_bytes = n_bytes
        self._pinned = device.type == "cuda"
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._blocks = [empty] * n_blocks
        # The last copy of each block on each device.
        self._copies: list[dict[torch.device, torch.cuda.Event]] = []
        for _ in range(n_blocks):
            self._copies.append({})
        self._turn = 0

    def take(self, n_bytes: int) -> Tensor:
        """``[n_bytes]`` uint8, valid until the next call. Waits for earlier copies with it."""
        self._turn = (self._turn + 1) % len(self._blocks)
        self._wait(self._turn)
        block = self._blocks[self._turn]
        if len(block) < n_bytes:
            size = max(n_bytes, self._n_bytes)
            block = torch.empty(
                size,
                dtype=torch.uint8,
                device="cpu",
                pin_memory=self._pinned,
            )
            self._blocks[self._turn] = block
        return block[:n_bytes]

    def copy(
        self,
        target: Tensor,
        source: Tensor,
    ) -> None:
        """Start a copy to or from the block of the last `take`. Values are cast on the device.

        On the device, the copy is ordered before later work in the current stream of the thread.
        """
        device, event = _begin_copy(target, source)
        if event is not None:
            self._copies[self._turn][device] = event

    def drain(self) -> None:
        """Wait for all copies."""
        for turn in range(len(self._blocks)):
            self._wait(turn)

    def pack(
        self,
        pieces: Iterable[Tensor],
        dtype: torch.dtype,
    ) -> Iterator[memoryview]:
        """Yield the bytes of ``pieces`` (any strides, dtype and device) as ``dtype``, side by side.

        Each result holds as many whole pieces as fit into a block, and is valid until the next is
        requested. The next is copied meanwhile.
        """
        packed = deque[tuple[int, memoryview]]()
        block = self.take(self._n_bytes)
        used = 0
        for piece in pieces:
            n_bytes = piece.numel() * dtype.itemsize

            # A full block is given out when its turn comes, just before it is used again.
            if used and used + n_bytes > len(block):
                values = block[:used].numpy().data
                packed.append((self._turn, values))
                if len(packed) == len(self._blocks):
                    turn, values = packed.popleft()
                    self._wait(turn)
                    yield values
                block = self.take(max(n_bytes, self._n_bytes))
                used = 0

            room = block[used : used + n_bytes]
            self.copy(room.view(dtype).view(piece.shape), piece)
            used += n_bytes

        # The last block, after those that are still being copied.
        values = block[:used].numpy().data
        packed.append((self._turn, values))
        for turn, values in packed:
            self._wait(turn)
            yield values

    def _wait(self, turn: int) -> None:
        for event in self._copies[turn].values():
            event.synchronize()
        self._copies[turn].clear()


def _begin_copy(target: Tensor, source: Tensor) -> tuple[torch.device, torch.cuda.Event | None]:
    """Start a copy on the current stream of either device. On the CPU the copy is done at once,
    without an event.
    """
    device = target.device if target.is_cuda else source.device
    if device.type != "cuda":
        target.copy_(source)
        return device, None
    # The event ends when this copy and all earlier work of the stream have ended.
    target.copy_(source, non_blocking=True)
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return device, event
