"""Folder at an fsspec URL, with the steps that each kind of storage needs to make a file complete.

Every operation has the time limits of the backend (s3fs: 5 s to connect, 15 s without data), a
limited number of attempts, and one type of error. Paths are relative to the URL. Buckets are never
created.

Credentials and endpoints are passed as the backend documents. S3: ``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_PROFILE``, or an instance role. Google:
``GOOGLE_APPLICATION_CREDENTIALS``. HDFS: ``HADOOP_CONF_DIR``, ``HADOOP_USER_NAME``.

Further options go through fsspec's configuration: ``FSSPEC_S3='{"max_concurrency": 4}'`` in the
environment, or ``~/.config/fsspec/*.json``. Set a lifecycle rule that aborts incomplete multipart
uploads: a kill can leave one.
"""

import contextlib
import glob
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec.core
from fsspec.dircache import DirCache
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
from .files import (
    DurableFile,
    StrPath,
    file_digest,
    fsync_dir,
    fsync_tree,
    make_durably,
    replace_atomically,
)
from .logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"}
"""Protocols of stores where an object appears complete or not at all."""
_CHUNKS_AT_ONCE = 8
_SECRET_VALUE = re.compile(
    r"([?&][\w.-]*(?:delegation|token|sig|secret|password|credential)[\w.-]*=)[^&\s]+",
    re.IGNORECASE,
)
"""Parameter of a URL that grants access, as WebHDFS and presigned URLs have them."""
FETCH_FIRST = "fetch it there first (`aws s3 cp --recursive`, or `get` of fsspec)"
"""Advice for URLs where local files are needed."""


