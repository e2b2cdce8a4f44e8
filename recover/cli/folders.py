"""A folder that is only read, here or at a URL: the same few questions of both."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from ...utils.errors import CheckpointCorruptError, CheckpointNotFoundError, MirrorError
from ...utils.files import digest_name, file_digest
from ...utils.manifest import MANIFEST_NAME, compare_listing, list_files, parse_manifest, read_manifest
from ..info import INFO_NAME, RecoverInfo


class Folder(ABC):
    """A generation, an export, or a published version.

    Attributes:
        where: its path or URL.
        path: of one on this machine; None at a URL.
    """

    where: str
    path: Path | None = None

    @property
    def name(self) -> str:
        """Its last part: ``global_step_120``."""
        return PurePosixPath(self.where).name

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of every file below it, by POSIX path."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A small file. Raises `CheckpointCorruptError` when it is not there."""

    @abstractmethod
    def read_range(self, name: str, begin: int, n_bytes: int) -> bytes:
        """A part of a file."""

    @abstractmethod
    def digest(self, name: str, n_bytes: int) -> str:
        """The digest of a file, as manifests have it."""

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self.sizes()

    def manifest(self) -> dict[str, Any]:
        """The manifest, checked against itself and against the names and sizes of the files.

        Raises:
            CheckpointCorruptError: naming the first thing that is wrong.
            CheckpointMismatchError: another version of Holdfast wrote it.
        """
        manifest = self.read_manifest()
        compare_listing(self.sizes(), manifest, self.where)
        return manifest

    def read_manifest(self) -> dict[str, Any]:
        """The manifest, checked against itself."""
        return parse_manifest(self.read(MANIFEST_NAME), f"{self.where}/{MANIFEST_NAME}")

    def info(self) -> RecoverInfo:
        """Of a generation, what it remembers besides tensors; raises as `manifest`."""
        return RecoverInfo.parse(self.read(INFO_NAME), f"{self.where}/{INFO_NAME}")


class LocalFolder(Folder):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointNotFoundError(f"there is no folder {path}")
        self.path, self.where = path, str(path)

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`."""
        return list_files(self._here)

    def read(self, name: str) -> bytes:
        """See `Folder.read`."""
        try:
            return (self._here / name).read_bytes()
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{self.where}/{name} is missing") from None

    def read_manifest(self) -> dict[str, Any]:
        """See `Folder.read_manifest`."""
        return read_manifest(self._here)

    def read_range(self, name: str, begin: int, n_bytes: int) -> bytes:
        """See `Folder.read_range`."""
        with open(self._here / name, "rb") as file:
            return os.pread(file.fileno(), n_bytes, begin)

    def digest(self, name: str, n_bytes: int) -> str:
        """See `Folder.digest`."""
        return file_digest(self._here / name)

    @property
    def _here(self) -> Path:
        assert self.path is not None
        return self.path


class RemoteFolder(Folder):
    """A folder at a URL; nothing of it is kept here."""

    def __init__(self, url: str) -> None:
        from ...utils import remote

        self._remote = remote.RemoteFolder(url, setting="the URL", error=MirrorError, attempts=3, first_wait_s=0.5)
        self.where = self._remote.url

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`."""
        try:
            return self._remote.sizes("")
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes:
        """See `Folder.read`."""
        if (data := self._remote.read(name)) is None:
            raise CheckpointCorruptError(f"{self.where}/{name} is missing")
        return data

    def read_range(self, name: str, begin: int, n_bytes: int) -> bytes:
        """See `Folder.read_range`."""
        return self._read(name, lambda: self._remote.read_range(name, begin, begin + n_bytes))

    def digest(self, name: str, n_bytes: int) -> str:
        """See `Folder.digest`."""

        def run() -> str:
            found = xxhash.xxh3_128()
            for chunk in self._remote.chunks(name, n_bytes):
                found.update(chunk)
            return digest_name(found)

        return self._read(name, run)

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{self.where}/{name} is missing, or was removed while it was read") from error
