"""Holdfast's ways to write a checkpoint, under the names used in the figures."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.engine import DCPState, FSDPEngine, SaveLoadMeta, StepInfo
from holdfast.engine.api import WeightFormat
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils import files
from holdfast.utils.files import remove_folder

from .model import SPEC
from .ranks import Session

DUMP = "Holdfast dump"
NO_OVERLAP = "Holdfast dump, no overlap"
SYNC_DUMP = "Holdfast dump, async_save off"
NO_DIGEST = "Holdfast dump, async_save off, no digests"
ENGINE_SAVE = "Holdfast engine.save"


class Dump:
    """`RecoverHandler.dump`: sample, write, fsync, agree, commit. Old snapshots are removed outside
    the measured time.

    Args:
        name: trial name of the run.
        async_save: whether to write in the background.
        overlap: whether to copy while training goes on, so that only the optimizer step waits for
            the copy.
    """

    def __init__(
        self,
        session: Session,
        engine: FSDPEngine,
        name: str,
        *,
        async_save: bool = True,
        overlap: bool = True,
    ) -> None:
        self._step = StepInfo(0, 0, 0, SPEC.steps_per_epoch)
        # An engine promises that it waits before it changes tensors. A plain state promises nothing
        # and is copied at once.
        self._engine: FSDPEngine | DCPState = engine
        if not overlap:
            self._engine = DCPState(
                engine.model,
                engine.optimizer,
                engine.lr_scheduler,
                engine.counters,
            )
        config = RecoverConfig(
            fileroot=str(session.options.scratch),
            trial_name=name,
            freq_steps=1,
            async_save=async_save,
            stop_signals=[],
        )
        self.root = config.recover_root
        self._handler = RecoverHandler(config, SPEC, group=engine.control_group)
        self._handler.load(self._engine)

    def save(self, path: Path) -> None:
        """Take a snapshot, at a path that the handler chooses."""
        self._handler.dump(self._engine, self._step, force=True)
        self._step = self._step.next()

    def wait(self) -> None:
        """Wait until the snapshot is committed."""
        self._handler.wait()

    def remove_old(self) -> None:
        """Remove all snapshots."""
        for generation in self.root.glob("global_step_*"):
            remove_folder(generation)

    def close(self) -> None:
        """Release the folder and the threads."""
        self._handler.close()


class EngineSave:
    """`FSDPEngine.save` and `load`, with the options of `SaveLoadMeta`."""

    def __init__(
        self,
        engine: FSDPEngine,
        weight_format: WeightFormat,
        dtype: str | None = None,
    ) -> None:
        self._engine = engine
        self._format: WeightFormat = weight_format
        self._dtype = dtype

    def save(self, path: Path) -> None:
        """Write, fsync, and make the folder visible."""
        self._engine.save(self._meta(path))

    def wait(self) -> None:
        """Return at once, because `save` has written everything."""

    def load(self, path: Path) -> None:
        """Verify and read everything before any weight changes."""
        self._engine.load(self._meta(path))

    def _meta(self, path: Path) -> SaveLoadMeta:
        return SaveLoadMeta(
            str(path), self._format, with_optim=self._format == "dcp", dtype=self._dtype
        )


class _NoDigest:
    def update(self, data: memoryview) -> None:
        """Ignore the data."""

    def hexdigest(self) -> str:
        """Return a digest of the usual length."""
        return "0" * 32


@contextmanager
def without_digests() -> Iterator[None]:
    """Write files without digests inside the block. The product has no such switch."""
    # Every file of the block gets a digest that does nothing.
    original = files.DurableFile.__init__

    def init(self: files.DurableFile, path: str | os.PathLike[str]) -> None:
        original(self, path)
        self._digest = _NoDigest()  # type: ignore[assignment]

    files.DurableFile.__init__ = init
    try:
        yield
    finally:
        files.DurableFile.__init__ = original
