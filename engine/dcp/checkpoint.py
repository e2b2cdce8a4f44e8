"""Save and load a `DCPState` as a torch.distributed.checkpoint folder: durable, checked, all ranks or none.

Writing goes through `DCPSaver` into a staging folder that becomes visible in one rename. Reading plans by itself
instead of in place: each rank verifies its share of the bytes and finds its part of every tensor, and only when all
ranks have found all they need is anything copied into the model, straight from the files. Host memory during a load: a
few megabytes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from ...utils.atomic_folder import staged_folder
from ...utils.distributed import all_ranks_succeed, gather_objects, get_rank, get_world_size
from ...utils.errors import CheckpointError, CheckpointMismatchError
from ...utils.manifest import MANIFEST_NAME, FileEntry, verify_folder, write_manifest
from ...utils.remote import FETCH_FIRST, require_local
from ..tensors import local_box, normal_tensors
from ..weight_changes import changing_weights
from .checked_reader import CheckedReader
from .direct_reader import Part, Placing
from .metadata import read_metadata, tensor_entry
from .save import ROOT, DCPSaver
from .state import PACKED, DCPState, StagedState, rank_key


def write_dcp(
    folder: str | os.PathLike[str], state: DCPState | StagedState, group: dist.ProcessGroup | None = None
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


def save_dcp(
    path: str | os.PathLike[str], state: DCPState | StagedState, group: dist.ProcessGroup | None = None
) -> None:
    """Save ``state`` as the new folder ``path`` with a manifest; it appears complete or not at all.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``).
        CheckpointExistsError: ``path`` exists.
        CheckpointWriteError: any rank could not write; nothing is left behind.
    """
    advice = "save to one, and set recover.mirror_url for copies of snapshots at a URL"
    with staged_folder(require_local(path, "a DCP checkpoint", advice), group) as staging:
        entries = gather_objects(write_dcp(staging, state, group), group)
        if isinstance(state, StagedState):
            with all_ranks_succeed(f"finishing {path}", group):
                state.finish()
        if get_rank(group) == 0:
            write_manifest(staging, [entry for rank in entries for entry in rank], {"world_size": len(entries)})


@dataclass(frozen=True)
class DCPLoad:
    """A folder that was found good on all ranks, and waits to be put into the live state.

    Attributes:
        first_group: which of the optimizer's parameter groups is the first one in the folder; 0 without an optimizer.
    """

    _state: DCPState
    _proposed: Mapping[str, torch.Tensor]
    _placing: Placing
    _given: dict[str, torch.Tensor]
    first_group: int

    def check_unchanged(self) -> None:
        """Raise `CheckpointCorruptError` unless the files are those that were checked; changes nothing.

        For all ranks, and all states that are loaded together, before any of them is changed.
        """
        self._placing.check_unchanged()

    @normal_tensors()
    def apply(self) -> None:
        """Copy it into the state; the folder must still be there.

        What could be checked has been. What is left to fail is a user's own counters, and files that are no longer what
        they were when they were checked: their identity, size and time of change are looked at before the first byte is
        copied and after the last. The bytes are not digested again, which would cost as much as verifying them did: a
        disk that gives other bytes the second time, without an error, is not noticed.

        Raises:
            CheckpointCorruptError: a file changed. If that was not seen before the first byte was copied, the state is
                not to be trusted: load again, or stop.
            OSError: a file can no longer be read; likewise.
        """
        self.check_unchanged()
        with changing_weights(self._state.model):
            self._state.adopt_state(self._proposed, self._given)
            self._placing.place()
            self._state.load_state_dict(self._given)


@normal_tensors()
def read_dcp(path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None) -> DCPLoad:
    """Verify the folder ``path`` and find what this rank needs, at any world size; all ranks of ``group`` call it.

    When it returns, every rank has found the folder sound and of this model, and every part it needs in its place;
    nothing in ``state`` has changed. Values are copied when the result is applied; held in memory until then is only
    what is small, or not stored as this version of torch stores it.

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
        live = _live_parts(path, state, metadata, proposed)
        loose = _loose_parts(path, state, metadata)
    with all_ranks_succeed(f"reading {path}", group):
        placing = Placing(path, metadata, live)
        copies = {name: part.like() for name, part in live.items() if name not in placing.names}
        _read(path, metadata, copies | loose)
        _check_tied(path, state, metadata, live)
        given = {name.removeprefix(f"{ROOT}."): part.tensor for name, part in (live | copies | loose).items()}
        order = _check_values(path, state, given).get("group_order", [0])
        placing.check_unchanged()
    return DCPLoad(state, proposed, placing, given, order.index(0))


def load_dcp(path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None) -> None:
    """Load the folder ``path`` into ``state``, at any world size; all ranks of ``group`` call it.

    Nothing in ``state`` changes unless every rank has found the folder sound and of this model. Should a file break
    after that, while it is read, the error says that the state is half loaded.
    A state without an optimizer takes only the model out of a training checkpoint. A folder as AReaL writes it has no
    schedule, counters or generators: those stay as they are, with a warning.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``).
        Otherwise see `read_dcp`.
    """
    path = require_local(path, "loading", FETCH_FIRST)
    load = read_dcp(path, state, group)
    with all_ranks_succeed(f"loading {path}", group):
        load.apply()


@normal_tensors()
def check_dcp(path: str | os.PathLike[str], state: DCPState) -> None:
    """Raise what `load_dcp` would raise of the folder's keys, shapes and dtypes; reads no data, changes nothing."""
    metadata = read_metadata(path)
    _live_parts(path, state, metadata, _propose_state(path, state, metadata))
    _loose_parts(path, state, metadata)


