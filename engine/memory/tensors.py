"""Tensors of a model by name, and what a rank holds of them: what both checkpoint formats need."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate

from ...utils.compat.torch_private import compute_local_shape_and_global_offset
from ...utils.distributed import get_rank
from ...utils.errors import ConfigError

T = TypeVar("T", bound=torch.Tensor)

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""What activation checkpointing, torch.compile and FSDP1 call the module that they wrap."""


@contextmanager
def normal_tensors() -> Iterator[None]:
    """What is made in the block can be trained with, also if the caller is in inference mode. Records no gradient."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """``(dotted name, tensor)`` of nested mappings, as torch's DCP names them."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Box(NamedTuple):
    """A block of a tensor.

    Attributes:
        offsets: first index in each dimension of the whole tensor.
        sizes: shape of the block.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_box(tensor: torch.Tensor) -> Box:
    """The block of a sharded tensor that this rank holds; all of a plain tensor. No communication.

    Args:
        tensor: with one block a rank, as `Shard` and `Replicate` leave it; a strided shard is several.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:  # this rank is outside of it
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return Box(tuple(offsets), tuple(sizes))


def counts_here(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # outside of the mesh
        return False
    replicas = zip(coordinate, tensor.placements, strict=True)
    return all(at == 0 for at, placement in replicas if isinstance(placement, Replicate))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as ``[n]`` uint8; of one element that may be a view with any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def clean_name(name: str) -> str:
    """A module's name for a tensor without the components that wrappers (torch.compile, FSDP1 ...) add to it."""
    if not any(wrapper in name for wrapper in WRAPPERS):  # as a rule: no need to take it apart
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def by_clean_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Clean name -> tensor.

    Args:
        named: name in the module -> tensor; one tensor may have several names.

    Raises:
        ConfigError: two tensors have the same clean name.
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
    """``named`` with each tensor under the first of its names only."""
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: named[name] for name in first.values()}
