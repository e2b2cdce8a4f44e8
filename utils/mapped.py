"""Windows of files in memory, without a copy."""

import mmap

_MADV_POPULATE_READ = 22  # Linux 5.14; Python knows no name for it
_MAP_NORESERVE = 0x4000  # no memory is reserved for writes that will not come


def map_window(fd: int, begin: int, length: int) -> memoryview | None:
    """``length`` bytes of a file from ``begin`` on, mapped, and all of them brought into memory.

    That comes first because an access that the disk refuses, or behind the end of the file, ends the process; so does
    one to a file that is cut later. Unmapped when nothing refers to it any more. The file does not change with it.

    Returns:
        None where that cannot be done: the file is shorter or cannot be read, the kernel is old (before Linux 5.14), or
        the file system has no maps. Reading says which.
    """
    first = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        # Private and writable, although nobody writes, because torch warns of memory that is not.
        access = {"flags": mmap.MAP_PRIVATE | _MAP_NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        mapped = mmap.mmap(fd, begin + length - first, offset=first, **access)
        mapped.madvise(_MADV_POPULATE_READ)
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
    return memoryview(mapped)[begin - first :]