def _propose_state(path: str | os.PathLike[str], state: DCPState, metadata: Metadata) -> dict[str, torch.Tensor]:
    """What ``state`` must be given before it can load this folder."""
    saved = metadata.state_dict_metadata
    if not any(name.startswith(f"{ROOT}.model.") for name in saved):
        raise CheckpointMismatchError(
            f"{path} holds no model under {ROOT!r}: its keys are {sorted(saved)[:4]} ...; expected {ROOT}.model.* as "
            "Holdfast and AReaL write"
        )
    trained = any(name == f"{ROOT}.param_groups" or name.startswith(f"{ROOT}.optim.") for name in saved)
    if state.optimizer is not None and not trained:  # plain SGD has groups but no state
        raise CheckpointMismatchError(f"{path} holds a model only, no optimizer state; load it with_optim=False")
    return state.propose_state(_shapes(metadata))


def _live_parts(
    path: str | os.PathLike[str], state: DCPState, metadata: Metadata, proposed: dict[str, torch.Tensor]
) -> dict[str, Part]:
    """Full name -> this rank's part of every tensor that is loaded in place; raises unless the folder fits them."""
    saved = metadata.state_dict_metadata
    live = {f"{ROOT}.{name}": tensor for name, tensor in (state.live_tensors() | proposed).items()}
    aliases = {f"{ROOT}.{alias}": live[f"{ROOT}.{name}"] for alias, name in state.aliases().items()}
    _check_same_names(path, live.keys(), saved.keys(), aliases.keys(), state)
    for name, tensor in (live | aliases).items():
        if name in saved:
            _check_same_tensor(path, name, tensor, metadata)
    chunks: dict[Any, ChunkStorageMetadata] = {}  # hundreds of tensors are cut in a few ways
    return {name: _part_of(tensor, chunks) for name, tensor in live.items()}


def _part_of(tensor: torch.Tensor, chunks: dict[Any, ChunkStorageMetadata]) -> Part:
    if not isinstance(tensor, DTensor):
        return _whole(tensor)
    cut = tensor.shape, tensor.device_mesh, tensor.placements
    if cut not in chunks:
        box = local_box(tensor)
        chunks[cut] = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    return Part(chunks[cut], tensor.to_local())


def _whole(tensor: torch.Tensor) -> Part:
    return Part(ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape), tensor)


def _loose_parts(path: str | os.PathLike[str], state: DCPState, metadata: Metadata) -> dict[str, Part]:
    """Full name -> memory for everything that comes back besides live tensors; all of it is small."""
    parts = {}
    for name in _loose_names(metadata.state_dict_metadata, state):
        entry = tensor_entry(metadata, name)
        if entry is None:
            raise CheckpointMismatchError(f"{path}: {name} is not a tensor; expected one, as Holdfast writes it")
        parts[name] = _whole(torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu"))
    return parts


def _shapes(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    entries = {name: tensor_entry(metadata, name) for name in metadata.state_dict_metadata}
    return {n.removeprefix(f"{ROOT}."): (e.size, e.properties.dtype) for n, e in entries.items() if e is not None}


def _loose_names(saved: Iterable[str], state: DCPState) -> list[str]:
    """What else comes back: schedule, counters, and this rank's generators and state of modules (rank 0's for a new
    rank)."""
    saved = list(saved)
    found = _of_rank("module_state", saved)
    if state.optimizer is not None:
        found += _of_rank("rng", saved) + [name for key in PACKED if (name := f"{ROOT}.{key}") in saved]
    return found


def _of_rank(key: str, saved: Sequence[str]) -> list[str]:
    own, first = (f"{ROOT}.{key}.{rank_key(rank)}." for rank in (get_rank(), 0))
    found = [name for name in saved if f"{name}.".startswith(own)]
    return found or [name for name in saved if f"{name}.".startswith(first)]


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


def _read(path: str | os.PathLike[str], metadata: Metadata, parts: Mapping[str, Part]) -> None:
    """Read parts at once, into memory that nothing else uses yet."""
    placing = Placing(path, metadata, parts)
    placing.place()
    items: list[ReadItem] = []
    for name in parts.keys() - placing.names:  # not stored as torch here stores it: each tensor as a whole
        items += parts[name].read_items(name, metadata)
    for item, values in CheckedReader(path, metadata).read_items(items):
        assert isinstance(values, torch.Tensor), f"{item} was planned as a tensor"
        target = parts[item.dest_index.fqn].tensor
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(values)


def _check_tied(path: str | os.PathLike[str], state: DCPState, metadata: Metadata, live: Mapping[str, Part]) -> None:
    """A folder that holds a tied tensor under two names must hold the same values under both."""
    for alias, name in state.aliases().items():
        names = f"{ROOT}.{alias}", f"{ROOT}.{name}"
        if names[0] in metadata.state_dict_metadata and not _same_values(path, metadata, names, live[names[1]]):
            raise CheckpointMismatchError(
                f"{path} holds different values for {alias.removeprefix('model.')} and {name.removeprefix('model.')}, "
                "which this model ties; build it with tie_word_embeddings=False"
            )


def _same_values(path: str | os.PathLike[str], metadata: Metadata, names: tuple[str, str], part: Part) -> bool:
    """Whether a part of two stored tensors is the same; a few rows at a time, where they are stored so."""
    direct = Placing(path, metadata, dict.fromkeys(names, part)).names.issuperset(names)
    for rows in part.split_rows() if direct else (part,):
        copies = {name: rows.like() for name in names}
        _read(path, metadata, copies)
        one, other = (copy.tensor for copy in copies.values())
        if not torch.equal(one, other):
            return False
    return True


def _check_values(path: str | os.PathLike[str], state: DCPState, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    try:
        return state.check_values(given)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
