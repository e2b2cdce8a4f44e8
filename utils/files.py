"""Durable files in a local or NFS folder: fsync, atomic replacement, digests, free space, staged
folders, mapping.

POSIX makes a rename atomic but not durable. The data, the file's name and the renamed folder each
need an fsync, in that order (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014).
"""

import contextlib
import ctypes
import errno
import io
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias

import xxhash

from .errors import CheckpointCorruptError, CheckpointError, CheckpointWriteError
from .heartbeat import beat
from .logging import get_logger

logger = get_logger(__name__)

StrPath: TypeAlias = str | os.PathLike[str]
"""A path as the caller has it, which `pathlib.Path` accepts."""

_WINDOW_BYTES = 16 << 20
_READ_BYTES = 2 << 20  # a buffer that stays in the cache halves the time of fresh memory
_WRITEBACK_BYTES = 64 << 20
_BLOCK_BYTES = 8 << 20
_MOST_VIEWS = 1000  # Linux takes 1024 a call
_SYNC_FILE_RANGE_WRITE = 2
_MADV_POPULATE_READ = 22  # Linux 5.14; Python knows no name for it
_MAP_NORESERVE = 0x4000  # reserve no memory, because nothing is written

_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


@contextmanager
def as_write_error(final: StrPath) -> Iterator[None]:
    """Convert an OSError of the block into a `CheckpointWriteError` that names ``final``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        # A replaced folder is there in any case.
        outcome = ""
        if not os.path.lexists(final):
            outcome = "; nothing became visible"
        raise CheckpointWriteError(
            f"cannot write {final}: {error.strerror or error}{outcome}"
        ) from error


@contextmanager
def half_loaded(folder: StrPath) -> Iterator[None]:
    """Wrap a block that puts values from ``folder`` into a model. A failure to read says that it is
    half loaded.
    """
    problem = (
        f"{folder} could not be read to its end; the model is now half loaded and must be loaded "
        "again"
    )
    try:
        yield
    except (OSError, CheckpointCorruptError) as error:
        if "half loaded" in str(error):  # by a block in this one
            raise
        # An OSError keeps its number and file, by which callers tell what may be temporary.
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise OSError(error.errno, f"{problem}: {reason}", error.filename) from error
        raise CheckpointCorruptError(f"{problem}: {error}") from error


def start_writeback(fd: int, start: int, n_bytes: int) -> None:
    """Ask the disk to start writing a part of a file, so that a later fsync is short. A hint that
    waits for nothing.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, start, n_bytes, _SYNC_FILE_RANGE_WRITE)


def fsync_file(path: StrPath) -> None:
    """Force the contents of a file to stable storage."""
    _fsync(path, os.O_RDONLY)


