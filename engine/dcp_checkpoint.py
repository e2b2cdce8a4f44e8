"""Save and load a `DCPState` as a torch.distributed.checkpoint folder: durable, checked, all ranks or none.

Writing goes through `DurableWriter` into a staging folder that becomes visible in one rename. Reading plans by itself
instead of in place: each rank reads its part of every tensor into buffers of its own, and only when all ranks have all
they need is anything copied into the model. Cost: one shard of host memory during a load.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..utils.distributed import all_ranks_succeed, gather_objects, get_rank, get_world_size
from ..utils.errors import CheckpointError, CheckpointMismatchError
from ..utils.manifest import MANIFEST_NAME, FileEntry, verify_folder, write_manifest
from ..utils.staging import staged_folder
from .dcp_metadata import read_metadata, tensor_entry
from .dcp_reader import CheckedReader
from .dcp_saver import ROOT, DCPSaver
from .dcp_state import PACKED, DCPState, rng_key


def write_dcp(
    folder: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None
) -> list[FileEntry]:
    """Write ``state`` into the existing, empty ``folder`` and fsync the files; all ranks of ``group`` call it.

    Returns:
        what this rank wrote: its own data file, and on rank 0 also the metadata.

    Raises:
        CheckpointWriteError: the file system refused, on any rank.
        PeerError: another rank failed for another reason; that rank raises its own error.
        RuntimeError: a rank is gone; within the timeout of the group.
    """
    with all_ranks_succeed(f"collecting the state for {folder}", group):  # torch would leave the other ranks waiting
        values = state.state_dict()
    return DCPSaver().write(folder, values, group)


def save_dcp(path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None) -> None:
    """Save ``state`` as the new folder ``path`` with a manifest; it appears complete or not at all.

    Raises:
        CheckpointExistsError: ``path`` exists.
        CheckpointWriteError: any rank could not write; nothing is left behind.
    """
    with staged_folder(path, group) as staging:
        entries = gather_objects(write_dcp(staging, state, group), group)
        if get_rank(group) == 0:
            write_manifest(staging, [entry for rank in entries for entry in rank], {"world_size": len(entries)})


@dataclass(frozen=True)
class DCPLoad:
    """A folder that was read and found good on all ranks, and waits to be put into the live state."""

    _state: DCPState
    _proposed: Mapping[str, torch.Tensor]
    _given: dict[str, torch.Tensor]

    def apply(self) -> None:
        """Copy it into the state. What could be checked has been; only a user's own counters can still refuse."""
        self._state.adopt_optimizer_state(self._proposed)
        self._state.load_state_dict(self._given)


def read_dcp(path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None) -> DCPLoad:
    """Read the folder ``path`` into memory of its own, at any world size; all ranks of ``group`` call it.

    When it returns, every rank has found the folder sound and of this model, and has read all it needs; nothing in
    ``state`` has changed. It costs the host memory of one shard until the result is dropped.

    Raises:
        CheckpointNotFoundError: no such folder, or not a DCP folder.
        CheckpointCorruptError: files are missing, short, damaged, or do not cover a tensor.
        CheckpointMismatchError: keys, shapes or dtypes are not those of ``state``, or tensors that its model ties
            differ.
        OSError: a file that is there cannot be read.
        PeerError: all is well here, but not on another rank.
    """
    with all_ranks_succeed(f"checking {path}", group):
        if (Path(path) / MANIFEST_NAME).exists():
            verify_folder(path, get_rank(group), get_world_size(group))
        metadata = read_metadata(path)
        proposed = _propose_state(path, state, metadata)
        buffers = _buffers_for(path, state, metadata, proposed)
    with all_ranks_succeed(f"reading {path}", group):
        _fill(path, metadata, buffers)
        given = {name.removeprefix(f"{ROOT}."): buffer.tensor for name, buffer in buffers.items()}
        _check_tied(path, state, given)
        _check_values(path, state, given)
    return DCPLoad(state, proposed, given)


def load_dcp(path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None) -> None:
    """Load the folder ``path`` into ``state``, at any world size; all ranks of ``group`` call it.

    Nothing in ``state`` changes unless every rank has found the folder sound, of this model, and has read all of it.
    A state without an optimizer takes only the model out of a training checkpoint. A folder as AReaL writes it has no
    schedule, counters or generators: those stay as they are, with a warning.

    Raises:
        see `read_dcp`.
    """
    load = read_dcp(path, state, group)
    with all_ranks_succeed(f"loading {path}", group):
        load.apply()


def check_dcp(path: str | os.PathLike[str], state: DCPState) -> None:
    """Raise what `load_dcp` would raise of the folder's keys, shapes and dtypes; reads no data, changes nothing."""
    metadata = read_metadata(path)
    _buffers_for(path, state, metadata, _propose_state(path, state, metadata))


