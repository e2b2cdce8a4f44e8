"""What one rank writes into a generation and reads back from it: its engines' shards, its generators, user objects.

Per-rank state lies in ``state/rank_00000.pt`` as tensors and plain values that torch loads with ``weights_only``. That
is checked when it is written: an object whose state could not be read back fails the snapshot, not the recovery.
"""

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..engine.api import Stateful
from ..engine.dcp_checkpoint import check_dcp, load_dcp, write_dcp
from ..engine.dcp_state import DCPState
from ..utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ..utils.files import write_durably
from ..utils.logging import get_logger
from ..utils.manifest import FileEntry, seal_files, verify_folder
from ..utils.rng import capture_rng, derive_rng, restore_rng
from ..utils.staging import as_write_error
from .ranks import RankTarget, rank_target

logger = get_logger(__name__)

DRIVER_STATE = "state/driver.pt"
DATA_STATE = "data.pt"


def rank_state_name(rank: int) -> str:
    """``state/rank_00001.pt``."""
    return f"state/rank_{rank:05d}.pt"


def write_rank(holder: Any, staging: str) -> list[FileEntry]:
    """Write this rank's part of a generation; all ranks call it.

    Args:
        holder: see `rank_target`.
        staging: folder that all ranks write into.

    Returns:
        every file this rank wrote, fsynced, named relative to ``staging``.

    Raises:
        CheckpointWriteError: this rank could not write.
        ConfigError: a user object's state could not be read back.
        PeerError: all is well here, but not on another rank.
    """
    target = rank_target(holder)
    group = _group(target, next(iter(target.engines.values())))
    with all_ranks_succeed("preparing the snapshot", group), as_write_error(staging):  # a collective save needs all
        for name in target.engines:
            (Path(staging) / name).mkdir(exist_ok=True)
        entries = write_process_state(staging, rank_state_name(get_rank()), target.stateful)
    for name, engine in target.engines.items():
        for entry in write_dcp(Path(staging) / name, _dcp_state(engine), _group(target, engine)):
            entries.append(FileEntry(f"{name}/{entry.name}", entry.bytes, entry.digest))
    return entries


def check_bytes(holder: Any, generation: str) -> str | None:
    """Compare this rank's share of a generation's files with the manifest; what is wrong, or None.

    A share each keeps the wait of any rank for the others short: the whole of a large checkpoint takes minutes.
    """
    try:
        verify_folder(generation, get_rank(), get_world_size())
    except CheckpointCorruptError as error:
        return str(error)
    return None


def check_rank(holder: Any, generation: str) -> None:
    """See that a verified generation is of this rank's engines, before any of them is touched.

    Raises:
        CheckpointMismatchError: other engines, or another model or optimizer; see `check_dcp`.
    """
    target, path = rank_target(holder), Path(generation)
    saved = {entry.name for entry in path.iterdir() if entry.is_dir()} - {"state"}
    if saved != target.engines.keys():
        raise CheckpointMismatchError(f"{path} holds engines {sorted(saved)}, this job has {sorted(target.engines)}")
    for name, engine in target.engines.items():
        check_dcp(path / name, _dcp_state(engine))


def read_rank(holder: Any, generation: str, versions: Mapping[str, int]) -> None:
    """Read this rank's part of a generation into its engines, user objects and generators; all ranks call it.

    Args:
        holder: see `rank_target`.
        generation: folder that was verified, and checked with `check_rank`.
        versions: engine name -> weight version, for engines whose shards hold no counters (a reference model).
    """
    target, path = rank_target(holder), Path(generation)
    for name, engine in target.engines.items():
        load_dcp(path / name, _dcp_state(engine), _group(target, engine))
        if name in versions and hasattr(engine, "set_version"):
            engine.set_version(versions[name])
    read_process_state(path, rank_state_name(get_rank()), target.stateful)


def weight_versions(holder: Any) -> dict[str, int]:
    """Engine name -> weight version, of the engines that count one."""
    engines = rank_target(holder).engines
    return {name: engine.get_version() for name, engine in engines.items() if hasattr(engine, "get_version")}


def write_process_state(folder: str, name: str, stateful: Mapping[str, Stateful]) -> list[FileEntry]:
    """Write the generators of this process and its user objects as ``<folder>/<name>``."""
    (Path(folder) / name).parent.mkdir(exist_ok=True)
    user = {key: pack_plain(f"state of {key!r}", thing.state_dict()) for key, thing in stateful.items()}
    state = pack_plain("generators", {"rng": capture_rng(), "user": user})
    write_durably(Path(folder) / name, state)
    return seal_files(folder, [name])


def read_process_state(generation: Path, name: str, stateful: Mapping[str, Stateful]) -> None:
    """Put back what `write_process_state` wrote, generators last.

    A process that the saved run did not have (a new rank; a driver after torchrun, or ranks after a driver) takes a
    user object's state from rank 0, else from the driver, and derives its generators from those of rank 0.
    """
    own, first = generation / name, generation / rank_state_name(0)
    files = [path for path in (own, first, generation / DRIVER_STATE) if path.exists()]
    states = {path: unpack_plain(path) for path in files}
    for key, thing in sorted(stateful.items()):
        source = next((path for path in files if key in states[path]["user"]), None)
        if source is None:
            logger.warning("%s has no state for %r; it starts anew", generation, key)
        else:
            thing.load_state_dict(load_plain(source, states[source]["user"][key]))
    for key in sorted(states[files[0]]["user"].keys() - stateful.keys()):
        logger.warning("%s has a state for %r, which nothing is registered for here; it is ignored", files[0], key)
    restore_rng(states[own]["rng"] if own in states else derive_rng(states[first]["rng"], get_rank()))


def pack_plain(what: str, value: Any) -> bytes:
    """``torch.save`` of tensors and plain values.

    Raises:
        ConfigError: ``value`` holds something that could only be loaded by running code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        allowed = "a state_dict may hold tensors, numbers, strings, lists and dicts"
        raise ConfigError(f"{what} cannot be saved: {_reason(error)}; {allowed}") from error
    return buffer.getvalue()


def unpack_plain(path: Path) -> Any:
    """What `pack_plain` packed, from a file."""
    try:
        return load_plain(path, path.read_bytes())
    except OSError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error.strerror}") from error


def load_plain(source: Path, data: bytes) -> Any:
    """What `pack_plain` packed; ``source`` is for the message."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointCorruptError(f"{source} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """In a line what torch says in ten, advice to load it unsafely included."""
    forbidden = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if forbidden:
        return f"it holds {forbidden[1]}, which could only be read by running code"
    if isinstance(error, pickle.UnpicklingError):
        return "it is not a file of tensors and plain values"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _dcp_state(engine: Any) -> DCPState:
    if isinstance(engine, DCPState):
        return engine
    return engine.dcp_state() if engine.optimizer is not None else engine.dcp_state(with_optim=False)


def _group(target: RankTarget, engine: Any) -> dist.ProcessGroup | None:
    return getattr(engine, "control_group", target.group)
