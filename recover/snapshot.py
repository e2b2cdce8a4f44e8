"""What one rank writes into a generation and reads back from it: its engines' shards and its process's state."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..engine.dcp_checkpoint import check_dcp, read_dcp, write_dcp
from ..engine.dcp_state import DCPState
from ..utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from ..utils.manifest import FileEntry, verify_file
from ..utils.staging import as_write_error
from .facts import EngineSample, sample_engine
from .process_state import ProcessState, rank_state_name, write_process_state
from .ranks import RankTarget, rank_target


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote, and what it says of it.

    Attributes:
        entries: every file, fsynced, named relative to the generation.
        versions: engine name -> weight version, of the engines that count one.
        samples: engine name -> this rank's sample of the state.
        rng: digest of this rank's generators.
    """

    entries: list[FileEntry]
    versions: dict[str, int]
    samples: dict[str, EngineSample]
    rng: str


@dataclass(frozen=True)
class RankState:
    """What one rank holds after a restore; ``rng`` as `ProcessState.restore` returns it."""

    samples: dict[str, EngineSample]
    rng: str | None


def write_rank(holder: Any, staging: str) -> RankPart:
    """Write this rank's part of a generation; all ranks call it.

    Args:
        holder: see `rank_target`.
        staging: folder that all ranks write into.

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
        entry, rng = write_process_state(staging, rank_state_name(get_rank()), target.stateful)
    entries, samples = [entry], {}
    for name, engine in target.engines.items():
        state = _dcp_state(engine)
        samples[name] = sample_engine(state)
        for entry in write_dcp(Path(staging) / name, state, _group(target, engine)):
            entries.append(FileEntry(f"{name}/{entry.name}", entry.bytes, entry.digest))
    return RankPart(entries, _weight_versions(target), samples, rng)


def check_bytes(holder: Any, generation: str, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Compare the bytes of this rank's share of a generation's files with their digests; what is wrong, or None.

    A share each keeps the wait of any rank for the others short: the whole of a large checkpoint takes minutes.

    Args:
        holder: see `rank_target`.
        generation: folder whose names and sizes one process has found as they should be.
        files: what its manifest says of them, as that process read it.

    Raises:
        CheckpointNotFoundError: this rank does not see a file that is there. That is no verdict on the generation.
    """
    for name, entry in list(files.items())[get_rank() :: get_world_size()]:
        try:
            verify_file(generation, name, entry)
        except CheckpointCorruptError as error:
            return str(error)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"rank {get_rank()} does not see {generation}/{name}, which the process that decides sees; all ranks "
                "need the same folder under the same path (an absolute recover.fileroot, mounted everywhere)"
            ) from error
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


def read_rank(holder: Any, generation: str, versions: Mapping[str, int]) -> RankState:
    """Read this rank's part of a generation into its engines, user objects and generators; all ranks call it.

    Nothing is changed before every rank has read everything, for all engines. Costs as much host memory as the shards
    of all engines.

    Args:
        holder: see `rank_target`.
        generation: folder that was verified, and checked with `check_rank`.
        versions: engine name -> weight version, for engines whose shards hold no counters (a reference model).

    Returns:
        what the rank holds now, to be compared with what the generation says.
    """
    target, path = rank_target(holder), Path(generation)
    states = {name: _dcp_state(engine) for name, engine in target.engines.items()}
    loads = {name: read_dcp(path / name, states[name], _group(target, target.engines[name])) for name in states}
    with all_ranks_succeed(f"reading {path}", _group(target, next(iter(target.engines.values())))):
        process = ProcessState.read(path, rank_state_name(get_rank()))
    for name, engine in target.engines.items():
        loads[name].apply()
        if name in versions and hasattr(engine, "set_version"):
            engine.set_version(versions[name])
    rng = process.restore(target.stateful)
    return RankState({name: sample_engine(state) for name, state in states.items()}, rng)


def _weight_versions(target: RankTarget) -> dict[str, int]:
    return {name: engine.get_version() for name, engine in target.engines.items() if hasattr(engine, "get_version")}


def _dcp_state(engine: Any) -> DCPState:
    if isinstance(engine, DCPState):
        return engine
    return engine.dcp_state() if engine.optimizer is not None else engine.dcp_state(with_optim=False)


def _group(target: RankTarget, engine: Any) -> dist.ProcessGroup | None:
    return getattr(engine, "control_group", target.group)
