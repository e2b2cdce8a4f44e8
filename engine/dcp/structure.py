"""Structure of a state: names, shapes, dtypes and placements of its tensors, but not their values.

Under FSDP2 every rank knows from mesh and placements which part of a DTensor every other rank holds, and what is not
sharded all of them hold. So ranks whose structures have the same digest can each tell, without a word to the others,
what all of them will write (see `save_plan`). The digest leaves out the one thing that differs: the rank in the names
of generators and of the state of modules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...utils.distributed import control_group, get_group_ranks, get_rank, get_world_size
from ..memory.tensors import Box, local_box, local_tensor
from .metadata import stored_properties
from .state import RANK_KEYED, ROOT, rank_key


@dataclass(frozen=True)
class TensorStructure:
    """One tensor of a state.

    Attributes:
        name: full name; `OWN` in it stands for the rank, in what each rank has of its own.
        shape: of the whole tensor.
        properties: as torch describes it in ``.metadata``, dtype among them.
        mesh: of a DTensor: ranks in the default group by coordinate, as nested tuples; else None.
        placements: of a DTensor.
    """

    name: str
    shape: tuple[int, ...]
    properties: TensorProperties
    mesh: Any = None
    placements: tuple[Placement, ...] = ()

    @property
    def whole_bytes(self) -> int:
        """Of the values of the whole tensor."""
        return math.prod(self.shape) * self.properties.dtype.itemsize

    @property
    def is_own(self) -> bool:
        """Whether every rank has one, under its own name."""
        return OWN in self.name

    def name_of(self, global_rank: int) -> str:
        """What it is called on a rank."""
        return self.name.replace(OWN, rank_key(global_rank))


OWN = "\0rank\0"
"""Stands for `rank_key` of the rank whose tensor it is; no module can have such a name."""


@dataclass(frozen=True)
class Structure:
    """Structure of a rank's state, and the ranks that save together.

    Attributes:
        ranks: of the group that saves, in the default group.
        rank: this one's, in the group that saves.
        tensors: of this rank's state, in its order, which is that of the files.
    """

    ranks: tuple[int, ...]
    rank: int
    tensors: tuple[TensorStructure, ...]

    @cached_property
    def shards(self) -> list["Shards | None"] | None:
        """How each tensor is divided among the ranks; None for what each has of its own.

        None of all of them, if that cannot be told from here: a tensor is on other ranks than these, or placed in a way
        that only torch knows.
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
        """16 bytes, the same on ranks with the same structure."""
        described = [
            (t.name, t.shape, repr(stored_properties(t.properties)), t.mesh, repr(t.placements)) for t in self.tensors
        ]
        return xxhash.xxh3_128_digest(repr((self.ranks, described)).encode())


def describe_state(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> Structure:
    """The structure of this rank's state, by full name."""
    own = rank_key(get_rank())
    prefixes = tuple(f"{ROOT}.{key}.{own}" for key in RANK_KEYED)
    meshes: dict[DeviceMesh, Any] = {}
    found = []
    for name, tensor in tensors.items():
        mesh, placements = None, ()
        if isinstance(tensor, DTensor):
            placements = tuple(tensor.placements)
            if tensor.device_mesh not in meshes:
                meshes[tensor.device_mesh] = _nested(tensor.device_mesh.mesh.tolist())
            mesh = meshes[tensor.device_mesh]
        if name.startswith(prefixes):
            name = name.replace(own, OWN, 1)
        properties = TensorProperties.create_from_tensor(local_tensor(tensor))
        found.append(TensorStructure(name, tuple(tensor.shape), properties, mesh, placements))
    return Structure(tuple(get_group_ranks(group)), get_rank(group), tuple(found))


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


def vote_on(structure: Structure, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What this rank brings to `agree_on`: ``[5]`` int64."""
    one, other = np.frombuffer(structure.digest, np.int64).tolist()
    return torch.tensor([one, ~one, other, ~other, not _are_known(structure, tensors)], dtype=torch.int64, device="cpu")


def agree_on(vote: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether all of several ranks have the same structure, and know each other's shards; one small all-reduce."""
    if get_world_size(group) == 1:
        return False
    dist.all_reduce(vote, dist.ReduceOp.MAX, group=control_group(group))
    one, not_one, other, not_other, unknown = vote.tolist()
    return one == ~not_one and other == ~not_other and not unknown  # the largest is the smallest, too


def _are_known(structure: Structure, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether this rank's shards are where `find_shards` says; every rank looks at its own."""
    if structure.shards is None:
        return False
    checked: set[int] = set()
    for shards, tensor in zip(structure.shards, tensors.values(), strict=True):
        if shards is None or id(shards) in checked or not isinstance(tensor, DTensor):
            continue
        checked.add(id(shards))
        if shards.box_of(structure.rank) != local_box(tensor):
            return False
    return True


@dataclass(frozen=True, eq=False)
class Shards:
    """How a tensor is divided among ranks, of which several may hold the same.

    Attributes:
        offsets: ``[ranks, dims]`` int64: where each rank's shard begins.
        sizes: ``[ranks, dims]`` int64.
        number: ``[ranks]``: shards that begin at one place have one number.
        holders: number -> the ranks that hold it, in order.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    number: list[int]
    holders: list[list[int]]

    def box_of(self, rank: int) -> Box:
        """A rank's shard."""
        return self._boxes[rank]

    @cached_property
    def _boxes(self) -> list[Box]:
        boxes = zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]

    @cached_property
    def is_held_alone(self) -> np.ndarray:
        """``[ranks]`` bool: of each rank's shard, whether no other rank holds it."""
        return np.array([len(self.holders[number]) == 1 for number in self.number])


def find_shards(
    shape: Sequence[int], mesh: Any, placements: Sequence[Placement], ranks: Sequence[int]
) -> Shards | None:
    """Which part of a tensor each of ``ranks`` holds, by the rules of DTensor: rows are dealt out in equal runs, of
    which the last are shorter or empty. None if it is not on these ranks, or placed in another way.

    Args:
        shape: of the whole tensor.
        mesh: ranks by coordinate; None for a tensor that all hold whole.
        placements: one for each dimension of the mesh.
        ranks: whose parts are wanted.
    """
    offsets = np.zeros((len(ranks), len(shape)), np.int64)
    sizes = np.tile(np.array(shape, np.int64), (len(ranks), 1))
    if mesh is not None:
        by_coordinate = np.array(mesh, np.int64)
        if sorted(by_coordinate.ravel().tolist()) != sorted(ranks):
            return None
        order = np.argsort(by_coordinate.ravel())[np.argsort(np.argsort(np.array(ranks)))]
        coordinates = np.unravel_index(order, by_coordinate.shape)
        for at, n_parts, placement in zip(coordinates, by_coordinate.shape, placements, strict=True):
            if type(placement) is Replicate:
                continue
            if type(placement) is not Shard:
                return None
            dim = placement.dim
            rows = sizes[:, dim]
            step = -(-rows // n_parts)
            begin = np.minimum(at * step, rows)
            length = np.minimum(step, rows - begin)
            offsets[:, dim] = np.where(length > 0, offsets[:, dim] + begin, shape[dim])
            sizes[:, dim] = length
    numbers: dict[tuple[int, ...], int] = {}
    number = [numbers.setdefault(tuple(offset), len(numbers)) for offset in offsets.tolist()]
    holders: list[list[int]] = [[] for _ in numbers]
    for rank, its_number in enumerate(number):
        holders[its_number].append(rank)
    return Shards(offsets, sizes, number, holders)
