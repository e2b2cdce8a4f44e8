"""The device meshes of an engine, and which of its ranks have the same data.

Consecutive ranks share a replica: rank = replica * (d / r) + shard. So copies are on different nodes if a replica fills
whole nodes.
"""

from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..parallel_strategy import ParallelStrategy

_hybrid_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], DeviceMesh]] = WeakKeyDictionary()
"""Meshes with replicas in each default group. Their communicators live as long as it, so engines share them."""
_numbers = count()
"""Numbers of these meshes in this process."""


@dataclass(frozen=True)
class Meshes:
    """The ranks of an engine, as `fully_shard` and the batches see them.

    Attributes:
        strategy: sizes of all dimensions.
        fsdp: mesh for `fully_shard`: all ranks in one dimension, or (replicas, shards).
        data_rank: index of this rank among the ranks with different data.
    """

    strategy: ParallelStrategy
    fsdp: DeviceMesh
    data_rank: int

    @property
    def data_size(self) -> int:
        """Number of ranks with different data."""
        assert self.strategy.data_parallel_size is not None
        return self.strategy.data_parallel_size


def open_meshes(strategy: ParallelStrategy, device: torch.device, timeout: timedelta) -> Meshes:
    """Make the meshes over the default group, on all of its ranks. ``strategy`` is for its number of ranks."""
    per_data_rank = strategy.cp_size * strategy.tp_size
    return Meshes(strategy, _fsdp_mesh(strategy, device.type, timeout), dist.get_rank() // per_data_rank)


def _fsdp_mesh(strategy: ParallelStrategy, device_type: str, timeout: timedelta) -> DeviceMesh:
    replicas, world_size = strategy.replicate_size, strategy.world_size
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("fsdp",))
    assert dist.group.WORLD is not None
    known = _hybrid_meshes.setdefault(dist.group.WORLD, {})
    if (key := (device_type, replicas)) not in known:
        ranks, number = torch.arange(world_size).view(replicas, -1), next(_numbers)
        # `init_device_mesh` knows no timeout, and splits the default group, which crashes unless it is the first gloo
        # group of the process (pytorch#192106).
        groups = [_own_group(ranks.T, timeout), _own_group(ranks, timeout)]
        # A mesh of an earlier default group must have other names, or DTensor's caches take it for this one.
        names = (f"replicate_{number}", f"fsdp_{number}") if number else ("replicate", "fsdp")
        known[key] = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
    return known[key]


def _own_group(rows: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of each row of ranks, and return the one with this rank."""
    groups = [dist.new_group(row, timeout=timeout) for row in rows.tolist()]  # elsewhere no group, but a number
    return next(group for group in groups if isinstance(group, dist.ProcessGroup))
