"""One job at a time in a folder: a lock on a file in it, which names its holder.

The lock belongs to an open file description (fcntl(2), Linux), so that other code of the process may open and close
the file, as a copy of the folder does. Where there are no such locks it is a POSIX record lock, which belongs to the
process and ends with any close of the file by it. The two exclude each other. Both work over NFS (version 4, and 3
where lockd runs), stay behind in a fork, and are gone the moment their holder ends, however it ends; nothing is left
that a person must clean up. A lock can still be lost: the file is removed, the NFS server forgets, a record lock is
closed. So whoever is about to commit asks first (`FolderLock.confirm`).

Taking a lock costs a few system calls and two fsyncs, confirming it a few system calls. The file stays for good: a job
that removed it could remove it from under another that has just opened it, and then two would hold a lock each.
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

from .errors import CheckpointWriteError, FolderInUseError
from .files import make_durably
from .logging import get_logger
from .processes import process_started_at

logger = get_logger(__name__)

_POLL_S = 0.1
"""How often a held lock is tried again; the call that waits for one has no timeout."""
_RECORD_BYTES = 512
"""What the holder writes is padded to this, so that one write replaces all of what its predecessor wrote."""
_HELD = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What file systems without locks say, and kernels without those of open file descriptions."""
_OFD_GETLK, _OFD_SETLK = 36, 37
"""Linux's F_OFD_GETLK and F_OFD_SETLK, which Python does not name where it was built with an old C library."""
_FLOCK = struct.Struct("@hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length (0: to the end of the file), pid (0 for these)."""
_EXCLUSIVE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_UNLOCKED = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)


class _LockFile:
    """The one open descriptor of a lock file, shared by all `FolderLock`s of this process.

    Two would exclude each other, or, with record locks, closing one would drop the lock of the other.

    Attributes:
        fd: the descriptor.
        users: how many locks hold it or wait for it.
        record: the holder's text in the file, as it was when this process had taken the lock.
        without_locks: why the file system has no locks; None where it has.
    """

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.users = 0
        self.record = b""
        self.without_locks: str | None = None
        self._by_description = sys.platform == "linux" and not _is_fuse(self.fd)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: one file may have several paths."""
        return _identity(os.fstat(self.fd))

    def lock(self) -> bool:
        """Take the lock, or make sure of it; False when another process has it."""
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
        """Whether anybody has the lock, this process included; True where that cannot be told.

        A lock hides from queries of its own kind by its owner, but not from those of the other kind.
        """
        if sys.platform != "linux":
            return True
        try:
            answer = fcntl.fcntl(self.fd, fcntl.F_GETLK if self._by_description else _OFD_GETLK, _EXCLUSIVE)
        except OSError:
            return True
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK

    def reopen(self, path: Path) -> None:
        """Go over to the file that is at ``path`` now, under the same descriptor; not locked yet."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)

    def read(self) -> bytes:
        """The text of the holder."""
        return os.pread(self.fd, _RECORD_BYTES, 0)

    def write(self, holder: dict[str, str | int]) -> None:
        """Replace the text of the holder, and remember what it is now."""
        try:
            os.pwrite(self.fd, json.dumps(holder).encode().ljust(_RECORD_BYTES - 1) + b"\n", 0)
            os.fsync(self.fd)
        finally:
            self.record = self.read()

    def close(self) -> None:
        """Unlock and close. Unlocking comes first: a child that C code has forked may have the description too."""
        if self._by_description:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, _OFD_SETLK, _UNLOCKED)
        os.close(self.fd)


_files: dict[tuple[int, int], _LockFile] = {}
_mutex = threading.RLock()


def _forget_in_child() -> None:
    """A forked child has the descriptors but not the locks; closing them there leaves the parent's locks alone."""
    for file in _files.values():
        os.close(file.fd)
        file.users = 0
    _files.clear()
    _mutex.release()


# Nobody forks while a file is open but not in `_files` yet: the child would keep it open, and with it the lock.
os.register_at_fork(before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_forget_in_child)


