"""Generations on a local folder: stage, commit, list, verify, set aside, retire.

A generation's name appears when it is complete, and no folder is ever written over. All of it runs in one process,
the decider: rank 0 under torchrun, the driver under Ray. No other file knows that generations are local folders.
"""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.errors import CheckpointCorruptError, CheckpointExistsError, CheckpointNotFoundError, CheckpointWriteError
from ..utils.files import commit_folder, fsync_dir, make_durably, remove_or_log, replace_atomically
from ..utils.logging import get_logger
from ..utils.manifest import FileEntry, check_listing, verify_folder, write_manifest
from ..utils.staging import as_write_error
from .info import RecoverInfo

logger = get_logger(__name__)

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_GENERATION = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Generation:
    """One committed snapshot: the state after ``step``."""

    step: int
    path: Path


class GenerationStore:
    """The generations of one run.

    Args:
        root: the ``recover`` folder; made by the first snapshot.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def generations(self) -> list[Generation]:
        """Everything that was committed and not set aside, newest first. Nothing is verified."""
        if not self.root.is_dir():
            return []
        matches = [(path, _GENERATION.fullmatch(path.name)) for path in self.root.iterdir() if path.is_dir()]
        found = [Generation(int(match[1]), path) for path, match in matches if match]
        return sorted(found, key=lambda generation: generation.step, reverse=True)

    def rejected(self) -> list[Path]:
        """What was set aside and waits for a person."""
        return sorted(self.root.glob(".rejected-*"))

    def sweep(self) -> None:
        """Remove what a killed writer left: staging folders, half-removed generations, a tracker that never was.

        What cannot be removed is logged and left: it costs space, not the run.
        """
        for pattern in (".staging-*", ".retired-*", f".{TRACKER_NAME}.*"):
            for leftover in self.root.glob(pattern):
                logger.info("sweeping %s, left by a writer that was killed", leftover)
                remove_or_log(leftover)

    def open_staging(self, step: int) -> Path:
        """A new hidden folder to write the generation of ``step`` into.

        Raises:
            CheckpointExistsError: the generation exists.
            CheckpointWriteError: the folder cannot be made.
        """
        if self._final(step).exists():
            raise CheckpointExistsError(f"{self._final(step)} exists already and is never written over")
        staging = self.root / f".staging-{step}-{uuid.uuid4().hex[:12]}"
        with as_write_error(staging):
            make_durably(self.root)
            staging.mkdir()
        return staging

    def commit(self, staging: Path, step: int, entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> Generation:
        """Make a staged generation visible: manifest, fsync, rename, fsync, tracker, in this order.

        Names and sizes on disk are compared with the manifest before the rename: a generation that would be refused
        at the next start must not become visible. The tracker is a hint, so that failing to write it fails nothing.

        Args:
            staging: from `open_staging`; every file in it has been fsynced by its writer.
            step: the last step that is in it.
            entries: every file, as its writer described it.
            facts: what else the manifest says.

        Raises:
            CheckpointWriteError: the file system refused, or a rank's file is not there. Nothing is visible, unless it
                was the fsync after the rename: then a complete generation is, which a power cut might take away.
        """
        final = self._final(step)
        with as_write_error(final):
            write_manifest(staging, entries, facts)
            try:
                check_listing(staging)
            except CheckpointCorruptError as error:
                raise CheckpointWriteError(f"{error}; do all ranks see the same {self.root}?") from error
            commit_folder(staging, final)
        try:
            replace_atomically(self.root / TRACKER_NAME, str(step).encode())
        except OSError as error:
            logger.warning("cannot write %s: %s", self.root / TRACKER_NAME, error)
        return Generation(step, final)

    def discard(self, staging: Path) -> None:
        """Remove a staging folder whose writers failed."""
        shutil.rmtree(staging, ignore_errors=True)

    def newest_valid(self, check: Callable[[Path], RecoverInfo] | None = None) -> tuple[Generation, RecoverInfo] | None:
        """The newest generation that passes ``check`` (None: `verify`); worse ones are set aside with the reason.

        Returns:
            None when nothing usable is left; `rejected` tells whether there ever was something.
        """
        check = check or self.verify
        for generation in self.generations():
            try:
                return generation, check(generation.path)
            except CheckpointCorruptError as error:
                self.set_aside(generation, str(error))
        return None

    def verify(self, path: Path) -> RecoverInfo:
        """`inspect` a generation, and compare every byte with its manifest."""
        info = self.inspect(path)
        verify_folder(path)
        return info

    def inspect(self, path: Path) -> RecoverInfo:
        """Compare names and sizes of a generation's files with its manifest, and read its info.

        Raises:
            CheckpointNotFoundError: there is no such folder.
            CheckpointCorruptError: naming the first thing that is wrong.
        """
        if not path.is_dir():
            raise CheckpointNotFoundError(f"there is no generation at {path}")
        check_listing(path)
        info, named = RecoverInfo.read(path), _GENERATION.fullmatch(path.name)
        if named and int(named[1]) != info.last_step_info.global_step:
            raise CheckpointCorruptError(f"{path} was renamed: it holds step {info.last_step_info.global_step}")
        return info

    def set_aside(self, generation: Generation, reason: str) -> Path:
        """Rename a generation so that nothing resumes from it; it stays for a person to look at."""
        words = re.sub(r"[^a-z0-9]+", "-", reason.replace(str(generation.path), "").lower()).strip("-")[:80]
        target = self.root / f".rejected-{generation.path.name}-{words}"
        if target.exists():
            target = target.with_name(f"{target.name}-{uuid.uuid4().hex[:8]}")
        os.rename(generation.path, target)
        fsync_dir(self.root)
        logger.warning("set %s aside as %s: %s", generation.path, target.name, reason)
        return target

    def retire(self, keep: int | None) -> None:
        """Remove all but the ``keep`` newest generations, oldest first; None keeps all.

        One that cannot be removed is logged and left: it costs space, not the run.
        """
        for generation in reversed(self.generations()[keep:] if keep is not None else []):
            remove_or_log(generation.path)

    def _final(self, step: int) -> Path:
        return self.root / f"global_step_{step}"
