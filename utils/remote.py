"""A folder at an fsspec URL, and what each kind of storage needs for a file there to be whole.

Every operation is bounded by the time-outs of the backend (s3fs: 5 s to connect, 15 s to hear anything), is tried a
bounded number of times, and ends in one kind of error. Paths are relative to the URL.

A local (or NFS) folder is written as everything else here is: fsync, rename, fsync. Other backends write files their
own way; `RemoteFolder.whole_files` says whether a cut one can be told from a whole one afterwards.

Credentials and endpoints are the backend's business and are given as it documents them. S3: ``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_PROFILE``, an instance's role. Google:
``GOOGLE_APPLICATION_CREDENTIALS``. Anything else a backend can be told goes through fsspec's own configuration:
``FSSPEC_S3='{"max_concurrency": 4}'`` in the environment, or ``~/.config/fsspec/*.json``. Buckets are never made. Let a
lifecycle rule of the bucket abort incomplete multipart uploads: a kill can leave one.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec.core
from fsspec.implementations.local import LocalFileSystem
from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
)

from .errors import CheckpointCorruptError, CheckpointError, ConfigError
from .files import DurableFile, file_digest, fsync_dir, fsync_tree, make_durably, replace_atomically
from .logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"}
"""Protocols under which an object appears whole or not at all."""
_CHUNKS_AT_ONCE = 8
FETCH_FIRST = "fetch it there first (`aws s3 cp --recursive`, or `get` of fsspec)"
"""What to do with a URL where something is read."""


class RemoteFolder:
    """The folder at a URL; nothing need be there yet.

    Args:
        url: with its protocol.
        setting: where the URL was given, for the error that it cannot be used: ``"config key 'recover.mirror_url'"``.
        error: what every method raises when the operation failed for good.
        chunk_bytes: what is read at once; `chunks` holds eight of them.
        attempts: how often each operation is tried.
        first_wait_s: how long before it is tried again, at first; doubles each time, up to a minute.

    Attributes:
        url: without the secrets that were in it.
        whole_files: a file that has its name and its size is whole, even when its writer was cut off. So it is with
            objects, which appear whole, and with local files, which get their names after their fsync. Elsewhere (sftp,
            smb, hdfs, whatever a plug-in brings) a power cut may leave a file of the right size with holes in it.

    Raises:
        ConfigError: the URL cannot be used, or a package for it is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        setting: str,
        error: type[CheckpointError],
        chunk_bytes: int = 8 << 20,
        attempts: int = 5,
        first_wait_s: float = 1.0,
    ) -> None:
        self._fs, self._root = _open_filesystem(url, setting)
        self._error = error
        self._chunk_bytes = chunk_bytes
        self.url = without_secrets(self._fs.unstrip_protocol(self._root))
        self._local = isinstance(self._fs, LocalFileSystem)
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self.whole_files = self._local or bool(protocols & _OBJECT_STORES)
        self._closed = threading.Event()
        # What may pass is every error: each backend raises others (botocore's and aiohttp's are no OSErrors), and a
        # refusal may be a token that is being renewed. That something is not there is an answer, not an error.
        final = (FileNotFoundError, CheckpointError)
        self._retrying = Retrying(
            retry=retry_if_exception_type(Exception) & retry_if_not_exception_type(final),
            stop=stop_after_attempt(attempts) | stop_when_event_set(self._closed),
            wait=wait_exponential(first_wait_s, max=60.0),
            sleep=sleep_using_event(self._closed),
            before_sleep=_log_retry,
        )

    def close(self) -> None:
        """Try nothing again, and nothing new."""
        self._closed.set()

    def names(self) -> list[str]:
        """What the folder holds, files and folders; nothing when it does not exist."""
        try:
            paths = self._call(self._fs.ls, "", detail=False)
        except FileNotFoundError:
            return []
        return [PurePosixPath(path).name for path in paths]

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below ``folder``, by its path relative to that; what cannot be listed may be left out.

        The empty string stands for all that is at the URL.
        """
        prefix = f"{self._root}/{folder}".rstrip("/") + "/"
        listing = self._call(self._fs.find, folder, detail=True)
        return {path.removeprefix(prefix): entry["size"] for path, entry in listing.items()}

    def size(self, path: str) -> int | None:
        """Bytes of a file; None when it is not there (and not when nobody knows, as ``exists`` of fsspec says it)."""
        try:
            return self._call(self._fs.info, path)["size"]
        except FileNotFoundError:
            return None

    def read(self, path: str) -> bytes | None:
        """A small file; None when it is not there."""
        try:
            return self._call(self._fs.cat_file, path)
        except FileNotFoundError:
            return None

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes of a file from ``start`` up to ``stop``.

        Raises:
            FileNotFoundError: it is not there.
        """
        return self._call(self._fs.cat_file, path, start=start, end=stop)

    def chunks(self, path: str, size: int) -> Iterator[bytes]:
        """A large file of ``size`` bytes, a few chunks at a time (side by side, where the backend can).

        Raises:
            FileNotFoundError: it is not there, or not any more.
        """
        starts = range(0, size, self._chunk_bytes)
        for first in range(0, len(starts), _CHUNKS_AT_ONCE):
            yield from self._call(self._read_ranges, path, starts[first : first + _CHUNKS_AT_ONCE], size)

    def put_file(self, source: Path, path: str, digest: str | None = None) -> None:
        """Upload a file to ``path``, over what is there; the backend reads it in parts.

        Args:
            source: the local file.
            path: where to.
            digest: expected `file_digest` of the file; None: it is not checked.

        Raises:
            CheckpointCorruptError: the file has another digest.
        """
        if self._local:
            self._call(self._copy_durably, path, source, digest)
        else:
            if digest is not None:
                _require_digest(source, file_digest(source), digest)
            self._call(self._put, path, source)

    def put_bytes(self, path: str, data: bytes) -> None:
        """Make ``path`` hold ``data``, at once."""
        self._call(self._write_durably if self._local else self._pipe, path, data)

    def flush(self, folder: str) -> None:
        """See that the names below a folder are on stable storage, which files have been put there."""
        if self._local and (Path(self._root) / folder).is_dir():
            self._call(fsync_tree, folder)

    def remove_file(self, path: str) -> None:
        """Remove a file, if it is there, and what a killed writer left of it."""
        if self._local:
            with contextlib.suppress(FileNotFoundError):
                self._call(os.unlink, str(_part(Path(path))))
        with contextlib.suppress(FileNotFoundError):
            self._call(self._fs.rm_file, path)
        with contextlib.suppress(FileNotFoundError):
            if self._local:  # or a power cut could bring it back, and not what is removed after it
                self._call(fsync_dir, str(PurePosixPath(path).parent))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all that is in it, in any order, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._call(self._fs.rm, folder, recursive=True)

    def _copy_durably(self, target: str, source: Path, digest: str | None) -> None:
        path = Path(target)
        make_durably(path.parent)
        part = _part(path)
        part.unlink(missing_ok=True)  # of a copy that was killed
        with open(source, "rb", buffering=0) as opened, DurableFile(part) as copy:
            while chunk := opened.read(self._chunk_bytes):
                copy.write(chunk)
        if digest is not None:
            _require_digest(source, copy.digest, digest)
        os.replace(part, path)

    def _write_durably(self, target: str, data: bytes) -> None:
        path = Path(target)
        make_durably(path.parent)
        replace_atomically(path, data, _part(path))

    def _pipe(self, target: str, data: bytes) -> None:
        self._make_parent(target)
        self._fs.pipe_file(target, data)

    def _put(self, target: str, source: Path) -> None:
        self._make_parent(target)
        self._fs.put_file(str(source), target)

    def _make_parent(self, target: str) -> None:
        if not self.whole_files:  # it may have real folders; making one in a bucket would make the bucket
            self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)

    def _read_ranges(self, path: str, starts: range, size: int) -> list[bytes]:
        ends = [min(start + self._chunk_bytes, size) for start in starts]
        chunks = self._fs.cat_ranges([path] * len(starts), list(starts), ends)
        for chunk in chunks:
            if isinstance(chunk, BaseException):  # how most backends report it, some whatever they are told
                raise chunk
        return chunks

    def _call(self, function: Callable[..., T], path: str, *args: Any, **options: Any) -> T:
        """Do something with a path, as often as may be.

        Raises:
            FileNotFoundError: an answer.
        """
        if self._closed.is_set():
            raise self._error(f"{self.url} is closed")
        try:
            return self._retrying(function, f"{self._root}/{path}".rstrip("/"), *args, **options)
        except RetryError as error:
            attempt = error.last_attempt
            cause = attempt.exception()
            raise self._error(
                f"{self.url}/{path} failed {attempt.attempt_number} times, the last time with "
                f"{type(cause).__name__}: {cause}"
            ) from cause


