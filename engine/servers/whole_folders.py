"""Comparison of all bytes of a published folder with its manifest, before a server that a damaged
file would end is told of the folder.
"""

from functools import lru_cache
from pathlib import Path
from threading import Lock

from ...utils.errors import CheckpointError
from ...utils.files import walk_leaves
from ...utils.manifest import verify_folder
from ...utils.timing import timed
from .http import Calls

Stamps = tuple[tuple[str, int, int, int, int], ...]

_verifying = Lock()


def require_whole(calls: Calls, path: str) -> None:
    """Raise PublishError if a file of the folder is missing, extra, or has other bytes than its
    manifest says, or if another update of this process reads one for longer than the limit.

    The bytes are read once for all servers of a process, and again if a file was touched. The time
    counts as ``verify`` of the update, and not towards its limit.
    """
    with timed(calls.seconds, "verify"):
        problem = _problem_in_turn(path, calls.limit_s)
    if problem is not None:
        raise calls.refuse(
            f"it was not told of {path}, which would end it: {problem}; publish again"
        )
    calls.restart_limit()


def _problem_in_turn(path: str, limit_s: float) -> str | None:
    """What is wrong with the folder. Others wait for the first one, and need not read again."""
    if not _verifying.acquire(timeout=limit_s):
        return f"it was not read, because another folder was after {limit_s:g} s"
    try:
        return _problem(path, _stamps(path))
    except OSError as error:
        return str(error)
    finally:
        _verifying.release()


def _stamps(path: str) -> Stamps:
    found = []
    for name, status in walk_leaves(Path(path)):
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found.append((name, status.st_ino, status.st_size, *times))
    return tuple(found)


@lru_cache(maxsize=4)
def _problem(path: str, stamps: Stamps) -> str | None:
    try:
        verify_folder(path)
    except CheckpointError as error:
        return str(error)
    return None
