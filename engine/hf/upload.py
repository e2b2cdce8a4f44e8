"""Export to a URL: files in a local staging folder are uploaded one by one, ``config.json`` last.

Stores have no rename. ``config.json`` makes the export count, because nothing loads a model without
it: it is uploaded when the store reports all other files with their sizes. A marker ``.exporting``,
uploaded first and removed last, shows that an export failed or was killed. Only files of such an
export are overwritten. A URL has one writer at a time.

Cost: room for one export on the disk of the staging folder, which all nodes must see (the rows of
all ranks go into one file), one write and read of the weights there, and per rank the memory of one
upload (s3fs: ``max_concurrency`` parts of 50 MB). The next export to the same URL removes what a
killed one left in the folder.
"""

import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ...utils.atomic_folder import open_staging
from ...utils.distributed import RankGroup, all_ranks_succeed, get_rank, rank_zero_decides
from ...utils.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointWriteError,
    ConfigError,
)
from ...utils.files import (
    StrPath,
    as_write_error,
    bytes_digest,
    remove_or_log,
    require_free_space,
    walk_files,
)
from ...utils.logging import get_logger
from ...utils.remote import RemoteFolder
from .sidecars import WEIGHT_SUFFIXES

logger = get_logger(__name__)

MARKER_NAME = ".exporting"
_COMMIT_NAME = "config.json"
MIN_FILE_BYTES = 500 * 10**6
"""Smaller files would only cost more requests."""


@contextmanager
def staging_folder(
    url: str,
    needed_bytes: int,
    parent: StrPath | None,
    group: RankGroup,
) -> Iterator[Path]:
    """Yield an empty folder that has room for an export to ``url`` and that all ranks see. Remove
    it at the end.
    """

    def make() -> Path:
        folder = Path(tempfile.gettempdir() if parent is None else parent).absolute()
        require_free_space(
            folder,
            needed_bytes,
            f"make room, or export to {url} with a staging_folder that has more",
        )

        # A killed export to the same URL left this folder, which is emptied.
        _, digest = bytes_digest(url.encode()).split(":")
        staging = open_staging(folder / f"holdfast-export-{digest}")

        # TMPDIR may be shared by all users.
        staging.chmod(0o700)
        return staging

    staging = rank_zero_decides(make, group)
    try:
        with all_ranks_succeed(f"staging the export to {url}", group):
            if not staging.is_dir():
                raise ConfigError(
                    f"{staging}, which rank 0 made to stage the export to {url}, is not there on "
                    f"{socket.gethostname()}; on several nodes staging_folder must be a folder "
                    "that all ranks see"
                )
        yield staging
    finally:
        if get_rank(group) == 0:
            remove_or_log(staging)


def require_absent(remote: RemoteFolder, names: Iterable[str]) -> None:
    """Raise `CheckpointExistsError` if the export would overwrite foreign files, or mix its weights
    with such files.
    """
    with as_write_error(remote.url):
        present = set(remote.names())
    if _COMMIT_NAME in present:
        raise CheckpointExistsError(
            f"{remote.url} has a {_COMMIT_NAME}, so there is a model, which is never written "
            "over; choose another path"
        )

    # Files of the same name are those of an export that failed, if its marker is there.
    ours = {PurePosixPath(name).parts[0] for name in names}
    others = []
    for name in sorted(present):
        written_over = name in ours and MARKER_NAME not in present
        mixed = name not in ours and name.endswith(WEIGHT_SUFFIXES)
        if written_over or mixed:
            others.append(name)
    if others:
        raise CheckpointExistsError(
            f"{remote.url} has {others[:5]}, which an export would write over, or be mixed with; "
            "remove them or choose another path"
        )


def begin(remote: RemoteFolder, staging: Path) -> None:
    """Mark the export as begun. Called when all files are in ``staging``."""
    require_absent(remote, walk_files(staging))
    with as_write_error(remote.url):
        remote.put_bytes(MARKER_NAME, b"")


def put_files(remote: RemoteFolder, staging: Path, names: Sequence[str]) -> None:
    """Upload the files of this rank, except ``config.json``."""
    with as_write_error(remote.url):
        for name in names:
            if name != _COMMIT_NAME:
                remote.put_file(staging / name, name)


def commit_upload(remote: RemoteFolder, staging: Path) -> None:
    """Check that all files are in the store, then upload ``config.json``."""
    with as_write_error(remote.url):
        # The store says what it has. A file may have been lost without an error.
        found = remote.sizes("")
        lost = []
        for name in walk_files(staging):
            size = (staging / name).stat().st_size
            if name != _COMMIT_NAME and found.get(name) != size:
                lost.append((name, size))
        if lost:
            name, size = lost[0]
            raise CheckpointWriteError(
                f"{remote.url}/{name} was put with {size} bytes, the store says "
                f"{found.get(name, 'nothing')} ({len(lost)} such files); nothing became visible"
            )
        remote.put_file(staging / _COMMIT_NAME, _COMMIT_NAME)
    try:
        remote.remove_file(MARKER_NAME)
    except CheckpointError as error:
        logger.warning("%s is complete, but its %s stays: %s", remote.url, MARKER_NAME, error)
