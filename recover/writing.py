"""The order of a dump: stage, write on every rank, compare with the last, describe, commit; all ranks or none."""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ..engine.api import Stateful, StepInfo
from ..utils.files import require_free_space
from ..utils.manifest import write_sealed
from ..utils.staging import as_write_error
from .data_state import DATA_STATE, capture_data
from .facts import EngineFacts, check_fresh, combine_ranks
from .info import INFO_NAME, RecoverInfo
from .process_state import DRIVER_STATE, rank_state_name, write_process_state
from .ranks import Ranks
from .snapshot import RankPart, write_rank
from .store import Generation, GenerationStore


class GenerationWriter:
    """Writes the generations of one run.

    Args:
        store: where to.
        stateful: name -> user object of this process; under Ray the driver's.
        make_room: called before anything is written; removes what nobody needs any more.

    Attributes:
        run_id: of the run; every generation names it.
        last_facts: engine name -> facts of the generation written or restored last.
    """

    def __init__(
        self, store: GenerationStore, run_id: str, stateful: Mapping[str, Stateful], make_room: Callable[[], None]
    ) -> None:
        self.run_id = run_id
        self.last_facts: Mapping[str, EngineFacts] = {}
        self._store, self._stateful, self._make_room = store, stateful, make_room

    def write(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        resumed_from: tuple[str | None, str | None],
    ) -> tuple[Generation, int]:
        """Write and commit the generation of a step; all that call the handler call this.

        Args:
            ranks: who writes.
            step_info: the step that was just trained.
            dataloader: its state goes along.
            metrics: remembered; what is not finite is left out.
            resumed_from: ``resume_path`` of the run and the digest that goes with it, in the process that decides.

        Returns:
            the generation, and the bytes of its files.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: nothing became visible; see `GenerationStore.commit`.
            ConfigError: the state of a user object or a dataloader could not be read back.
        """
        started = time.monotonic()
        staging = ranks.decide(partial(self._open_staging, step_info.global_step))
        with ExitStack() as undo:
            if ranks.is_decider:
                undo.callback(self._store.discard, staging)
            data = capture_data(ranks, dataloader)  # first: asking torchdata's loader may draw a number
            parts = ranks.run_all(write_rank, str(staging))
            facts = combine_ranks([part.samples for part in parts])

            def commit() -> tuple[Generation, int]:
                check_fresh(self.last_facts, facts)
                info = RecoverInfo(
                    step_info,
                    self.run_id,
                    ranks.world_size,
                    parts[0].versions,
                    *resumed_from,
                    save_s=time.monotonic() - started,
                    metrics=_finite(metrics),
                    engines=facts,
                    rng={Path(rank_state_name(rank)).stem: part.rng for rank, part in enumerate(parts)},
                )
                return self._commit(staging, info, parts, data, ranks.is_driver)

            committed = ranks.decide(commit)
            undo.pop_all()
        self.last_facts = facts
        return committed

    def _open_staging(self, step: int) -> Path:
        self._make_room()
        with as_write_error(self._store.root):
            require_free_space(self._store.root, self._store.newest_bytes())
        return self._store.open_staging(step)

    def _commit(
        self, staging: Path, info: RecoverInfo, parts: Sequence[RankPart], data: bytes | None, has_driver: bool
    ) -> tuple[Generation, int]:
        entries = [entry for part in parts for entry in part.entries]
        with as_write_error(staging):
            if has_driver:
                entry, info.rng[Path(DRIVER_STATE).stem] = write_process_state(
                    str(staging), DRIVER_STATE, self._stateful
                )
                entries.append(entry)
            files = {INFO_NAME: info.to_json()} | ({} if data is None else {DATA_STATE: data})
            entries += [write_sealed(staging, name, content) for name, content in files.items()]
        generation = self._store.commit(staging, info.last_step_info.global_step, entries, _manifest_facts(info))
        return generation, sum(entry.bytes for entry in entries)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has no NaN; a metric that is none is worth as much as one that is not there."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _manifest_facts(info: RecoverInfo) -> Mapping[str, Any]:
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
