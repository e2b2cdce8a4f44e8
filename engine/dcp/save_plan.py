"""Who writes which tensor where: the plan of a save, which holds for all states of the same structure.

Ranks with the same `structure` plan alone: each works out what all of them hold, which of them writes what several
hold, and how its own file is laid out. Rank 0 also makes ``.metadata``. Where structures differ by rank, rank 0 gathers
what every rank has, as torch's planner describes it, plans for all, and tells each its part. Both ways write the same
bytes.

How long the archive of a tensor is follows from its shape and dtype (see `tensor_framing`), so that ``.metadata`` is
known before a byte is written, and the same for every save.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from ...utils.compat.torch_private import CURRENT_DCP_VERSION, StorageInfo
from ...utils.distributed import all_ranks_succeed, control_group, get_rank, get_world_size
from ...utils.garbage import no_collection
from .metadata import pickle_metadata
from .state import rank_key
from .structure import Structure
from .tensor_framing import archive_of

_SPREAD_BYTES = 64 << 10
"""Replicated values below this size are written by the first rank that has them, as torch does: where ranks should not
differ but do (counters), the first is heard, and so little does not weigh."""

Paths = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class RankSavePlan:
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


def plan_alone(structure: Structure, values: Mapping[str, Any]) -> RankSavePlan:
    """This rank's plan, where all ranks have the same structure and know each other's shards (see `agree_on`).

    Args:
        structure: of this rank's state.
        values: nested dicts of its tensors.
    """
    writers = _Writers(structure)
    names, n_bytes = [], 0
    for number in writers.written_by(structure.rank):
        tensor = structure.tensors[number]
        names.append(tensor.name_of(structure.ranks[structure.rank]))
        n_bytes += archive_of(writers.box_of(number, structure.rank)[1], tensor.properties.dtype).bytes
    metadata = b""
    if structure.rank == 0:
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(values), is_coordinator=True)
        with no_collection():
            metadata = pickle_metadata(_metadata(structure, writers, planner.mappings))
    return RankSavePlan(_file_of(structure.rank), tuple(names), n_bytes, metadata)


def plan_together(values: Mapping[str, Any], group: dist.ProcessGroup | None) -> RankSavePlan:
    """Agree on a plan for nested dicts of tensors that may differ by rank; all ranks of ``group`` call it.

    Raises:
        ValueError: the ranks' parts of a tensor do not make a whole.
        PeerError: another rank failed.
    """
    planner = DefaultSavePlanner()
    with all_ranks_succeed("planning a save", group):
        planner.set_up_planner(dict(values), is_coordinator=get_rank(group) == 0)
        local = planner.create_local_plan()
    everybody = _gather(local, group)
    plans: list[RankSavePlan] = []
    with all_ranks_succeed("planning a save", group):
        if get_rank(group) == 0:
            with no_collection():
                parts, metadata = planner.create_global_plan(_deduplicate(everybody))
                plans = _lay_out(parts, metadata)
    return _scatter(plans, group)


def choose_writers(loads: Sequence[int], shared: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """Which rank writes what several hold, such that all write about as much: the largest are dealt out first.

    Args:
        loads: bytes of the tensors of which each rank alone holds a part, and writes it; a tensor counts with all its
            bytes, as torch has it: ranks hold about equal parts.
        shared: the same of each part that several ranks hold, and these ranks.

    Returns:
        for each of ``shared``, the rank.
    """
    bytes_of_rank, writers = list(loads), [0] * len(shared)
    for number in sorted(range(len(shared)), key=lambda number: -shared[number][0]):
        n_bytes, holders = shared[number]
        candidates = holders if n_bytes >= _SPREAD_BYTES else holders[:1]
        writers[number] = min(candidates, key=bytes_of_rank.__getitem__)
        bytes_of_rank[writers[number]] += n_bytes
    return writers


class _Writers:
    """Who writes which shard, of a structure that all ranks have; tensors go by their number in it."""

    def __init__(self, structure: Structure) -> None:
        assert structure.shards is not None, "the ranks have agreed that the shards are known"
        self._structure, self._shards = structure, structure.shards
        loads = np.zeros(len(structure.ranks), np.int64)
        shared: list[tuple[int, int, int, int, list[int]]] = []
        for number, shards in enumerate(self._shards):
            if shards is None:  # as much on every rank
                continue
            n_bytes = structure.tensors[number].whole_bytes
            loads += shards.is_held_alone * n_bytes
            held_by_several = [(shard, ranks) for shard, ranks in enumerate(shards.holders) if len(ranks) > 1]
            shared += [(ranks[0], number, shard, n_bytes, ranks) for shard, ranks in held_by_several]
        shared.sort()  # by rank and tensor: the order in which `_deduplicate` meets them
        chosen = choose_writers(loads.tolist(), [(n_bytes, ranks) for *_, n_bytes, ranks in shared])
        self._chosen = {(number, shard): rank for (_, number, shard, *_), rank in zip(shared, chosen, strict=True)}

    def written_by(self, rank: int) -> Iterator[int]:
        """The tensors of which a rank writes its shard, in order."""
        for number, shards in enumerate(self._shards):
            if shards is None or self._chosen.get((number, shards.number[rank]), rank) == rank:
                yield number

    def box_of(self, number: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a rank's shard of a tensor."""
        shards, shape = self._shards[number], self._structure.tensors[number].shape
        return ((0,) * len(shape), shape) if shards is None else shards.box_of(rank)


