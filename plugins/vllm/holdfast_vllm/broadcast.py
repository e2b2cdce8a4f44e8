"""``holdfast_broadcast``: receive the weights from the trainer over a gloo process group.

The trainer's client calls ``/init_weight_transfer_engine`` while it opens the group as rank 0; then for every version
``/start_weight_update``, ``/update_weights`` while it broadcasts, ``/finish_weight_update``: the routes, and the update
info, of vLLM's own ``nccl`` engine, which is the one for GPUs. All tensors are received into host memory, and their
digest compared, before a layer is taken apart: a trainer that dies in a broadcast leaves the server as it was. Costs a
second copy of the weights in the memory of every worker while that lasts.
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
    """The group to join.

    Attributes:
        master_address: host of the trainer's ``TCPStore``.
        master_port: its port.
        rank_offset: rank of this server's first worker; the sender is rank 0.
        world_size: sender and all workers of all servers.
        timeout_s: how long the group waits for any of them.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class BroadcastUpdateInfo(WeightTransferUpdateInfo):
    """The tensors that will be broadcast, in this order, then the xxh3_128 digest of all their bytes (``[16]`` uint8).

    Attributes:
        names: as in a Hugging Face folder.
        dtype_names: ``"bfloat16"`` ...
        shapes: of each.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class BroadcastWeightTransferEngine(CheckedEngine):
    """Receives all tensors on all workers, then loads them."""

    init_info_cls = BroadcastInitInfo
    update_info_cls = BroadcastUpdateInfo
    _group: dist.ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        """Join the group; one that was joined before is left."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=timeout)
        rank = init_info.rank_offset + worker
        self._group = dist.ProcessGroupGloo(store, rank, init_info.world_size, timeout)

    def checked_weights(self, update_info: BroadcastUpdateInfo, rank: int, world_size: int) -> Weights:
        """The tensors that the sender broadcasts, in host memory, once their digest is that of what was sent."""
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
