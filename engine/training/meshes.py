"""The device meshes of an engine, and which of its ranks have the same data.

Consecutive ranks share the most: rank = ((replica * shards + shard) * c + sequence part) * t +
tensor part. So matrices and rows are shared within a node if t c divides its ranks, and copies are
on different nodes if a replica fills whole nodes.
"""

from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ..memory.per_model import PerModel
from ..parallel_strategy import ParallelStrategy

_known = PerModel[dict[tuple[str, ParallelStrategy], "Meshes"]](
    "meshes",
    "Meshes in a default group, by device type and strategy. `open_meshes` adds to them. Their "
    "communicators live as long as the group, so engines share them.",
)
_numbers = count()
"""Numbers of meshes with several dimensions in this process."""


@dataclass(frozen=True)
class Meshes:
    """The ranks of an engine, as `fully_shard` and the batches see them.

    Attributes:
        strategy: sizes of all dimensions.
        fsdp: mesh for `fully_shard`: (shards,) or (replicas, shards). Ranks that share a row are
            different shards.
        tensor: mesh of the t ranks that share matrices. None for t = 1.
        expert_fsdp: mesh for `fully_shard` of experts: like ``fsdp``, with fewer shards. None for e
            = 1.
        expert: mesh of the e ranks that share experts. None for e = 1.
        alone: mesh of this rank alone. None for e = 1.
        sequence: group of the c ranks that share a row. None for c = 1.
        data: group of the ranks with the same parts of other data. None if every rank has its own
            data.
        peers: group of the c t ranks with the same data, its head first. None if every rank has its
            own data.
    """

    strategy: ParallelStrategy
    fsdp: DeviceMesh
    tensor: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    alone: DeviceMesh | None = None
    sequence: ProcessGroup | None = None
    data: ProcessGroup | None = None
    peers: ProcessGroup | None = None

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks with different data."""
        return dist.get_rank() // self.ranks_with_same_data

    @property
    def data_size(self) -> int:
        """Number of ranks with different data."""
        assert self.strategy.data_parallel_size is not None
        return self.strategy.data_parallel_size

    @property
    def ranks_with_same_data(self) -> int:
        """As in `ParallelStrategy`."""
        return self.strategy.ranks_with_same_data

    @property
    def is_head(self) -> bool:
        """Whether this rank is the first with its data. What is counted once for each data rank is
        counted here.
        """
        return dist.get_rank() % self.ranks_with_same_data == 0

    def n_parts(self, param: Tensor) -> int:
        """Number of parts of a parameter on different ranks that FSDP2 does not gather: e for
        experts, t for matrices that tensor parallelism cuts, else 1.
        """
        n_parts = 1
        for mesh in (self.tensor, self.expert):
            if mesh is not None and is_cut(param, mesh):
                n_parts *= mesh.size()
        return n_parts


def is_cut(tensor: Tensor, mesh: DeviceMesh | None) -> bool:
    """Whether the ranks of a mesh with one dimension, as `Meshes.tensor`, hold different parts of a
    tensor.
    """
    if mesh is None or not isinstance(tensor, DTensor):
        return False
    name = (mesh.mesh_dim_names or ("",))[0]
    names = tensor.device_mesh.mesh_dim_names or ()
    if name not in names:
        return False
    placement = tensor.placements[names.index(name)]
    return not placement.is_replicate()


def open_meshes(strategy: ParallelStrategy, device: torch.device, timeout: timedelta) -> Meshes:
    """Make the meshes over the default group, on all of its ranks. ``strategy`` is for its number
    of ranks.

    Engines with the same strategy share them, and so the ``timeout`` of the first one.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _known.of(world)
    if known is None:
        known = _known.set(world, {})
    # Making meshes is collective. All ranks have made the same ones before.
    key = (device.type, strategy)
    if key not in known:
        known[key] = _make_meshes(strategy, device.type, timeout)
    return known[key]


def _make_meshes(strategy: ParallelStrategy, device_type: str, timeout: timedelta) -> Meshes:
    r = strategy.replicate_size
    c = strategy.cp_size
    t = strategy.tp_size
    e = strategy.ep_size
    per_replica = strategy.world_size // r

    # Ranks that share a matrix or an expert are the innermost dimension, so they are neighbours.
    sizes = {"replicate": r, "fsdp": per_replica // t, "tp": t}
    fsdp, tensor = _mesh(device_type, sizes, timeout)

    expert_fsdp = None
    expert = None
    alone = None
    if e > 1:
        sizes = {"replicate": r, "efsdp": per_replica // e, "ep": e}
        expert_fsdp, expert = _mesh(device_type, sizes, timeout)
        own = dist.new_group(
            [dist.get_rank()],
            timeout=timeout,
            use_local_synchronization=True,
        )
        assert isinstance(own, ProcessGroup)
        alone = DeviceMesh.from_group(own, device_type)

    # All ranks make the same groups in the same order.
    sequence = None
    data = None
    peers = None
    if c * t > 1:
        ranks = torch.arange(strategy.world_size).view(-1, c, t)
        same_data = ranks.view(-1, c * t)
        if c > 1:
            same_row = ranks.transpose(1, 2).reshape(-1, c)
            sequence = _own_group(same_row, timeout)
        data = _own_group(same_data.T, timeout)
        peers = _own_group(same_data, timeout)

    return Meshes(
        strategy,
        fsdp,
        tensor,
        expert_fsdp,
        expert,
        alone,
        sequence,
        data,
        peers,
    )


def _mesh(
    device_type: str,
    sizes: dict[str, int],
    timeout: timedelta,
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh (replicate, fsdp) and the mesh of the third dimension, slices of one mesh
    over all ranks.

    Dimensions of one rank are left out, except the second.
    """
    _, shards, parts = sizes
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == shards}
    shape = tuple(sizes.values())
    if len(sizes) == 1:
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(sizes))
        return mesh, None

    # `init_device_mesh` knows no timeout, and splits the default group, which crashes unless it is
    # the first gloo group of the process (pytorch#192106).
    ranks = torch.arange(dist.get_world_size()).view(shape)
    groups = []
    for dim, size in enumerate(shape):
        rows = ranks.movedim(dim, -1).reshape(-1, size)
        groups.append(_own_group(rows, timeout))

    # A mesh of an earlier default group must have other names, or DTensor's caches take it for this
    # one.
    number = next(_numbers)
    names = {name: f"{name}_{number}" if number else name for name in sizes}
    whole = DeviceMesh.from_group(
        groups,
        device_type,
        mesh=ranks,
        mesh_dim_names=tuple(names.values()),
    )
    if parts not in names:
        return whole, None
    sharded = tuple(name for key, name in names.items() if key != parts)
    return whole[sharded], whole[names[parts]]


def _own_group(rows: Tensor, timeout: timedelta) -> ProcessGroup:
    """Make a group of each row of ranks, and return the one with this rank."""
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    return own  # type: ignore[return-value]
