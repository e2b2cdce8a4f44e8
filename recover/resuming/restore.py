"""Restore a verified generation: compare it with the engines, read it, apply it, and verify the
result.

Nothing is touched before the comparison. Data cursor, engines, user objects and generators are
restored in this order, and the result is compared with ``recover_info.json``.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.api import Stateful
from ...engine.dcp.configured import Settled
from ...engine.dcp.fingerprint import sample_state
from ...utils.distributed import all_ranks_succeed, get_rank
from ...utils.errors import CheckpointCorruptError, ConfigError
from ...utils.files import half_loaded
from ...utils.logging import get_logger
from ...utils.plain_values import read_plain, unpack_plain
from ...utils.rng import RngState, capture_rng, check_rng, derive_rng, restore_rng, rng_digest
from ..data.restore import RestoredEpoch, restore_data
from ..engines import EngineSample, combine_ranks, count_engine, engines_of, numerical_switches
from ..info import DRIVER_STATE, SHARED, RecoverInfo, rank_state_name
from ..ranks import Ranks
from .check import OpenedGeneration, check_restored, open_generation, warn_of_configuration
from .choice import Choice

logger = get_logger(__name__)


@dataclass
class Position:
    """The position of the run."""

    ranks: Ranks  # passed to `load`
    has_data: (
        bool  # a dataloader was passed to `load`, so that each generation has to hold its state
    )
    step: int | None = None  # the last snapshotted or restored step. None before the first one
    # rest of the epoch after a restore. None after the first step
    epoch: RestoredEpoch | None = None
    # restored state of this process's random generators. None in a fresh run
    rng: RngState | None = None

    def check_dataloader(self, dataloader: Stateful | None) -> None:
        """Raise `ConfigError` if `load` and `dump` do not agree on whether there is a dataloader:
        the next start would refuse the generation.
        """
        if (dataloader is not None) == self.has_data:
            return
        with_one, without = ("load", "dump") if self.has_data else ("dump", "load")
        raise ConfigError(
            f"{without} got no dataloader, but {with_one} did: the next start would refuse the "
            "generation. Pass the same one to both"
        )


@dataclass(frozen=True)
class RankState:
    """State of one rank after a restore, to be compared with ``recover_info.json``."""

    samples: dict[str, EngineSample]  # engine name -> sample
    switches: dict[str, str]  # see `numerical_switches`
    settled: dict[str, Settled]  # engine name -> what became of its configuration
    process: str  # process of the saved run that it continues
    rng: str | None  # digest of the generators (see `ProcessState.restore`)
    saved_sharing: int  # number of ranks with the same data in the saved run
    sharing: int  # the same number now


def restore_run(
    ranks: Ranks, choice: Choice, dataloader: Stateful | None, stateful: Mapping[str, Stateful]
) -> RestoredEpoch | None:
    """Restore a verified generation on all ranks and in the process that calls the handler.

    Collective over the callers. ``dataloader`` is the one of this process, and ``stateful`` has its
    user objects, for the case that this process is not one of the ranks. Returns the rest of the
    dataloader's epoch.

    Raises:
        CheckpointMismatchError, DatasetMismatchError: the generation is not of this job.
        CheckpointCorruptError: it cannot be read, or the restored state differs from the saved one.
    """
    path, info = choice
    opened = ranks.apart()
    opened.open_sessions(open_generation, str(path))

    # The loader comes first: its iterator draws numbers, and the generators are restored later.
    loader = None if info.lacks("data") else dataloader
    rest_of_epoch: RestoredEpoch | None = None

    def restore_loader() -> None:  # returns nothing, because a loader cannot be sent to a rank
        nonlocal rest_of_epoch
        # Ranks that are no head may take their batches from it.
        if ranks.is_head or loader is not None:
            rest_of_epoch = restore_data(
                path, loader, ranks.caller, ranks.n_callers, info.last_step_info
            )

    ranks.here(restore_loader)

    # Engines, user objects and generators: of a driver, then of every rank.
    driver = ProcessState.read(path, None) if ranks.is_driver else None
    is_own = not info.lacks("schedule")
    states = opened.run_sessions(read_rank, info.weight_versions, is_own)
    opened.close_sessions()
    digests = [(state.process, state.rng) for state in states]
    if driver is not None:
        digests.append((driver.own.stem, driver.restore(stateful)))

    # Ranks that continue the same process all have to have its generators: a wrong digest stays.
    generators: dict[str, str] = {}
    for name, digest in digests:
        if digest is not None and generators.get(name) in (None, info.rng.get(name)):
            generators[name] = digest
    facts = combine_ranks([state.samples for state in states])
    table = check_restored(path.name, (info.engines, info.rng), (facts, generators))

    if ranks.is_leader:
        step = info.last_step_info.global_step
        logger.info("step %d of run %s\n%s", step, info.run_id, table)
        warn_of_configuration(path.name, info.switches, states[0].switches, states[0].settled)
        _warn_of_absent(path, info)
        _warn_of_fewer(info, ranks, states[0])
    return rest_of_epoch


def read_rank(
    opened: OpenedGeneration, holder: Any, versions: Mapping[str, int], is_own: bool
) -> RankState:
    """Read this rank's part of a generation into its engines, user objects and generators. All
    ranks call it.

    Nothing changes before every rank has found all its parts sound, for all engines. Then the
    values are read straight into the live tensors.

    Args:
        opened: the result of `open_generation` on this rank.
        holder: see `engines_of`.
        versions: engine name -> weight version, for engines whose shards hold no counters (a
            reference model).
        is_own: False if it was converted from a trainer that did not save its schedule.
    """
    target = engines_of(holder)
    path = opened.path

    # Step 1: look at every part. A part that is not sound fails here, on all ranks.
    states = {name: target.state(name) for name in target.engines}
    loads = {name: opened.checkpoints[name].read(state) for name, state in states.items()}
    opened.close()  # everything is planned
    with all_ranks_succeed(f"reading {path}", target.group_of()):
        process = ProcessState.read(path, get_rank(target.group), target.ranks_with_same_data)
        for load in loads.values():
            load.check_unchanged()

    # Step 2: read the values. Once the first engine has its own, an error leaves a mixed state.
    configured = {}
    for name, engine in target.engines.items():
        with half_loaded(path) if configured else nullcontext():
            configured[name] = loads[name].apply()
        if name in versions and hasattr(engine, "set_version"):
            engine.set_version(versions[name])
    rng = process.restore(target.stateful)

    # Step 3: state the facts, then settle the configuration, which may change a rate.
    samples = {}
    for name, load in loads.items():
        counts = count_engine(load.state, load.first_group)
        sample = sample_state(load.state.live_tensors(), target.group_of(name))
        samples[name] = replace(counts, sample=sample)
    settled = {name: each.settle(is_own=is_own) for name, each in configured.items()}
    return RankState(
        samples,
        numerical_switches(states, target.engines),
        settled,
        process.own.stem,
        rng,
        process.saved_sharing,
        target.ranks_with_same_data,
    )


def _warn_of_fewer(info: RecoverInfo, ranks: Ranks, state: RankState) -> None:
    """Log that ranks with data of their own are gone, if any are."""
    saved_by = info.world_size // state.saved_sharing
    there_are = ranks.world_size // state.sharing
    if saved_by > there_are and info.rng:
        logger.warning(
            "%d ranks with different data saved it, now there are %d: the user objects and "
            "generators of the others stay behind",
            saved_by,
            there_are,
        )


def _warn_of_absent(path: Path, info: RecoverInfo) -> None:
    """Log the parts of a run that a converted generation lacks because its source had none."""
    if info.converted is None:
        return
    source = info.converted["from"]
    for part in sorted(info.converted.keys() - {"from"}):
        logger.warning(
            "%s was converted from %s, which had no %s: %s",
            path.name,
            source,
            part,
            info.converted[part],
        )


@dataclass(frozen=True)
class ProcessState:
    """Generators and user objects of a process, read and not yet restored.

    A rank continues the saved rank with its number if that had the same data, else the first one
    that had. A process that the saved run did not have (a rank with new data, a driver after
    torchrun, or ranks after a driver) takes the state of a user object from rank 0, else from the
    driver, and derives its generators from those of rank 0 and the number of its data. A converted
    generation may have no such state at all. Then everything stays as it is.

    """

    own: Path  # file of this process, ``state/rank_00001.pt``. It may not exist
    sources: Mapping[Path, dict[str, Any]]  # files to take its state from, and their contents
    data_rank: int  # number of its data
    saved_sharing: int  # number of ranks with the same data in the saved run

    @classmethod
    def read(
        cls, generation: Path, rank: int | None, ranks_with_same_data: int = 1
    ) -> "ProcessState":
        """Read the file of ``rank`` (None: the driver), and those of rank 0 and the driver, which
        may stand in for it.

        Raises:
            CheckpointCorruptError: a file is not the state of a process.
        """
        rank_zero = generation / rank_state_name(0)
        driver = generation / DRIVER_STATE
        states = {}
        for path in (rank_zero, driver):
            if path.exists():
                states[path] = _read_process_file(path)
        saved_sharing = states.get(rank_zero, {}).get(SHARED, 1)

        # Another world size may give this rank other data, then it continues the first rank with
        # its data.
        own = driver
        data_rank = 0
        if rank is not None:
            data_rank = rank // ranks_with_same_data
            has_same_data = rank // saved_sharing == data_rank
            saved_rank = rank if has_same_data else data_rank * saved_sharing
            own = generation / rank_state_name(saved_rank)
        if own not in states and own.exists():
            states[own] = _read_process_file(own)

        sources = {path: states[path] for path in (own, rank_zero, driver) if path in states}
        return cls(own, sources, data_rank, saved_sharing)

    def restore(self, stateful: Mapping[str, Stateful]) -> str | None:
        """Restore user objects, then generators.

        Returns the digest of the generators. None if they were derived, or if this process has
        other CUDA devices than the saved one, because their generators stay as they are.
        """
        # User objects, each from the first process that had it.
        for key, thing in sorted(stateful.items()):
            saved = [state["user"][key] for state in self.sources.values() if key in state["user"]]
            if saved:
                thing.load_state_dict(saved[0])
            else:
                logger.warning("%s has no state for %r; it starts anew", self.own.parents[1], key)
        if not self.sources:
            return None
        first, state = next(iter(self.sources.items()))
        for key in sorted(state["user"].keys() - stateful.keys()):
            logger.warning(
                "%s has a state for %r, which nothing is registered for here; it is ignored",
                first,
                key,
            )

        # Generators: its own, or new ones that follow from another process's.
        if first != self.own:
            restore_rng(derive_rng(state["rng"], self.data_rank))
            return None
        restore_rng(state["rng"])
        now = capture_rng()
        shapes_saved = {name: rows.shape for name, rows in state["rng"].items()}
        shapes_now = {name: rows.shape for name, rows in now.items()}
        return rng_digest(now) if shapes_now == shapes_saved else None


def _read_process_file(path: Path) -> dict[str, Any]:
    state = read_plain(path)
    is_process = (
        isinstance(state, dict)
        and isinstance(state.get("rng"), dict)
        and isinstance(state.get("user"), dict)
    )
    if not is_process:
        raise CheckpointCorruptError(
            f"{path} is not the state of a process; expected dicts 'rng' and 'user'"
        )
    sharing = state.get(SHARED, 1)
    if type(sharing) is not int or sharing < 1:
        raise CheckpointCorruptError(
            f"{path} says that {sharing!r} ranks have the same data; expected a whole number"
        )
    check_rng(state["rng"])
    user = {key: unpack_plain(data, f"{path}: {key}") for key, data in state["user"].items()}
    return state | {"user": user}
