"""Helpers for both checkpoint formats: tensors of a model by name, and the part of each that a rank
holds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...utils.compat.torch_private import StridedShard, root_mesh
from ...utils.distributed import get_rank, get_world_size
from ...utils.errors import ConfigError
from .per_model import PerModel

T = TypeVar("T", bound=Tensor)

CHECKPOINTED = "_checkpoint_wrapped_module"
"""Name that torch's wrappers of activation checkpointing and offload give to the module inside."""
WRAPPERS = (CHECKPOINTED, "_orig_mod", "_fsdp_wrapped_module")
"""Names that activation checkpointing, torch.compile and FSDP1 give to the module that they wrap.
"""


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Create tensors that can be trained, even if the caller is in inference mode. Records no
    gradient.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def flatten(
    nested: Mapping[str, Any],
    prefix: str = "",
) -> Iterator[tuple[str, Tensor]]:
    """``(dotted name, tensor)`` of nested mappings, named as in torch's DCP."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Dotted name and tensor of each parameter and buffer. A tied tensor comes once for each of
    its names.
    """
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of ``model`` that FSDP2 has sharded, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Give up gathered parameters, so that the parameters of ``model`` are the shards.

    FSDP2 leaves the gathered ones in the model after a forward without a backward. They are other
    tensors, in the dtype of the computation, and what is written to them is lost.
    """
    for module in fsdp_modules(model):
        module.reshard()


class Box(NamedTuple):
    """A block of a tensor."""

    offsets: tuple[int, ...]  # first index in each dimension of the whole tensor
    sizes: tuple[int, ...]  # shape of the block

    @property
    def last(self) -> tuple[int, ...]:
        """Last index in each dimension of the whole tensor."""
        ranges = zip(self.offsets, self.sizes, strict=True)
        return tuple(at + size - 1 for at, size in ranges)

    def of(
        self,
        whole: Tensor,
    ) -> Tensor:
        """The block of a tensor, a view."""
        ranges = zip(self.offsets, self.sizes, strict=True)
        index = tuple(slice(at, at + size) for at, size in ranges)
        return whole[index]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next in each dimension of a contiguous tensor."""
    # From the last dimension, whose elements are side by side.
    strides: list[int] = []
    run = 1
    for size in reversed(shape):
        strides.append(run)
        run *= size
    return tuple(reversed(strides))


def local_box(tensor: Tensor) -> Box:
    """The block of a sharded tensor that this rank holds, or all of a plain tensor. No
    communication.

    Raises:
        ConfigError: ranks hold something else than one block each, or FSDP2 and DTensor disagree
            about the blocks.
    """
    origin = (0,) * tensor.dim()
    if not isinstance(tensor, DTensor):
        return Box(origin, tuple(tensor.shape))
    mesh = tensor.device_mesh
    placements = tensor.placements

    # A rank outside of the mesh holds nothing.
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Box(origin, origin)

    # The placements must describe the block that the rank has.
    here = np.array([coordinate])
    found = cut_boxes(tensor.shape, mesh.shape, placements, here)
    held = tuple(local_tensor(tensor).shape)
    if found is None or found[0].sizes != held:
        raise ConfigError(
            f"a tensor {list(tensor.shape)} is placed as {placements} on {mesh}, and this rank "
            f"holds {list(held)} of it; expected the block that a Shard or Replicate on each "
            "dimension of the mesh gives it"
        )
    return found[0]


