"""What one rank reads of a generation: a share of its files to verify it, its engines' shards, its process's state."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.dcp.load import check_dcp, read_dcp
from ...engine.dcp.metadata import read_layout
from ...utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from ...utils.manifest import verify_file
from ..info import rank_state_name
from ..ranks.facts import EngineSample, numerical_switches, sample_engine
from ..ranks.target import rank_target
from .process_state import ProcessState


@dataclass(frozen=True)
class RankState:
    """What one rank holds after a restore. ``switches`` is from `numerical_switches`, ``rng`` from
    `ProcessState.restore`."""

    samples: dict[str, EngineSample]
    switches: dict[str, str]
    rng: str | None


def check_bytes(holder: Any, generation: str, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Compare the bytes of this rank's share of a generation's files with their digests; what is wrong, or None.

    What its ``.metadata`` says of an engine's tensors must make a whole, too: a writer's fault has the right digest.
    The files are divided among the ranks of the target's group (see `share_of`): one rank alone would take minutes for
    a large checkpoint.

    Args:
        holder: see `rank_target`.
        generation: folder whose names and sizes one process has found as they should be.
        files: what its manifest says of them, as that process read it.

    Raises:
        CheckpointNotFoundError: this rank does not see a file that is there. That is no verdict on the generation.
    """
    group, sizes = rank_target(holder).group, {name: entry["bytes"] for name, entry in files.items()}
    for name in share_of(sizes, get_rank(group), get_world_size(group)):
        try:
            verify_file(generation, name, files[name])
            if Path(name).name == ".metadata":
                read_layout(Path(generation, name).parent)
        except CheckpointCorruptError as error:
            return str(error)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"rank {get_rank()} does not see {generation}/{name}, which the leader sees; all ranks "
                "need the same folder under the same path (an absolute recover.fileroot, mounted everywhere)"
            ) from error
    return None


_OF_RANK = re.compile(r".+/__(\d+)_\d+\.distcp|state/rank_(\d+)\.pt")


def share_of(files: Mapping[str, int], rank: int, world_size: int) -> list[str]:
    """The files of a generation that ``rank`` verifies; every file is in the share of exactly one rank.

    At the world size that it was saved with, a rank verifies its own data files and its own process state: it reads
    them next, and finds them in the page cache of its machine. For that reason ``.metadata`` is always rank 0's. All
    other files, and at another world size all files, are assigned from the largest to the smallest, each to the rank
    with the fewest bytes so far. So are those of a group other than the job's first ranks: its process states are
    numbered in the job, its data files in the group.

    Args:
        files: name -> bytes.
        rank: whose share, in the group of those that verify.
        world_size: number of ranks of that group.
    """
    owners = {name: int(match[1] or match[2]) for name in files if (match := _OF_RANK.fullmatch(name))}
    if set(owners.values()) != set(range(world_size)):
        owners = {}
    owners |= {name: 0 for name in files if Path(name).name == ".metadata"}
    shares: list[list[str]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for name in sorted(files, key=lambda name: (name not in owners, -files[name], name)):
        owner = owners.get(name, loads.index(min(loads)))
        shares[owner].append(name)
        loads[owner] += files[name]
    return shares[rank]


def check_rank(holder: Any, generation: str) -> None:
    """See that a verified generation is of this rank's engines, before any of them is touched; all ranks call it.

    Raises:
        CheckpointMismatchError: other engines, or another model or optimizer; see `check_dcp`.
    """
    target, path = rank_target(holder), Path(generation)
    with all_ranks_succeed(f"comparing {path}", target.group_of()):
        saved = {entry.name for entry in path.iterdir() if entry.is_dir()} - {"state"}
        if saved != target.engines.keys():
            raise CheckpointMismatchError(
                f"{path} holds engines {sorted(saved)}, this job has {sorted(target.engines)}"
            )
        states = {name: target.state(name) for name in target.engines}
    for name, state in states.items():
        check_dcp(path / name, state, target.group_of(name))


def read_rank(holder: Any, generation: str, versions: Mapping[str, int]) -> RankState:
    """Read this rank's part of a generation into its engines, user objects and generators; all ranks call it.

    Nothing is changed before every rank has found everything sound and in its place, for all engines; then values are
    read straight into the live tensors.

    Args:
        holder: see `rank_target`.
        generation: folder that was verified, and checked with `check_rank`.
        versions: engine name -> weight version, for engines whose shards hold no counters (a reference model).

    Returns:
        what the rank holds now, to be compared with what the generation says.
    """
    target, path = rank_target(holder), Path(generation)
    states = {name: target.state(name) for name in target.engines}
    loads = {name: read_dcp(path / name, states[name], target.group_of(name)) for name in states}
    with all_ranks_succeed(f"reading {path}", target.group_of()):
        process = ProcessState.read(path, rank_state_name(get_rank()))
        for load in loads.values():
            load.check_unchanged()
    for name, engine in target.engines.items():
        loads[name].apply()
        if name in versions and hasattr(engine, "set_version"):
            engine.set_version(versions[name])
    rng = process.restore(target.stateful)
    samples = {name: sample_engine(load.state, load.first_group) for name, load in loads.items()}
    return RankState(samples, numerical_switches(states), rng)