def local_folder(path: str | os.PathLike[str]) -> Path | None:
    """The folder of this machine that a path, or a ``file://`` URL, names; None for any other URL.

    Raises:
        ConfigError: it was a URL, before it went through a `Path`, which takes one of two slashes away.
    """
    text = os.fspath(path)
    if re.match(r"[A-Za-z][\w.+-]+:/(?!/)", text):
        raise ConfigError(
            f"path is {without_secrets(text)}: a URL that has lost a slash, as in a pathlib.Path; give it as text "
            f"(s3://bucket/folder), or ./{text.partition('/')[0]}/ for a folder that is called so"
        )
    if "://" not in text:
        return Path(path)
    if text.partition("://")[0] in LocalFileSystem.protocol:
        return Path(fsspec.core.strip_protocol(text))
    return None


def require_local(path: str | os.PathLike[str], what: str, advice: str, setting: str = "path") -> Path:
    """`local_folder` for what can do nothing with a URL.

    Raises:
        ConfigError: ``path``, which was given as ``setting``, is one; ``what`` needs a folder, and ``advice`` says what
            to do.
    """
    if (folder := local_folder(path)) is None:
        raise ConfigError(
            f"{setting} is {without_secrets(os.fspath(path))}; {what} needs a folder of this machine: {advice}"
        )
    return folder


