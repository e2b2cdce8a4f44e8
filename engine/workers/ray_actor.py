"""`RankActor` as Ray runs it, and where it runs."""

import os
from dataclasses import dataclass

import ray

from ...utils.processes import ProcessId
from .actor import RankActor, device_index


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, the address and Ray's name of its node, and which of the GPUs torch sees there is its."""

    id: ProcessId
    host: str
    node_id: str
    device: int | None


class RayActor(RankActor):
    """`RankActor`, with what only Ray can tell it."""

    def start(self, serve_store: bool) -> tuple[RankProcess, int]:
        """Who and where this process is, and the port of the store it serves (0 without)."""
        host = ray.util.get_node_ip_address()
        gpus = ray.get_gpu_ids()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
        device = device_index(gpus, visible) if gpus else None
        where = RankProcess(self.process(), host, ray.get_runtime_context().get_node_id(), device)
        return where, self.serve_store(host) if serve_store else 0
