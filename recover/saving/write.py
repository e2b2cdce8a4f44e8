"""Write a step: capture it on every rank, write it on every rank, commit it in the leader.

A step becomes a snapshot (a generation in ``recover/``), a Hugging Face export (a folder in ``hf/``), or both from one
capture. Each is written into a hidden staging folder, fsynced by every rank, and becomes visible by one rename.
"""

import math
import os
import platform
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ...engine.api import Stateful, StepInfo
from ...utils.errors import CheckpointError, ConfigError, FolderInUseError, StaleSnapshotError
from ...utils.files import commit_folder, remove_or_log, require_free_space
from ...utils.logging import get_logger
from ...utils.manifest import write_entry
from ...utils.rng import rng_digest
from ...utils.write_errors import as_write_error
from ..config import RecoverConfig
from ..data.state import DATA_STATE, capture_data
from ..info import DRIVER_STATE, INFO_NAME, EngineFacts, RecoverInfo, rank_state_name
from ..ranks.coordinator import Ranks
from ..ranks.facts import combine_ranks
from ..storage.generations import Generation
from ..storage.run_folder import RunFolder
from .rank import ExportRequest, RankSession, capture_process, check_export, write_process

logger = get_logger(__name__)


@dataclass(frozen=True)
class Capture:
    """A step as the calling process captured it. The ranks keep their own captures in their sessions.

    Attributes:
        began_s: start of the save, on the monotonic clock.
        data: state of the dataloaders.
        driver: state of the driver's process and the digest of its generators. None if the ranks call the handler.
    """

    step_info: StepInfo
    in_background: bool
    began_s: float
    metrics: Mapping[str, float]
    data: bytes | None
    driver: tuple[bytes, str] | None


class StepWriter:
    """Writes the snapshots and exports of one run.

    Attributes:
        run_id: recorded in every generation.
        resumed_from: ``resume_path`` and the digest of that generation's manifest, in the leader.
        last_facts: engine name -> facts of the last generation, which the next one must not repeat.
        export_request: export that every rank is asked for. None if exports are never due.
    """

    def __init__(
        self,
        config: RecoverConfig,
        folder: RunFolder,
        run_id: str,
        stateful: Mapping[str, Stateful],
        sidecars: tuple[object, object],
    ) -> None:
        self.run_id = run_id
        self.resumed_from: tuple[str | None, str | None] = None, None
        self.last_facts: Mapping[str, EngineFacts] = {}
        self.export_request: ExportRequest | None = None
        if config.hf_freq_steps is not None:
            self.export_request = ExportRequest(config.hf_engine, config.hf_dtype, config.hf_adapters, *sidecars)
        self._config, self._folder, self._stateful = config, folder, stateful
        self._exported_step: int | None = None

    def check_export(self, ranks: Ranks) -> None:
        """Raise `ConfigError` on all ranks unless all can make the configured exports. Collective over the callers."""
        if self.export_request is not None:
            ranks.run_all(check_export, self.export_request)

    def export_due(self, step: int) -> bool:
        """Whether to export the weights after ``step``. Called in the leader."""
        every = self._config.hf_freq_steps
        if every is None or (step + 1) % every or step == self._exported_step:
            return False
        return not os.path.lexists(self._folder.exports.path_of(step))

    def capture(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        kinds: Collection[str],
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        *,
        in_background: bool,
    ) -> Capture:
        """Capture a step on all ranks. Collective over the callers.

        With ``in_background`` every rank copies its state, so that training can change it before it is written.

        Raises:
            ConfigError: the state of a user object or a dataloader could not be read back.
        """
        began_s, snapshot, export = time.monotonic(), "snapshot" in kinds, "export" in kinds
        if export:
            self._exported_step = step_info.global_step  # never due twice, even if it fails
        data = capture_data(ranks, dataloader) if snapshot else None  # first: torchdata's loader may draw a number
        ranks.run_sessions(RankSession.capture, in_background, snapshot, export)
        driver = None
        if snapshot and ranks.is_driver:
            state, rng = capture_process(self._stateful)
            driver = state, rng_digest(rng)
        return Capture(step_info, in_background, began_s, finite_numbers(metrics), data, driver)

    def write_snapshot(self, ranks: Ranks, capture: Capture) -> float:
        """Write and commit a captured snapshot. Collective over the callers. Returns seconds since the save began.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: nothing became visible (see `GenerationStore.commit`).
        """
        step, store = capture.step_info.global_step, self._folder.generations

        def open_staging() -> Path:
            with self._folder.committing():
                self._folder.delete_old()
            with as_write_error(store.root):
                require_free_space(store.root, store.newest_bytes())
            return store.open_staging(step)

        staging = ranks.decide(open_staging)
        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(store.discard, staging)
            parts = ranks.run_sessions(RankSession.write_snapshot, str(staging), capture.in_background)
            assert len(parts) == ranks.world_size, "a generation without a rank's shards would be no generation"
            facts = combine_ranks([part.samples for part in parts])

            def commit() -> tuple[Generation, int]:
                check_fresh(self.last_facts, facts)
                entries = [entry for part in parts for entry in part.entries]
                info = RecoverInfo(
                    capture.step_info,
                    self.run_id,
                    len(parts),
                    parts[0].versions,
                    *self.resumed_from,
                    save_s=time.monotonic() - capture.began_s,
                    metrics=dict(capture.metrics),
                    engines=facts,
                    rng={Path(rank_state_name(rank)).stem: part.rng for rank, part in enumerate(parts)},
                    switches=parts[0].switches,
                    meshes={name: one.mesh for name, one in parts[0].samples.items() if one.mesh},
                )
                with self._folder.committing():
                    with as_write_error(staging):
                        if capture.driver is not None:
                            state, info.rng[Path(DRIVER_STATE).stem] = capture.driver
                            entries.append(write_process(staging, DRIVER_STATE, state))
                        entries.append(write_entry(staging, INFO_NAME, info.to_json()))
                        if capture.data is not None:
                            entries.append(write_entry(staging, DATA_STATE, capture.data))
                    generation = store.commit(staging, step, entries, manifest_facts(info))
                return generation, sum(entry.bytes for entry in entries)

            generation, n_bytes = ranks.decide(commit)
            undo.pop_all()
        self.last_facts = facts
        seconds = time.monotonic() - capture.began_s
        logger.info("step %d: committed %s, %d bytes in %.3f s", generation.step, generation.path, n_bytes, seconds)
        ranks.decide(partial(self._copy_and_delete, generation))
        return seconds

    def _copy_and_delete(self, generation: Generation) -> None:
        """Copy the generation to the mirror and delete old ones. A failure here does not undo the commit."""
        try:
            with self._folder.committing():
                self._folder.keep(generation)
        except FolderInUseError:
            raise
        except (CheckpointError, OSError, RuntimeError) as error:  # (no thread can be started at the very end)
            logger.error("step %d: committed, but what follows failed: %s", generation.step, error)

    def write_export(self, ranks: Ranks, capture: Capture) -> float:
        """Write and commit a captured export. Collective over the callers. Returns seconds since the save began.

        Raises:
            CheckpointWriteError, PeerError: nothing became visible.
            CheckpointMismatchError: the file format of the architecture has no place for a weight.
        """
        step, exports = capture.step_info.global_step, self._folder.exports
        final = exports.path_of(step)

        def commit() -> None:
            with self._folder.committing(), as_write_error(final):
                commit_folder(staging, final)
                self._delete_old_exports()

        staging = ranks.decide(partial(exports.open_staging, step))
        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(exports.discard, staging)
            ranks.run_sessions(RankSession.write_export, str(staging), capture.in_background)
            ranks.decide(commit)
            undo.pop_all()
        seconds = time.monotonic() - capture.began_s
        logger.info("step %d: exported %s in %.3f s", step, final, seconds)
        return seconds

    def _delete_old_exports(self) -> None:
        keep, exports = self._config.hf_max_to_keep, self._folder.exports
        try:
            old = exports.generations()[keep:] if keep is not None else []
        except OSError as error:
            logger.warning("no export is deleted, because %s cannot be listed: %s", exports.root, error)
            return
        for export in old:
            remove_or_log(export.path)

    def give_up_exports(self, after: int) -> None:
        """Quarantine exports of steps later than ``after``, and remove unfinished ones. Called in the leader.

        The run goes back and trains those steps again, so their weights are no longer weights of this run.
        """
        self._exported_step = None
        if self._config.hf_freq_steps is None:
            return
        exports = self._folder.exports
        exports.sweep()
        for export in exports.generations():
            if export.step > after:
                exports.quarantine(export, f"the run went back to before step {export.step}")


