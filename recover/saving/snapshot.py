"""`SnapshotWriter`: the order of a snapshot: capture, write on every rank, compare with the last, describe, commit."""

import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ...engine.api import Stateful, StepInfo
from ...utils.errors import CheckpointError, ConfigError, FolderInUseError
from ...utils.files import require_free_space
from ...utils.logging import get_logger
from ...utils.manifest import write_entry
from ...utils.write_errors import as_write_error
from ..consistency import check_fresh, combine_ranks
from ..coordinator import Ranks
from ..data.state import DATA_STATE, capture_data
from ..info import INFO_NAME, EngineFacts, RecoverInfo
from ..process_state import DRIVER_STATE, capture_process, rank_state_name, write_process
from ..storage.generations import Generation
from ..storage.run_folder import RunFolder
from .rank_session import RankPart, RankSession

logger = get_logger(__name__)


@dataclass(frozen=True)
class Capture:
    """A run at one step boundary, as far as the process that calls the handler knows it.

    Attributes:
        step_info: the step that was just trained.
        metrics: stored in `RecoverInfo`; NaN and infinity are left out.
        data: the dataloaders' state.
        driver: state of the driver's process and the digest of its generators; None when the ranks call the handler.
        in_background: whether it is written while training goes on.
        began_s: on the monotonic clock.
    """

    step_info: StepInfo
    metrics: dict[str, float]
    data: bytes | None
    driver: tuple[bytes, str] | None
    in_background: bool
    began_s: float


class SnapshotWriter:
    """Writes the generations of one run.

    Args:
        folder: where to.
        run_id: of the run; every generation names it.
        stateful: name -> user object of this process; under Ray the driver's.

    Attributes:
        run_id: see above.
        resumed_from: ``resume_path`` and the digest of that generation's manifest; in the leader.
        last_facts: engine name -> counts and fingerprints of the last generation; those of a new one must differ.
    """

    def __init__(self, folder: RunFolder, run_id: str, stateful: Mapping[str, Stateful]) -> None:
        self.run_id = run_id
        self.resumed_from: tuple[str | None, str | None] = None, None
        self.last_facts: Mapping[str, EngineFacts] = {}
        self._folder, self._stateful = folder, stateful

    def capture(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        *,
        in_background: bool,
        export: bool,
    ) -> Capture:
        """Capture the state of the run after a step, on all ranks; collective over the callers.

        Args:
            ranks: whose state.
            step_info: the step.
            dataloader: its state goes along.
            metrics: likewise.
            in_background: have the ranks copy their state, so that it can be written while it changes.
            export: have them capture what `ExportWriter.write` writes, too.

        Raises:
            ConfigError: the state of a user object or a dataloader could not be read back.
        """
        began_s = time.monotonic()
        data = capture_data(ranks, dataloader)  # first: asking torchdata's loader may draw a number
        ranks.run_sessions(RankSession.capture, in_background, True, export)
        driver = capture_process(self._stateful) if ranks.is_driver else None
        return Capture(step_info, finite_numbers(metrics), data, driver, in_background, began_s)

    def write(self, ranks: Ranks, capture: Capture) -> float:
        """Write and commit what was captured; collective over the callers.

        Returns:
            seconds since the capture was begun.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: nothing became visible; see `GenerationStore.commit`.
        """
        staging = ranks.decide(partial(self._open_staging, capture.step_info.global_step))
        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(self._folder.generations.discard, staging)
            parts = ranks.run_sessions(RankSession.write_snapshot, str(staging), capture.in_background)
            assert len(parts) == ranks.world_size, "a generation without a rank's shards would be no generation"
            facts = combine_ranks([part.samples for part in parts])
            generation, n_bytes = ranks.decide(partial(self._commit, staging, capture, parts, facts))
            undo.pop_all()
        self.last_facts = facts
        seconds = time.monotonic() - capture.began_s
        logger.info("step %d: committed %s, %d bytes in %.3f s", generation.step, generation.path, n_bytes, seconds)
        ranks.decide(partial(self._keep, generation))
        return seconds

    def _open_staging(self, step: int) -> Path:
        generations = self._folder.generations
        with self._folder.committing():
            self._folder.delete_old()
        with as_write_error(generations.root):
            require_free_space(generations.root, generations.newest_bytes())
        return generations.open_staging(step)

    def _commit(
        self, staging: Path, capture: Capture, parts: Sequence[RankPart], facts: dict[str, EngineFacts]
    ) -> tuple[Generation, int]:
        """The generation, and the bytes of its files."""
        check_fresh(self.last_facts, facts)
        info = RecoverInfo(
            capture.step_info,
            self.run_id,
            len(parts),
            parts[0].versions,
            *self.resumed_from,
            save_s=time.monotonic() - capture.began_s,
            metrics=capture.metrics,
            engines=facts,
            rng={Path(rank_state_name(rank)).stem: part.rng for rank, part in enumerate(parts)},
            switches=parts[0].switches,
        )
        entries = [entry for part in parts for entry in part.entries]
        with self._folder.committing():
            with as_write_error(staging):
                if capture.driver is not None:
                    state, info.rng[Path(DRIVER_STATE).stem] = capture.driver
                    entries.append(write_process(staging, DRIVER_STATE, state))
                files = {INFO_NAME: info.to_json()} | ({} if capture.data is None else {DATA_STATE: capture.data})
                entries += [write_entry(staging, name, content) for name, content in files.items()]
            step = capture.step_info.global_step
            generation = self._folder.generations.commit(staging, step, entries, manifest_facts(info))
        return generation, sum(entry.bytes for entry in entries)

    def _keep(self, generation: Generation) -> None:
        """What follows a commit: the generation is there, whatever this comes to."""
        try:
            with self._folder.committing():
                self._folder.keep(generation)
        except FolderInUseError:
            raise
        except (CheckpointError, OSError, RuntimeError) as error:  # (no thread can be started at the very end)
            logger.error("step %d: committed, but what follows failed: %s", generation.step, error)


def finite_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite, as floats: JSON has no NaN.

    Raises:
        ConfigError: one is no number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, str | bytes):  # of which float() would take some
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"dump was given the metric {name!r} as {value!r}, a {type(value).__name__}; expected a number"
            ) from error
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def manifest_facts(info: RecoverInfo) -> Mapping[str, Any]:
    """What the manifest of a generation says besides its files."""
    return {
        "run_id": info.run_id,
        "step": info.last_step_info.global_step,
        "step_info": asdict(info.last_step_info),
        "weight_versions": info.weight_versions,
        "world_size": info.world_size,
        "mesh": {"dp": info.world_size},
        "libraries": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
