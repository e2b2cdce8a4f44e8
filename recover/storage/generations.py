"""Generations on a local folder: stage, commit, list, verify, quarantine, delete by retention.

A generation's name appears when it is complete, and no folder is ever written over. All of it runs in one process,
the leader: rank 0 under torchrun, the driver under Ray. No other file knows that generations are local folders.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from ...utils.files import (
    commit_folder,
    fsync_dir,
    make_durably,
    remove_or_log,
    replace_atomically,
    walk_leaves,
    write_durably,
)
from ...utils.logging import get_logger
from ...utils.manifest import (
    FileEntry,
    check_listing,
    read_manifest,
    verify_file,
    verify_folder,
    write_manifest,
)
from ...utils.write_errors import as_write_error
from ..info import INFO_NAME, RecoverInfo
from .retention import RetentionRules, steps_to_keep

logger = get_logger(__name__)

LOCK_NAME = "recover.lock"
"""Name of a run's lock file, next to the folder of generations. See `RecoverConfig.lock_path`."""
TRACKER_NAME = "latest_checkpointed_iteration.txt"
_GENERATION = re.compile(r"global_step_(\d+)")
_PIN = re.compile(r"\.pinned-global_step_(\d+)")


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
        self.root = root.absolute()  # ranks may have other working folders

    @property
    def tracker(self) -> Path:
        """The file that names the newest generation for people and tools; a hint, never trusted to choose by."""
        return self.root / TRACKER_NAME

    def generations(self) -> list[Generation]:
        """Everything that was committed and not quarantined, newest first. Nothing is verified."""
        if not self.root.is_dir():
            return []
        matches = [(path, _GENERATION.fullmatch(path.name)) for path in self.root.iterdir() if path.is_dir()]
        found = [Generation(int(match[1]), path) for path, match in matches if match]
        return sorted(found, key=lambda generation: generation.step, reverse=True)

    def pins(self) -> set[int]:
        """The steps that a person has pinned: no rule deletes their generations."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        return {int(match[1]) for match in map(_PIN.fullmatch, names) if match}

    def pin(self, step: int) -> None:
        """Have the generation of ``step`` stay whatever the rules say; it need not be there yet.

        The mark lies beside it: a generation is never changed after its commit.
        """
        if step not in self.pins():
            write_durably(self._pin_of(step), b"")
            fsync_dir(self.root)

    def unpin(self, step: int) -> None:
        """Leave the generation of ``step`` to the rules again."""
        self._pin_of(step).unlink(missing_ok=True)
        fsync_dir(self.root)

    def quarantined(self) -> list[Path]:
        """Folders of generations that were refused; a person looks at them."""
        return sorted(self.root.glob(".rejected-*"))

    def sweep(self) -> None:
        """Remove what a killed writer left: staging folders, half-removed generations, a tracker that never was.

        What cannot be removed is logged and left: it costs space, not the run.
        """
        if self.root.is_dir():
            fsync_dir(self.root)  # what an earlier process has named counts only once it is on the disk
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
        staging = self.root / f".staging-{step}-{uuid.uuid4().hex[:12]}"
        with as_write_error(staging):
            if self.path_of(step).exists():
                raise CheckpointExistsError(f"{self.path_of(step)} exists already and is never written over")
            make_durably(self.root)
            staging.mkdir()
        return staging

    def staged_bytes(self, step: int) -> int:
        """Bytes in the staging folders of ``step``, which ranks are writing to; 0 when there is none."""
        n_bytes = 0
        for staging in self.root.glob(f".staging-{step}-*"):
            with contextlib.suppress(OSError):  # it was renamed or removed meanwhile, as a rule
                n_bytes += sum(status.st_size for _, status in walk_leaves(staging))
        return n_bytes

    def newest_bytes(self) -> int:
        """Size of the newest generation's files, by its manifest: what the next one will need. 0 when there is none."""
        for generation in self.generations():
            with contextlib.suppress(CheckpointError, OSError):
                return sum(entry["bytes"] for entry in read_manifest(generation.path)["files"].values())
        return 0

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
        with as_write_error(self.path_of(step)):
            write_manifest(staging, entries, facts)
            try:
                check_listing(staging)
            except CheckpointCorruptError as error:
                raise CheckpointWriteError(f"{error}; do all ranks see the same {self.root}?") from error
        return self.adopt(staging, step)

    def adopt(self, staging: Path, step: int) -> Generation:
        """Make a staged folder visible that has its manifest already, as a copy of a generation has.

        Raises:
            CheckpointWriteError: as `commit`.
        """
        final = self.path_of(step)
        with as_write_error(final):
            commit_folder(staging, final)
        try:
            replace_atomically(self.tracker, str(step).encode())
        except OSError as error:
            logger.warning("cannot write %s: %s", self.tracker, error)
        return Generation(step, final)

    def discard(self, staging: Path) -> None:
        """Remove a staging folder whose writers failed."""
        shutil.rmtree(staging, ignore_errors=True)

    def newest_valid(
        self, check: Callable[[Path], RecoverInfo] | None = None, *, quarantine: bool = True
    ) -> tuple[Generation, RecoverInfo] | None:
        """The newest generation that passes ``check`` (None: `verify`); damaged ones are quarantined, or logged only.

        Returns:
            None when nothing usable is left; `quarantined` tells whether there ever was something.
        """
        check = check or self.verify
        for generation in self.generations():
            try:
                return generation, check(generation.path)
            except CheckpointCorruptError as error:
                if quarantine:
                    self.quarantine(generation, str(error))
                else:
                    logger.warning("%s is not usable: %s", generation.path, error)
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
            CheckpointMismatchError: another version of Holdfast wrote it.
        """
        if not path.is_dir():
            raise CheckpointNotFoundError(f"there is no generation at {path}")
        files = check_listing(path)["files"]
        if INFO_NAME in files:  # its words are judged before the other bytes are compared
            verify_file(path, INFO_NAME, files[INFO_NAME])
        info, named = RecoverInfo.read(path), _GENERATION.fullmatch(path.name)
        if named and int(named[1]) != info.last_step_info.global_step:
            raise CheckpointCorruptError(f"{path} was renamed: it holds step {info.last_step_info.global_step}")
        return info

    def quarantine(self, generation: Generation, reason: str) -> Path:
        """Rename a generation so that nothing resumes from it; it stays for a person to look at."""
        words = re.sub(r"[^a-z0-9]+", "-", reason.replace(str(generation.path), "").lower()).strip("-")[:80]
        target = self.root / f".rejected-{generation.path.name}-{words}"
        if target.exists():
            target = target.with_name(f"{target.name}-{uuid.uuid4().hex[:8]}")
        os.rename(generation.path, target)
        fsync_dir(self.root)
        logger.warning("quarantined %s as %s: %s", generation.path, target.name, reason)
        return target

    def delete_by_retention(self, rules: RetentionRules, copied: Collection[int] = ()) -> None:
        """Remove the generations that no rule wants, oldest first; what is there now decides, not what was.

        The newest usable one always stays, and so do pinned ones and the steps ``copied``, whose files somebody reads.
        One that cannot be removed is logged and left: it costs space, not the run.
        """
        try:
            generations = {generation.step: generation for generation in self.generations()}
            newest_usable = next((g.step for g in generations.values() if self._usable(g)), None)
            metrics = {step: self._metrics(g) if rules.best else {} for step, g in generations.items()}
            pins = self.pins()
        except OSError as error:
            logger.warning("no generation is deleted, because one cannot be read: %s", error)
            return
        keep = steps_to_keep(metrics, rules) | {newest_usable, *pins, *copied}
        for step in sorted(generations.keys() - keep):
            remove_or_log(generations[step].path)

    def _usable(self, generation: Generation) -> bool:
        try:
            self.inspect(generation.path)
        except CheckpointError:
            return False
        return True

    def _metrics(self, generation: Generation) -> Mapping[str, float]:
        try:
            return RecoverInfo.read(generation.path).metrics
        except CheckpointError:
            return {}

    def _pin_of(self, step: int) -> Path:
        return self.root / f".pinned-{self.path_of(step).name}"

    def path_of(self, step: int) -> Path:
        """Where the generation of ``step`` is, or would be."""
        return self.root / f"global_step_{step}"