def fsync_dir(path: StrPath) -> None:
    """Force a folder's entries (names, renames, removals) to stable storage."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: StrPath, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_durably(folder: StrPath) -> None:
    """Create a folder and its parents, with each name on stable storage.

    The parent of an existing folder is synced too, because its creator may have been killed before
    the fsync.
    """
    folder = Path(folder)
    if folder.is_dir():
        # A user who cannot read the parent did not create the folder.
        with contextlib.suppress(PermissionError):
            fsync_dir(folder.parent)
        return
    make_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_dir(folder.parent)


def fsync_tree(path: StrPath) -> None:
    """Fsync ``path`` and every folder below it, deepest first. Writers have synced the files."""
    for folder, _, _ in os.walk(path, topdown=False, onerror=_raise):
        fsync_dir(folder)


class DurableFile:
    """New file, written from start to end, that is on stable storage after `close`. The caller
    fsyncs the folder.

    The digest covers the bytes as they were passed, so damage on the way to the disk is found
    later. The kernel is asked to start writing early, so that the fsync is short. As a context
    manager it closes the file at the end of the block. If the block raises, the unfinished file
    stays for the caller to remove. ``bytes`` is the number of bytes written. Raises FileExistsError
    if ``path`` exists: nothing is ever overwritten.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self.bytes = 0
        self._begun_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._file = open(path, "xb")  # noqa: SIM115

    @property
    def digest(self) -> str:
        """Digest of all bytes written so far, in the form of `file_digest`."""
        return digest_name(self._digest)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of ``data``."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self._advance(len(view))

    def write_views(self, views: Iterable[bytes | memoryview]) -> None:
        """Append all ``views`` without a copy. Their bytes must not change before this returns.

        Writes end at multiples of `_BLOCK_BYTES`, so that the page cache keeps the file in large
        pages and a later digest takes two thirds of the time.
        """
        # What `write` has left in its buffer comes first.
        self._file.flush()
        pending: list[memoryview] = []
        room = _BLOCK_BYTES - self.bytes % _BLOCK_BYTES
        for whole in views:
            view = memoryview(whole).cast("B")
            self._digest.update(view)
            # Write as often as a block is full, and keep the rest.
            while len(view) >= room:
                self._write_pending([*pending, view[:room]])
                view = view[room:]
                pending = []
                room = _BLOCK_BYTES
            if view:
                pending.append(view)
                room -= len(view)
            if len(pending) == _MOST_VIEWS:
                self._write_pending(pending)
                pending = []
        self._write_pending(pending)

    def _write_pending(self, views: list[memoryview]) -> None:
        n_bytes = sum(map(len, views))
        # A write may end anywhere in the list. It goes on from there.
        while views:
            written = os.writev(self._file.fileno(), views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
        self._advance(n_bytes)

    def _advance(self, n_bytes: int) -> None:
        self.bytes += n_bytes
        fresh = self.bytes - self._begun_bytes
        if fresh >= _WRITEBACK_BYTES:
            start_writeback(self._file.fileno(), self._begun_bytes, fresh)
            self._begun_bytes = self.bytes
        beat()

    def close(self) -> None:
        """Flush, fsync and close. Further calls do nothing."""
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
        self._file.raw.close()  # skips the buffer, which could not be written before


def open_regular(path: StrPath, flags: int = os.O_RDONLY) -> int:
    """Open a file like `os.open`. Raises OSError if it is not a regular file, because a pipe would
    block the caller.
    """
    fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
    return fd


def write_durably(path: StrPath, data: bytes) -> None:
    """Create ``path`` with ``data`` as a `DurableFile`. The caller fsyncs the folder."""
    with DurableFile(path) as file:
        file.write(data)


def replace_atomically(path: StrPath, data: bytes, temporary: Path | None = None) -> None:
    """Replace the contents of ``path`` durably. A crash leaves the old contents or the new, never a
    mixture.

    ``temporary`` is the sibling that is written first. It may be left from a killed writer. None
    means a new name.
    """
    path = Path(path)

    # The new contents are on stable storage before they take the old name.
    temporary = temporary or path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.unlink(missing_ok=True)
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def file_digest(path: StrPath) -> str:
    """Return the digest of a file, ``"xxh3_128:<hex>"``. The file is mapped or read a few megabytes
    at a time.
    """
    digest = xxhash.xxh3_128()
    # Each part is a sign of life, because a large file takes minutes.
    with open(path, "rb", buffering=0) as file:
        for content in _contents(file):
            digest.update(content)
            beat()
    return digest_name(digest)


def _contents(file: io.FileIO) -> Iterator[memoryview]:
    # A part is valid until the next one is requested. Mapped pages need no copy, which halves the
    # time for cached files. Files that cannot be mapped are read, which reports the error.
    size = os.fstat(file.fileno()).st_size
    at = 0
    while at < size:
        window = map_window(file.fileno(), at, min(_WINDOW_BYTES, size - at))
        if window is None:
            break
        os.posix_fadvise(file.fileno(), at + len(window), _WINDOW_BYTES, os.POSIX_FADV_WILLNEED)
        with window:
            yield window
            at += len(window)
    # The rest is read. Pipes cannot seek, but they were not mapped either.
    if at:
        file.seek(at)
    buffer = memoryview(bytearray(_READ_BYTES))
    count = file.readinto(buffer)
    while count:
        yield buffer[:count]
        count = file.readinto(buffer)


def read_window(fd: int, begin: int, length: int) -> memoryview:
    """Read part of a file, mapped if possible (see `map_window`). It is shorter at the end of the
    file.
    """
    os.posix_fadvise(fd, begin + length, _WINDOW_BYTES, os.POSIX_FADV_WILLNEED)
    window = map_window(fd, begin, length)
    if window is None:
        return memoryview(os.pread(fd, length, begin))
    return window


def map_window(fd: int, begin: int, length: int) -> memoryview | None:
    """Map ``length`` bytes of a file from ``begin`` on, and load all of them into memory.

    They are loaded at once because a later access that the disk refuses, or behind the end of the
    file, ends the process with SIGBUS. For the same reason the file must not be truncated. The
    mapping ends when nothing refers to it. None if the file is shorter or unreadable, the kernel is
    older than Linux 5.14, or the file system cannot map. Read the file then. If it is damaged, that
    raises the error.
    """
    # A mapping begins at a page.
    first = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        # Writable although nothing is written, because torch warns about read-only memory.
        access = {
            "flags": mmap.MAP_PRIVATE | _MAP_NORESERVE,
            "prot": mmap.PROT_READ | mmap.PROT_WRITE,
        }
        mapped = mmap.mmap(fd, begin + length - first, offset=first, **access)
        mapped.madvise(_MADV_POPULATE_READ)
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
    return memoryview(mapped)[begin - first :]


def bytes_digest(data: bytes) -> str:
    """Return the `file_digest` of a file with the contents ``data``."""
    return digest_name(xxhash.xxh3_128(data))


def digest_name(digest: xxhash.xxh3_128) -> str:
    """Return ``"xxh3_128:<hex>"`` of the bytes that ``digest`` has seen."""
    return f"xxh3_128:{digest.hexdigest()}"


def require_free_space(
    folder: StrPath,
    needed_bytes: int,
    advice: str = "make room, keep fewer snapshots, or write elsewhere",
) -> None:
    """Raise `CheckpointWriteError` unless the file system of ``folder`` has ``needed_bytes`` free.

    File systems that do not count their blocks (some network and FUSE file systems) pass, and
    quotas are not seen. The write itself fails there. Raises CheckpointWriteError if space is
    short, or the file system cannot be asked.
    """
    # A folder that does not exist will be on the file system of the nearest one above it.
    try:
        existing = Path(folder).absolute()
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
    except OSError as error:
        raise CheckpointWriteError(f"cannot ask for the free space of {folder}: {error}") from error
    # Without blocks, the file system does not count them.
    free_bytes = status.f_bavail * status.f_frsize
    if status.f_blocks and free_bytes < needed_bytes:
        raise CheckpointWriteError(
            f"{folder} needs {needed_bytes} bytes, its file system has {free_bytes} free; {advice}"
        )


def staging_path(final: StrPath) -> Path:
    """Return a new hidden sibling of ``final`` to write into before `commit_folder`. It is not
    created.
    """
    final = Path(final)
    return final.with_name(f".staging-{final.name}-{uuid.uuid4().hex[:12]}")


def is_free(final: StrPath) -> bool:
    """Return whether a folder may be renamed to ``final``: nothing is there, or an empty folder.

    The current folder is not free, because the process would be left in a folder that is gone.
    """
    is_folder = os.path.isdir(final) and not os.path.islink(final) and not os.path.ismount(final)
    if is_folder:
        return not os.path.samefile(final, os.curdir) and not os.listdir(final)
    return not os.path.lexists(final)


def commit_folder(staging: StrPath, final: StrPath) -> None:
    """Make a folder whose files are fsynced visible under its final name: fsync folders, rename,
    fsync the parent.

    An existing empty folder is replaced and passes its permissions to the new one.

    Raises:
        FileExistsError: ``final`` exists and is not empty. Nothing is ever overwritten.
    """
    if os.path.isdir(final) and is_free(final):
        shutil.copymode(final, staging)

    # Names inside are on stable storage before the folder has its final name.
    fsync_tree(staging)
    if not is_free(final):
        raise FileExistsError(f"{final} exists already and is never written over")
    os.rename(staging, final)
    fsync_dir(Path(final).parent)


def remove_folder(path: StrPath) -> None:
    """Remove a folder, or a link to one, after renaming it to a hidden name, so that no reader sees
    half of it.
    """
    path = Path(path)
    if path.is_symlink():
        path.unlink(missing_ok=True)
        fsync_dir(path.parent)
        return
    # A hidden folder is one whose removal has begun, or that never became visible.
    doomed = path
    if not path.name.startswith("."):
        doomed = path.with_name(f".retired-{path.name}-{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(FileNotFoundError):
        if doomed != path:
            os.rename(path, doomed)
        # Also after the rename of a killed process, so that no half-removed folder comes back.
        fsync_dir(path.parent)
        shutil.rmtree(doomed)


def remove_or_log(path: StrPath) -> None:
    """Remove a folder with everything in it, or a file. If that fails, log it and continue: only
    disk space is lost.
    """
    try:
        if os.path.isdir(path):
            remove_folder(path)
        else:
            Path(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)


def walk_files(folder: StrPath) -> Iterator[str]:
    """Yield every file below ``folder`` as sorted relative POSIX paths. OSError if a folder cannot
    be listed.
    """
    found = []
    for here, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = Path(here, name)
            if path.is_file():
                found.append(path.relative_to(folder).as_posix())
    yield from sorted(found)


def walk_leaves(folder: StrPath) -> Iterator[tuple[str, os.stat_result]]:
    """Yield ``(POSIX path relative to folder, lstat)`` of every non-folder and every empty folder
    below ``folder``.

    Raises OSError if a folder cannot be listed.
    """
    for here, folders, names in os.walk(folder, onerror=_raise):
        # Links to folders are among the folders. An empty folder is its own leaf.
        leaves = [Path(here, name) for name in (*names, *folders)]
        if not leaves and Path(here) != Path(folder):
            leaves = [Path(here)]
        for path in leaves:
            status = path.lstat()
            if path == Path(here) or not stat.S_ISDIR(status.st_mode):
                yield path.relative_to(folder).as_posix(), status


def _raise(error: OSError) -> None:
    raise error