def check_fresh(before: Mapping[str, EngineFacts], now: Mapping[str, EngineFacts]) -> None:
    """Refuse a snapshot that repeats the one before.

    After an update the moments or the parameters have changed. If only one changed (a rate of 0, an update below the
    precision, gradients too small for an accumulator), a warning is logged.

    Raises:
        StaleSnapshotError: every sampled value equals the last snapshot's, although the optimizer has stepped.
    """
    for name in now.keys() & before.keys():
        old, new = before[name], now[name]
        if not new.moved or (new.optimizer_steps or 0) <= (old.optimizer_steps or 0):
            continue
        steps = f"optimizer steps {old.optimizer_steps} and {new.optimizer_steps}"
        still = [part for part, value in new.fingerprints.items() if value == old.fingerprints.get(part)]
        if len(still) == len(new.fingerprints):
            raise StaleSnapshotError(
                f"stale snapshot of {name!r}: fingerprints did not change between {steps}; not committed"
            )
        if still and new.lr:
            logger.warning("the sampled %s of %r is the same at %s", still[0], name, steps)


def finite_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics as floats, because JSON has no NaN.

    Raises:
        ConfigError: a metric is not a number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, str | bytes):  # some strings would pass float()
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"dump was given the metric {name!r} as {value!r}, a {type(value).__name__}; expected a number"
            ) from error
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def manifest_facts(info: RecoverInfo) -> Mapping[str, Any]:
    """Return the entries of a generation's manifest other than its files."""
    return {
        "run_id": info.run_id,
        "step": info.last_step_info.global_step,
        "step_info": asdict(info.last_step_info),
        "weight_versions": info.weight_versions,
        "world_size": info.world_size,
        "mesh": info.meshes,
        "libraries": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
