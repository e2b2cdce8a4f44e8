"""Lock on a file that keeps a folder to one job, and names its holder.

On Linux the lock belongs to an open file description (fcntl(2)), so other code in the process may
open and close the file, as a copy of the folder does. Elsewhere it is a POSIX record lock, which
belongs to the process and ends when any of its descriptors of the file is closed. The two kinds
exclude each other. Both work over NFS (version 4, or 3 with lockd), are not inherited by a fork,
and end with their process, so nobody has to clean up.

A lock can still be lost: the file is removed, the NFS server forgets, or a record lock is closed.
So the holder calls `FolderLock.confirm` before each commit.

Taking a lock costs a few system calls and two fsyncs, confirming it a few system calls. The file is
never removed: a job might remove it just after another has opened it, and then both would hold a
lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

from .errors import CheckpointWriteError, FolderInUseError, JobRefusedError
from .files import StrPath, make_durably
from .logging import get_logger
from .processes import process_started_at

logger = get_logger(__name__)

_POLL_S = 0.1
"""Seconds between attempts. The blocking call has no timeout."""
REQUEUED_S = 90.0
"""Shortest time for which a job waits that SLURM has started again: the ranks of its first start
may live on a node that was lost, and NFS may keep their lock for so long.
"""
_RECORD_BYTES = 512
"""Size to which the holder's text is padded, so that one write replaces the whole text of the
previous holder.
"""
_HELD = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""Errors of file systems without locks, and of kernels without locks of open file descriptions."""
_OFD_GETLK = 36
_OFD_SETLK = 37
"""F_OFD_GETLK and F_OFD_SETLK of Linux. Python lacks the names if it was built with an old C
library.
"""

