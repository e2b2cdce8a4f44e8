"""`Saver`: decide whether and how a step is saved, and account for the outcome.

A save in order, with the file that continues the story:

1. `Saver.save`: is the step due, and is the last one written?
2. `StepWriter.capture` in ``write.py``: every rank captures its state (``rank.py``). `dump` can return now.
3. `StepWriter.write_snapshot`: every rank writes its part, the leader commits the generation and copies it.
4. `Saver.settle`: collect the result, and raise or count a failure.

One step at a time is written in the background (``background.py``), on a thread with its own process group, or under
Ray on threads of the workers. Its collectives therefore never interleave with those of training.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from ...engine.api import Stateful, StepInfo
from ...utils.distributed import is_write_failure
from ...utils.errors import CheckpointWriteError, ConfigError, PeerError, StaleSnapshotError
from ...utils.files import as_write_error
from ...utils.logging import get_logger
from ..config import RecoverConfig
from ..data.position import RestoredEpoch
from ..ranks.coordinator import Ranks
from ..storage.run_folder import RunFolder
from ..triggers.schedule import Triggers, Wanted
from .background import AtExit, BackgroundStep, patience_s
from .write import StepWriter, finite_numbers

logger = get_logger(__name__)


@dataclass
class SaveStats:
    """Outcomes and costs of the snapshots and exports of a handler, in this process.

    Attributes:
        committed: snapshots that became generations.
        failed: snapshots that could not be committed.
        exported: committed Hugging Face exports.
        exports_failed: exports that could not be committed.
        skipped: due steps that were not saved, because an earlier one was still being written.
        waited: due steps that waited for an earlier one.
        waited_s: seconds spent waiting, in total.
        blocked_s: seconds that the last save kept training, including the wait.
        save_s: seconds from the start to the commit of the last snapshot.
        export_s: seconds that the last export took, including the snapshot of the same step.
    """

    committed: int = 0
    failed: int = 0
    exported: int = 0
    exports_failed: int = 0
    skipped: int = 0
    waited: int = 0
    waited_s: float = 0.0
    blocked_s: float = 0.0
    save_s: float = 0.0
    export_s: float = 0.0


class Saver:
    """Saves the steps of one handler.

    Attributes:
        stats: outcomes and costs.
        failed_in_a_row: ``snapshot`` or ``export`` -> number of failures since the last success.
        writer: writes snapshots and exports.
    """

    def __init__(self, config: RecoverConfig, folder: RunFolder, writer: StepWriter, triggers: Triggers) -> None:
        self.stats, self.failed_in_a_row = SaveStats(), {"snapshot": 0, "export": 0}
        self.writer = writer
        self._config, self._folder, self._triggers = config, folder, triggers
        self._background: BackgroundStep | None = None
        self._at_exit = AtExit(self._end_of_process)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, as far as this process knows."""
        return self._background is None or self._background.ended

    def wants(
        self, step_info: StepInfo, epoch: RestoredEpoch | None, force: bool, metrics: Mapping[str, float]
    ) -> Wanted:
        """Return what `Triggers` cannot know about a step: forced snapshots, exports, results to collect.

        Raises:
            ConfigError: a metric or the step could not be saved. Nothing was staged.
        """
        finite_numbers(metrics)
        if epoch is not None:
            epoch.check(step_info)
        wanted = Wanted.FORCE if force else Wanted(0)
        if self._background is not None and self._background.ended:
            wanted |= Wanted.SETTLE
        return wanted | Wanted.EXPORT if self.writer.export_due(step_info.global_step) else wanted

    def save(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        wanted: Wanted,
        last_step: int | None,
        dataloader: Stateful | None,
        metrics: Mapping[str, float],
        *,
        must: bool,
        in_background: bool,
    ) -> bool:
        """Save a step as far as it is due. Collective over the callers.

        Args:
            ranks: ranks to capture.
            step_info: the step that was just trained.
            wanted: flags from `Triggers.after_step`.
            last_step: last step that was snapshotted or restored, if any.
            dataloader: see `RecoverHandler.dump`.
            metrics: see `RecoverHandler.dump`.
            must: take a snapshot although none is due, and raise its failure, now or later.
            in_background: return when the state is staged, and write it while training continues.

        Returns:
            whether a snapshot was taken: committed, or staged for the background.

        Raises:
            CheckpointWriteError, StaleSnapshotError, PeerError: see `tolerating`.
            ConfigError: the state of a user object could not be read back, or the job went back to an earlier step.
        """
        step, started_s = step_info.global_step, time.monotonic()
        background = self._background
        if must and background is not None and background.step == step:
            background.must = True  # this very snapshot is being written
        snapshot, saved, checked = must or Wanted.SNAPSHOT in wanted, False, False
        kinds = ["export"] if Wanted.EXPORT in wanted else []
        with self.tolerating(step, must):
            if snapshot and ranks.decide(partial(self._is_new, step, last_step)):
                kinds.insert(0, "snapshot")
            checked = True
        if checked:
            if not kinds or not self._wait_or_skip(must):
                return False
            saved = self.save_kinds(
                ranks, step_info, kinds, dataloader, metrics, must=must, in_background=in_background
            )
        if snapshot:
            self._triggers.schedule.mark(step_info)  # after a failure too: with freq_secs every step would try again
        self.stats.blocked_s = time.monotonic() - started_s
        blocked_s, n_failed = round(self.stats.blocked_s, 4), self.failed_in_a_row["snapshot"]
        self._folder.journal.note("save", step=step, blocked_s=blocked_s, failed_in_a_row=n_failed)
        return saved

    def save_kinds(
        self,
        ranks: Ranks,
        step_info: StepInfo,
        kinds: Sequence[str],
        dataloader: Stateful | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        must: bool = False,
        in_background: bool,
    ) -> bool:
        """Do the same for a step that is due as ``kinds``: ``snapshot``, ``export`` or both, in this order."""
        step, writes = step_info.global_step, {}
        with self.tolerating(step, must and kinds[0] == "snapshot", kinds[0]):
            capture = self.writer.capture(
                ranks, step_info, kinds, dataloader, metrics or {}, in_background=in_background
            )
            functions = {"snapshot": self.writer.write_snapshot, "export": self.writer.write_export}
            writers = ranks.in_background() if in_background else ranks
            writes = {kind: partial(functions[kind], writers, capture) for kind in kinds}
        if in_background and writes:
            staged_bytes = partial(self._folder.staged_bytes, step)
            self._background = BackgroundStep(step, writes, must=must, written_bytes=staged_bytes)
            self._at_exit.register()
            return "snapshot" in kinds
        committed = self.stats.committed
        for kind, write in writes.items():
            with self.tolerating(step, must and kind == "snapshot", kind):
                self._count(kind, write())
        return self.stats.committed > committed

    def _is_new(self, step: int, last_step: int | None) -> bool:
        store, background = self._folder.generations, self._background
        with as_write_error(store.root):
            newest = max((generation.step for generation in store.generations()), default=-1)
        if background is not None and "snapshot" in background.tasks:
            newest = max(newest, background.step)
        if newest > step or newest == step != last_step:
            raise ConfigError(
                f"step {step} is to be snapshotted, but {store.root} holds step {newest}: the job went back. Start "
                "from the step after the one that load returned"
            )
        return newest < step

    def _wait_or_skip(self, must: bool) -> bool:
        """Wait for a step that is still being written, or return False to skip the new one."""
        if (background := self._background) is None:
            return True
        step, started_s = background.step, time.monotonic()
        if self._config.on_busy == "skip" and not must:
            self.stats.skipped += 1
            if not background.was_busy:
                logger.info("a step is due to be saved, but step %d is still being written: skipped", step)
            elif started_s - background.began_s > self._config.save_timeout_s:
                logger.warning("step %d has been pending for %.0f s; skipped", step, started_s - background.began_s)
            background.was_busy = True
            return False
        self.settle()
        waited_s = time.monotonic() - started_s
        self.stats.waited += 1
        self.stats.waited_s += waited_s
        logger.info("a step is due to be saved, but step %d was still being written: waited %.3f s", step, waited_s)
        return True

    @contextmanager
    def tolerating(self, step: int, must: bool, kind: str = "snapshot") -> Iterator[None]:
        """Log and count a snapshot or export that fails in this block, up to ``save_failures_allowed`` in a row.

        Raises:
            CheckpointWriteError, StaleSnapshotError: it ``must`` not fail, or one more in a row than allowed failed.
            PeerError: the same on another rank, or another rank failed for any other reason.
        """
        try:
            yield
        except (CheckpointWriteError, StaleSnapshotError, PeerError) as error:
            self.stats.failed += kind == "snapshot"
            self.stats.exports_failed += kind == "export"
            if must or not (is_write_failure(error) or isinstance(error, StaleSnapshotError)):
                raise
            self.failed_in_a_row[kind] += 1
            n_failed, allowed = self.failed_in_a_row[kind], self._config.save_failures_allowed
            if n_failed > allowed:
                raise
            logger.error("step %d: %s failed, %d in a row (%d allowed): %s", step, kind, n_failed, allowed, error)

    def _count(self, kind: str, seconds: float) -> None:
        self.failed_in_a_row[kind] = 0
        if kind == "snapshot":
            self.stats.committed += 1
            self.stats.save_s = seconds
        else:
            self.stats.exported += 1
            self.stats.export_s = seconds
        self._triggers.pace.saved(seconds)

    def settle(self, must: bool = False) -> None:
        """Wait until nothing is being written, and collect the results. With ``must`` every failure is raised.

        Raises:
            Exception: errors from the background (see `tolerating`).
        """
        if (background := self._background) is None:
            return
        background.wait()  # KeyboardInterrupt here leaves the state unchanged
        self._background = None
        with ExitStack() as results:  # the export's first: if both have failed, the snapshot's error is raised
            for kind in background.tasks:
                results.callback(self._collect, background, kind, must or (background.must and kind == "snapshot"))

    def _collect(self, background: BackgroundStep, kind: str, must: bool) -> None:
        with self.tolerating(background.step, must or background.lost_peers(kind), kind):
            self._count(kind, background.result(kind))

    def linger(self) -> None:
        """Wait for the background while it makes progress. The run ends with an error, so nothing follows."""
        if self._background is not None:
            self._background.linger(self._triggers.pace.save_s)

    def close(self, *, settle: bool) -> None:
        """Stop writing in the background. With ``settle``, collect the results first, and raise every failure.

        Without ``settle``, or if the wait is interrupted, nothing is committed after this call, unless a commit hangs
        (see `RunFolder.end_commits`).
        """
        try:
            if settle:
                self.settle(must=True)
        finally:
            self._abandon()
            self._at_exit.unregister()

    def _abandon(self) -> None:
        self._folder.end_commits(patience_s(self._triggers.pace.save_s))
        background, self._background = self._background, None
        if background is not None:
            background.give_up()

    def _end_of_process(self) -> None:
        """Finish the last snapshot of a process that did not call `close`, or end it with an error."""
        if (background := self._background) is None:
            return
        try:
            self.linger()
        finally:
            self._abandon()
            background.require_snapshot()
