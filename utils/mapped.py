"""Parts of files mapped into memory, without a copy."""

import mmap

_MADV_POPULATE_READ = 22  # Linux 5.14; Python knows no name for it
_MAP_NORESERVE = 0x4000  # reserve no memory, because nothing is written


def map_window(fd: int, begin: int, length: int) -> memoryview | None:
    """Map ``length`` bytes of a file from ``begin`` on, and load all of them into memory.

    They are loaded at once because a later access that the disk refuses, or behind the end of the file, ends the
    process with SIGBUS. For the same reason the file must not be truncated. The mapping ends when nothing refers to it.

    Returns:
        None if the file is shorter or unreadable, the kernel is older than Linux 5.14, or the file system cannot map.
        Read the file then. If it is damaged, that raises the error.
    """
    first = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        # Writable although nothing is written, because torch warns about read-only memory.

        access = {"flags": mmap.MAP_PRIVATE | _MAP_NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        mapped = mmap.mmap(fd, begin + length - first, offset=first, **access)
        mapped.madvise(_MADV_POPULATE_READ)
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
    return memoryview(mapped)[begin - first :]