def cut_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Any],
    coordinates: np.ndarray,
) -> list[Box] | None:
    """The block of a tensor at each of the ``coordinates``, ``[ranks, dimensions of the mesh]``.

    Rows are dealt out in runs of equal length, the last ones shorter or empty. None for an unknown
    class of placement.

    Raises:
        ConfigError: see `local_box`.
    """
    order = _order_of_cuts(shape, mesh_shape, placements)
    if order is None:
        return None

    # Each dimension of the mesh cuts what the one before has left: [ranks, dimensions].
    n_ranks = len(coordinates)
    whole = np.array(shape, np.int64)
    offsets = np.zeros((n_ranks, len(shape)), np.int64)
    sizes = np.tile(whole, (n_ranks, 1))
    for at in order:
        dim = placements[at].dim
        rows = sizes[:, dim]
        step = -(-rows // mesh_shape[at])
        begin = np.minimum(coordinates[:, at] * step, rows)
        length = np.minimum(step, rows - begin)
        # An empty block begins behind the last row.
        first = offsets[:, dim] + begin
        offsets[:, dim] = np.where(length > 0, first, shape[dim])
        sizes[:, dim] = length
    boxes = []
    for at, length in zip(offsets.tolist(), sizes.tolist(), strict=True):
        boxes.append(Box(tuple(at), tuple(length)))
    return boxes


def _order_of_cuts(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Any],
) -> list[int] | None:
    """The mesh dimensions that cut a tensor, in the order of the cuts. None for an unknown class of
    placement.

    FSDP2 cuts what tensor parallelism has left on a rank, although its dimension of the mesh comes
    first. DTensor says so with a strided shard, whose factor is the number of pieces that later
    dimensions of the mesh make before it.
    """
    order: list[int] = []
    for at, placement in reversed(list(enumerate(placements))):
        if type(placement) is Replicate:
            continue
        if type(placement) not in (Shard, StridedShard):
            return None

        # An ordinary shard is cut before the dimensions of the mesh that come after it.
        factor = getattr(placement, "split_factor", 1)
        dim = placement.dim
        if factor == 1:
            order.insert(0, at)
            continue

        # A strided shard is cut last. Its factor must be the number of pieces that there are.
        described = (
            f"a tensor {list(shape)} is placed as {tuple(placements)} on a mesh {list(mesh_shape)}"
        )
        later_cuts = [later for later in order if placements[later].dim == dim]
        pieces = math.prod(mesh_shape[later] for later in later_cuts)
        if factor != pieces:
            raise ConfigError(
                f"{described}, so that a rank holds several runs of rows; use tensor parallelism "
                "that cuts rows evenly, and shard experts one by one"
            )

        # Where the factor does not divide the rows, the two agree only about two halves of pieces.
        cuts = []
        for size, other in zip(mesh_shape, placements, strict=True):
            if size > 1 and getattr(other, "dim", None) == dim:
                cuts.append(size)
        has_many_cuts = len(cuts) > 2
        divisor = math.prod(cuts) if has_many_cuts else factor
        if shape[dim] % divisor and (has_many_cuts or mesh_shape[at] > 2):
            raise ConfigError(
                f"{described}: FSDP2 and DTensor cut {shape[dim]} rows differently, because "
                f"{factor} does not divide them; use tensor parallelism that cuts rows evenly, "
                "and shard experts one by one"
            )
        order.append(at)
    return order


class _MeshRanks(NamedTuple):
    """Global ranks by coordinate, each ``[copies, *mesh.shape]``: of a mesh alone, and of all
    slices like it.
    """

    alone: np.ndarray
    slices: np.ndarray


_mesh_ranks = PerModel[_MeshRanks](
    "mesh_ranks", "Results of `ranks_of` for a mesh, which sets them. They never change."
)


def ranks_of(
    mesh: DeviceMesh,
    group: Sequence[int] | None = None,
) -> np.ndarray:
    """Global ranks by coordinate, ``[copies, *mesh.shape]``, the slice with this rank and those
    with copies of it.

    A tensor on a slice of a mesh is the same on all ranks that differ only in the dimensions
    outside of the slice, unless the slice alone is the ``group`` of ranks that hold the tensor.
    """
    # Kept, because a mesh makes its tensor of ranks at each look, and every step and every load
    # asks for each tensor.
    ranks = _mesh_ranks.of(mesh)
    if ranks is None:
        own = mesh.mesh.numpy()
        root = root_mesh(mesh).mesh.numpy()
        ranks = _mesh_ranks.set(mesh, _MeshRanks(own[None], _slices_like(own, root)))
    if group is not None and len(group) == ranks.alone.size:
        return ranks.alone
    return ranks.slices


