"""Restore a verified generation: compare it with the engines, read it, apply it, and verify the
result.

Nothing is touched before the comparison. Data cursor, engines, user objects and generators are
restored in this order, and the result is compared with ``recover_info.json``.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.api import Stateful
from ...engine.dcp.configured import Settled
from ...engine.dcp.load import read_dcp
from ...utils.distributed import all_ranks_succeed, get_rank
from ...utils.errors import CheckpointCorruptError
from ...utils.files import half_loaded
from ...utils.logging import get_logger
from ...utils.plain_values import read_plain, unpack_plain
from ...utils.rng import RngState, capture_rng, check_rng, derive_rng, restore_rng, rng_digest
from ..data.restore import RestoredEpoch, restore_data
from ..engines import EngineSample, combine_ranks, engines_of, numerical_switches, sample_engine
from ..info import DRIVER_STATE, SHARED, RecoverInfo, rank_state_name
from ..ranks import Ranks
from .check import check_rank, check_restored, warn_of_configuration
from .choice import Choice

logger = get_logger(__name__)


@dataclass
class Position:
    """The position of the run."""

    ranks: Ranks  # passed to `load`
    step: int | None = None  # the last snapshotted or restored step. None before the first one
    epoch: RestoredEpoch | None = (
        None  # rest of the epoch after a restore. None after the first step
    )
    rng: RngState | None = (
        None  # restored state of this process's random generators. None in a fresh run
    )


@dataclass(frozen=True)
class RankState:
    """State of one rank after a restore, to be compared with ``recover_info.json``."""

    samples: dict[str, EngineSample]  # engine name -> sample
    switches: dict[str, str]  # see `numerical_switches`
    settled: dict[str, Settled]  # engine name -> what became of its configuration
    process: str  # process of the saved run that it continues
    rng: str | None  # digest of the generators (see `ProcessState.restore`)
    sharing: tuple[int, int]  # number of ranks with the same data, when it was saved and now


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
    last = info.last_step_info
    ranks.run_all(check_rank, str(path))
    epochs: list[RestoredEpoch | None] = []  # a loader does not travel
    loader = None if info.lacks("data") else dataloader

    def restore_loader() -> None:
        needed = (
            ranks.is_head or loader is not None
        )  # other ranks may take their batches from the head
        epochs.append(
            restore_data(path, loader, ranks.caller, ranks.n_callers, last) if needed else None
        )

    ranks.here(restore_loader)
    process = ProcessState.read(path, None) if ranks.is_driver else None
    states = ranks.run_all(read_rank, str(path), info.weight_versions, not info.lacks("schedule"))
    rng = [(state.process, state.rng) for state in states]
    if process is not None:
        rng.append((process.name, process.restore(stateful)))
    restored: dict[str, str] = {}
    for name, digest in rng:  # ranks that continue the same process all have to have its generators
        if digest is not None and restored.get(name) in (None, info.rng.get(name)):
            restored[name] = digest
    facts = combine_ranks([state.samples for state in states])
    table = check_restored(path.name, (info.engines, info.rng), (facts, restored))
    if ranks.is_leader:
        logger.info("step %d of run %s\n%s", last.global_step, info.run_id, table)
        warn_of_configuration(path.name, info.switches, states[0].switches, states[0].settled)
        _warn_of_absent(path, info)
        _warn_of_fewer(info, ranks, states[0].sharing)
    return epochs[0]


def read_rank(holder: Any, generation: str, versions: Mapping[str, int], is_own: bool) -> RankState:
    """Read this rank's part of a generation into its engines, user objects and generators. All
    ranks call it.

    Nothing changes before every rank has found all its parts sound, for all engines. Then the
    values are read straight into the live tensors.

    Args:
        holder: see `engines_of`.
        generation: verified folder that has passed `check_rank`.
        versions: engine name -> weight version, for engines whose shards hold no counters (a
            reference model).
        is_own: False if it was converted from a trainer that did not save its schedule.
    """
    target, path = engines_of(holder), Path(generation)
    states = {name: target.state(name) for name in target.engines}
    loads = {name: read_dcp(path / name, states[name], target.group_of(name)) for name in states}
    with all_ranks_succeed(f"reading {path}", target.group_of()):
        process = ProcessState.read(path, get_rank(), target.ranks_with_same_data)
        for load in loads.values():
            load.check_unchanged()
    configured = {}
    for number, (name, engine) in enumerate(target.engines.items()):
        with half_loaded(path) if number else nullcontext():  # the first engine has its values
            configured[name] = loads[name].apply()
        if name in versions and hasattr(engine, "set_version"):
            engine.set_version(versions[name])
    rng = process.restore(target.stateful)
    samples = {name: sample_engine(load.state, load.first_group) for name, load in loads.items()}
    settled = {
        name: each.settle(is_own=is_own) for name, each in configured.items()
    }  # last, because it may change a rate
    sharing = process.saved_sharing, target.ranks_with_same_data
    switches = numerical_switches(states, target.engines)
    return RankState(samples, switches, settled, process.name, rng, sharing)


def _warn_of_fewer(info: RecoverInfo, ranks: Ranks, sharing: tuple[int, int]) -> None:
    """Log that ranks with data of their own are gone, if any are. ``sharing`` is that of
    `RankState`.
    """
    saved_by = info.world_size // sharing[0]
    there_are = ranks.world_size // sharing[1]
    if saved_by > there_are and info.rng:
        logger.warning(
            "%d ranks with different data saved it, now there are %d: the user objects and generators of the others "
            "stay behind", saved_by, there_are,
        )  # fmt: skip


def _warn_of_absent(path: Path, info: RecoverInfo) -> None:
    """Log the parts of a run that a converted generation lacks because its source had none."""
    if info.converted is not None:
        for part in sorted(info.converted.keys() - {"from"}):
            outcome, source = info.converted[part], info.converted["from"]
            logger.warning(
                "%s was converted from %s, which had no %s: %s", path.name, source, part, outcome
            )


class ProcessState:
    """Generators and user objects of a process, read and not yet restored.

    A rank continues the saved rank with its number if that had the same data, else the first one
    that had. A process that the saved run did not have (a rank with new data, a driver after
    torchrun, or ranks after a driver) takes the state of a user object from rank 0, else from the
    driver, and derives its generators from those of rank 0 and the number of its data. A converted
    generation may have no such state at all. Then everything stays as it is.

    Attributes:
        name: the saved process, ``rank_00001`` or ``driver``.
        saved_sharing: number of ranks with the same data in the saved run.
    """

    def __init__(
        self, own: Path, sources: Mapping[Path, dict[str, Any]], data_rank: int, saved_sharing: int
    ) -> None:
        self.name, self.saved_sharing = own.stem, saved_sharing
        self._own, self._sources, self._data_rank = own, sources, data_rank

    @classmethod
    def read(
        cls, generation: Path, rank: int | None, ranks_with_same_data: int = 1
    ) -> "ProcessState":
        """Read the file of ``rank`` (None: the driver), and those of rank 0 and the driver, which
        may stand in for it.

        Raises:
            CheckpointCorruptError: a file is not the state of a process.
        """
        standing_in = [generation / rank_state_name(0), generation / DRIVER_STATE]
        states = {path: _read_process_file(path) for path in standing_in if path.exists()}
        own, data_rank, saved_sharing = (
            standing_in[1],
            0,
            states.get(standing_in[0], {}).get(SHARED, 1),
        )
        if rank is not None:
            data_rank = rank // ranks_with_same_data
            has_same_data = rank // saved_sharing == data_rank
            own = generation / rank_state_name(rank if has_same_data else data_rank * saved_sharing)
        if own not in states and own.exists():
            states[own] = _read_process_file(own)
        sources = {path: states[path] for path in (own, *standing_in) if path in states}
        return cls(own, sources, data_rank, saved_sharing)

    def restore(self, stateful: Mapping[str, Stateful]) -> str | None:
        """Restore user objects, then generators.

        Returns the digest of the generators. None if they were derived, or if this process has
        other CUDA devices than the saved one, because their generators stay as they are.
        """
        for key, thing in sorted(stateful.items()):
            source = next(
                (path for path, state in self._sources.items() if key in state["user"]), None
            )
            if source is None:
                logger.warning("%s has no state for %r; it starts anew", self._own.parents[1], key)
            else:
                thing.load_state_dict(self._sources[source]["user"][key])
        if (first := next(iter(self._sources), None)) is None:
            return None
        for key in sorted(self._sources[first]["user"].keys() - stateful.keys()):
            logger.warning(
                "%s has a state for %r, which nothing is registered for here; it is ignored",
                first,
                key,
            )
        if self._own in self._sources:
            saved = self._sources[self._own]["rng"]
            restore_rng(saved)
            now = capture_rng()
            same_devices = {name: rows.shape for name, rows in saved.items()} == {
                n: t.shape for n, t in now.items()
            }
            return rng_digest(now) if same_devices else None
        restore_rng(derive_rng(self._sources[first]["rng"], self._data_rank))
        return None


def _read_process_file(path: Path) -> dict[str, Any]:
    state = read_plain(path)
    parts = [state.get("rng"), state.get("user")] if isinstance(state, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointCorruptError(
            f"{path} is not the state of a process; expected dicts 'rng' and 'user'"
        )
    if type(sharing := state.get(SHARED, 1)) is not int or sharing < 1:
        raise CheckpointCorruptError(
            f"{path} says that {sharing!r} ranks have the same data; expected a whole number"
        )
    check_rng(state["rng"])
    return state | {
        "user": {key: unpack_plain(data, f"{path}: {key}") for key, data in state["user"].items()}
    }
