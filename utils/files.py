"""Durable files on a local (or NFS) folder: fsync, atomic replace, digests, free space, and staged folders.

POSIX makes a rename atomic but not durable: the data, the file's name and the renamed folder each need
an fsync of their own, in that order (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014).
"""

import contextlib
import ctypes
import errno
import io
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import xxhash

from .errors import CheckpointWriteError
from .heartbeat import beat
from .logging import get_logger
from .mapped import map_window

logger = get_logger(__name__)

_WINDOW_BYTES = 16 << 20
_READ_BYTES = 2 << 20  # into memory that stays in the cache: half the time of fresh memory
_WRITEBACK_BYTES = 64 << 20
_BLOCK_BYTES = 8 << 20
_MOST_VIEWS = 1000  # Linux takes 1024 a call
_SYNC_FILE_RANGE_WRITE = 2

_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def start_writeback(fd: int, start: int, n_bytes: int) -> None:
    """Have the disk begin with ``n_bytes`` of a file from ``start`` on, so that fsync has less to wait for.

    Only a hint: it waits for nothing, and fsync reports errors. Does nothing without ``sync_file_range`` (Linux).
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, start, n_bytes, _SYNC_FILE_RANGE_WRITE)


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Force the contents of a file to stable storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Force a folder's entries (names, renames, removals) to stable storage."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_durably(folder: str | os.PathLike[str]) -> None:
    """Make a folder and its parents, the name of each on stable storage.

    A folder that is there already may be one whose maker was killed before its fsync: the next one up is synced again.
    """
    folder = Path(folder)
    if folder.is_dir():
        with contextlib.suppress(PermissionError):  # who may not look into a folder has not made one in it either
            fsync_dir(folder.parent)
        return
    make_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_dir(folder.parent)


def fsync_tree(path: str | os.PathLike[str]) -> None:
    """Fsync every folder below and including ``path``, deepest first; files are their writers' business."""
    for folder, _, _ in os.walk(path, topdown=False, onerror=_raise):
        fsync_dir(folder)


class DurableFile:
    """A new file, written from start to end, that is on stable storage once it is closed. The caller fsyncs the folder.

    The digest is taken of what is handed over, not of what can be read back: what rots on the way to the disk is found
    too. It costs one pass over bytes that are in the cache anyway (xxh3 runs at memory speed). The kernel is asked to
    begin with what was written before there is much of it, so that the disk works meanwhile and the fsync is short.

    As a context manager it is closed when the block ends; a block that raises leaves the file as it is, to be removed.

    Args:
        path: must not exist.

    Attributes:
        bytes: how many were written.

    Raises:
        FileExistsError: ``path`` exists; nothing is ever written over.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes = 0
        self._begun_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._file = open(path, "xb")  # noqa: SIM115

    @property
    def digest(self) -> str:
        """Of everything written so far, as `file_digest` gives it."""
        return digest_name(self._digest)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``, all of it; the number of its bytes."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self._advance(len(view))
        return len(view)

    def write_views(self, views: Iterable[bytes | memoryview]) -> None:
        """Append all of ``views``, whose bytes may not change before this returns.

        They are handed to the system as they lie, in writes that end at multiples of `_BLOCK_BYTES` wherever the views
        do: so the page cache keeps the file in large pages, and a digest of it takes two thirds of the time later.
        """
        self._file.flush()
        pending: list[memoryview] = []
        room = _BLOCK_BYTES - self.bytes % _BLOCK_BYTES
        for whole in views:
            view = memoryview(whole).cast("B")
            self._digest.update(view)
            while len(view) >= room:
                self._write_pending([*pending, view[:room]])
                pending, view, room = [], view[room:], _BLOCK_BYTES
            if view:
                pending.append(view)
                room -= len(view)
            if len(pending) == _MOST_VIEWS:
                self._write_pending(pending)
                pending = []
        self._write_pending(pending)

    def _write_pending(self, views: list[memoryview]) -> None:
        n_bytes = sum(map(len, views))
        while views:
            written = os.writev(self._file.fileno(), views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
        self._advance(n_bytes)

    def _advance(self, n_bytes: int) -> None:
        self.bytes += n_bytes
        if (fresh := self.bytes - self._begun_bytes) >= _WRITEBACK_BYTES:
            start_writeback(self._file.fileno(), self._begun_bytes, fresh)
            self._begun_bytes = self.bytes
        beat()

    def tell(self) -> int:
        """Where the next byte goes."""
        return self.bytes

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """The file descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Flush, then fsync, then close; may be called twice."""
        if not self._file.closed:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        self._file.raw.close()  # what is still buffered could not be written, and must not be tried again


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file as `os.open` does; OSError where it is no regular file, because a pipe would block the caller."""
    fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
    return fd


def write_durably(path: str | os.PathLike[str], data: bytes) -> None:
    """Create ``path`` with ``data`` and fsync it. The caller fsyncs the folder.

    Raises:
        FileExistsError: ``path`` exists; nothing is ever written over.
    """
    with DurableFile(path) as file:
        file.write(data)


