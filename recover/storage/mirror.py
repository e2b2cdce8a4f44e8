"""Copies of committed generations at any fsspec URL, for the case that the disk or cluster of a run
is lost.

In this package a mirror always means these copies of generations, with everything that a resume
needs. The mirror of the package ``holdfast_weights`` holds published weights, for servers.

    <url>/global_step_120/...        the files of the local folder, ``manifest.json`` uploaded last
    <url>/.copying-global_step_120   an unfinished copy: the manifest of its generation
    <url>/.damaged-global_step_120   the manifest of a copy with the same wrong bytes in two reads

A copy is complete when its manifest is there, and a fetch verifies every byte against it. A copy
that lacks nothing but its manifest is unconfirmed: the manifest is in its ``.copying-`` file. An
interrupted copy is completed by the next copy of the same generation. The copy of any other one
removes it, before it begins if files are missing, otherwise at its end. A damaged copy is fetched
again only if there is no other.

Cost: one background thread in the leader. It reads every file twice, for the digest and for the
upload (from the page cache), and needs the backend's upload memory (s3fs: ``max_concurrency`` parts
of 50 MB). Each URL must have only one writer. The lock of the run's folder ensures that, as long as
each run folder has its own URL.
"""

import re
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    FolderInUseError,
    MirrorError,
)
from ...utils.files import DurableFile, as_write_error, bytes_digest, write_durably
from ...utils.logging import get_logger
from ...utils.manifest import MANIFEST_NAME, parse_manifest, read_manifest
from ...utils.remote import RemoteFolder
from ..info import INFO_NAME, RecoverInfo
from .generations import Generation, GenerationStore

logger = get_logger(__name__)

_NAMES = re.compile(r"(?:\.part-)?(?:\.(?:copying|damaged)-)?global_step_(0|[1-9]\d*)")


CopyState = Literal["complete", "unconfirmed", "damaged", "incomplete", "no manifest", "empty"]
"""What there is of a generation at a mirror. A run can resume from the first two, and perhaps from
a damaged copy.

- complete: the manifest is there.
- unconfirmed: everything is there but the manifest, because the copier was killed before it.
- damaged: a fetch read the same wrong bytes twice.
- incomplete: a copy that was not finished. Some of its files are missing.
- no manifest: files that nothing describes. Somebody has removed the others.
- empty: no file. A store with real folders keeps them.
"""


