"""The folder of versions that a trainer publishes, read through fsspec: a local folder, a bucket,
or ``serve``.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from .errors import FolderError, MissingError
from .files import allocate, write_exactly
from .manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, TAIL_BYTES, Files, Manifest, parse_manifest
from .threads import in_parallel

T = TypeVar("T")

_CHUNK_BYTES = 8 << 20
_WAITS_S = (0.5, 2.0)
"""Seconds before the second and the third attempt."""


class _Part(NamedTuple):
    """Bytes of a file."""

    name: str
    start: int
    stop: int


def version_name(version: int) -> str:
    """Name of a version's folder: ``v00000121``."""
    return f"v{version:08d}"


def version_of(name: str) -> int | None:
    """Version of a folder, or None if its name is not a version's."""
    match = re.fullmatch(r"v(\d{8,18})", name, re.ASCII)
    if match is None:
        return None
    version = int(match[1])
    return version if version_name(version) == name else None


class Source:
    """A folder of versions at any URL that fsspec opens. Paths are relative to it.

    Args:
        url: path or URL.
        token: sent to a source with HTTP.

    Attributes:
        name: the URL without secrets.
        folder: the path of a local folder, else None.

    Raises:
        FolderError: of every method, if the source cannot be read. MissingError if a file does not
            exist.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.name = re.sub(r"(:/+)[^/\s]*@", r"\1", url)
        self._http = url.startswith(("http://", "https://"))

        options: dict[str, Any] = {"skip_instance_cache": True}
        if self._http and token:
            options["client_kwargs"] = {"headers": {"Authorization": f"Bearer {token}"}}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except Exception as error:  # of any type, as backends differ
            raise FolderError(f"{self.name} cannot be opened: {error}") from error
        # Listings that were read earlier do not count. Some backends refuse fsspec's option for it.
        if hasattr(self._fs, "dircache"):
            self._fs.dircache.use_listings_cache = False
        self._root = root.rstrip("/")
        self.folder: Path | None = None
        if isinstance(self._fs, LocalFileSystem):
            self.folder = Path(self._root or "/")

    def versions(self) -> list[int]:
        """List the versions, oldest first. Empty if the folder does not exist."""
        try:
            names = self._call("", self._fs.ls, detail=False)
        except MissingError:
            return []

        # Backends list paths, some with a slash behind folders.
        found = (version_of(name.rstrip("/").rpartition("/")[2]) for name in names)
        return sorted(version for version in found if version is not None)

    def size(self, path: str) -> int:
        """Size of a regular file. FolderError for a link or another special file."""
        info = self._call(path, self._fs.info)
        if info["type"] != "file" or info.get("islink") or not isinstance(info["size"], int):
            raise FolderError(f"{self.name}/{path} is not a regular file with a size")
        return info["size"]

    def read(
        self,
        path: str,
        start: int,
        stop: int,
    ) -> bytes:
        """Read the bytes of a file from ``start`` up to ``stop``."""
        data = b""
        if stop > start:
            data = self._call(path, self._fs.cat_file, start=start, end=stop)
        if len(data) != stop - start:
            raise FolderError(
                f"{self.name}/{path} gave {len(data)} bytes in place of {start} to {stop}"
            )
        return data

    def read_manifest(self, folder: str) -> Manifest:
        """Read the manifest of a folder."""
        path = f"{folder}/{MANIFEST_NAME}"
        size = self.size(path)
        if size > MAX_MANIFEST_BYTES:
            raise FolderError(
                f"{self.name}/{path} has {size} bytes, more than {MAX_MANIFEST_BYTES}"
            )
        return parse_manifest(self.read(path, 0, size), f"{self.name}/{path}")

    def manifest_tail(self, folder: str) -> bytes:
        """Read the end of a folder's manifest, which is different in every other manifest."""
        path = f"{folder}/{MANIFEST_NAME}"
        size = self.size(path)
        return self.read(path, max(0, size - TAIL_BYTES), size)

    def fetch(
        self,
        folder: str,
        files: Files,
        target: Path,
    ) -> None:
        """Copy files of a folder into ``target``, several parts at once. Their digests are not
        checked.
        """
        # Room for everything first. Then each part goes to its place.
        parts = []
        for name, entry in files.items():
            size = self.size(f"{folder}/{name}")
            if size != entry["bytes"]:
                raise FolderError(
                    f"{self.name}/{folder}/{name} has {size} bytes, the manifest says "
                    f"{entry['bytes']}"
                )
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            allocate(target / name, size)
            for start in range(0, size, _CHUNK_BYTES):
                parts.append(_Part(name, start, min(start + _CHUNK_BYTES, size)))

        def copy(part: _Part) -> None:
            data = self.read(f"{folder}/{part.name}", part.start, part.stop)
            with open(target / part.name, "r+b", buffering=0) as file:
                write_exactly(file, part.start, data)

        in_parallel(copy, parts)

    def _call(self, path: str, function: Callable[..., T], **options: Any) -> T:
        quoted = quote(path) if self._http else path
        url = f"{self._root}/{quoted}".rstrip("/")
        for wait_s in (*_WAITS_S, None):
            try:
                return function(url, **options)
            except Exception as error:
                # Backends raise types of their own, such as aiohttp's. Over HTTP, every failed
                # request for a size is a FileNotFoundError.
                cause = error.__cause__ if self._http else None
                absent = cause is None or getattr(cause, "status", None) == 404
                if isinstance(error, FileNotFoundError) and absent:
                    raise MissingError(f"{self.name}/{path} is missing") from None
                if wait_s is None:
                    cause = cause or error
                    message = f"cannot read {self.name}/{path}: {type(cause).__name__}: {cause}"
                    raise FolderError(message) from error
                time.sleep(wait_s)
        raise AssertionError