def replace_atomically(path: str | os.PathLike[str], data: bytes, temporary: Path | None = None) -> None:
    """Make ``path`` hold ``data``, durably: a reader, or a crash, sees the old contents or the new, never a mixture.

    Args:
        path: need not exist.
        data: the new contents.
        temporary: sibling of ``path`` to write to before the rename; what a killed writer left there is written over.
            None takes a new name.
    """
    path = Path(path)
    if temporary is None:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    else:
        temporary.unlink(missing_ok=True)
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def file_digest(path: str | os.PathLike[str]) -> str:
    """``"xxh3_128:<hex>"`` of a file's bytes, which are mapped, or else read, a few megabytes at a time.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        for content in _contents(file):
            digest.update(content)
            beat()
    return digest_name(digest)


def _contents(file: io.FileIO) -> Iterator[memoryview]:
    """All bytes of a file, in order, each part good until the next one is asked for.

    Mapped pages need not be copied: a digest of what is in the page cache takes half the time. What cannot be mapped is
    read, which says why.
    """
    size, at = os.fstat(file.fileno()).st_size, 0
    while at < size and (window := map_window(file.fileno(), at, min(_WINDOW_BYTES, size - at))) is not None:
        os.posix_fadvise(file.fileno(), at + len(window), _WINDOW_BYTES, os.POSIX_FADV_WILLNEED)
        with window:
            yield window
            at += len(window)
    if at:  # (a pipe can be read, too)
        file.seek(at)
    buffer = memoryview(bytearray(_READ_BYTES))
    while count := file.readinto(buffer):
        yield buffer[:count]


def bytes_digest(data: bytes) -> str:
    """What `file_digest` says of a file that holds ``data``."""
    return digest_name(xxhash.xxh3_128(data))


def digest_name(digest: xxhash.xxh3_128) -> str:
    """``"xxh3_128:<hex>"`` of what ``digest`` has seen."""
    return f"xxh3_128:{digest.hexdigest()}"


def require_free_space(
    folder: str | os.PathLike[str],
    needed_bytes: int,
    advice: str = "make room, keep fewer snapshots, or write elsewhere",
) -> None:
    """See that the file system of ``folder``, which need not exist yet, has room for ``needed_bytes``.

    One that does not count its blocks (some network and FUSE file systems) passes; neither do quotas show here. Both
    fail the write itself.

    Raises:
        CheckpointWriteError: it has not, or cannot be asked.
    """
    try:
        existing = Path(folder).absolute()
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
    except OSError as error:
        raise CheckpointWriteError(f"cannot ask for the free space of {folder}: {error}") from error
    free_bytes = status.f_bavail * status.f_frsize
    if status.f_blocks and free_bytes < needed_bytes:
        raise CheckpointWriteError(
            f"{folder} needs {needed_bytes} bytes, its file system has {free_bytes} free; {advice}"
        )


def staging_path(final: str | os.PathLike[str]) -> Path:
    """A fresh hidden sibling of ``final`` to write into before `commit_folder`; not created."""
    final = Path(final)
    return final.with_name(f".staging-{final.name}-{uuid.uuid4().hex[:12]}")


def is_free(final: str | os.PathLike[str]) -> bool:
    """Whether a folder may be renamed to ``final``: there is nothing, or an empty folder, which a rename replaces."""
    is_folder = os.path.isdir(final) and not os.path.islink(final) and not os.path.ismount(final)
    return not os.listdir(final) if is_folder else not os.path.lexists(final)


def commit_folder(staging: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Make a completely written folder visible under its final name, durably.

    Writers have fsynced the files. This fsyncs the folders, renames, and fsyncs the parent. An empty folder that is
    there is replaced, and gives its permissions to the new one.

    Raises:
        FileExistsError: ``final`` exists and is no empty folder: nothing is ever written over.
    """
    if os.path.isdir(final) and is_free(final):
        shutil.copymode(final, staging)
    fsync_tree(staging)
    if not is_free(final):
        raise FileExistsError(f"{final} exists already and is never written over")
    os.rename(staging, final)
    fsync_dir(Path(final).parent)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder so that no reader sees half of it: rename it to a hidden name first, then delete.

    Of a link to a folder the link is removed: what it leads to is somebody else's.
    """
    path = Path(path)
    if path.is_symlink():
        path.unlink(missing_ok=True)
        fsync_dir(path.parent)
        return
    doomed = path if path.name.startswith(".") else path.with_name(f".retired-{path.name}-{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(FileNotFoundError):
        if doomed != path:
            os.rename(path, doomed)
        fsync_dir(path.parent)  # also of a rename that a killed process has made: no name comes back, half removed
        shutil.rmtree(doomed)


def remove_or_log(path: str | os.PathLike[str]) -> None:
    """`remove_folder`, or remove a file; what cannot be removed is logged and left: it costs space, not the run."""
    try:
        if os.path.isdir(path):
            remove_folder(path)
        else:
            Path(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)


def walk_files(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Every regular file below ``folder``, as sorted POSIX paths relative to it.

    Raises:
        OSError: a folder cannot be listed; what is in it is not taken for missing.
    """
    root = Path(folder)
    found = [Path(here, name) for here, _, names in os.walk(root, onerror=_raise) for name in names]
    yield from sorted(path.relative_to(root).as_posix() for path in found if path.is_file())


def walk_leaves(folder: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """``(POSIX path relative to folder, lstat)`` of all that is below and is no folder, and of empty folders.

    Raises:
        OSError: a folder cannot be listed.
    """
    for here, folders, names in os.walk(folder, onerror=_raise):
        leaves = [Path(here, name) for name in (*names, *folders)]
        if not leaves and Path(here) != Path(folder):
            leaves = [Path(here)]
        for path in leaves:
            status = path.lstat()
            if path == Path(here) or not stat.S_ISDIR(status.st_mode):
                yield path.relative_to(folder).as_posix(), status


def _raise(error: OSError) -> None:
    """For `os.walk`, which otherwise leaves out what it cannot list."""
    raise error
