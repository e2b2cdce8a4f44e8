"""Whether a DCP folder is of this model and optimizer, and what of it this rank reads into which tensor."""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...utils.distributed import get_rank
from ...utils.errors import CheckpointMismatchError
from ..memory.tensors import Box, local_box
from .base_model import BASE, BASE_SAMPLE
from .direct_reader import Destination
from .layout import FolderLayout
from .roots import describe_roots
from .state import ADAPTERS, PACKED, ROOT, DCPState, rank_key

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Destinations:
    """What a rank reads of a folder, and where it goes. Names are those in the folder, with `ROOT`.

    Attributes:
        proposed: dotted name -> new tensor for what the state has no fitting one for: see `DCPState.propose_state`.
        live: name -> this rank's part of a model or optimizer tensor, read when the load is applied.
        small: name -> fresh memory for schedule, counters, generators and state of modules, read before.
        ties: name under which the folder holds a tied tensor once more -> the name it has in ``live``.
    """

    proposed: dict[str, torch.Tensor]
    live: dict[str, Destination]
    small: dict[str, Destination]
    ties: dict[str, str]


def find_destinations(path: PathLike, layout: FolderLayout, state: DCPState) -> Destinations:
    """Compare names, shapes and dtypes of a folder with ``state``; no data is read, and ``state`` stays as it is.

    Raises:
        CheckpointMismatchError: the folder is of another model or optimizer.
    """
    _check_kind(path, layout, state)
    found = {name.removeprefix(f"{ROOT}."): (stored.shape, stored.dtype) for name, stored in layout.tensors.items()}
    proposed = state.propose_state(found)
    live = {f"{ROOT}.{name}": tensor for name, tensor in (state.live_tensors() | proposed).items()}
    aliases = {f"{ROOT}.{alias}": f"{ROOT}.{name}" for alias, name in state.aliases().items()}
    ties = {alias: name for alias, name in aliases.items() if alias in layout.names() and name in live}
    _check_same_names(path, live.keys(), layout.names(), aliases.keys(), state)
    for name, tensor in (live | {alias: live[name] for alias, name in ties.items()}).items():
        _check_same_tensor(path, name, tensor, layout)
    boxes: dict[Any, Box] = {}  # hundreds of tensors are cut in a few ways
    return Destinations(
        proposed,
        {name: _local_destination(tensor, boxes) for name, tensor in live.items()},
        {name: _small_destination(path, name, layout) for name in _small_names(layout.names(), state)},
        ties,
    )


def _check_kind(path: PathLike, layout: FolderLayout, state: DCPState) -> None:
    names = layout.names()
    if not any(name.startswith(f"{ROOT}.model.") for name in names):
        raise CheckpointMismatchError(
            f"{path} holds no model under {ROOT!r}, where Holdfast and AReaL have it; {describe_roots(names)}"
        )
    trained = any(name == f"{ROOT}.param_groups" or name.startswith(f"{ROOT}.optim.") for name in names)
    if state.optimizer is not None and not trained:  # plain SGD has groups but no state
        raise CheckpointMismatchError(f"{path} holds a model only, no optimizer state; load it with_optim=False")


def _check_same_names(
    path: PathLike, live: Iterable[str], saved: Collection[str], aliases: Iterable[str], state: DCPState
) -> None:
    prefixes = (f"{ROOT}.model.",) if state.optimizer is None else (f"{ROOT}.model.", f"{ROOT}.optim.state.")
    here, there = set(live), {name for name in saved if name.startswith(prefixes)}
    if missing := sorted(here - there):
        raise CheckpointMismatchError(
            f"{path} lacks {missing[0]!r} ({len(missing)} missing): it is a checkpoint of another model or optimizer"
            + (", or of one that had other parameters frozen, which it leaves out" if f"{ROOT}.{BASE}" in saved else "")
        )
    if unexpected := sorted((there - here).difference(aliases)):
        raise CheckpointMismatchError(
            f"{path} has {unexpected[0]!r}, which this model or optimizer does not ({len(unexpected)} unexpected)"
        )


def _check_same_tensor(path: PathLike, name: str, live: torch.Tensor, layout: FolderLayout) -> None:
    stored = layout.tensors.get(name)
    if stored is None:
        raise CheckpointMismatchError(f"{path}: {name} is not a tensor; expected {list(live.shape)} {live.dtype}")
    if stored.shape != live.shape:
        raise CheckpointMismatchError(
            f"{path}: {name} has shape {list(stored.shape)}, this model needs {list(live.shape)}; is it another model?"
        )
    if stored.dtype != live.dtype:
        raise CheckpointMismatchError(f"{path}: {name} has dtype {stored.dtype}, this model needs {live.dtype}")


def _local_destination(tensor: torch.Tensor, boxes: dict[Any, Box]) -> Destination:
    if not isinstance(tensor, DTensor):
        return Destination(_whole(tensor.shape), tensor)
    cut = tensor.shape, tensor.device_mesh, tensor.placements
    if cut not in boxes:
        boxes[cut] = local_box(tensor)
    return Destination(boxes[cut], tensor.to_local())


def _small_destination(path: PathLike, name: str, layout: FolderLayout) -> Destination:
    stored = layout.tensors.get(name)
    if stored is None:
        raise CheckpointMismatchError(f"{path}: {name} is not a tensor; expected one, as Holdfast writes it")
    return Destination(_whole(stored.shape), torch.empty(stored.shape, dtype=stored.dtype, device="cpu"))


def _whole(shape: torch.Size) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def _small_names(saved: Iterable[str], state: DCPState) -> list[str]:
    """What comes back besides live tensors; of what each rank has of its own, a new rank gets that of rank 0."""
    saved = sorted(saved)
    found = _of_rank("module_state", saved)
    found += [
        name
        for name in saved
        if name in (f"{ROOT}.{BASE}", f"{ROOT}.{ADAPTERS}") or name.startswith(f"{ROOT}.{BASE_SAMPLE}.")
    ]
    if state.optimizer is not None:
        found += _of_rank("rng", saved) + [name for key in PACKED if (name := f"{ROOT}.{key}") in saved]
    return found


def _of_rank(key: str, saved: Sequence[str]) -> list[str]:
    own, first = (f"{ROOT}.{key}.{rank_key(rank)}." for rank in (get_rank(), 0))
    found = [name for name in saved if f"{name}.".startswith(own)]
    return found or [name for name in saved if f"{name}.".startswith(first)]