class _Buffer:
    """Host memory for one rank's part of one tensor, and where in the tensor it belongs."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, live: torch.Tensor | None = None) -> None:
        offsets = [0] * len(shape)
        if isinstance(live, DTensor):
            local, begin = compute_local_shape_and_global_offset(shape, live.device_mesh, live.placements)
            shape, offsets = torch.Size(local), list(begin)
        self.tensor = torch.empty(shape, dtype=dtype)
        self.chunk = ChunkStorageMetadata(torch.Size(offsets), shape)


def _propose_state(path: str | os.PathLike[str], state: DCPState, metadata: Metadata) -> dict[str, torch.Tensor]:
    """Optimizer state that ``state`` must be given before it can load this folder; nothing for a model alone."""
    saved = metadata.state_dict_metadata
    if not any(name.startswith(f"{ROOT}.model.") for name in saved):
        raise CheckpointMismatchError(
            f"{path} holds no model under {ROOT!r}: its keys are {sorted(saved)[:4]} ...; expected {ROOT}.model.* as "
            "Holdfast and AReaL write"
        )
    trained = any(name == f"{ROOT}.param_groups" or name.startswith(f"{ROOT}.optim.") for name in saved)
    if state.optimizer is not None and not trained:  # plain SGD has groups but no state
        raise CheckpointMismatchError(f"{path} holds a model only, no optimizer state; load it with_optim=False")
    return state.propose_optimizer_state(_shapes(metadata, f"{ROOT}.optim.state."))


def _buffers_for(
    path: str | os.PathLike[str], state: DCPState, metadata: Metadata, proposed: dict[str, torch.Tensor]
) -> dict[str, _Buffer]:
    """Full name -> buffer of everything ``state`` wants; raises unless the folder fits it."""
    saved = metadata.state_dict_metadata
    live = {f"{ROOT}.{name}": tensor for name, tensor in (state.live_tensors() | proposed).items()}
    aliases = {f"{ROOT}.{alias}": live[f"{ROOT}.{name}"] for alias, name in state.aliases().items()}
    _check_same_names(path, live.keys(), saved.keys(), aliases.keys(), state)
    live |= {alias: tensor for alias, tensor in aliases.items() if alias in saved}
    buffers = {}
    for name, tensor in live.items():
        _check_same_tensor(path, name, tensor, metadata)
        buffers[name] = _Buffer(tensor.shape, tensor.dtype, tensor)
    if state.optimizer is not None:
        for name in _training_names(saved.keys()):
            entry = tensor_entry(metadata, name)
            if entry is None:
                raise CheckpointMismatchError(f"{path}: {name} is not a tensor; expected one, as Holdfast writes it")
            buffers[name] = _Buffer(entry.size, entry.properties.dtype)
    return buffers


def _shapes(metadata: Metadata, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    entries = {name: tensor_entry(metadata, name) for name in metadata.state_dict_metadata if name.startswith(prefix)}
    return {n.removeprefix(f"{ROOT}."): (e.size, e.properties.dtype) for n, e in entries.items() if e is not None}


def _training_names(saved: Iterable[str]) -> list[str]:
    """What else comes back: schedule, counters, and the generators of this rank (of rank 0 for a new rank)."""
    saved = list(saved)
    own = f"{ROOT}.rng.{rng_key(get_rank())}."
    rng = own if any(name.startswith(own) for name in saved) else f"{ROOT}.rng.{rng_key(0)}."
    exact = {f"{ROOT}.{key}" for key in PACKED}
    return [name for name in saved if name in exact or name.startswith(rng)]


def _check_same_names(
    path: str | os.PathLike[str], live: Iterable[str], saved: Iterable[str], aliases: Iterable[str], state: DCPState
) -> None:
    prefixes = (f"{ROOT}.model.",) if state.optimizer is None else (f"{ROOT}.model.", f"{ROOT}.optim.state.")
    here, there = set(live), {name for name in saved if name.startswith(prefixes)}
    if missing := sorted(here - there):
        raise CheckpointMismatchError(
            f"{path} lacks {missing[0]!r} ({len(missing)} missing): it is a checkpoint of another model or optimizer"
        )
    if unexpected := sorted((there - here).difference(aliases)):
        raise CheckpointMismatchError(
            f"{path} has {unexpected[0]!r}, which this model or optimizer does not ({len(unexpected)} unexpected)"
        )


def _check_same_tensor(path: str | os.PathLike[str], name: str, live: torch.Tensor, metadata: Metadata) -> None:
    entry = tensor_entry(metadata, name)
    if entry is None:
        raise CheckpointMismatchError(f"{path}: {name} is not a tensor; expected {list(live.shape)} {live.dtype}")
    if entry.size != live.shape:
        raise CheckpointMismatchError(
            f"{path}: {name} has shape {list(entry.size)}, this model needs {list(live.shape)}; is it another model?"
        )
    if entry.properties.dtype != live.dtype:
        raise CheckpointMismatchError(
            f"{path}: {name} has dtype {entry.properties.dtype}, this model needs {live.dtype}"
        )


def _fill(path: str | os.PathLike[str], metadata: Metadata, buffers: Mapping[str, _Buffer]) -> None:
    """Read this rank's part of every tensor; each rank plans by itself."""
    items: list[ReadItem] = []
    for name, buffer in buffers.items():
        entry = tensor_entry(metadata, name)
        assert entry is not None
        items += create_read_items_for_chunk_list(name, entry, [buffer.chunk]) if buffer.tensor.numel() else []
    for item, values in CheckedReader(path, metadata).read_items(items):
        assert isinstance(values, torch.Tensor), f"{item} was planned as a tensor"
        target = buffers[item.dest_index.fqn].tensor
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(values)


def _check_tied(path: str | os.PathLike[str], state: DCPState, given: Mapping[str, torch.Tensor]) -> None:
    """A folder that holds a tied tensor under two names must hold the same values under both."""
    for alias, name in state.aliases().items():
        if alias in given and not torch.equal(given[alias], given[name]):
            raise CheckpointMismatchError(
                f"{path} holds different values for {alias.removeprefix('model.')} and {name.removeprefix('model.')}, "
                "which this model ties; build it with tie_word_embeddings=False"
            )


def _check_values(path: str | os.PathLike[str], state: DCPState, given: Mapping[str, torch.Tensor]) -> None:
    try:
        state.check(given)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
