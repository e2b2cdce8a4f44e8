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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
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
    RankGroup,
    all_ranks_succeed,
    control_group,
    get_group_ranks,
    get_rank,
    get_world_size,
)
from ..memory.tensors import Box, cut_boxes, local_box, local_tensor, ranks_of
from .format import (
    Tensors,
    archive_of,
    no_collection,
    pickle_metadata,
    rank_key,
    stored_properties,
)
from .state import GENERATORS, RANK_KEYED, ROOT


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

    def name_of(self, rank: int) -> str:
        """Full name of the tensor on a rank of the group that saves."""
        return self.name.replace(OWN, rank_key(rank // self.sharing))

    def bytes_of(self, box: Box) -> int:
        """Bytes of the archive of a part of the tensor."""
        return archive_of(box.sizes, self.properties.dtype).bytes


OWN = "\0rank\0"
"""Stands for the `rank_key` of the rank that has the tensor. No module can have such a name."""


@dataclass(frozen=True, eq=False)
class Shards:
    """How a tensor is divided among ranks. Several ranks may hold the same shard."""

    boxes: list[Box]  # the shard of each rank
    number: list[int]  # number of each rank's shard. Shards with the same offsets have one number
    holders: list[list[int]]  # number -> the ranks that hold the shard, in order


def find_shards(
    shape: Sequence[int],
    mesh: Any,
    placements: Sequence[Placement],
    ranks: Sequence[int],
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
        mesh = ranks
        placements = [Replicate()]
    by_coordinate = np.array(mesh, np.int64)
    on_mesh = by_coordinate.ravel().tolist()
    if sorted(on_mesh) != sorted(ranks):
        return None

    # Coordinates on the mesh, of one rank after the other: [ranks, dimensions of the mesh].
    places = {rank: place for place, rank in enumerate(on_mesh)}
    place_of_rank = [places[rank] for rank in ranks]
    by_dimension = np.unravel_index(place_of_rank, by_coordinate.shape)
    coordinates = np.stack(by_dimension, 1)
    boxes = cut_boxes(shape, by_coordinate.shape, placements, coordinates)
    if boxes is None:
        return None

    # Ranks whose shards have the same offsets hold the same shard.
    numbers = {}
    number_of_rank = []
    holders: list[list[int]] = []
    for rank, box in enumerate(boxes):
        number = numbers.setdefault(box.offsets, len(numbers))
        if number == len(holders):
            holders.append([])
        holders[number].append(rank)
        number_of_rank.append(number)
    return Shards(boxes, number_of_rank, holders)


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
        # Many tensors are cut alike.
        by_cut: dict[Any, Shards | None] = {}
        found = []
        for tensor in self.tensors:
            if tensor.is_own:
                found.append(None)
                continue
            cut = (tensor.shape, tensor.mesh, tensor.placements)
            if cut not in by_cut:
                by_cut[cut] = find_shards(*cut, self.ranks)
            found.append(by_cut[cut])
        return None if None in by_cut.values() else found

    @cached_property
    def digest(self) -> bytes:
        """16 bytes, the same on ranks with the same structure. The number of the rank itself has no
        influence.
        """
        described = [
            (
                tensor.name,
                tensor.sharing,
                tensor.shape,
                repr(stored_properties(tensor.properties)),
                tensor.mesh,
                repr(tensor.placements),
            )
            for tensor in self.tensors
        ]
        text = repr((self.ranks, described))
        return xxhash.xxh3_128_digest(text.encode())


def describe_state(
    tensors: Tensors,
    group: RankGroup,
    n_peers: int = 1,
) -> Structure:
    """The structure of this rank's state. ``n_peers`` is `DCPState.ranks_with_same_data`."""
    ranks = get_group_ranks(group)
    meshes: dict[DeviceMesh, Any] = {}
    found = []
    for name, tensor in tensors.items():
        # The ranks that hold its parts. Hundreds of tensors share a mesh.
        mesh = None
        placements: tuple[Placement, ...] = ()
        if isinstance(tensor, DTensor):
            if tensor.device_mesh not in meshes:
                coordinates = ranks_of(tensor.device_mesh, ranks)
                meshes[tensor.device_mesh] = _nested(coordinates.tolist())
            mesh = meshes[tensor.device_mesh]
            placements = (Replicate(), *tensor.placements)

        # The ranks that have it. Ranks with the same data have the same generators.
        sharing = 1
        if name.startswith(f"{ROOT}.{GENERATORS}."):
            sharing = n_peers
        own = rank_key(get_rank(group) // sharing)
        if name.startswith(tuple(f"{ROOT}.{key}.{own}" for key in RANK_KEYED)):
            name = name.replace(own, OWN, 1)

        properties = TensorProperties.create_from_tensor(local_tensor(tensor))
        structure = TensorStructure(
            name, tuple(tensor.shape), properties, mesh, placements, sharing
        )
        found.append(structure)
    return Structure(tuple(ranks), get_rank(group), tuple(found))


def _nested(values: Any) -> Any:
    if isinstance(values, list):
        return tuple(map(_nested, values))
    return values


def vote_on(
    structure: Structure,
    tensors: Tensors,
) -> Tensor:
    """This rank's input for `agree_on`, ``[5]`` int64."""
    # The largest of the inverted numbers is the inverse of the smallest.
    digest = np.frombuffer(structure.digest, np.int64)
    one, other = digest.tolist()
    unknown = not _are_known(structure, tensors)
    return torch.tensor(
        [one, ~one, other, ~other, unknown],
        dtype=torch.int64,
        device="cpu",
    )


def agree_on(
    vote: Tensor,
    group: RankGroup,
) -> bool:
    """Whether all ranks have one structure and know each other's shards. One small all-reduce."""
    if get_world_size(group) == 1:
        return False
    dist.all_reduce(vote, dist.ReduceOp.MAX, group=control_group(group))
    one, not_one, other, not_other, unknown = vote.tolist()

    # All digests are equal if the largest is the smallest, too.
    are_equal = one == ~not_one and other == ~not_other
    return are_equal and not unknown


def _are_known(
    structure: Structure,
    tensors: Tensors,
) -> bool:
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


def plan_alone(
    structure: Structure,
    values: Mapping[str, Any],
) -> RankSavePlan:
    """Plan the file of this rank without communication. All ranks must have the same ``structure``
    (see `agree_on`).
    """
    # The file of this rank.
    own_rank = structure.rank
    writers = _Writers(structure)
    names = []
    n_bytes = 0
    for number in writers.written_by(own_rank):
        tensor = structure.tensors[number]
        names.append(tensor.name_of(own_rank))
        n_bytes += tensor.bytes_of(writers.box_of(number, own_rank))

    # The files of all ranks.
    metadata = b""
    if own_rank == 0:
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(values), is_coordinator=True)
        with no_collection():
            metadata = pickle_metadata(_metadata(structure, writers, planner.mappings))
    return RankSavePlan(_file_of(own_rank), tuple(names), n_bytes, metadata)


def plan_together(
    values: Mapping[str, Any],
    group: RankGroup,
) -> RankSavePlan:
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

    # Rank 0 plans for all.
    plans: list[RankSavePlan] = []
    with all_ranks_succeed("planning a save", group):
        if get_rank(group) == 0:
            with no_collection():
                parts, metadata = planner.create_global_plan(_deduplicate(everybody))
                plans = _lay_out(parts, metadata)
    return _scatter(plans, group)


class SharedPart(NamedTuple):
    """A part of a tensor that several ranks hold."""

    n_bytes: int
    holders: Sequence[int]


def choose_writers(
    loads: Sequence[int],
    shared: Sequence[SharedPart],
) -> list[int]:
    """Choose a rank for each part that several ranks hold, so that all write about as much. Largest
    parts first.

    Args:
        loads: bytes that each rank writes anyway, because it alone holds a part. A tensor counts
            with all its bytes, as in torch, because ranks hold about equal parts.
        shared: bytes and holders of each part that several ranks hold.
    """
    loads = list(loads)
    writers = [0] * len(shared)
    largest_first = sorted(range(len(shared)), key=lambda number: -shared[number].n_bytes)
    for number in largest_first:
        n_bytes, candidates = shared[number]
        if n_bytes < _SPREAD_BYTES:
            candidates = candidates[:1]
        writer = min(candidates, key=loads.__getitem__)
        loads[writer] += n_bytes
        writers[number] = writer
    return writers


class _Writers:
    """The rank that writes each shard, for a structure that all ranks have. Tensors have their
    numbers in it.
    """

    def __init__(self, structure: Structure) -> None:
        assert structure.shards is not None, "the ranks have agreed that the shards are known"
        self._structure = structure
        self._shards = structure.shards
        loads = [0] * len(structure.ranks)
        shared = []
        for number, shards in enumerate(self._shards):
            if shards is None:  # as much on every rank
                continue
            tensor = structure.tensors[number]
            n_bytes = math.prod(tensor.shape) * tensor.properties.dtype.itemsize
            for shard, holders in enumerate(shards.holders):
                if len(holders) == 1:
                    loads[holders[0]] += n_bytes
                else:
                    part = SharedPart(n_bytes, holders)
                    shared.append((holders[0], number, shard, part))

        # The order of `_deduplicate`: by rank, then by tensor.
        shared.sort()
        chosen = choose_writers(loads, [part for *_, part in shared])
        self._chosen = {}
        for (_, number, shard, _), writer in zip(shared, chosen, strict=True):
            self._chosen[number, shard] = writer

    def written_by(self, rank: int) -> Iterator[int]:
        for number, shards in enumerate(self._shards):
            if shards is None:
                # The first of the ranks that share an own tensor writes it.
                writes = rank % self._structure.tensors[number].sharing == 0
            else:
                shard = shards.number[rank]
                writes = self._chosen.get((number, shard), rank) == rank
            if writes:
                yield number

    def box_of(
        self,
        number: int,
        rank: int,
    ) -> Box:
        shards = self._shards[number]
        if shards is not None:
            return shards.boxes[rank]
        shape = self._structure.tensors[number].shape
        return Box((0,) * len(shape), shape)


def _metadata(
    structure: Structure,
    writers: _Writers,
    paths: Mapping[str, tuple[Any, ...]],
) -> Metadata:
    """The metadata that torch's planner makes from the plans of all ranks.

    Pickle writes an object that it meets again as a reference, so the bytes show which strings are
    one object. The strings of a rank are separate objects, as if its plan had come from that rank.
    """
    entries = {}
    stored: dict[MetadataIndex, StorageInfo] = {}
    n_ranks = len(structure.ranks)
    everybody = [_as_received(structure, paths, rank) for rank in range(n_ranks)]
    for rank, (names, _) in enumerate(everybody):
        file = _file_of(rank)
        end = 0
        for number in writers.written_by(rank):
            name = names[number]
            tensor = structure.tensors[number]
            box = writers.box_of(number, rank)
            if name not in entries:
                entries[name] = TensorStorageMetadata(
                    replace(tensor.properties), torch.Size(tensor.shape), []
                )

            # One more chunk of the tensor, and the place of its archive.
            chunks = entries[name].chunks
            index = MetadataIndex(name, box.offsets, len(chunks))
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            chunks.append(chunk)
            n_bytes = tensor.bytes_of(box)
            stored[index] = StorageInfo(file, end, n_bytes)
            end += n_bytes

    # ChainMap merges so: the order of the last, the values of the first.
    merged = {}
    for _, its_paths in reversed(everybody):
        merged |= its_paths
    return Metadata(dict(entries), merged, stored, None, CURRENT_DCP_VERSION)


def _as_received(
    structure: Structure,
    paths: Mapping[str, tuple[Any, ...]],
    rank: int,
) -> tuple[list[str], dict[str, tuple[Any, ...]]]:
    """Names of a rank's tensors, and the paths that come from it, as objects that no other rank
    has.
    """
    keys: dict[int, str] = {}  # a key that is one object here is one there
    names = [tensor.name_of(rank) for tensor in structure.tensors]
    its_paths: dict[str, tuple[Any, ...]] = dict.fromkeys(names, ())
    for name, tensor in zip(names, structure.tensors, strict=True):
        if rank == structure.rank:
            its_paths[name] = paths[name]
        elif tensor.is_own:
            # The path of this rank's own tensor, with the key of the other rank.
            root, kind, key, *rest = paths[tensor.name_of(structure.rank)]
            its_key = keys.setdefault(id(key), rank_key(rank // tensor.sharing))
            its_paths[name] = (root, kind, its_key, *rest)
    return pickle.loads(pickle.dumps((names, its_paths)))


def _deduplicate(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, with a part that several ranks hold in the plan of only one."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = item.tensor_storage_size() or 0

    # A part that one rank alone holds is written by that one.
    loads = [0] * len(plans)
    writers: dict[MetadataIndex, int] = {}
    shared: dict[MetadataIndex, SharedPart] = {}
    for index, ranks in holders.items():
        if len(ranks) == 1:
            writers[index] = ranks[0]
            loads[ranks[0]] += sizes[index]
        else:
            shared[index] = SharedPart(sizes[index], ranks)
    chosen = choose_writers(loads, list(shared.values()))
    writers.update(zip(shared, chosen, strict=True))

    kept = []
    for rank, plan in enumerate(plans):
        items = [item for item in plan.items if writers[item.index] == rank]
        kept.append(replace(plan, items=items))
    return kept


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _lay_out(
    plans: list[SavePlan],
    metadata: Metadata,
) -> list[RankSavePlan]:
    found = []
    stored: dict[MetadataIndex, StorageInfo] = {}
    for rank, plan in enumerate(plans):
        file = _file_of(rank)
        names = []
        end = 0
        for item in plan.items:
            data = item.tensor_data
            assert data is not None, f"{item.index.fqn} is no tensor"
            archive = archive_of(tuple(data.chunk.sizes), data.properties.dtype)
            n_bytes = archive.bytes
            stored[item.index] = StorageInfo(file, end, n_bytes)
            names.append(item.index.fqn)
            end += n_bytes
        found.append(RankSavePlan(file, tuple(names), end, b""))

    # Rank 0 also writes ``.metadata``.
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = stored
    data = pickle_metadata(metadata)
    found[0] = replace(found[0], metadata=data)
    return found


def _gather(
    local: SavePlan,
    group: RankGroup,
) -> list[SavePlan]:
    if get_world_size(group) == 1:
        return [local]
    everybody: list[Any] = []
    if get_rank(group) == 0:
        everybody = [None] * get_world_size(group)
    dist.gather_object(local, everybody or None, group=control_group(group), group_dst=0)
    return everybody


def _scatter(
    plans: list[RankSavePlan],
    group: RankGroup,
) -> RankSavePlan:
    if get_world_size(group) == 1:
        return plans[0]
    own: list[Any] = [None]
    dist.scatter_object_list(own, plans or None, group=control_group(group), group_src=0)
    return own[0]
