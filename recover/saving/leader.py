"""The order of a dump: capture, write on every rank, compare with the last, describe, commit; all ranks or none."""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ...engine.api import Stateful, StepInfo
from ...utils.atomic_folder import as_write_error
from ...utils.files import require_free_space
from ...utils.manifest import write_sealed
from ..consistency import EngineFacts, check_fresh, combine_ranks
from ..coordinator import Ranks
from ..data.state import DATA_STATE, capture_data
from ..info import INFO_NAME, RecoverInfo
from ..process_state import DRIVER_STATE, capture_process, rank_state_name, write_process
from ..storage.generations import Generation, GenerationStore
from .rank import RankPart, capture_rank, write_rank


@dataclass(frozen=True)
class Capture:
    """A run at one step boundary, as far as the process that calls the handler knows it.

    Attributes:
        step_info: the step that was just trained.
        metrics: a copy of what is remembered, without what is not finite.
        resumed_from: ``resume_path`` of the run and the digest that goes with it, in the leader.
        data: the dataloaders' state.
        driver: state of the driver's process and the digest of its generators; None when the ranks call the handler.
        staged: whether the ranks' state may change while it is written.
        began_s: on the monotonic clock.
    """

    step_info: StepInfo
    metrics: dict[str, float]
    resumed_from: tuple[str | None, str | None]
    data: bytes | None
    driver: tuple[bytes, str] | None
    staged: bool
    began_s: float


class GenerationWriter:
    """Writes the generations of one run.

    Args:
        store: where to.
        key: of the handler, which the ranks know it by.
        run_id: of the run; every generation names it.
        stateful: name -> user object of this process; under Ray the driver's.
        make_room: called before anything is written; removes what nobody needs any more.

    Attributes:
        run_id: see above.
        last_facts: engine name -> facts of the generation written or restored last.
    """

    def __init__(
        self,
        store: GenerationStore,
        key: str,
        run_id: str,
        stateful: Mapping[str, Stateful],
        make_room: Callable[[], None],
    ) -> None:
        self.run_id = run_id
        self.last_facts: Mapping[str, EngineFacts] = {}
        self._store, self._key, self._stateful, self._make_room = store, key, stateful, make_room

    def capture(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        resumed_from: tuple[str | None, str | None],
        *,
        staged: bool,
        export: bool = False,
    ) -> Capture:
        """Capture the state of the run after a step, on all ranks; collective over the callers.

        Args:
            ranks: whose state.
            step_info: the step.
            dataloader: its state goes along.
            metrics: see `Capture`, as is the next.
            resumed_from: in the leader.
            staged: have the ranks copy their state, so that it can be written while it changes.
            export: have them capture what `HFExports.write` writes, too.

        Raises:
            ConfigError: the state of a user object or a dataloader could not be read back.
        """
        began_s = time.monotonic()
        data = capture_data(ranks, dataloader)  # first: asking torchdata's loader may draw a number
        ranks.run_all(capture_rank, self._key, staged, True, export)
        driver = capture_process(self._stateful) if ranks.is_driver else None
        return Capture(step_info, _finite(metrics), resumed_from, data, driver, staged, began_s)

    def write(
        self, ranks: Ranks, capture: Capture, committing: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Generation, int]:
        """Write and commit what was captured; collective over the callers.

        Args:
            ranks: who writes.
            capture: what `capture` returned.
            committing: entered in the leader for whatever changes the generations that are there, the commit above
                all; if it raises, that is not done.

        Returns:
            the generation, and the bytes of its files.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: nothing became visible; see `GenerationStore.commit`.
        """
        staging = ranks.decide(partial(self._open_staging, capture.step_info.global_step, committing))
        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(self._store.discard, staging)
            parts = ranks.run_all(write_rank, self._key, str(staging), capture.staged)
            assert len(parts) == ranks.world_size, "a generation without a rank's shards would be no generation"
            facts = combine_ranks([part.samples for part in parts])

            def commit() -> tuple[Generation, int]:
                check_fresh(self.last_facts, facts)
                info = RecoverInfo(
                    capture.step_info,
                    self.run_id,
                    ranks.world_size,
                    parts[0].versions,
                    *capture.resumed_from,
                    save_s=time.monotonic() - capture.began_s,
                    metrics=capture.metrics,
                    engines=facts,
                    rng={Path(rank_state_name(rank)).stem: part.rng for rank, part in enumerate(parts)},
                )
                with committing():
                    return self._commit(staging, info, parts, capture)

            committed = ranks.decide(commit)
            undo.pop_all()
        self.last_facts = facts
        return committed

    def staged_bytes(self, step: int) -> int:
        """See `GenerationStore.staged_bytes`."""
        return self._store.staged_bytes(step)

    def _open_staging(self, step: int, committing: Callable[[], AbstractContextManager[None]]) -> Path:
        with committing():
            self._make_room()
        with as_write_error(self._store.root):
            require_free_space(self._store.root, self._store.newest_bytes())
        return self._store.open_staging(step)

    def _commit(
        self, staging: Path, info: RecoverInfo, parts: Sequence[RankPart], capture: Capture
    ) -> tuple[Generation, int]:
        entries = [entry for part in parts for entry in part.entries]
        with as_write_error(staging):
            if capture.driver is not None:
                state, info.rng[Path(DRIVER_STATE).stem] = capture.driver
                entries.append(write_process(staging, DRIVER_STATE, state))
            files = {INFO_NAME: info.to_json()} | ({} if capture.data is None else {DATA_STATE: capture.data})
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