class RemoteFolder:
    """Folder at a URL. It need not exist.

    Args:
        url: URL with its protocol.
        setting: where the URL was given, for error messages: ``"config key 'recover.mirror_url'"``.
        error: error type of operations that failed at every attempt.
        chunk_bytes: size of a read. `chunks` holds eight in memory.
        attempts: attempts per operation.
        first_wait_s: seconds before the second attempt. Doubles each time, up to a minute.

    Attributes:
        url: URL without a password, which opens the same folder again.
        whole_files: whether a file with its final name and size is complete even if its writer was
            killed. True for objects, which appear complete, and local files, which are renamed
            after their fsync. Elsewhere (sftp, smb, hdfs, plug-ins) a power cut may leave holes in
            a file of the right size.

    Raises:
        ConfigError: the URL cannot be used, or a package for it is not installed.

    Example:
        >>> folder = RemoteFolder("s3://bucket/run", setting="--to", error=MirrorError)
        >>> folder.put_file(Path("model.safetensors"), "step-8/model.safetensors")
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
        self.url = _url_to_show(self._fs, self._root, url)
        self._local = isinstance(self._fs, LocalFileSystem)
        # Readers of a local file or an object never see half of it, as they may elsewhere.
        named = self._fs.protocol
        protocols = {named} if isinstance(named, str) else set(named)
        self.whole_files = self._local or bool(protocols & _OBJECT_STORES)
        self._closed = threading.Event()

        # All errors are tried again: backends raise different types (botocore's and aiohttp's are
        # not OSErrors), and even a refusal may be temporary, while a token is renewed. A missing
        # file is an answer, not an error.
        final = (FileNotFoundError, CheckpointError)
        self._retrying = Retrying(
            retry=retry_if_exception_type(Exception) & retry_if_not_exception_type(final),
            stop=stop_after_attempt(attempts) | stop_when_event_set(self._closed),
            wait=wait_exponential(first_wait_s, max=60.0),
            sleep=sleep_using_event(self._closed),
            before_sleep=self._log_retry,
        )

    def close(self) -> None:
        """Refuse further operations and attempts."""
        self._closed.set()

    def names(self) -> list[str]:
        """List the names of files and folders in the folder. Empty if it does not exist."""
        paths = self._find(self._fs.ls, "", detail=False) or ()
        return [PurePosixPath(path).name for path in paths]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file below ``folder`` ("": the URL), by path relative to it.
        Empty if it does not exist.

        Entries that cannot be listed may be missing.
        """
        prefix = f"{self._root}/{folder}".rstrip("/") + "/"
        listing = self._find(self._fs.find, folder, detail=True) or {}
        return {path.removeprefix(prefix): entry["size"] for path, entry in listing.items()}

    def holds_files(self, folder: str) -> bool:
        """Whether there is a file below ``folder``. Unlike with `sizes`, a part that cannot be
        listed is an error.
        """
        whole = f"{self._root}/{folder}"
        for entry in self._find(self._fs.ls, folder, detail=True) or ():
            path = entry["name"].rstrip("/")
            # An object with the name of the folder, which a web console makes.
            if path == whole:
                continue
            if entry["type"] != "directory":
                return True
            if self.holds_files(f"{folder}/{PurePosixPath(path).name}"):
                return True
        return False

    def size(self, path: str) -> int | None:
        """Size of a file. None if it does not exist. Unlike fsspec's ``exists``, a failed request
        is an error.
        """
        found = self._find(self._fs.info, path)
        if found is None:
            return None
        return found["size"]

    def read(self, path: str) -> bytes | None:
        """Read a small file. None if it does not exist."""
        return self._find(self._fs.cat_file, path)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Read the bytes of a file from ``start`` up to ``stop``. FileNotFoundError if it does not
        exist.
        """
        return self._call(self._fs.cat_file, path, start=start, end=stop)

    def chunks(self, path: str, size: int) -> Iterator[bytes]:
        """Yield a file of ``size`` bytes in chunks, a few at a time (in parallel if the backend
        can).
        """
        starts = range(0, size, self._chunk_bytes)
        for first in range(0, len(starts), _CHUNKS_AT_ONCE):
            some = starts[first : first + _CHUNKS_AT_ONCE]
            yield from self._call(self._read_ranges, path, some, size)

    def put_file(self, source: Path, path: str, digest: str | None = None) -> None:
        """Upload a local file, replacing one. CheckpointCorruptError if it does not have this
        `file_digest`.
        """
        if self._local:
            self._call(self._copy_durably, path, source, digest)
        else:
            if digest is not None:
                _require_digest(source, file_digest(source), digest)
            self._call(self._put, path, source)

    def put_bytes(self, path: str, data: bytes) -> None:
        """Write ``data`` to ``path`` in one operation."""
        write = self._write_durably if self._local else self._pipe
        self._call(write, path, data)

    def flush(self, folder: str) -> None:
        """Sync the names below a local folder to stable storage, after files were put there."""
        if self._local and (Path(self._root) / folder).is_dir():
            self._call(fsync_tree, folder)

    def remove_file(self, path: str) -> None:
        """Remove a file and the parts that a killed writer left, if they exist."""
        if self._local:
            self._find(os.unlink, str(_part(Path(path))))
        self._find(self._fs.rm_file, path)
        # Otherwise a power cut could bring the file back, but not files removed later.
        if self._local:
            self._find(fsync_dir, str(PurePosixPath(path).parent))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and its contents, in any order, if it exists."""
        whole = f"{self._root}/{folder}"
        if self._local or not glob.has_magic(whole):
            self._find(self._fs.rm, folder, recursive=True)
            return

        # fsspec would remove every folder whose name fits such a pattern, also those of other
        # runs. So its contents are removed one by one, those of a folder before the folder.
        entries = self._find(self._fs.find, folder, withdirs=True, detail=True) or {}
        kinds = {whole: "directory"}
        for path, entry in entries.items():
            kinds[path] = entry["type"]
        for path in sorted(kinds, reverse=True):
            relative = path.removeprefix(f"{self._root}/")
            if kinds[path] != "directory":
                self._find(self._fs.rm_file, relative)
            elif not self.whole_files:  # object stores have no real folders
                self._find(self._fs.rmdir, relative)

    def _copy_durably(self, target: str, source: Path, digest: str | None) -> None:
        path = Path(target)
        make_durably(path.parent)
        part = _part(path)
        part.unlink(missing_ok=True)  # left by a copy that was killed
        with open(source, "rb", buffering=0) as opened, DurableFile(part) as copy:
            while chunk := opened.read(self._chunk_bytes):
                copy.write(chunk)
        # The copy gets its name after its bytes were compared.
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
        # The backend may have real folders. In an object store this would create the bucket.
        if not self.whole_files:
            self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)

    def _read_ranges(self, path: str, starts: range, size: int) -> list[bytes]:
        ends = [min(start + self._chunk_bytes, size) for start in starts]
        chunks = self._fs.cat_ranges([path] * len(starts), list(starts), ends)
        # Most backends return errors.
        for chunk in chunks:
            if isinstance(chunk, BaseException):
                raise chunk
        return chunks

    def _find(self, function: Callable[..., T], path: str, **options: Any) -> T | None:
        with contextlib.suppress(FileNotFoundError):
            return self._call(function, path, **options)
        return None

    def _call(self, function: Callable[..., T], path: str, *args: Any, **options: Any) -> T:
        """Run an operation on a path with all its attempts. Raises `FileNotFoundError` if the path
        does not exist.
        """
        if self._closed.is_set():
            raise self._error(f"{self.url} is closed")
        try:
            return self._retrying(function, f"{self._root}/{path}".rstrip("/"), *args, **options)
        except RetryError as error:
            attempt = error.last_attempt
            cause = attempt.exception()
            problem = _describe(cause)
            # A traceback would show the whole text of the cause.
            shown = cause if str(cause) in problem else None
            raise self._error(
                f"{self.url}/{path} failed {attempt.attempt_number} times, the last time with "
                f"{problem}"
            ) from shown

    def _log_retry(self, state: RetryCallState) -> None:
        path = state.args[0].removeprefix(self._root)
        error = state.outcome and state.outcome.exception()
        problem = _describe(error)
        logger.warning("%s%s: %s; again in %.1f s", self.url, path, problem, state.upcoming_sleep)