class Mirror:
    """The copies of one run's generations. All methods that ask the mirror raise `MirrorError` if
    it does not answer.

    Example:

        mirror = Mirror("s3://bucket/experiment/trial", keep=2)
        mirror.submit(generation)  # returns at once
        mirror.wait(timeout_s=600)

    Args:
        url: URL of the run, ``s3://bucket/experiment/trial``.
        keep: number of newest generations to keep there. None keeps all.
        setting: origin of the URL, for the error message if it cannot be used.
        delete_old: after a complete copy, delete those beyond ``keep`` and the remains of
            interrupted and damaged ones. Only the run that owns the mirror should do that.
        confirm: called in the background before a copy changes the mirror. Raises if another job
            may write to it by now. None: nobody else does.
        transport: see `RemoteFolder`, which also raises for a URL that cannot be used.

    Attributes:
        last_error: error of the last copy. None if it succeeded.
    """

    def __init__(
        self,
        url: str,
        keep: int | None,
        *,
        setting: str = "config key 'recover.mirror_url'",
        delete_old: bool = True,
        confirm: Callable[[], None] | None = None,
        **transport: Any,
    ) -> None:
        self.last_error: Exception | None = None
        self._keep = keep
        self._deletes_old = delete_old
        self._confirm = confirm or (lambda: None)
        self._remote = RemoteFolder(url, setting=setting, error=MirrorError, **transport)
        # steps whose manifests were seen there, so that they are read only once
        self._complete: set[int] = set()
        self._changed = threading.Condition()
        self._copying: Generation | None = None
        self._waiting: Generation | None = None

    @property
    def url(self) -> str:
        """URL of the copies, without secrets."""
        return self._remote.url

    def steps(self, *, damaged: bool = False) -> list[int]:
        """Steps of the complete and sound copies, newest first, or of the damaged ones."""
        return self._steps_of(self._remote.names(), damaged=damaged)

    def _steps_of(
        self, names: Collection[str], *, damaged: bool, known: Collection[int] = ()
    ) -> list[int]:
        # Manifests of the steps ``known`` exist and are not read.
        found = []
        for step in _steps_in(names):
            if step in known and _folder(step) in names and _damaged(step) not in names:
                is_damaged = False
            else:
                manifest = self._remote.read(_manifest(step))
                if manifest is None:
                    continue
                is_damaged = self._is_damaged(step, manifest, names)
            if is_damaged == damaged:
                found.append(step)
        return found

    def _is_damaged(self, step: int, manifest: bytes, names: Collection[str]) -> bool:
        marked = _damaged(step) in names
        return marked and self._remote.read(_damaged(step)) == manifest

    def states(self) -> dict[int, CopyState]:
        """State of everything that is there, by step, newest first."""
        names = self._remote.names()
        return {step: self._state(step, names) for step in _steps_in(names)}

    def _state(self, step: int, names: Collection[str]) -> CopyState:
        manifest = self._remote.read(_manifest(step))
        if manifest is not None:
            return "damaged" if self._is_damaged(step, manifest, names) else "complete"

        # Without a marker, nothing describes the files.
        marker = self._remote.read(_marker(step))
        has_files = self._remote.holds_files(_folder(step))
        if marker is None:
            return "no manifest" if has_files else "empty"
        if not has_files:
            return "incomplete"

        # The marker is the manifest of what is being copied.
        where = f"{self.url}/{_marker(step)}"
        try:
            files = parse_manifest(marker, where)["files"]
        except (CheckpointCorruptError, CheckpointMismatchError):
            return "no manifest"
        for name, entry in files.items():
            if self._remote.size(f"{_folder(step)}/{name}") != entry["bytes"]:
                return "incomplete"
        return "unconfirmed"

    def traces(self) -> list[int]:
        """Steps of which there is anything, newest first."""
        return _steps_in(self._remote.names())

    def has_other(self, generation: Generation) -> bool:
        """Whether the mirror has a complete copy of another generation of this step, which `submit`
        would replace.
        """
        found = self._remote.read(_manifest(generation.step))
        return found is not None and found != (generation.path / MANIFEST_NAME).read_bytes()

    def submit(self, generation: Generation) -> None:
        """Copy a committed generation in the background. It replaces a generation that still waits
        for its turn.
        """
        with self._changed:
            if self._copying is None:
                self._start(generation)
                return
            if self._waiting is not None:
                logger.warning(
                    "no copy of %s at %s: a newer one came", self._waiting.path, self.url
                )
            self._waiting = generation

    def pinned(self) -> set[int]:
        """Steps that are being copied or wait for it. Their local folders must stay."""
        with self._changed:
            unfinished = [self._copying, self._waiting]
            return {generation.step for generation in unfinished if generation is not None}

    def inspect(self, step: int) -> RecoverInfo:
        """Check that all files of a generation are there with their sizes, and read its info."""
        files = self._checked_files(step, self._read_manifest(step))
        name = f"{_folder(step)}/{INFO_NAME}"
        where = f"{self.url}/{name}"
        data = self._remote.read(name) if INFO_NAME in files else None
        if data is None or bytes_digest(data) != files[INFO_NAME]["digest"]:
            raise CheckpointCorruptError(f"{where} is missing, or not what the manifest says")
        info = RecoverInfo.parse(data, where)
        found = info.last_step_info.global_step
        if found != step:
            raise CheckpointCorruptError(f"{where} is of step {found}")
        return info

    def fetch(self, step: int, store: GenerationStore) -> Generation:
        """Download a complete or unconfirmed generation into the store and verify it. It becomes
        visible only when it is complete and sound.

        Raises:
            CheckpointCorruptError: the copy is damaged or incomplete, or a read was wrong. An older
                copy may be usable. If two reads of a file gave the same wrong bytes, the copy is
                marked as damaged.
            CheckpointMismatchError: the copy is of another run than the store, or has a newer
                format than this version knows.
            CheckpointExistsError, CheckpointWriteError: see `GenerationStore.open_staging`.
        """
        started = time.monotonic()
        manifest = self._read_manifest(step)
        run_id = parse_manifest(manifest, f"{self.url}/{_manifest(step)}").get("run_id")
        store.require_own(run_id, f"{self.url}/{_folder(step)}")

        staging = store.open_staging(step)
        with ExitStack() as undo:
            undo.callback(store.discard, staging)
            with as_write_error(staging):
                fetched_bytes = self._download(step, manifest, staging)
            generation = store.adopt(staging, step)
            undo.pop_all()

        seconds = time.monotonic() - started
        logger.info(
            "fetched %s from %s: %d bytes in %.1f s",
            generation.path,
            self.url,
            fetched_bytes,
            seconds,
        )
        return generation

    def forget_newer(self, step: int) -> None:
        """Remove all generations newer than ``step``, because the run went back to ``step`` and
        will make others.
        """
        for newer in self.traces():
            if newer > step:
                logger.warning(
                    "removing the copy of step %d at %s: the run goes on from step %d",
                    newer,
                    self.url,
                    step,
                )
                self._remove(newer)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no copy is running or waiting. Returns False after ``timeout_s``."""
        steps = sorted(self.pinned())
        if steps and timeout_s > 0:
            logger.info(
                "waiting up to %.0f s for the copy of step(s) %s to %s", timeout_s, steps, self.url
            )
        with self._changed:
            return self._changed.wait_for(lambda: self._copying is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """`wait`, then give up with a warning. The process can exit even while a call to the mirror
        hangs.
        """
        if not self.wait(timeout_s):
            steps = sorted(self.pinned())
            logger.warning(
                "gave up copying step(s) %s to %s; the next start copies them", steps, self.url
            )
        self._remote.close()

    def _start(self, generation: Generation | None) -> None:
        self._copying = None  # in case no thread starts
        if generation is None:
            return
        # A daemon thread, so that a hanging call cannot keep the process alive. It leaves no more
        # than a kill does.
        work = threading.Thread(target=self._work, args=(generation,), name="mirror", daemon=True)
        work.start()
        self._copying = generation

    def _work(self, generation: Generation) -> None:
        try:
            self._copy_or_warn(generation)
        finally:  # also after an error, the next one gets its turn
            with self._changed:
                following = self._waiting
                self._waiting = None
                self._start(following)
                self._changed.notify_all()

    def _copy_or_warn(self, generation: Generation) -> None:
        started = time.monotonic()
        path = generation.path
        try:
            self._confirm()
            copied_bytes = self._copy(generation)
        except (CheckpointError, FolderInUseError, OSError) as error:
            if path.is_dir():
                self.last_error = error
                logger.warning("no copy of %s at %s: %s", path, self.url, error)
            else:
                logger.warning("no copy of %s at %s: it was removed meanwhile", path, self.url)
            return
        self.last_error = None
        seconds = time.monotonic() - started
        logger.info("copied %s to %s: %d bytes in %.1f s", path, self.url, copied_bytes, seconds)

        if not self._deletes_old:
            return
        try:
            self._confirm()
            self._delete_old(generation.step, GenerationStore(path.parent).pins())
        except (CheckpointError, FolderInUseError, OSError) as error:
            logger.warning("older copies stay at %s: %s", self.url, error)

    def _copy(self, generation: Generation) -> int:
        remote = self._remote
        step = generation.step
        folder = _folder(step)
        files = read_manifest(generation.path)["files"]
        manifest = (generation.path / MANIFEST_NAME).read_bytes()
        todo = self._unfinished(step, files)
        is_damaged = remote.read(_damaged(step)) == manifest

        if todo or is_damaged or remote.read(_manifest(step)) != manifest:
            self._make_room(step)
            # Sizes show which files of an interrupted copy are there, but not from which
            # generation: this step may have been trained and partly copied before. The marker tells
            # the generation.
            if is_damaged or not remote.whole_files or remote.read(_marker(step)) != manifest:
                self._remove(step)
                remote.put_bytes(_marker(step), manifest)
                todo = list(files)

            for name in todo:
                path = generation.path / name
                remote.put_file(path, f"{folder}/{name}", files[name]["digest"])
            lost = self._unfinished(step, files)
            if lost:
                raise MirrorError(
                    f"{lost[0]} of step {step} was put and is not there ({len(lost)} in all)"
                )

            # The manifest comes last, because with it the copy is complete.
            self._confirm()
            remote.flush(folder)
            remote.put_bytes(_manifest(step), manifest)
        remote.remove_file(_marker(step))
        return sum(files[name]["bytes"] for name in todo)

    def _make_room(self, step: int) -> None:
        # Nothing can resume from a copy that lacks files. On a store that is nearly full, its
        # remains would make every later copy fail.
        if not self._deletes_old:
            return
        try:
            names = self._remote.names()
            for other in _steps_in(names):
                is_begun = other != step and _marker(other) in names
                if is_begun and self._state(other, names) == "incomplete":
                    self._remove(other)
        except MirrorError as error:
            logger.warning("remains of interrupted copies stay at %s: %s", self.url, error)

    def _unfinished(self, step: int, files: dict[str, Any]) -> list[str]:
        sizes = self._remote.sizes(_folder(step))
        return [name for name, entry in files.items() if sizes.get(name) != entry["bytes"]]

    def _delete_old(self, newest: int, pins: set[int]) -> None:
        # Copies newer than the one just made stay and do not count. They were damaged or out of
        # reach when the run resumed from an older one, and the run will replace them. They are no
        # reason to remove a sound copy.
        names = self._remote.names()
        sound = self._steps_of(names, damaged=False, known=self._complete)
        self._complete.update(sound)
        kept = [step for step in sound if step <= newest][: self._keep]
        for step in reversed(_steps_in(names)):
            if step <= newest and step not in kept and step not in pins:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # The manifest first, so that a half-removed copy never looks complete.
        self._complete.discard(step)
        self._remote.remove_file(_manifest(step))
        self._remote.remove_folder(_folder(step))
        self._remote.remove_file(_marker(step))
        self._remote.remove_file(_damaged(step))

    def _mark_damaged(self, step: int, manifest: bytes) -> str:
        if self._remote.read(_manifest(step)) != manifest:
            return "the copy was never confirmed"
        try:
            self._remote.put_bytes(_damaged(step), manifest)
        except MirrorError as error:
            return f"the copy cannot be marked as damaged: {error}"
        return f"{self.url}/{_damaged(step)} says so from now on"

    def _read_manifest(self, step: int) -> bytes:
        manifest = self._remote.read(_manifest(step))
        if manifest is None:
            manifest = self._remote.read(_marker(step))
        if manifest is None:
            raise CheckpointCorruptError(
                f"{self.url}/{_manifest(step)} is missing: the copy was never complete"
            )
        return manifest

    def _checked_files(self, step: int, manifest: bytes) -> dict[str, dict[str, Any]]:
        files = parse_manifest(manifest, f"{self.url}/{_manifest(step)}")["files"]
        for name, entry in files.items():
            self._check_size(f"{_folder(step)}/{name}", entry["bytes"])
        return files

    def _download(self, step: int, manifest: bytes, staging: Path) -> int:
        files = self._checked_files(step, manifest)  # before gigabytes are read
        write_durably(staging / MANIFEST_NAME, manifest)
        for name, entry in files.items():
            path = f"{_folder(step)}/{name}"
            target = staging / name
            expected = entry["digest"]
            found = self._download_file(path, target, entry["bytes"])
            if found == expected:
                continue

            # This is usually one bad read (a cache, a proxy, memory), so the file is read again.
            target.unlink()
            again = self._download_file(path, target, entry["bytes"])
            problem = f"{self.url}/{path} has digest {found}, the manifest says {expected}"
            if again == expected:
                logger.warning("%s: that was a bad read, the second one is right", problem)
                continue
            what = f"in a second read it has {again}"
            if again == found:
                what = self._mark_damaged(step, manifest)
            raise CheckpointCorruptError(f"{problem}; {what}")
        return sum(entry["bytes"] for entry in files.values())

    def _check_size(self, path: str, expected: Any) -> None:
        # The manifest comes from outside and could name any file here.
        pure = PurePosixPath("/", path)
        if str(pure) != f"/{path}" or ".." in pure.parts or pure.name == MANIFEST_NAME:
            raise CheckpointCorruptError(
                f"{self.url}: the manifest names {path!r}, which is no file of a generation"
            )
        size = self._remote.size(path)
        if size is None:
            raise CheckpointCorruptError(f"{self.url}/{path} is missing")
        if size != expected:
            raise CheckpointCorruptError(
                f"{self.url}/{path} has {size} bytes, the manifest says {expected}"
            )

    def _download_file(self, path: str, target: Path, size: int) -> str:
        target.parent.mkdir(parents=True, exist_ok=True)
        with DurableFile(target) as file:
            try:
                for chunk in self._remote.chunks(path, size):
                    file.write(chunk)
            except FileNotFoundError as error:
                raise CheckpointCorruptError(
                    f"{self.url}/{path} was removed while it was read"
                ) from error
        return file.digest


def _steps_in(names: Collection[str]) -> list[int]:
    matches = [_NAMES.fullmatch(name) for name in names]
    return sorted({int(match[1]) for match in matches if match}, reverse=True)


def _folder(step: int) -> str:
    return f"global_step_{step}"


def _manifest(step: int) -> str:
    return f"{_folder(step)}/{MANIFEST_NAME}"


def _marker(step: int) -> str:
    return f".copying-{_folder(step)}"


def _damaged(step: int) -> str:
    return f".damaged-{_folder(step)}"
