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

Stamps = tuple[tuple[str, int, int, int], ...]

_verifying = Lock()


def require_whole(calls: Calls, path: str) -> None:
    """Raise PublishError if a file of the folder is missing, extra, or has other bytes than its
    manifest says.

    The bytes are read once for all servers of a process, and again if a file was touched. The time
    counts as ``verify`` of the update.
    """
    try:
        # The others wait for the first one, and need not read again.
        with timed(calls.seconds, "verify"), _verifying:
            _verify(path, _stamps(path))
    except (CheckpointError, OSError) as error:
        raise calls.refuse(
            f"it was not told of {path}, which would end it: {error}; publish again"
        ) from error


def _stamps(path: str) -> Stamps:
    found = []
    for name, status in walk_leaves(Path(path)):
        found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


@lru_cache(maxsize=4)
def _verify(path: str, stamps: Stamps) -> None:
    verify_folder(path)
