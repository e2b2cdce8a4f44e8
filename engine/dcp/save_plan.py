"""The plan of a save: which rank writes which tensor where. It holds for all states of the same
structure.

Under FSDP2 every rank can derive from mesh and placements which part of a DTensor every other rank
holds (see `find_shards`), and all ranks hold the rest. So ranks whose structures have the same
digest plan alone: each derives which rank writes each part, and the layout of its own file. Rank 0
also makes ``.metadata``. If the structures differ, rank 0 gathers the tensors of every rank, and
plans for all with torch's planner. Both ways write the same bytes.

The length of a tensor's archive follows from shape and dtype (see `archive_of`). So ``.metadata``
is known before a byte is written, and is the same for every save.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ...utils.compat.torch_private import CURRENT_DCP_VERSION, StorageInfo
from ...utils.distributed import (
    all_ranks_succeed,
    control_group,
    get_group_ranks,
    get_rank,
    get_world_size,
)
from ..memory.tensors import Box, cut_boxes, local_box, local_tensor, ranks_of
from .format import archive_of, no_collection, pickle_metadata, stored_properties
from .state import GENERATORS, RANK_KEYED, ROOT, rank_key


@dataclass(frozen=True)
class TensorStructure:
    """Name, shape, dtype and placement of one tensor of a state, without its values."""

    # full name, with `OWN` for the rank if each rank, or each data rank, has a tensor of its own
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    properties: TensorProperties  # torch's description in ``.metadata``, with the dtype
    mesh: Any = None  # of a DTensor: `ranks_of` its mesh, as nested tuples
    placements: tuple[Placement, ...] = ()  # of a DTensor: on each dimension of ``mesh``
    # number of consecutive ranks that have the same own tensor, which the first of them writes
    sharing: int = 1

    @property
    def is_own(self) -> bool:
        """Whether every rank, or every data rank, has such a tensor under its own name."""
        return OWN in self.name

    def name_of(self, global_rank: int) -> str:
        """Full name of the tensor on a rank."""
        return self.name.replace(OWN, rank_key(global_rank // self.sharing))


OWN = "\0rank\0"
"""Stands for the `rank_key` of the rank that has the tensor. No module can have such a name."""


@dataclass(frozen=True, eq=False)
class Shards:
    """How a tensor is divided among ranks. Several ranks may hold the same shard."""

    boxes: list[Box]  # the shard of each rank
    number: list[int]  # number of each rank's shard. Shards with the same offsets have one number
    holders: list[list[int]]  # number -> the ranks that hold the shard, in order


def find_shards(
    shape: Sequence[int], mesh: Any, placements: Sequence[Placement], ranks: Sequence[int]
) -> Shards | None:
    """Find the part of a tensor that each of ``ranks`` holds, without communication.

    Args:
        shape: shape of the whole tensor.
        mesh: ranks by coordinate. None for a tensor that every rank holds whole.
        placements: one for each dimension of the mesh.
        ranks: ranks of the group that saves, in the default group.

    Returns:
        None if the tensor is on other ranks, or placed in a way that only torch knows.

    Raises:
        ConfigError: a rank holds several runs of rows (see `local_box`).
    """
    if mesh is None:
        mesh, placements = ranks, [Replicate()]
    by_coordinate = np.array(mesh, np.int64)
    if sorted(by_coordinate.ravel().tolist()) != sorted(ranks):
        return None
    order = np.argsort(by_coordinate.ravel())[np.argsort(np.argsort(np.array(ranks)))]
    coordinates = np.stack(np.unravel_index(order, by_coordinate.shape), 1)
    boxes = cut_boxes(shape, by_coordinate.shape, placements, coordinates)
    if boxes is None:
        return None
    numbers: dict[tuple[int, ...], int] = {}
    number = [numbers.setdefault(box.offsets, len(numbers)) for box in boxes]
    holders: list[list[int]] = [[] for _ in numbers]
    for rank, its_number in enumerate(number):
        holders[its_number].append(rank)
    return Shards(boxes, number, holders)


@dataclass(frozen=True)
class Structure:
    """Structure of a rank's state, and the ranks that save together."""

    ranks: tuple[int, ...]  # ranks of the group that saves, in the default group
    rank: int  # this rank in the group that saves
    tensors: tuple[TensorStructure, ...]  # in the order of the files

    @cached_property
    def shards(self) -> list[Shards | None] | None:
        """How each tensor is divided among the ranks. An element is None if each rank has a tensor
        of its own.

        None if a tensor is on other ranks than these, or placed in a way that only torch knows.
        """
        found: dict[Any, Shards | None] = {}
        for tensor in self.tensors:
            cut = tensor.shape, tensor.mesh, tensor.placements
            if not tensor.is_own and cut not in found:
                found[cut] = find_shards(tensor.shape, tensor.mesh, tensor.placements, self.ranks)
        if None in found.values():
            return None
        return [None if t.is_own else found[t.shape, t.mesh, t.placements] for t in self.tensors]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes, the same on ranks with the same structure. The number of the rank itself has no
        influence.
        """
        described = [
            (
                t.name,
                t.sharing,
                t.shape,
                repr(stored_properties(t.properties)),
                t.mesh,
                repr(t.placements),
            )
            for t in self.tensors
        ]
        return xxhash.xxh3_128_digest(repr((self.ranks, described)).encode())


def describe_state(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, n_peers: int = 1
) -> Structure:
    """The structure of this rank's state. ``n_peers`` is `DCPState.ranks_with_same_data`."""
    ranks = get_group_ranks(group)
    meshes, found = dict[DeviceMesh, Any](), list[TensorStructure]()
    for name, tensor in tensors.items():
        mesh, placements = None, ()
        if isinstance(tensor, DTensor):
            placements = Replicate(), *tensor.placements
            if tensor.device_mesh not in meshes:
                meshes[tensor.device_mesh] = _nested(ranks_of(tensor.device_mesh, ranks).tolist())
            mesh = meshes[tensor.device_mesh]
        sharing = n_peers if name.startswith(f"{ROOT}.{GENERATORS}.") else 1
        own = rank_key(get_rank() // sharing)
        if name.startswith(tuple(f"{ROOT}.{key}.{own}" for key in RANK_KEYED)):
            name = name.replace(own, OWN, 1)
        properties = TensorProperties.create_from_tensor(local_tensor(tensor))
        found.append(
            TensorStructure(name, tuple(tensor.shape), properties, mesh, placements, sharing)
        )
    return Structure(tuple(ranks), get_rank(group), tuple(found))


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


def vote_on(structure: Structure, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """This rank's input for `agree_on`, ``[5]`` int64."""
    one, other = np.frombuffer(structure.digest, np.int64).tolist()
    return torch.tensor(
        [one, ~one, other, ~other, not _are_known(structure, tensors)],
        dtype=torch.int64,
        device="cpu",
    )


def agree_on(vote: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks have the same structure and know each other's shards. One small all-reduce."""
    if get_world_size(group) == 1:
        return False
    dist.all_reduce(vote, dist.ReduceOp.MAX, group=control_group(group))
    one, not_one, other, not_other, unknown = vote.tolist()
    return (
        one == ~not_one and other == ~not_other and not unknown
    )  # the largest is the smallest, too


def _are_known(structure: Structure, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether this rank's shards are where `find_shards` says. Every rank checks its own."""
    if structure.shards is None:
        return False
    checked: set[int] = set()
    for shards, tensor in zip(structure.shards, tensors.values(), strict=True):
        if shards is None or id(shards) in checked or not isinstance(tensor, DTensor):
            continue
        checked.add(id(shards))
        if shards.boxes[structure.rank] != local_box(tensor):
            return False
    return True


_SPREAD_BYTES = 64 << 10
"""The first rank that has a smaller replicated value writes it, as torch does, even if counters
differ by rank.
"""


@dataclass(frozen=True)
class RankSavePlan:
    """The data file of one rank, the tensors in it, and its length. On rank 0 also the bytes of
    ``.metadata``.
    """

    file: str
    names: tuple[str, ...]
    n_bytes: int
    metadata: bytes


def plan_alone(structure: Structure, values: Mapping[str, Any]) -> RankSavePlan:
    """Plan the file of this rank without communication. All ranks must have the same ``structure``
    (see `agree_on`).
    """
    writers = _Writers(structure)
    names, n_bytes, metadata = [], 0, b""
    for number in writers.written_by(structure.rank):
        tensor = structure.tensors[number]
        names.append(tensor.name_of(structure.ranks[structure.rank]))
        n_bytes += archive_of(
            writers.box_of(number, structure.rank)[1], tensor.properties.dtype
        ).bytes
    if structure.rank == 0:
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(values), is_coordinator=True)
        with no_collection():
            metadata = pickle_metadata(_metadata(structure, writers, planner.mappings))
    return RankSavePlan(_file_of(structure.rank), tuple(names), n_bytes, metadata)


def plan_together(values: Mapping[str, Any], group: dist.ProcessGroup | None) -> RankSavePlan:
    """Agree on a plan for nested dicts of tensors that may differ by rank. All ranks of ``group``
    call it.

    Raises:
        ValueError: the ranks' parts of a tensor do not form the whole tensor.
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
    """Choose a rank for each part that several ranks hold, so that all write about as much. Largest
    parts first.

    Args:
        loads: bytes that each rank writes anyway, because it alone holds a part. A tensor counts
            with all its bytes, as in torch, because ranks hold about equal parts.
        shared: bytes and holders of each part that several ranks hold.
    """
    bytes_of_rank, writers = list(loads), [0] * len(shared)
    for number in sorted(range(len(shared)), key=lambda number: -shared[number][0]):
        n_bytes, holders = shared[number]
        candidates = holders if n_bytes >= _SPREAD_BYTES else holders[:1]
        writers[number] = min(candidates, key=bytes_of_rank.__getitem__)
        bytes_of_rank[writers[number]] += n_bytes
    return writers


class _Writers:
    """The rank that writes each shard, for a structure that all ranks have. Tensors have their
    numbers in it.
    """

    def __init__(self, structure: Structure) -> None:
        assert structure.shards is not None, "the ranks have agreed that the shards are known"
        self._structure, self._shards = structure, structure.shards
        loads = np.zeros(len(structure.ranks), np.int64)
        shared: list[tuple[int, int, int, int, list[int]]] = []
        for number, shards in enumerate(self._shards):
            if shards is None:  # as much on every rank
                continue
            tensor = structure.tensors[number]
            n_bytes = math.prod(tensor.shape) * tensor.properties.dtype.itemsize
            loads[[ranks[0] for ranks in shards.holders if len(ranks) == 1]] += n_bytes
            held_by_several = [
                (shard, ranks) for shard, ranks in enumerate(shards.holders) if len(ranks) > 1
            ]
            shared += [
                (ranks[0], number, shard, n_bytes, ranks) for shard, ranks in held_by_several
            ]
        shared.sort()  # by rank and tensor, as `_deduplicate` meets them
        chosen = choose_writers(loads.tolist(), [(n_bytes, ranks) for *_, n_bytes, ranks in shared])
        self._chosen = {
            (number, shard): rank
            for (_, number, shard, *_), rank in zip(shared, chosen, strict=True)
        }

    def written_by(self, rank: int) -> Iterator[int]:
        for number, shards in enumerate(self._shards):
            is_first = self._structure.ranks[rank] % self._structure.tensors[number].sharing == 0
            if (
                is_first
                if shards is None
                else self._chosen.get((number, shards.number[rank]), rank) == rank
            ):
                yield number

    def box_of(self, number: int, rank: int) -> Box:
        shards, shape = self._shards[number], self._structure.tensors[number].shape
        return Box((0,) * len(shape), shape) if shards is None else shards.boxes[rank]


def _metadata(
    structure: Structure, writers: _Writers, paths: Mapping[str, tuple[Any, ...]]
) -> Metadata:
    """The metadata that torch's planner makes from the plans of all ranks.

    Pickle writes an object that it meets again as a reference, so the bytes show which strings are
    one object. The strings of a rank are separate objects, as if its plan had come from that rank.
    """
    entries: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, StorageInfo] = {}
    everybody = [_as_received(structure, paths, rank) for rank in range(len(structure.ranks))]
    for rank, (names, _) in enumerate(everybody):
        file, at = _file_of(rank), 0
        for number in writers.written_by(rank):
            tensor, (offsets, sizes) = structure.tensors[number], writers.box_of(number, rank)
            if (entry := entries.get(names[number])) is None:
                entry = TensorStorageMetadata(
                    replace(tensor.properties), torch.Size(tensor.shape), []
                )
                entries[names[number]] = entry
            index = MetadataIndex(names[number], offsets, len(entry.chunks))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            n_bytes = archive_of(sizes, tensor.properties.dtype).bytes
            stored[index] = StorageInfo(file, at, n_bytes)
            at += n_bytes
    merged: dict[str, tuple[Any, ...]] = {}
    for _, its_paths in reversed(
        everybody
    ):  # as ChainMap does: order of the last, values of the first
        merged |= its_paths
    return Metadata(dict(entries), merged, stored, None, CURRENT_DCP_VERSION)


def _as_received(
    structure: Structure, paths: Mapping[str, tuple[Any, ...]], rank: int
) -> tuple[list[str], dict[str, tuple[Any, ...]]]:
    """Names of a rank's tensors, and the paths that come from it, as objects that no other rank
    has.
    """
    own, its = structure.ranks[structure.rank], structure.ranks[rank]
    names = [tensor.name_of(its) for tensor in structure.tensors]
    keys: dict[int, str] = {}  # a key that is one object here is one there
    its_paths: dict[str, tuple[Any, ...]] = dict.fromkeys(names, ())
    for name, tensor in zip(names, structure.tensors, strict=True):
        if rank == structure.rank:
            its_paths[name] = paths[name]
        elif tensor.is_own:
            root, kind, key, *rest = paths[tensor.name_of(own)]
            its_paths[name] = (
                root,
                kind,
                keys.setdefault(id(key), rank_key(its // tensor.sharing)),
                *rest,
            )
    return pickle.loads(pickle.dumps((names, its_paths)))


def _deduplicate(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, with a part that several ranks hold in the plan of only one."""
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
    writers = {index: ranks[0] for index, ranks in holders.items()} | dict(
        zip(shared, chosen, strict=True)
    )
    return [
        replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _lay_out(plans: list[SavePlan], metadata: Metadata) -> list[RankSavePlan]:
    found: list[RankSavePlan] = []
    stored: dict[MetadataIndex, StorageInfo] = {}
    for rank, plan in enumerate(plans):
        file, at = _file_of(rank), 0
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            n_bytes = archive_of(
                tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype
            ).bytes
            stored[item.index] = StorageInfo(file, at, n_bytes)
            at += n_bytes
        found.append(RankSavePlan(file, tuple(item.index.fqn for item in plan.items), at, b""))
    metadata.version, metadata.storage_data = CURRENT_DCP_VERSION, stored
    found[0] = replace(found[0], metadata=pickle_metadata(metadata))
    return found


def _gather(local: SavePlan, group: dist.ProcessGroup | None) -> list[SavePlan]:
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
