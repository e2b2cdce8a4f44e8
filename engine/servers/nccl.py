"""`NcclGroup`: send buckets to the GPUs of a server over NCCL. This file holds all code of the
senders that needs CUDA. It has never run on GPUs.

The peers are communicators of other programs (PyNccl in vLLM), so nothing of torch's rendezvous
exists there:

- The unique id is made by the group's first collective and read from its store, which no other
  process sees.
- That collective is the ``all_reduce`` of one float32 that PyNccl runs after it has joined.
- NCCL has no timeouts. A timer aborts the communicator, so that a worker that hangs costs
  ``limit_s`` and no more. The time limit of the group is longer than any send, because torch's
  watchdog would end the process of the trainer.

Trainer and server need the same version of NCCL, and the same ``NCCL_CUMEM_ENABLE``.
"""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...utils.logging import get_logger

logger = get_logger(__name__)

_NEVER = timedelta(days=365)
_FIRST_ID = "0"  # key under which ProcessGroupNCCL stores the id of its first communicator


class NcclGroup:
    """A group of rank 0 and ``workers`` GPUs. A bucket is copied to the current GPU before it is
    sent.

    Args:
        workers: number of GPUs of the server.
        limit_s: time limit of `connect` and `send`.
        largest_bytes: size of the largest bucket.
    """

    def __init__(self, workers: int, limit_s: float, largest_bytes: int) -> None:
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise RuntimeError(
                "rank 0 has no GPU, or a torch without NCCL; use the backend 'holdfast_gloo'"
            )
        logger.warning("sending weights to servers over NCCL has never run on GPUs")
        self._workers = workers
        self._limit_s = limit_s
        self._largest = largest_bytes
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._aborted = False

        # The store stays in this process: no worker joins by it.
        self._store = dist.HashStore()
        world_size = 1 + workers
        self._group = dist.ProcessGroupNCCL(self._store, 0, world_size, _NEVER)  # type: ignore[arg-type]

    @property
    def init_info(self) -> dict[str, Any]:
        """See `SenderGroup`. Waits until `connect`, on another thread, has made the unique id.

        The packing rule of vLLM ends a chunk with the tensor that *exceeds* the size. So with the
        largest bucket as the size, each bucket is one chunk.
        """
        self._store.wait([_FIRST_ID], timedelta(seconds=self._limit_s))
        unique_id = self._store.get(_FIRST_ID)
        return {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": 1 + self._workers,
            "packed": True,
            "packed_buffer_size_bytes": self._largest,
            "packed_num_buffers": 1,
        }

    def connect(self) -> None:
        """See `SenderGroup`."""
        # What PyNccl runs after it has joined. It also makes the unique id.
        with self._limited():
            flag = torch.zeros(1, device=self._device)
            self._group.allreduce([flag]).wait()  # type: ignore[attr-defined]

    def send(self, data: torch.Tensor) -> None:
        """See `SenderGroup`."""
        with self._limited():
            on_device = data.to(self._device, non_blocking=True)
            work = self._group.broadcast([on_device], dist.BroadcastOptions())  # type: ignore[attr-defined]
            work.wait()

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Run collectives on a stream of their own until they are complete, or abort them."""
        # NCCL itself would wait for ever.
        timer = threading.Timer(self._limit_s, self.abort)
        timer.daemon = True
        timer.start()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
                yield
                torch.cuda.current_stream().synchronize()
        finally:
            timer.cancel()
        if self._aborted:
            raise RuntimeError(
                f"a worker did not take part within {self._limit_s:g} s; the communicator was "
                "aborted"
            )

    def abort(self) -> None:
        """See `SenderGroup`. Kernels of the group end, whatever its workers do."""
        self._aborted = True
        self._group.abort()
