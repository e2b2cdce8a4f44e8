"""The order of a resume from a verified generation: compare it with the engines (nothing is touched before), put back
data cursor, engines, user objects and generators, and compare what is there then with what was saved."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...engine.api import Stateful
from ...utils.logging import get_logger
from ...utils.rng import RngState
from ..data.position import RestoredEpoch
from ..data.state import restore_data
from ..info import DRIVER_STATE, RecoverInfo, rank_state_name
from ..ranks.coordinator import Ranks
from ..ranks.facts import combine_ranks
from .consistency import check_restored, warn_of_switches
from .process_state import ProcessState
from .rank import check_rank, read_rank
from .select import Choice

logger = get_logger(__name__)


@dataclass
class Position:
    """Where the run is.

    Attributes:
        ranks: passed to `load`.
        step: snapshotted or restored last; None: none yet.
        epoch: rest of the epoch after a restore; None after the first step.
        rng: state of this process's random generators, as restored; None in a fresh run.
    """

    ranks: Ranks
    step: int | None = None
    epoch: RestoredEpoch | None = None
    rng: RngState | None = None


def restore_run(
    ranks: Ranks, choice: Choice, dataloader: Stateful | None, stateful: Mapping[str, Stateful]
) -> RestoredEpoch | None:
    """Bring all ranks, and the process that calls the handler, to a generation; collective over the callers.

    Args:
        ranks: whose engines, user objects and generators.
        choice: a generation that was verified.
        dataloader: of this process.
        stateful: name -> user object of this process, where it is not one of the ranks.

    Returns:
        what the dataloader has left of its epoch.

    Raises:
        CheckpointMismatchError, DatasetMismatchError: the generation is not of this job.
        CheckpointCorruptError: it cannot be read, or is not what was restored.
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
    _tell_absent(path, info)
    if info.world_size > ranks.world_size and info.rng:
        logger.warning(
            "%d ranks saved it, now there are %d: the user objects and generators of the others stay behind",
            info.world_size, ranks.world_size,
        )  # fmt: skip
    return epochs[0]


def _tell_absent(path: Path, info: RecoverInfo) -> None:
    """Log what a converted generation could not bring back, because its source had none of it."""
    if info.converted is not None:
        for part in sorted(info.converted.keys() - {"from"}):
            outcome, source = info.converted[part], info.converted["from"]
            logger.warning("%s was converted from %s, which had no %s: %s", path.name, source, part, outcome)