def _slices_like(
    own: np.ndarray,
    root: np.ndarray,
) -> np.ndarray:
    """All slices of the ranks ``root`` in the directions of the slice ``own``, or ``own`` alone if
    it is none.
    """
    if root.size % own.size:
        return own[None]

    # Dimensions of the root in which the ranks of the slice do not differ come first.
    inside = np.argwhere(np.isin(root, own))
    outside = []
    along = []
    for dim in range(root.ndim):
        n_places = len(np.unique(inside[:, dim]))
        (outside if n_places < 2 else along).append(dim)
    slices = root.transpose(outside + along).reshape(-1, *own.shape)

    # The slice itself must be among them.
    own_dims = tuple(range(1, slices.ndim))
    is_own = (slices == own).all(own_dims)
    return slices if is_own.any() else own[None]


def copy_number(
    tensor: Tensor,
    group: Sequence[int] | None = None,
) -> tuple[int, int]:
    """This rank's number among the ranks that hold the same part of a tensor, and how many these
    are.

    ``group`` has the global ranks that hold the tensor, in order. None: all ranks. ``(0, 0)`` on a
    rank without a part.
    """
    rank = get_rank()
    if not isinstance(tensor, DTensor):
        if group is None:
            return rank, get_world_size()
        return list(group).index(rank), len(group)

    ranks = ranks_of(tensor.device_mesh, group)
    here = np.argwhere(ranks == rank)
    if not len(here):
        return 0, 0

    # Copies differ in the slice, or in a dimension of the mesh that does not cut the tensor.
    kept = [0]
    for dim, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            kept.append(1 + dim)
    sizes = [ranks.shape[dim] for dim in kept]
    number = np.ravel_multi_index(here[0][kept], sizes)
    return int(number), math.prod(sizes)


def counts_here(
    tensor: Tensor,
    group: Sequence[int] | None = None,
) -> bool:
    """Whether this rank is the first of the ranks that hold the same part of a tensor. ``group``:
    see `copy_number`.
    """
    number, copies = copy_number(tensor, group)
    return number == 0 < copies


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dimensions)


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as ``[n]`` uint8. A tensor of one element may have any
    stride.
    """
    elements = tensor.as_strided((tensor.numel(),), (1,))
    return elements.view(torch.uint8)


def memory_of(data: Tensor) -> memoryview:
    """The memory of `bytes_of` a CPU tensor, to read or to write. It keeps the tensor alive.

    ``Tensor.numpy`` would forbid for ever to resize the storage, and so to free the memory of a
    live parameter.
    """
    return np.asarray(_Memory(data)).data


class _Memory:
    def __init__(
        self,
        data: Tensor,
    ) -> None:
        self._data = data
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": tuple(data.shape),
            "data": (data.data_ptr(), False),
        }


def clean_name(name: str) -> str:
    """The name of a tensor in a module without the components that wrappers (torch.compile, FSDP1
    ...) add.
    """
    # Most names have no such component, and this is faster.
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts)


def by_clean_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Clean name -> tensor. A tensor may have several names in ``named``, pairs of a name and a
    tensor.

    Raises ConfigError if two tensors have the same clean name.
    """
    found: dict[str, T] = {}
    # Clean name -> the first name with its wrappers, for the message.
    raw: dict[str, str] = {}
    for name, tensor in named:
        clean = clean_name(name)
        # Several names of one tensor may have the same clean name.
        if found.setdefault(clean, tensor) is not tensor:
            raise ConfigError(
                f"{raw[clean]} and {name} would both be called {clean} in a checkpoint, which "
                f"leaves out what wrappers add to names ({', '.join(WRAPPERS)}); rename one of "
                "the modules"
            )
        raw.setdefault(clean, name)
    return found


def first_names(named: Mapping[str, T]) -> dict[str, T]:
    """``named`` with only the first name of each tensor."""
    # Dictionaries keep the order, so the first name of a tensor is met first.
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: named[name] for name in first.values()}