class FolderLock:
    """Keeps other processes out of the folder of a lock file. Several in one process share the lock.

    Args:
        path: the lock file; it and its folder are made when missing, and the file is never removed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: _LockFile | None = None

    @property
    def held(self) -> bool:
        """Whether `acquire` succeeded in this process (not before a fork) and `release` was not called since."""
        return self._file is not None and self._file.users > 0

    def acquire(self, timeout_s: float) -> None:
        """Take the lock and write down who holds it; does nothing when it is held already.

        Where the file system has no locks this warns and goes on without one.

        Args:
            timeout_s: how long to wait for another holder; 0 asks once.

        Raises:
            FolderInUseError: another process still holds it; the message says which.
            CheckpointWriteError: the file cannot be made or locked.
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

    def confirm(self) -> None:
        """Make sure that the folder is still this process's alone; call it before anything in it is committed.

        A lock that was lost, because its file was removed or replaced say, is taken again and a warning says so, unless
        another job has come meanwhile. Only for a lock that is held.

        Raises:
            FolderInUseError: another process has the lock, or has had it: the folder is no longer as this one left it.
            CheckpointWriteError: the file cannot be looked at or locked.
        """
        file = self._file
        assert file is not None and self.held, "only who holds the lock commits"
        try:
            file, lost = self._follow(file)
            if not file.lock():
                raise FolderInUseError(self._taken(f"is in use by {_holder(file.read()) or 'an unknown holder'}"))
            text = file.read()
            if text != file.record and (other := _holder(text)) is not None:
                raise FolderInUseError(self._taken(f"has been in use by {other}"))
            if lost is not None:
                self._write_holder(file)
                logger.warning("%s %s; it is locked again, and nobody has used the folder meanwhile", self.path, lost)
        except OSError as error:
            raise self._write_error(error) from error

    def release(self) -> None:
        """Give the lock up; it is free when every `FolderLock` of this process has. Does nothing when not held."""
        if self._file is not None and self.held:
            _leave(self._file)
        self._file = None

    def _follow(self, file: _LockFile) -> tuple[_LockFile, str | None]:
        """The file to lock, and how the lock was lost, if it was; one that is gone or another is made, or opened.

        Where another `FolderLock` of this process was there first, this one shares what that has.
        """
        try:
            stays = _identity(os.stat(self.path)) == file.identity
        except FileNotFoundError:
            stays = False
        if stays:
            return file, None if file.is_locked() else "was unlocked by somebody, or forgotten by its file server"
        make_durably(self.path.parent)
        with _mutex:
            if (other := _opened(self.path)) is not None:
                other.users += 1
                _leave(file)
                self._file = other
                return other, None
            del _files[file.identity]
            file.reopen(self.path)
            _files[file.identity] = file
        return file, "was removed or replaced"

    def _write_holder(self, file: _LockFile) -> None:
        started = datetime.fromtimestamp(process_started_at()).astimezone().isoformat(timespec="seconds")
        try:
            file.write({"host": socket.gethostname(), "pid": os.getpid(), "started": started})
        except OSError as error:  # a full disk: the lock is held all the same
            logger.warning("cannot write the holder to %s, others will not be told who it is: %s", self.path, error)

    def _refusal(self, file: _LockFile, timeout_s: float) -> str:
        return (
            f"{self.path.parent} is in use by {_holder(file.read()) or 'an unknown holder'}; waited {timeout_s:g} s. "
            "Wait for that job or end it, or give this one another recover.trial_name; recover.lock_timeout_s is how "
            "long a job waits"
        )

    def _taken(self, by: str) -> str:
        return (
            f"{self.path.parent} {by}, since this job lost its lock on {self.path}: nothing more is committed. Leave "
            "the folder to one job; the same command goes on from the newest snapshot in it"
        )

    def _write_error(self, error: OSError) -> CheckpointWriteError:
        return CheckpointWriteError(
            f"cannot lock {self.path}: {error.strerror or error}; a job needs a folder that it can write to"
        )


def probe_lock(path: Path) -> bool | None:
    """Whether a process holds the lock of a file, which is neither made nor locked by asking.

    None where that cannot be told: the file is unreadable, or its file system has no locks.
    """
    if _opened(path) is not None:  # closing it would drop a record lock of this process
        return True
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        by_description = sys.platform == "linux" and not _is_fuse(fd)
        answer = fcntl.fcntl(fd, _OFD_GETLK if by_description else fcntl.F_GETLK, _EXCLUSIVE)
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK
    except OSError:
        return None
    finally:
        os.close(fd)


def _join(path: Path) -> _LockFile:
    """The process's descriptor of the file, opened when this is the first to ask, with one more user."""
    with _mutex:
        file = _opened(path)  # before opening it: closing it would drop a record lock
        if file is None:
            file = _LockFile(path)
            _files[file.identity] = file
        file.users += 1
        return file


def _opened(path: Path) -> _LockFile | None:
    """The process's descriptor of the file that is at ``path`` now, if it has one."""
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
    """Whether the file is on FUSE, which takes a lock of an open file description for a record lock of its process.

    Some of its servers keep such a lock when the process is gone, and the folder would stay in use. From
    proc_pid_mountinfo(5), whose third field is the device.
    """
    device = os.fstat(fd).st_dev
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    types = {mount[mount.index("-") + 1] for mount in mounts if mount[2] == f"{os.major(device)}:{os.minor(device)}"}
    return any(kind.partition(".")[0] in ("fuse", "fuseblk") for kind in types)


def _holder(text: bytes) -> str | None:
    """Who wrote ``text``, in words; None when it is incomplete. It may, for a moment, be a predecessor's."""
    try:
        holder = json.loads(text)
        return f"pid {int(holder['pid'])} on host {holder['host']}, started {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return None