def _metadata(structure: Structure, writers: _Writers, paths: Paths) -> Metadata:
    """What torch's planner makes of the plans of all ranks.

    Pickle writes an object that it meets again as a reference, so that the bytes show which strings are one object:
    those of a rank are objects of their own, as when its plan has come from it.
    """
    entries: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, StorageInfo] = {}
    everybody = [_as_received(structure, paths, rank) for rank in range(len(structure.ranks))]
    for rank, (names, _) in enumerate(everybody):
        file, at = _file_of(rank), 0
        for number in writers.written_by(rank):
            tensor, (offsets, sizes) = structure.tensors[number], writers.box_of(number, rank)
            if (entry := entries.get(names[number])) is None:
                entry = TensorStorageMetadata(replace(tensor.properties), torch.Size(tensor.shape), [])
                entries[names[number]] = entry
            index = MetadataIndex(names[number], offsets, len(entry.chunks))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            n_bytes = archive_of(sizes, tensor.properties.dtype).bytes
            stored[index] = StorageInfo(file, at, n_bytes)
            at += n_bytes
    merged: dict[str, tuple[Any, ...]] = {}
    for _, its_paths in reversed(everybody):  # as ChainMap does: order of the last, values of the first
        merged |= its_paths
    return Metadata(dict(entries), merged, stored, None, CURRENT_DCP_VERSION)


def _as_received(structure: Structure, paths: Paths, rank: int) -> tuple[list[str], dict[str, tuple[Any, ...]]]:
    """Names of a rank's tensors, and their paths where they come from it, as objects that no other rank has."""
    own, its = structure.ranks[structure.rank], structure.ranks[rank]
    names = [tensor.name_of(its) for tensor in structure.tensors]
    keys: dict[int, str] = {}  # a key that is one object here is one there
    its_paths: dict[str, tuple[Any, ...]] = dict.fromkeys(names, ())
    for name, tensor in zip(names, structure.tensors, strict=True):
        if rank == structure.rank:
            its_paths[name] = paths[name]
        elif tensor.is_own:
            root, kind, key, *rest = paths[tensor.name_of(own)]
            its_paths[name] = (root, kind, keys.setdefault(id(key), rank_key(its)), *rest)
    return pickle.loads(pickle.dumps((names, its_paths)))


def _deduplicate(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, with what several of them hold in the plan of one only."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = item.tensor_storage_size() or 0
    loads = [0] * len(plans)
    for index, ranks in holders.items():
        loads[ranks[0]] += sizes[index] if len(ranks) == 1 else 0
    shared = [index for index, ranks in holders.items() if len(ranks) > 1]
    chosen = choose_writers(loads, [(sizes[index], holders[index]) for index in shared])
    writers = {index: ranks[0] for index, ranks in holders.items()} | dict(zip(shared, chosen, strict=True))
    return [
        replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _lay_out(plans: list[SavePlan], metadata: Metadata) -> list[RankSavePlan]:
    stored: dict[MetadataIndex, StorageInfo] = {}
    files, names, lengths = [], [], []
    for rank, plan in enumerate(plans):
        at = 0
        files.append(_file_of(rank))
        names.append(tuple(item.index.fqn for item in plan.items))
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            n_bytes = archive_of(tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype).bytes
            stored[item.index] = StorageInfo(files[-1], at, n_bytes)
            at += n_bytes
        lengths.append(at)
    metadata.version, metadata.storage_data = CURRENT_DCP_VERSION, stored
    data = pickle_metadata(metadata)
    return [
        RankSavePlan(file, own, n_bytes, data if rank == 0 else b"")
        for rank, (file, own, n_bytes) in enumerate(zip(files, names, lengths, strict=True))
    ]


def _gather(local: SavePlan, group: dist.ProcessGroup | None) -> list[SavePlan]:
    """All ranks' plans on rank 0; nothing elsewhere."""
    if get_world_size(group) == 1:
        return [local]
    everybody: list[Any] = [None] * get_world_size(group) if get_rank(group) == 0 else []
    dist.gather_object(local, everybody or None, group=control_group(group), group_dst=0)
    return everybody


def _scatter(plans: list[RankSavePlan], group: dist.ProcessGroup | None) -> RankSavePlan:
    if get_world_size(group) == 1:
        return plans[0]
    own: list[Any] = [None]
    dist.scatter_object_list(own, plans or None, group=control_group(group), group_src=0)
    return own[0]
