"""Folders that commands read, on this machine or at a URL, behind one interface."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import xxhash

from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    MirrorError,
)
from ...utils.files import digest_name
from ...utils.manifest import (
    MANIFEST_NAME,
    EntryFields,
    Manifest,
    compare_listing,
    described_digest,
    list_files,
    parse_manifest,
    read_manifest,
)
from ...utils.pieces import read_digest
from ..info import INFO_NAME, RecoverInfo
from ..storage.generations import GenerationStore

if TYPE_CHECKING:
    from ..storage.mirror import Mirror

_AT_A_URL: dict[str, Any] = {"setting": "the URL", "attempts": 3, "first_wait_s": 0.5}


class Folder:
    """A generation, an export, or a published version on this machine.

    Attributes:
        where: path or URL of the folder.
        path: path of the folder. None at a URL.
    """

    where: str
    path: Path | None

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointNotFoundError(f"there is no folder {path}")
        self._here = path
        self.path = path
        self.where = str(path)

    @property
    def name(self) -> str:
        """Last part of the path or URL, for example ``global_step_120``."""
        return PurePosixPath(self.where).name

    def sizes(self) -> dict[str, int]:
        """Bytes of every file in the folder, by POSIX path relative to it."""
        return list_files(self._here)

    def read(self, name: str) -> bytes:
        """Contents of a small file. Raises `CheckpointCorruptError` if it is missing."""
        try:
            return (self._here / name).read_bytes()
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{self.where}/{name} is missing") from None

    def read_range(self, name: str, begin: int, n_bytes: int) -> bytes:
        """Part of a file."""
        with open(self._here / name, "rb") as file:
            return os.pread(file.fileno(), n_bytes, begin)

    def digest(self, name: str, entry: EntryFields) -> str:
        """Digest of a file, of the kind that its entry in a manifest has."""
        path = self._here / name
        return described_digest(path, entry)

    def has(self, name: str) -> bool:
        """Whether the folder holds this file."""
        return name in self.sizes()

    def inside(self, name: str) -> "Folder":
        """A folder in this one."""
        return Folder(self._here / name)

    def manifest(self) -> Manifest:
        """Read the manifest, and compare it with the names and sizes of the files. Raises as
        `check_listing`.
        """
        manifest = self.read_manifest()
        compare_listing(self.sizes(), manifest, self.where)
        return manifest

    def read_manifest(self) -> Manifest:
        """Read the manifest and check only its own digest."""
        return read_manifest(self._here)

    def info(self) -> RecoverInfo:
        """Info of a generation. Raises as `manifest`."""
        data = self.read(INFO_NAME)
        return RecoverInfo.parse(data, f"{self.where}/{INFO_NAME}")


class UrlFolder(Folder):
    """The same at an fsspec URL. Nothing is kept on this machine.

    Attributes:
        url: the URL as given, while `where` is for messages and hides a password.
    """

    def __init__(self, url: str) -> None:
        from ...utils.remote import RemoteFolder

        self.url = url.rstrip("/")
        self._remote = RemoteFolder(url, error=MirrorError, **_AT_A_URL)
        self.where = self._remote.url
        self.path = None

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`."""
        return self._remote.sizes("")

    def read(self, name: str) -> bytes:
        """See `Folder.read`."""
        data = self._remote.read(name)
        if data is None:
            raise CheckpointCorruptError(f"{self.where}/{name} is missing")
        return data

    def inside(self, name: str) -> Folder:
        """See `Folder.inside`."""
        return UrlFolder(f"{self.url}/{name}")

    def read_manifest(self) -> Manifest:
        """See `Folder.read_manifest`."""
        data = self.read(MANIFEST_NAME)
        return parse_manifest(data, f"{self.where}/{MANIFEST_NAME}")

    def read_range(self, name: str, begin: int, n_bytes: int) -> bytes:
        """See `Folder.read_range`."""
        end = begin + n_bytes
        with self._must_have(name):
            return self._remote.read_range(name, begin, end)

    def digest(self, name: str, entry: EntryFields) -> str:
        """See `Folder.digest`."""
        if "pieces" in entry:
            read = partial(self.read_range, name)
            return read_digest(entry["pieces"], read)
        # Read in chunks, because a file may be larger than the memory.
        found = xxhash.xxh3_128()
        with self._must_have(name):
            for chunk in self._remote.chunks(name, entry["bytes"]):
                found.update(chunk)
        return digest_name(found)

    @contextmanager
    def _must_have(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                f"{self.where}/{name} is missing, or was removed while it was read"
            ) from error


def open_mirror(url: str) -> "Mirror":
    """Open the copies at a URL. This object never deletes one."""
    from ..storage.mirror import Mirror

    return Mirror(url, None, delete_old=False, **_AT_A_URL)


@contextmanager
def local_copy(folder: Folder) -> Iterator[Path]:
    """Yield a generation as a folder on this machine. A copy at a URL is fetched, verified, and
    removed afterwards.
    """
    if folder.path is not None:
        yield folder.path
        return

    # The URL ends with global_step_<step>, and the mirror is the folder that it is in.
    assert isinstance(folder, UrlFolder)
    root, _, name = folder.url.rpartition("/")
    step = int(name.rpartition("_")[2])
    with tempfile.TemporaryDirectory(prefix="holdfast-") as temporary:
        store = GenerationStore(Path(temporary))
        fetched = open_mirror(root).fetch(step, store)
        yield fetched.path
