"""Which part of a tensor each rank holds, by the rules of DTensor and without communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.distributed.tensor import Placement, Replicate, Shard

from ..memory.tensors import Box


@dataclass(frozen=True, eq=False)
class Shards:
    """How a tensor is divided among ranks. Several ranks may hold the same shard.

    Attributes:
        offsets: ``[ranks, dims]`` int64, first index of each rank's shard.
        sizes: ``[ranks, dims]`` int64.
        number: ``[ranks]``, number of each rank's shard. Shards with the same offsets have one number.
        holders: number -> the ranks that hold the shard, in order.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    number: list[int]
    holders: list[list[int]]

    def box_of(self, rank: int) -> Box:
        """The shard of a rank."""
        return self._boxes[rank]

    @cached_property
    def _boxes(self) -> list[Box]:
        boxes = zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]

    @cached_property
    def is_held_alone(self) -> np.ndarray:
        """``[ranks]`` bool: whether no other rank holds this rank's shard."""
        return np.array([len(self.holders[number]) == 1 for number in self.number])


def find_shards(
    shape: Sequence[int], mesh: Any, placements: Sequence[Placement], ranks: Sequence[int]
) -> Shards | None:
    """Find the part of a tensor that each of ``ranks`` holds.

    DTensor deals rows out in runs of equal length. The last runs are shorter or empty.

    Args:
        shape: shape of the whole tensor.
        mesh: ranks by coordinate. None for a tensor that every rank holds whole.
        placements: one for each dimension of the mesh.
        ranks: ranks of the group that saves, in the default group.

    Returns:
        None if the tensor is on other ranks, or placed in a way that only torch knows.
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
