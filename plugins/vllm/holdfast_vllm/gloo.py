"""``holdfast_gloo``: receive the weights from the trainer over a gloo process group, bucket by
bucket.

The trainer calls ``/init_weight_transfer_engine`` while it opens the group as rank 0, and again
only after an error. For every version it calls ``/start_weight_update``, ``/update_weights`` for
each bucket while it broadcasts it, and ``/finish_weight_update``. Routes and update info are those
of vLLM's ``nccl`` engine for GPUs, and in addition the digest of the bucket. A bucket is received
into host memory and compared with its digest before it is loaded.

A trainer that dies before the first bucket has arrived changes nothing. One that dies later leaves
a mixture of old and new weights. No layer stays dismantled then, so the next complete version
repairs it.
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
class GlooInitInfo(WeightTransferInitInfo):
    """The group to join."""

    # host of the trainer's ``TCPStore``
    master_address: str
    master_port: int
    # rank of this server's first worker
    rank_offset: int
    # all workers, and the sender as rank 0
    world_size: int
    timeout_s: float  # longest wait for a rank


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """A bucket: tensors whose bytes are side by side. Wide dtypes come first."""

    # names as in a Hugging Face folder
    names: list[str]
    dtype_names: list[str]  # such as "bfloat16"
    shapes: list[list[int]]
    digest: str  # "xxh3_128:<hex>" of all bytes
    last: bool  # whether it completes the version


class GlooWeightTransferEngine(CheckedEngine):
    """Receive a bucket on all workers, then load it."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: dist.ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Leave the last group and join the new one."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(
            init_info.master_address, init_info.master_port, is_master=False, timeout=timeout
        )
        rank = init_info.rank_offset + worker
        self._group = dist.ProcessGroupGloo(store, rank, init_info.world_size, timeout)

    def checked_weights(
        self,
        update_info: GlooUpdateInfo,
        rank: int,
        world_size: int,
    ) -> Weights:
        """Receive a bucket into host memory and compare its digest with the sender's."""
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(update_info.shapes, dtypes, strict=True)
        ]
        data = self._receive(sum(sizes))
        found = f"xxh3_128:{xxhash.xxh3_128(data.numpy()).hexdigest()}"  # type: ignore[arg-type]
        if found != update_info.digest:
            raise ValueError(
                f"the tensors that arrived have digest {found}, those that were sent "
                f"{update_info.digest}"
            )

        # The bytes of each tensor, which follow each other.
        tensors = zip(data.split(sizes), dtypes, update_info.shapes, strict=True)
        shaped = [part.view(dtype).view(shape) for part, dtype, shape in tensors]
        return zip(update_info.names, shaped, strict=True)

    def _receive(self, n_bytes: int) -> torch.Tensor:
        if self._group is None:
            raise RuntimeError("no process group; call /init_weight_transfer_engine first")
        data = torch.empty(n_bytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = _SENDER
        self._group.broadcast([data], options).wait()  # type: ignore[attr-defined]
        return data

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None
