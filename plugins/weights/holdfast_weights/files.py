"""Local files: exact reads and writes, copies that share blocks, fsync, and a walk that refuses
links.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from .errors import FolderError

# Answers of kernels and file systems that cannot copy by themselves.
_NO_COPY_IN_KERNEL = {
    errno.ENOSYS,
    errno.EXDEV,
    errno.EINVAL,
    errno.EOPNOTSUPP,
}


def read_exactly(file: FileIO, offset: int, n_bytes: int) -> bytes:
    """Read a part of an open file. FolderError if the file is shorter."""
    # Usually one call reads everything.
    data = os.pread(file.fileno(), n_bytes, offset)
    while len(data) < n_bytes:
        more = os.pread(file.fileno(), n_bytes - len(data), offset + len(data))
        if not more:
            raise FolderError(f"{file.name} is shorter than {offset + n_bytes} bytes")
        data += more
    return data


def write_exactly(file: FileIO, offset: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` into an open file."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file.fileno(), rest, offset)
        rest = rest[written:]
        offset += written


def allocate(path: Path, n_bytes: int) -> None:
    """Create a file with its blocks, so that a full disk is found before anything is fetched."""
    with open(path, "xb", buffering=0) as file:
        if n_bytes:
            os.posix_fallocate(file.fileno(), 0, n_bytes)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new one. File systems with reflinks (XFS, Btrfs) share the blocks, so
    nothing is copied.
    """
    with (
        open(source, "rb", buffering=0) as old,
        open(target, "xb", buffering=0) as new,
    ):
        # The kernel copies, or shares, as much as it likes at a time.
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno not in _NO_COPY_IN_KERNEL:
                raise
            shutil.copyfileobj(old, new, 1 << 20)


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to stable storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def list_files(folder: Path) -> Iterator[str]:
    """Yield every file below ``folder`` as a relative POSIX path. FolderError for a link or another
    special file.
    """
    for here, folders, names in os.walk(folder, onerror=_raise):
        for name in (*folders, *names):
            path = Path(here, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                yield path.relative_to(folder).as_posix()
            elif not stat.S_ISDIR(mode):
                raise FolderError(f"{path} is not a regular file")


def _raise(error: OSError) -> None:
    raise error