def without_secrets(text: str) -> str:
    """``text`` without the users and passwords of the URLs in it."""
    return re.sub(r"(:/+)[^/\s]*@", r"\1", text)


def _part(path: Path) -> Path:
    """Where a local file is written before it gets its name."""
    return path.with_name(f".part-{path.name}")


def _open_filesystem(url: str, setting: str) -> tuple[Any, str]:
    """The backend of a URL, and the path in it.

    It is an instance of our own (fsspec hands out shared ones, with the options of whoever came first), which remembers
    no listings: they would be stale.
    """
    try:
        if "://" not in url:
            raise ValueError("it has no protocol")
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        if re.search(r"://[^/\s]*:[^/\s]*@", url) and "@" in root.split("/")[0]:
            # It would be taken for a part of the bucket's name, and be shown in every message.
            raise ValueError("its backend takes no password from there, but as it documents")
    except (ImportError, ValueError, OSError) as error:
        problem = f"{setting} ({url!r}) cannot be used: {error}; expected a URL as file:///folder or "
        raise ConfigError(
            without_secrets(problem)
            + "s3://bucket/folder, with its fsspec backend installed (s3fs for s3://, gcsfs for gs://)"
        ) from error
    return fs, root.rstrip("/")


def _require_digest(source: Path, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointCorruptError(f"{source} has digest {found}, the manifest says {expected}")


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome and state.outcome.exception()
    logger.warning("%s: %s: %s; again in %.1f s", state.args[0], type(error).__name__, error, state.upcoming_sleep)
