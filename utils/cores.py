"""How many threads this process should read files with."""

import os

MOST = 8
"""Threads that read one file: more of them are no faster, from the page cache or from a disk."""


def reading_threads() -> int:
    """This process's cores, shared among the ranks of its host: 1 to `MOST`.

    Not ``torch.get_num_threads()``, which torchrun and Ray set to 1 for a rank, so that what it computes disturbs no
    other: threads that read spend their time in the kernel. Ranks that no launcher has counted by host
    (``LOCAL_WORLD_SIZE``) may all be on this one.
    """
    from .distributed import get_world_size  # with torch, which a command that reads files does without

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or get_world_size())
    return min(max(len(os.sched_getaffinity(0)) // ranks, 1), MOST)