_FLOCK = struct.Struct("@hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length (0 means to the end), pid (0 for
these locks).
"""
_EXCLUSIVE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_UNLOCKED = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)


class _LockFile:
    """The only open descriptor of a lock file in this process, shared by all its `FolderLock`
    objects.

    Two descriptors would exclude each other. With record locks, closing one would drop the lock of
    the other.
    """

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.users = 0  # locks that hold the file or wait for it
        self.record = b""  # holder's text after this process took the lock
        self.without_locks: str | None = None  # why the file system has no locks
        self._by_description = sys.platform == "linux" and not _is_fuse(self.fd)

    @property
    def identity(self) -> tuple[int, int]:
        # Device and inode, because one file may have several paths.
        return _identity(os.fstat(self.fd))

    def lock(self) -> bool:
        # Take or confirm the lock. False if another process has it.
        try:
            self._set_lock()
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self.without_locks = error.strerror
        return True

    def _set_lock(self) -> None:
        if self._by_description:
            try:
                fcntl.fcntl(self.fd, _OFD_SETLK, _EXCLUSIVE)
                return
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._by_description = False
        fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_locked(self) -> bool:
        """Return whether any process has the lock, including this one. True if that cannot be
        determined.
        """
        # A query does not see the owner's own locks of the same kind, so it uses the other kind.
        if sys.platform != "linux":
            return True
        try:
            query = fcntl.F_GETLK if self._by_description else _OFD_GETLK
            answer = fcntl.fcntl(self.fd, query, _EXCLUSIVE)
        except OSError:
            return True
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK

    def reopen(self, path: Path) -> None:  # under the same descriptor, without locking it
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)

    def read(self) -> bytes:
        return os.pread(self.fd, _RECORD_BYTES, 0)

    def write(self, holder: dict[str, str | int]) -> None:
        try:
            os.pwrite(self.fd, json.dumps(holder).encode().ljust(_RECORD_BYTES - 1) + b"\n", 0)
            os.fsync(self.fd)
        finally:
            self.record = self.read()

    def close(self) -> None:
        """Unlock and close. Unlocking is explicit because a child forked by C code may share the
        description.
        """
        if self._by_description:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, _OFD_SETLK, _UNLOCKED)
        os.close(self.fd)


_files: dict[tuple[int, int], _LockFile] = {}
_mutex = threading.RLock()


def _forget_in_child() -> None:
    """Close the descriptors in a forked child, which does not inherit the locks. The parent keeps
    its locks.
    """
    for file in _files.values():
        os.close(file.fd)
        file.users = 0
    _files.clear()
    _mutex.release()


# The mutex prevents forks while an open file is missing in `_files`: the child would keep the file
# open and locked.
os.register_at_fork(
    before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_forget_in_child
)


class FolderLock:
    """Lock that keeps other processes out of a folder. Several objects in one process share the
    lock.

    Args:
        path: lock file. The file and its folder are created if missing, and the file is never
            removed.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path).absolute()
        self._file: _LockFile | None = None

    @property
    def held(self) -> bool:
        """Whether this process has acquired the lock since any fork and not released it."""
        return self._file is not None and self._file.users > 0

    def acquire(self, timeout_s: float) -> None:
        """Take the lock and record its holder. Does nothing if the lock is already held.

        On a file system without locks this logs a warning and goes on.

        Raises:
            FolderInUseError: another process still holds the lock after ``timeout_s``. The message
                names it.
            CheckpointWriteError: the file cannot be created or locked.
        """
        if self.held:
            return
        end = time.monotonic() + timeout_s
        try:
            make_durably(self.path.parent)
            file = _join(self.path)
            with contextlib.ExitStack() as undo:
                undo.callback(_leave, file)
                while not file.lock():
                    left_s = end - time.monotonic()
                    if left_s <= 0:
                        raise FolderInUseError(self._refusal(file, timeout_s))
                    time.sleep(min(_POLL_S, left_s))
                self._write_holder(file)
                undo.pop_all()
        except OSError as error:
            raise self._write_error(error) from error
        self._file = file
        if file.without_locks:
            logger.warning(
                "%s is on a file system without locks (%s): nothing keeps a second job out of %s",
                self.path, file.without_locks, self.path.parent,
            )  # fmt: skip

    def acquire_for_job(self, timeout_s: float) -> None:
        """`acquire` for a job. One that SLURM has started again waits for at least `REQUEUED_S`.

        Raises:
            JobRefusedError: instead of FolderInUseError.
            CheckpointWriteError: as `acquire`.
        """
        is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        if is_requeued:
            timeout_s = max(timeout_s, REQUEUED_S)
        try:
            self.acquire(timeout_s)
        except FolderInUseError as error:
            refusal = JobRefusedError(
                f"{error}. The job ends with code {JobRefusedError.code}: the same command may be "
                "started again"
            )
            logger.error("%s", refusal)
            raise refusal from None

    def confirm(self) -> None:
        """Check that this process still has the folder alone. Call this before each commit, while
        the lock is held.

        A lost lock (the file was removed or replaced, for example) is taken again with a warning.

        Raises `FolderInUseError` if another process has or had it meanwhile, so that the folder may
        have changed, and `CheckpointWriteError` if the file cannot be read or locked.
        """
        file = self._file
        assert file is not None and self.held, "only who holds the lock commits"
        try:
            file, lost = self._follow(file)
            if not file.lock():
                raise FolderInUseError(
                    self._taken(f"is in use by {_holder(file.read()) or 'an unknown holder'}")
                )
            text = file.read()
            other = _holder(text) if text != file.record else None
            if other is not None:
                raise FolderInUseError(self._taken(f"has been in use by {other}"))
            if lost is not None:
                self._write_holder(file)
                logger.warning(
                    "%s %s; it is locked again, and nobody has used the folder meanwhile",
                    self.path,
                    lost,
                )
        except OSError as error:
            raise self._write_error(error) from error

    def release(self) -> None:
        """Release the lock. It becomes free when all `FolderLock` objects of this process have
        released it.
        """
        if self._file is not None and self.held:
            _leave(self._file)
        self._file = None

    def _follow(self, file: _LockFile) -> tuple[_LockFile, str | None]:
        # The file to lock, and how the lock was lost, or None. A missing file is created and a
        # replaced one is opened. If another `FolderLock` of this process did so first, its file is
        # shared.
        try:
            stays = _identity(os.stat(self.path)) == file.identity
        except FileNotFoundError:
            stays = False
        if stays and file.is_locked():
            return file, None
        if stays:
            return file, "was unlocked by somebody, or forgotten by its file server"
        make_durably(self.path.parent)
        with _mutex:
            other = _opened(self.path)
            if other is not None:
                other.users += 1
                _leave(file)
                self._file = other
                return other, None
            del _files[file.identity]
            file.reopen(self.path)
            _files[file.identity] = file
        return file, "was removed or replaced"

    def _write_holder(self, file: _LockFile) -> None:
        started = (
            datetime.fromtimestamp(process_started_at()).astimezone().isoformat(timespec="seconds")
        )
        try:
            file.write({"host": socket.gethostname(), "pid": os.getpid(), "started": started})
        except OSError as error:  # for example a full disk; the lock is held anyway
            logger.warning(
                "cannot write the holder to %s, others will not be told who it is: %s",
                self.path,
                error,
            )

    def _refusal(self, file: _LockFile, timeout_s: float) -> str:
        return (
            f"{self.path.parent} is in use by {_holder(file.read()) or 'an unknown holder'}; "
            f"waited {timeout_s:g} s. Wait for that job or end it, or give this one another "
            "recover.trial_name; recover.lock_timeout_s is how long a job waits"
        )

    def _taken(self, by: str) -> str:
        return (
            f"{self.path.parent} {by}, since this job lost its lock on {self.path}: nothing more "
            "is committed. Leave the folder to one job; the same command goes on from the newest "
            "snapshot in it"
        )

    def _write_error(self, error: OSError) -> CheckpointWriteError:
        return CheckpointWriteError(
            f"cannot lock {self.path}: {error.strerror or error}; a job needs a folder that it "
            "can write to"
        )


