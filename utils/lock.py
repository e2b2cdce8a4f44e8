"""One job at a time in a folder: a POSIX record lock on a file in it, which names its holder.

A record lock works over NFS (version 4, and 3 where lockd runs), belongs to one process and not to the children it
forks, and is gone the moment that process ends, however it ends; nothing is left that a person must clean up. Taking
it costs a few system calls and one fsync. The file stays for good: a job that removed it could remove it from under
another that has just opened it, and then two would hold a lock each.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
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
"""What file systems without record locks say."""


@dataclass
class _Descriptor:
    """The one open descriptor of a lock file, and how many locks of this process hold it or wait for it."""

    fd: int
    users: int = 0


# Record locks are the process's, not the descriptor's: a second lock on the same file succeeds, and closing *any*
# descriptor of the file drops the lock, whoever opened it. So all locks of a process share one descriptor a file, and
# the last user closes it. Keyed by (device, inode): one file may have several paths.
_descriptors: dict[tuple[int, int], _Descriptor] = {}
_mutex = threading.Lock()


def _forget_in_child() -> None:
    """A forked child has the descriptors but not the locks; closing them there leaves the parent's locks alone."""
    global _mutex
    _mutex = threading.Lock()  # another thread may have held it when this one forked
    for descriptor in _descriptors.values():
        os.close(descriptor.fd)
        descriptor.users = 0
    _descriptors.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class FolderLock:
    """Keeps other processes out of the folder of a lock file. Several in one process share the lock.

    Nothing else in this process may open the file: closing it again would drop the lock.

    Args:
        path: the lock file; it and its folder are made when missing, and the file is never removed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: _Descriptor | None = None

    @property
    def held(self) -> bool:
        """Whether `acquire` succeeded in this process (not before a fork) and `release` was not called since."""
        return self._descriptor is not None and self._descriptor.users > 0

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
            descriptor = _join(self.path)
        except OSError as error:
            raise self._write_error(error) from error
        with contextlib.ExitStack() as undo:
            undo.callback(_leave, descriptor)
            while not self._try_lock(descriptor.fd):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise FolderInUseError(self._refusal(descriptor.fd, timeout_s))
                time.sleep(min(_POLL_S, left_s))
            undo.pop_all()
        self._descriptor = descriptor
        self._write_holder(descriptor.fd)

    def release(self) -> None:
        """Give the lock up; it is free when every `FolderLock` of this process has. Does nothing when not held."""
        if self._descriptor is not None and self.held:
            _leave(self._descriptor)
        self._descriptor = None

    def _try_lock(self, fd: int) -> bool:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno not in _NO_LOCKS:
                raise self._write_error(error) from error
            logger.warning(
                "%s is on a file system without locks (%s): nothing keeps a second job out of %s",
                self.path, error.strerror, self.path.parent,
            )  # fmt: skip
        return True

    def _write_holder(self, fd: int) -> None:
        started = datetime.fromtimestamp(process_started_at()).astimezone().isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        try:
            os.pwrite(fd, json.dumps(holder).encode().ljust(_RECORD_BYTES - 1) + b"\n", 0)
            os.fsync(fd)
        except OSError as error:  # a full disk: the lock is held all the same
            logger.warning("cannot write the holder to %s, others will not be told who it is: %s", self.path, error)

    def _refusal(self, fd: int, timeout_s: float) -> str:
        return (
            f"{self.path.parent} is in use by {_read_holder(fd)}; waited {timeout_s:g} s. Wait for that job or end it, "
            "or give this one another recover.trial_name; recover.lock_timeout_s is how long a job waits"
        )

    def _write_error(self, error: OSError) -> CheckpointWriteError:
        return CheckpointWriteError(
            f"cannot lock {self.path}: {error.strerror or error}; a job needs a folder that it can write to"
        )


def _join(path: Path) -> _Descriptor:
    """The process's descriptor of the file, opened when this is the first to ask, with one more user."""
    with _mutex:
        descriptor = None
        with contextlib.suppress(FileNotFoundError):
            descriptor = _descriptors.get(_identity(os.stat(path)))  # before opening it: see above
        if descriptor is None:
            make_durably(path.parent)
            descriptor = _Descriptor(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
            _descriptors[_identity(os.fstat(descriptor.fd))] = descriptor
        descriptor.users += 1
        return descriptor


def _leave(descriptor: _Descriptor) -> None:
    with _mutex:
        descriptor.users -= 1
        if descriptor.users == 0:
            del _descriptors[_identity(os.fstat(descriptor.fd))]
            os.close(descriptor.fd)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _read_holder(fd: int) -> str:
    """Who holds the lock, in words; what it wrote may be incomplete or, for a moment, its predecessor's."""
    try:
        holder = json.loads(os.pread(fd, _RECORD_BYTES, 0))
        return f"pid {int(holder['pid'])} on host {holder['host']}, started {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown holder"
