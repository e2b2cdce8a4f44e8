"""Restore a verified generation: compare it with the engines, read it, apply it, and verify the result.

Nothing is touched before the comparison. Data cursor, engines, user objects and generators are restored in this order,
and the result is compared with ``recover_info.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.api import Stateful
from ...engine.dcp.load import read_dcp
from ...utils.distributed import all_ranks_succeed, get_rank
from ...utils.logging import get_logger
from ...utils.rng import RngState
from ..data.restore import RestoredEpoch, restore_data
from ..engines import EngineSample, combine_ranks, numerical_switches, rank_target, sample_engine
from ..info import DRIVER_STATE, RecoverInfo, rank_state_name
from ..ranks import Ranks
from .check import check_rank
from .consistency import check_restored, warn_of_switches
from .process_state import ProcessState
from .select import Choice

logger = get_logger(__name__)


@dataclass
class Position:
    """The position of the run.

    Attributes:
        ranks: passed to `load`.
        step: the last snapshotted or restored step. None before the first one.
        epoch: rest of the epoch after a restore. None after the first step.
        rng: restored state of this process's random generators. None in a fresh run.
    """

    ranks: Ranks
    step: int | None = None
    epoch: RestoredEpoch | None = None
    rng: RngState | None = None


@dataclass(frozen=True)
class RankState:
    """State of one rank after a restore.

    Attributes:
        samples: engine name -> what `check_restored` compares.
        switches: see `numerical_switches`.
        rng: digest of the generators (see `ProcessState.restore`).
    """

    samples: dict[str, EngineSample]
    switches: dict[str, str]
    rng: str | None


def restore_run(
    ranks: Ranks, choice: Choice, dataloader: Stateful | None, stateful: Mapping[str, Stateful]
) -> RestoredEpoch | None:
    """Restore a generation on all ranks and in the process that calls the handler. Collective over the callers.

    Args:
        ranks: their engines, user objects and generators are restored.
        choice: a verified generation.
        dataloader: of this process.
        stateful: name -> user object of this process, if this process is not one of the ranks.

    Returns:
        the rest of the dataloader's epoch.

    Raises:
        CheckpointMismatchError, DatasetMismatchError: the generation is not of this job.
        CheckpointCorruptError: it cannot be read, or the restored state differs from the saved one.
    """
    path, info = choice
    last = info.last_step_info
    ranks.run_all(check_rank, str(path))
    epochs: list[RestoredEpoch | None] = []  # a loader does not travel
    loader = None if info.lacks("data") else dataloader
    ranks.here(lambda: epochs.append(restore_data(path, loader, ranks.caller, ranks.n_callers, last)))
    process = ProcessState.read(path, DRIVER_STATE) if ranks.is_driver else None
    states = ranks.run_all(read_rank, str(path), info.weight_versions)
    rng = {Path(rank_state_name(rank)).stem: state.rng for rank, state in enumerate(states)}
    if process is not None:
        rng[Path(DRIVER_STATE).stem] = process.restore(stateful)
    restored = {name: digest for name, digest in rng.items() if digest is not None}
    facts = combine_ranks([state.samples for state in states])
    table = check_restored(path.name, (info.engines, info.rng), (facts, restored))
    logger.info("step %d of run %s\n%s", last.global_step, info.run_id, table)
    warn_of_switches(path.name, info.switches, states[0].switches)
    _warn_of_absent(path, info)
    if info.world_size > ranks.world_size and info.rng:
        logger.warning(
            "%d ranks saved it, now there are %d: the user objects and generators of the others stay behind",
            info.world_size, ranks.world_size,
        )  # fmt: skip
    return epochs[0]


def read_rank(holder: Any, generation: str, versions: Mapping[str, int]) -> RankState:
    """Read this rank's part of a generation into its engines, user objects and generators. All ranks call it.

    Nothing changes before every rank has found all its parts sound, for all engines. Then the values are read straight
    into the live tensors.

    Args:
        holder: see `rank_target`.
        generation: verified folder that has passed `check_rank`.
        versions: engine name -> weight version, for engines whose shards hold no counters (a reference model).

    Returns:
        the state of the rank, to be compared with ``recover_info.json``.
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


def _warn_of_absent(path: Path, info: RecoverInfo) -> None:
    """Log the parts of a run that a converted generation lacks because its source had none."""
    if info.converted is not None:
        for part in sorted(info.converted.keys() - {"from"}):
            outcome, source = info.converted[part], info.converted["from"]
            logger.warning("%s was converted from %s, which had no %s: %s", path.name, source, part, outcome)
