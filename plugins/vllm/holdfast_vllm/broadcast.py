"""``holdfast_broadcast``: receive the weights from the trainer over a gloo process group.

The trainer calls ``/init_weight_transfer_engine`` while it opens the group as rank 0. For every version it calls
``/start_weight_update``, ``/update_weights`` while it broadcasts, and ``/finish_weight_update``. Routes and update info
are those in vLLM's ``nccl`` engine for GPUs. All tensors are received into host memory and compared with their digest
before a layer is dismantled, so a trainer that dies during a broadcast changes nothing. This costs a second copy of the
weights in the host memory of every worker.
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
import xxhash
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from .checked import CheckedEngine, Weights

_SENDER = 0


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    """The group to join."""

    master_address: str  # host of the trainer's ``TCPStore``
    master_port: int
    rank_offset: int  # rank of this server's first worker
    world_size: int  # all workers, and the sender as rank 0
    timeout_s: float  # longest wait for a rank


@dataclass
class BroadcastUpdateInfo(WeightTransferUpdateInfo):
    """The broadcast tensors in order. The xxh3_128 digest of all their bytes follows (``[16]`` uint8)."""

    names: list[str]  # names as in a Hugging Face folder
    dtype_names: list[str]  # such as "bfloat16"
    shapes: list[list[int]]


class BroadcastWeightTransferEngine(CheckedEngine):
    """Receive all tensors on all workers, then load them."""

    init_info_cls = BroadcastInitInfo
    update_info_cls = BroadcastUpdateInfo
    _group: dist.ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        """Leave the last group and join the new one."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=timeout)
        rank = init_info.rank_offset + worker
        self._group = dist.ProcessGroupGloo(store, rank, init_info.world_size, timeout)

    def checked_weights(self, update_info: BroadcastUpdateInfo, rank: int, world_size: int) -> Weights:
        """Receive the tensors into host memory and compare their digest with the sender's."""
        digest, received = xxhash.xxh3_128(), []
        for dtype_name, shape in zip(update_info.dtype_names, update_info.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            flat = self._next(prod(shape) * dtype.itemsize)
            digest.update(flat.numpy())  # type: ignore[arg-type]
            received.append(flat.view(dtype).view(shape))
        if bytes(self._next(digest.digest_size).numpy()) != digest.digest():
            raise ValueError("the tensors that arrived have another digest than those that were sent")
        return zip(update_info.names, received, strict=True)

    def _next(self, n_bytes: int) -> torch.Tensor:
        if self._group is None:
            raise RuntimeError("no process group; call /init_weight_transfer_engine first")
        flat = torch.empty(n_bytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = _SENDER
        self._group.broadcast([flat], options).wait()  # type: ignore[attr-defined]
        return flat

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None
