"""How many threads this process should read files with."""

import os

MOST = 8
"""Threads that read one file: more of them are no faster, from the page cache or from a disk."""


def reading_threads() -> int:
    """This rank's share of the cores: 1 to `MOST`.

    The ranks of a host share the cores that a process may run on. A process that may run on fewer than its parent has
    a share already, which its launcher gave it (``torchrun --numa-binding``, ``taskset``).

    Not ``torch.get_num_threads()``, which torchrun and Ray set to 1 for a rank, so that what it computes disturbs no
    other: threads that read spend their time in the kernel. Ranks that no launcher has counted by host
    (``LOCAL_WORLD_SIZE``) may all be on this one.
    """
    from .distributed import get_world_size  # with torch, which a command that reads files does without

    cores = os.sched_getaffinity(0)
    has_share = cores < os.sched_getaffinity(os.getppid())
    ranks = 1 if has_share else int(os.environ.get("LOCAL_WORLD_SIZE") or get_world_size())
    return min(max(len(cores) // ranks, 1), MOST)
