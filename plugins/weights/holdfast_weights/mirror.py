"""`Mirror`: keeps the newest versions of a source as complete, verified folders on a local disk.

    LOCAL/v00000120/, LOCAL/v00000121/    complete and verified folders, two at most
    LOCAL/current -> v00000121            moved last
    LOCAL/.staging-v00000122-<hex>/       a version that is being made
    LOCAL/.mirror                         mark and lock of the one mirror that owns the folder

A new version begins with a copy of a held one, never with the folder itself, because a server may
have mapped it. The deltas change the copy, all files are compared with the trainer's digests and
fsynced, and the folder is renamed. A killed mirror leaves a staging folder, which the next start
removes. That start also verifies all folders, because a power cut may have torn them.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .delta import apply_deltas
from .errors import FolderError, MissingError
from .files import copy_file, fsync, list_files
from .manifest import DELTA_NAME, MANIFEST_NAME, Manifest, check_files, check_folder
from .source import Source, version_name, version_of
from .threads import in_parallel
from .versions import SMALL_FILES, Delta, Plan, check_version, make_plan

logger = logging.getLogger(__name__)

CURRENT = "current"
_LOCK = ".mirror"
_LOAD_S = 300
"""Time that a server has to load a version before `follow` may remove it."""
_MOST_WAIT_S = 60
"""Longest time until `follow` tries again after an error."""


class Mirror:
    """The local folder of a source.

    Args:
        source: where the trainer publishes.
        local: an empty folder, one of an earlier mirror, or one that does not exist yet.

    Raises:
        FolderError: ``local`` is not a mirror's, another mirror uses it, or it overlaps with the
            source.
    """

    def __init__(self, source: Source, local: Path) -> None:
        self.source = source
        self.local = local.absolute()

        # One version is made at a time. The other lock is of the attributes below.
        self._making = threading.Lock()
        self._state = threading.RLock()
        self._held: dict[int, Manifest] = {}
        self._current: int | None = None
        # The last version given to a server, and when.
        self._answered: tuple[int, float] | None = None
        self._doing = "starting"
        self._error = ""

        self._lock_fd = self._own()

    def _own(self) -> int:
        """Lock the folder against other mirrors. Returns the open lock."""
        if self.source.folder is not None:
            # The mirror would find its own versions in the source, or remove the trainer's.
            real = self.local.resolve()
            other = self.source.folder.resolve()
            if real == other or real in other.parents or other in real.parents:
                raise FolderError(
                    f"{self.local} and its source {other} overlap; "
                    "choose a folder of its own for the mirror"
                )

        # A mirror removes files, so the folder must be empty or a mirror's.
        self.local.mkdir(parents=True, exist_ok=True)
        if os.listdir(self.local) and not (self.local / _LOCK).is_file():
            raise FolderError(
                f"{self.local} has files that no mirror made, and a mirror removes files; choose "
                "another"
            )

        fd = os.open(self.local / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise FolderError(f"{self.local} is used by another mirror that runs") from None
        return fd

    def open(self) -> None:
        """Remove leftovers and verify every version. A damaged one is removed, and made again when
        it is needed.
        """
        for name in os.listdir(self.local):
            path = self.local / name
            version = version_of(name)
            if name.startswith((".staging-", ".retired-", ".current-")):
                _remove(path)
            elif version is not None:
                self._doing = f"verifying {name}"
                try:
                    self._held[version] = _require_full(path)
                except FolderError as error:
                    logger.warning("%s is damaged and removed: %s", path, error)
                    self._remove_version(version)

        # ``current`` stays where it is, if that version is held, or goes to the newest.
        link = self.local / CURRENT
        pointed = version_of(os.readlink(link)) if link.is_symlink() else None
        if pointed in self._held:
            self._current = pointed
        elif self._held:
            self._point(max(self._held))
        else:
            link.unlink(missing_ok=True)
        self._doing = "idle"
        logger.info("%s holds %s", self.local, sorted(self._held) or "no version")

    def prepare(self, version: int, label: str) -> Path:
        """Return the complete folder of a version, which is made if it is not held. It becomes
        ``current``.

        Raises:
            FolderError: there is no such version with this label, or it is damaged. Nothing was
                changed.
            OSError: the local disk refused. Nothing became visible.
        """
        if not self._give(version, label):
            with self._making:
                if not self._give(version, label):
                    self._make(version, label)
                    self._give(version, label)
        return self.local / version_name(version)

    def _give(self, version: int, label: str) -> bool:
        with self._state:
            held = self._held.get(version)
            if held is None or held.label != label:
                return False
            if not (self.local / version_name(version) / MANIFEST_NAME).exists():
                return False
            self._answered = (version, time.monotonic())
            if self._current != version:
                self._point(version)
            return True

    def follow(self, every_s: float) -> None:
        """Prepare the newest version of the source again and again, less often after errors. Never
        returns.
        """
        wait_s = every_s
        while True:
            try:
                self.prepare_newest()
                wait_s = every_s
            except Exception as error:
                # Whatever it is, the source may be all right the next time.
                wait_s = max(every_s, min(2 * wait_s, _MOST_WAIT_S))
                self._error = f"{type(error).__name__}: {error}"
                expected = isinstance(error, FolderError | OSError)
                logger.warning("%s, again in %.0f s", error, wait_s, exc_info=not expected)
            time.sleep(wait_s)

    def prepare_newest(self) -> None:
        """Make the newest version of the source ``current``. Raises as `prepare`.

        Postponed while a server may still load a version that would have to be removed.
        """
        for version in reversed(self.source.versions()):
            try:
                tail = self.source.manifest_tail(version_name(version))
            except MissingError:
                # The version is being uploaded or removed.
                continue
            with self._making:
                held = self._held.get(version)
                if held is None or not held.data.endswith(tail):
                    self._make(version, None)
                elif self._current != version:
                    self._point(version)
            return

    def status(self) -> dict[str, Any]:
        """Return the labels of the held versions, the version of ``current``, the work and the last
        error.
        """
        held = sorted(self._held.copy().items())
        return {
            "source": self.source.name,
            "held": {str(version): manifest.label for version, manifest in held},
            "current": self._current,
            "doing": self._doing,
            "error": self._error or None,
        }

    def _make(self, version: int, label: str | None) -> None:
        """Make a version and move ``current`` to it. Without a label, take any, and do nothing if
        it has to wait.
        """
        name = version_name(version)
        began = time.monotonic()
        try:
            self._doing = f"planning {name}"
            plan = make_plan(self.source, version, label, self._held)
            if not self._make_room(plan, wait=label is None):
                return
            try:
                self._write(plan)
            except (FolderError, FileNotFoundError) as error:
                # A delta, or the local base, is not as it was published.
                if not plan.held:
                    raise
                logger.warning("%s: %s; once more from a full version", name, error)
                try:
                    plan = make_plan(self.source, version, plan.target.label, {})
                    self._write(plan)
                except FolderError as second:
                    both = f"{error}; once more from a full version: {second}"
                    raise FolderError(both) from second
        finally:
            self._doing = "idle"
        self._error = ""
        logger.info(
            "%s: fetched %d of %d bytes in %d deltas and %d full versions, verified, %.2f s",
            name,
            plan.bytes,
            plan.target.bytes,
            len(plan.deltas),
            not plan.held,
            time.monotonic() - began,
        )

    def _make_room(self, plan: Plan, wait: bool) -> bool:
        """Remove all versions but the one to begin with. With ``wait``, return False if one may be
        loaded now.
        """
        with self._state:
            keep = plan.begin_version if plan.held else self._current
            doomed = [version for version in self._held if version != keep]
            if wait and self._answered is not None:
                answered, when = self._answered
                if answered in doomed and time.monotonic() < when + _LOAD_S:
                    return False

            # From here on no server is given a version whose folder will be removed.
            for version in doomed:
                del self._held[version]
        if keep is not None and keep != self._current:
            self._point(keep)
        for version in doomed:
            self._remove_version(version)
        return True

    def _write(self, plan: Plan) -> None:
        """Make the folder of a version in staging, verify it, and make it visible."""
        name = version_name(plan.version)
        staging = self.local / f".staging-{name}-{uuid.uuid4().hex[:12]}"
        target = staging / "target"
        try:
            target.mkdir(parents=True)
            self._doing = f"fetching {plan.bytes} bytes for {name}"
            folders = {}
            for delta in plan.deltas:
                folder = staging / version_name(delta.version)
                folders[delta.version] = self._fetch_delta(delta, folder)

            # The files of the first folder that no delta replaces.
            small = plan.small_files()
            begin = [file for file in plan.target.files if small.get(file) is None]
            self._begin(plan, begin, target)

            self._doing = f"applying {len(folders)} deltas to {name}"
            if folders:
                deltas = [(folders[delta.version], delta) for delta in plan.deltas]
                apply_deltas(target, plan.target.weights, deltas)
            for file, delta in small.items():
                if delta is not None:
                    (target / file).parent.mkdir(parents=True, exist_ok=True)
                    copy_file(folders[delta.version] / SMALL_FILES / file, target / file)
            (target / MANIFEST_NAME).write_bytes(plan.target.data)
            self._doing = f"verifying {name}"
            check_folder(target)

            # Mirrors of this one may want the last delta.
            if plan.deltas:
                os.rename(folders[plan.deltas[-1].version], target / DELTA_NAME)

            self._doing = f"syncing {name}"
            # Files first, then the folders that name them, from the innermost.
            in_parallel(fsync, (target / file for file in list_files(target)))
            for folder, _, _ in os.walk(target, topdown=False):
                fsync(Path(folder))
            self._commit(target, plan)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _fetch_delta(self, delta: Delta, folder: Path) -> Path:
        folder.mkdir()
        self.source.fetch(delta.folder, delta.manifest.files, folder)
        check_files(folder, delta.manifest.files)
        (folder / MANIFEST_NAME).write_bytes(delta.manifest.data)
        return folder

    def _begin(
        self,
        plan: Plan,
        files: Sequence[str],
        target: Path,
    ) -> None:
        """Copy or fetch the files of the first folder."""
        folder = version_name(plan.begin_version)
        if not plan.held:
            wanted = {file: plan.begin.files[file] for file in files}
            self.source.fetch(folder, wanted, target)
            return
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
        in_parallel(lambda file: copy_file(self.local / folder / file, target / file), files)

    def _commit(self, target: Path, plan: Plan) -> None:
        final = self.local / version_name(plan.version)
        if final.exists():
            # The version of another label, from before a crash of the trainer.
            with self._state:
                self._held.pop(plan.version, None)
            self._remove_version(plan.version)
        os.rename(target, final)

        # The rename is certain when both folders are.
        fsync(target.parent)
        fsync(self.local)
        with self._state:
            self._held[plan.version] = plan.target
        self._point(plan.version)

    def _point(self, version: int) -> None:
        """Move ``current`` to a version at once."""
        with self._state:
            link = self.local / f".current-{uuid.uuid4().hex[:12]}"
            os.symlink(version_name(version), link)
            os.replace(link, self.local / CURRENT)
            fsync(self.local)
            self._current = version

    def _remove_version(self, version: int) -> None:
        """Remove a folder after it was renamed, so that half of a version is never visible."""
        path = self.local / version_name(version)
        hidden = self.local / f".retired-{path.name}-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, hidden)
            fsync(self.local)
            _remove(hidden)


def _require_full(path: Path) -> Manifest:
    """Verify a version that a mirror made."""
    if path.is_symlink():
        raise FolderError(f"{path} is a link")
    manifest, _, full = check_version(path)
    if not full:
        raise FolderError(f"{path} has only a delta")
    return manifest


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