def probe_lock(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file, without touching the file. None if it
    cannot be determined.
    """
    if _opened(path) is not None:  # opening and closing it would drop this process's record lock
        return True
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        by_description = sys.platform == "linux" and not _is_fuse(fd)
        query = _OFD_GETLK if by_description else fcntl.F_GETLK
        answer = fcntl.fcntl(fd, query, _EXCLUSIVE)
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK
    except OSError:
        return None
    finally:
        os.close(fd)


def _join(path: Path) -> _LockFile:
    with _mutex:
        file = _opened(
            path
        )  # checked first, because closing a second descriptor would drop a record lock
        if file is None:
            file = _LockFile(path)
            _files[file.identity] = file
        file.users += 1
        return file


def _opened(path: Path) -> _LockFile | None:
    """Return this process's descriptor of the file that is now at ``path``, or None."""
    with contextlib.suppress(FileNotFoundError):
        return _files.get(_identity(os.stat(path)))
    return None


def _leave(file: _LockFile) -> None:
    with _mutex:
        file.users -= 1
        if file.users == 0:
            del _files[file.identity]
            file.close()


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _is_fuse(fd: int) -> bool:
    # FUSE treats a lock of a file description as a record lock of its process, and some servers
    # keep it after the process has ended. In proc_pid_mountinfo(5) the third field is the device.
    device = os.fstat(fd).st_dev
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    types = {
        mount[mount.index("-") + 1]
        for mount in mounts
        if mount[2] == f"{os.major(device)}:{os.minor(device)}"
    }
    return any(kind.partition(".")[0] in ("fuse", "fuseblk") for kind in types)


def _holder(text: bytes) -> str | None:
    # None if the text is incomplete. For a moment the text may be the previous holder's.
    try:
        holder = json.loads(text)
        return f"pid {int(holder['pid'])} on host {holder['host']}, started {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return None