def local_folder(path: StrPath) -> Path | None:
    """Return the local folder that a path or a ``file://`` URL names, or None for any other URL."""
    text = os.fspath(path)
    if re.match(r"[A-Za-z][\w.+-]+:/(?!/)", text):
        raise ConfigError(
            f"path is {without_secrets(text)}: a URL that has lost a slash, as in a pathlib.Path; "
            f"give it as text (s3://bucket/folder), or ./{text.partition('/')[0]}/ for a folder "
            "that is called so"
        )
    if "://" not in text:
        return Path(path)
    if text.partition("://")[0] in LocalFileSystem.protocol:
        return Path(fsspec.core.strip_protocol(text))
    return None


def require_local(path: StrPath, what: str, advice: str, setting: str = "path") -> Path:
    """Return the local folder of ``path``, which ``what`` needs. ConfigError if it is empty, which
    would mean the current folder, and with ``advice`` if it is a URL.
    """
    if not os.fspath(path):
        raise ConfigError(f"{setting} is empty; {what} needs a folder (the current one is '.')")
    folder = local_folder(path)
    if folder is None:
        raise ConfigError(
            f"{setting} is {without_secrets(os.fspath(path))}; {what} needs a folder of this "
            f"machine: {advice}"
        )
    return folder


def without_secrets(text: str) -> str:
    """Remove users, passwords and the values of secret parameters of URLs from ``text``."""
    text = re.sub(r"(:/+)[^/\s]*@", r"\1", text)
    return _SECRET_VALUE.sub(r"\1...", text)


def _part(path: Path) -> Path:
    return path.with_name(f".part-{path.name}")


def _open_filesystem(url: str, setting: str) -> tuple[Any, str]:
    try:
        if "://" not in url:
            raise ValueError("it has no protocol")
        # fsspec's shared instances have the options of their first user.
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        if re.search(r"://[^/\s]*:[^/\s]*@", url) and "@" in root.split("/")[0]:
            # The backend would take the password for a part of the bucket's name and show it in
            # every message.
            raise ValueError("its backend takes no password from there, but as it documents")
    except Exception as error:  # of any type, as backends differ
        problem = f"{setting} ({url!r}) cannot be used: {_first_line(error)}"
        raise ConfigError(
            f"{without_secrets(problem)}; expected a URL as file:///folder or s3://bucket/folder, "
            "with its fsspec backend installed (s3fs for s3://, gcsfs for gs://, "
            "holdfast[hdfs] for hdfs:// and webhdfs://)"
        ) from error

    # Cached listings are stale. They are switched off here, because backends that pass their
    # options on (hdfs-native, sftp) refuse fsspec's option for it.
    if isinstance(getattr(fs, "dircache", None), DirCache):
        fs.dircache.use_listings_cache = False
    return fs, root.rstrip("/")


def _url_to_show(
    fs: Any,
    root: str,
    url: str,
) -> str:
    if "::" in url:
        return without_secrets(url.rstrip("/"))
    scheme, _, rest = url.partition("://")
    if "?" not in root:
        rest, _, _ = rest.partition("?")  # options, among them secrets
    netloc, slash, path = rest.rstrip("/").partition("/")
    login, at, host = netloc.rpartition("@")

    # fsspec's own form of a URL lacks its host and user, unless the host is a part of the path, as
    # a bucket is. Without them it cannot be opened.
    is_in_path = root.rstrip("/") != slash + path
    if not netloc or (is_in_path and not at):
        return without_secrets(fs.unstrip_protocol(root))
    user = login.partition(":")[0]
    return f"{scheme}://{user}{at}{host}{slash}{path}"


def _describe(error: BaseException | None) -> str:
    """Type and first line of an error, without secrets."""
    return f"{type(error).__name__}: {without_secrets(_first_line(error))}"


def _first_line(error: BaseException | None) -> str:
    # The further lines of HDFS are a Java stack. hdfs-native separates lines by a backslash and n.
    first, *_ = re.split(r"\n|\\n", str(error).strip(), maxsplit=1)
    return first.rstrip()


def _require_digest(source: Path, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointCorruptError(f"{source} has digest {found}, the manifest says {expected}")
