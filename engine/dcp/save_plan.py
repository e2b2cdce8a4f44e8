"""Who writes which tensor where: the plan of a save, which holds for all states of the same structure.

Every rank describes what it has, as torch's planner does; rank 0 decides for each replicated tensor which rank writes
it, and lays out the files. How long the archive of a tensor is follows from its shape and dtype (see `tensor_framing`),
so that ``.metadata`` is known before a byte is written, and the same for every save.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from ...utils.distributed import all_ranks_succeed, control_group, get_group_ranks, get_rank, get_world_size
from ..compat.torch_private import CURRENT_DCP_VERSION, StorageInfo
from .tensor_framing import archive_of

_SPREAD_BYTES = 64 << 10
"""Replicated values below this size are written by the first rank that has them, as torch does: where ranks should not
differ but do (counters), the first is heard, and so little does not weigh."""


@dataclass(frozen=True)
class SavePlanOfRank:
    """What one rank writes.

    Attributes:
        file: name of its data file.
        names: of the tensors in it, in order.
        n_bytes: how long the file is, as ``.metadata`` has it.
        metadata: on rank 0, the bytes of ``.metadata``; empty elsewhere.
    """

    file: str
    names: tuple[str, ...]
    n_bytes: int
    metadata: bytes


def structure_of(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> list[Any]:
    """What a plan depends on, of this rank: compares equal when the plan may be used again."""
    parts: list[Any] = [get_rank(group), get_group_ranks(group)]  # others have made other plans with each other
    for name, tensor in tensors.items():
        layout = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ()
        parts.append((name, tensor.shape, tensor.dtype, *layout))
    return parts


def make_plan(values: Mapping[str, Any], group: dist.ProcessGroup | None) -> SavePlanOfRank:
    """Agree on a plan for nested dicts of tensors; all ranks of ``group`` call it.

    Raises:
        ValueError: the ranks' parts of a tensor do not make a whole.
        PeerError: another rank failed.
    """
    planner = DefaultSavePlanner()
    with all_ranks_succeed("planning a save", group):
        planner.set_up_planner(dict(values), is_coordinator=get_rank(group) == 0)
        local = planner.create_local_plan()
    everybody = _gather(local, group)
    plans: list[SavePlanOfRank] = []
    with all_ranks_succeed("planning a save", group):
        if get_rank(group) == 0:
            parts, metadata = planner.create_global_plan(spread(everybody))
            plans = _lay_out(parts, metadata)
    return _scatter(plans, group)


def spread(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, with what several of them have in one only, such that all write about as much."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = item.tensor_storage_size() or 0
    loads = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    by_freedom = sorted(holders, key=lambda index: (len(holders[index]) > 1, -sizes[index]))
    for index in by_freedom:  # first what has to be where it is, then the largest
        candidates = holders[index] if sizes[index] >= _SPREAD_BYTES else holders[index][:1]
        writer[index] = min(candidates, key=lambda rank: loads[rank])
        loads[writer[index]] += sizes[index]
    return [
        replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _lay_out(plans: list[SavePlan], metadata: Metadata) -> list[SavePlanOfRank]:
    stored: dict[MetadataIndex, StorageInfo] = {}
    files, names, lengths = [], [], []
    for rank, plan in enumerate(plans):
        at = 0
        files.append(f"__{rank}_0.distcp")
        names.append(tuple(item.index.fqn for item in plan.items))
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            n_bytes = archive_of(tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype).bytes
            stored[item.index] = StorageInfo(files[-1], at, n_bytes)
            at += n_bytes
        lengths.append(at)
    metadata.version, metadata.storage_data = CURRENT_DCP_VERSION, stored
    data = pickle.dumps(metadata)
    return [
        SavePlanOfRank(file, own, n_bytes, data if rank == 0 else b"")
        for rank, (file, own, n_bytes) in enumerate(zip(files, names, lengths, strict=True))
    ]


def _gather(local: SavePlan, group: dist.ProcessGroup | None) -> list[SavePlan]:
    """All ranks' plans on rank 0; nothing elsewhere."""
    if get_world_size(group) == 1:
        return [local]
    everybody: list[Any] = [None] * get_world_size(group) if get_rank(group) == 0 else []
    dist.gather_object(local, everybody or None, group=control_group(group), group_dst=0)
    return everybody


def _scatter(plans: list[SavePlanOfRank], group: dist.ProcessGroup | None) -> SavePlanOfRank:
    if get_world_size(group) == 1:
        return plans[0]
    own: list[Any] = [None]
    dist.scatter_object_list(own, plans or None, group=control_group(group), group_src=0)
    return own[0]
