"""Helpers for both checkpoint formats: tensors of a model by name, and the part of each that a rank holds."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...utils.compat.torch_private import compute_local_shape_and_global_offset, root_mesh
from ...utils.distributed import get_rank
from ...utils.errors import ConfigError

T = TypeVar("T", bound=torch.Tensor)

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Names that activation checkpointing, torch.compile and FSDP1 give to the module that they wrap."""


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Create tensors that can be trained, even if the caller is in inference mode. Records no gradient."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """``(dotted name, tensor)`` of nested mappings, named as in torch's DCP."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Box(NamedTuple):
    """A block of a tensor."""

    offsets: tuple[int, ...]  # first index in each dimension of the whole tensor
    sizes: tuple[int, ...]  # shape of the block


def local_box(tensor: torch.Tensor) -> Box:
    """The block of a sharded tensor that this rank holds, or all of a plain tensor. No communication.

    Raises:
        ConfigError: the ranks do not hold one block each, or FSDP2 and DTensor disagree about them.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:  # this rank is outside the mesh
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())
    _require_one_block(tensor)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return Box(tuple(offsets), tuple(sizes))


def _require_one_block(tensor: DTensor) -> None:
    """A strided shard is a block only together with the later cuts of the same dimension that it leaves room for."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for at, placement in enumerate(placements):
        if (factor := getattr(placement, "split_factor", 1)) == 1:
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        later = math.prod(mesh.size(other) for other in range(at + 1, mesh.ndim) if placements[other] == Shard(dim))
        if later != factor or (mesh.size(at) > 2 and tensor.shape[dim] % factor):
            raise ConfigError(
                f"a tensor {list(tensor.shape)} is placed as {placements} on {mesh}, so that a rank holds several runs "
                "of rows; use tensor parallelism that cuts rows evenly, and shard experts one by one"
            )


def counts_here(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of the ranks that hold the same part of a tensor.

    A tensor on a slice of a mesh is the same on all ranks that differ only in the dimensions outside of the slice.
    """
    if not isinstance(tensor, DTensor):
        return get_rank() == 0
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:  # outside of the mesh
        return False
    cut = {dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)}
    root = root_mesh(mesh)
    if root is not mesh and set(mesh.mesh_dim_names or ()) <= set(root.mesh_dim_names or ()):
        cut = {root.mesh_dim_names.index(mesh.mesh_dim_names[dim]) for dim in cut}  # type: ignore[union-attr,index]
        mesh = root
    coordinate = mesh.get_coordinate()
    return all(at == 0 for dim, at in enumerate(coordinate or ()) if dim not in cut)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as ``[n]`` uint8. A tensor of one element may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(data: torch.Tensor) -> memoryview:
    """The memory of `bytes_of` a CPU tensor, to read or to write. It keeps the tensor alive.

    ``Tensor.numpy`` would forbid for ever to resize the storage, and so to free the memory of a live parameter.
    """
    return np.asarray(_Memory(data)).data


class _Memory:
    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": tuple(data.shape), "data": (data.data_ptr(), False)
        }  # fmt: skip


def clean_name(name: str) -> str:
    """The name of a tensor in a module without the components that wrappers (torch.compile, FSDP1 ...) add."""
    if not any(wrapper in name for wrapper in WRAPPERS):  # the usual case, and faster
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def by_clean_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Clean name -> tensor. A tensor may have several names in ``named``, pairs of a name and a tensor.

    Raises ConfigError if two tensors have the same clean name.
    """
    found: dict[str, T] = {}
    raw: dict[str, str] = {}
    for name, tensor in named:
        clean = clean_name(name)
        if found.setdefault(clean, tensor) is not tensor:
            raise ConfigError(
                f"{raw[clean]} and {name} would both be called {clean} in a checkpoint, which leaves out what wrappers "
                f"add to names ({', '.join(WRAPPERS)}); rename one of the modules"
            )
        raw.setdefault(clean, name)
    return found


def first_names(named: Mapping[str, T]) -> dict[str, T]:
    """``named`` with only the first name of each tensor."""
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: named[name] for name in first.values()}
