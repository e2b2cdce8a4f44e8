"""Number of threads with which a process should read files."""

import os

MOST = 8
"""Limit of the threads that read one file. More are no faster, neither from the page cache nor from a disk."""


def reading_threads() -> int:
    """Return this rank's share of the host's cores, from 1 to `MOST`.

    The ranks of a host share the cores that a process may run on. If this process may run on fewer cores than its
    parent, its launcher has already given it a share (``torchrun --numa-binding``, ``taskset``).

    ``torch.get_num_threads()`` is not used: torchrun and Ray set it to 1 so that the ranks' computations do not disturb
    each other, but reading threads spend their time in the kernel. Without ``LOCAL_WORLD_SIZE`` all ranks are assumed
    to be on this host.
    """
    from .distributed import get_world_size  # imports torch, which commands that only read files do not need

    cores = os.sched_getaffinity(0)
    has_share = cores < os.sched_getaffinity(os.getppid())
    ranks = 1 if has_share else int(os.environ.get("LOCAL_WORLD_SIZE") or get_world_size())
    return min(max(len(cores) // ranks, 1), MOST)
