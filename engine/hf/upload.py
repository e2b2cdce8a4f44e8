"""Export a sharded model to a URL: write a Hugging Face folder to a local disk, then upload it file by file.

    <url>/.exporting             put first, removed last: the export's id and the names of its files, as JSON
    <url>/model*.safetensors     each uploaded by one rank, the ranks side by side
    <url>/...                    index, tokenizer, generation config
    <url>/config.json            put last, once all of the others are there in their sizes

Stores have no rename. So an export counts when its ``config.json`` is there: nothing loads a model without it. The next
export to the same URL removes the files that ``.exporting`` of a killed or failed one names, and no others. A URL has
one writer at a time: an export whose marker was replaced by that of another fails. Durability of uploaded files is the
store's; every operation is tried several times.

The files are written as those of any export (`write`), in a staging folder that goes at the end. What a killed export
leaves there is removed by the next export to the same URL with the same staging folder.

Cost: room on the disk of the staging folder for one export, which is checked first; one write and one read of the
weights there, spread over the ranks. On several nodes all of them must see the staging folder, because rows of every
rank go into one file. Memory: what the backend takes for an upload (s3fs: ``max_concurrency`` parts of 50 MB) a rank.
"""

import json
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.atomic_folder import open_staging
from ...utils.distributed import (
    all_ranks_succeed,
    all_ranks_succeed_slowly,
    get_rank,
    get_world_size,
    rank_zero_decides,
)
from ...utils.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError, ConfigError, HoldfastError
from ...utils.files import bytes_digest, remove_or_log, require_free_space, walk_files
from ...utils.logging import get_logger
from ...utils.remote import RemoteFolder, without_secrets
from ...utils.write_errors import as_write_error
from ..api import HFExportOptions
from .sidecars import WEIGHT_SUFFIXES
from .write import plan_export, write_planned

logger = get_logger(__name__)

MARKER_NAME = ".exporting"
_COMMIT_NAME = "config.json"
_MIN_FILE_BYTES = 500 * 10**6
"""Smaller files would only cost more requests."""


def export_to_url(
    model: PreTrainedModel,
    url: str,
    options: HFExportOptions,
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
) -> None:
    """Put a Hugging Face folder at ``url``, of any fsspec backend; see `save_hf`, which calls this."""
    started, rank = time.monotonic(), get_rank(group)
    with all_ranks_succeed(f"preparing {without_secrets(url)}", group):
        remote = RemoteFolder(url, setting="path", error=CheckpointWriteError)
        plan = plan_export(model, options, rank, get_world_size(group), share_bytes=_MIN_FILE_BYTES)
    export = _Upload(remote)
    with _staging_folder(remote.url, plan.layout.total_bytes, options.staging_folder, group) as staging:
        rank_zero_decides(partial(export.begin, [file.name for file in plan.layout.files]), group)
        try:
            names = write_planned(plan, model, staging, options, group=group, gather_group=gather_group)
            rank_zero_decides(partial(export.announce, staging), group)
            all_ranks_succeed_slowly(f"uploading to {remote.url}", partial(export.put, staging, names), group)
            rank_zero_decides(partial(export.commit, staging), group)
        except BaseException as error:
            if rank == 0:
                # Unless the ranks have agreed, one that is on its own may complete a file yet.
                export.undo(agreed=isinstance(error, HoldfastError))
            raise
    seconds = time.monotonic() - started
    logger.info("exported to %s: %d bytes of weights in %.1f s", remote.url, plan.layout.total_bytes, seconds)


@contextmanager
def _staging_folder(
    url: str, needed_bytes: int, parent: str | os.PathLike[str] | None, group: dist.ProcessGroup | None
) -> Iterator[Path]:
    """Yield an empty folder with room for an export to ``url`` that all ranks see; it goes when the block ends.

    Raises:
        CheckpointWriteError: it cannot be made, or lacks room.
        ConfigError: this rank does not see it.
    """

    def make() -> Path:
        folder = Path(tempfile.gettempdir() if parent is None else parent).absolute()
        advice = f"make room, or export to {url} with a staging_folder that has more"
        require_free_space(folder, needed_bytes, advice)
        staging = open_staging(folder / f"holdfast-export-{bytes_digest(url.encode()).split(':')[1]}")
        staging.chmod(0o700)  # TMPDIR may be everybody's
        return staging

    staging = rank_zero_decides(make, group)
    try:
        with all_ranks_succeed(f"staging the export to {url}", group):
            if not staging.is_dir():
                raise ConfigError(
                    f"{staging}, which rank 0 made to stage the export to {url}, is not there on "
                    f"{socket.gethostname()}; on several nodes staging_folder must be a folder that all ranks see"
                )
        yield staging
    finally:
        if get_rank(group) == 0:
            remove_or_log(staging)


class _Upload:
    """The files of one export at a URL. All methods but `put` are for rank 0."""

    def __init__(self, remote: RemoteFolder) -> None:
        self._remote, self._committed = remote, False
        self._id = uuid.uuid4().hex
        self._names: list[str] = []  # in the marker: what may be there of this export

    def begin(self, weights: Sequence[str]) -> None:
        """Remove what a killed export left, and put the marker.

        Raises:
            CheckpointExistsError: there is a model, or something that would be written over.
        """
        with as_write_error(self._remote.url):
            if self._remote.size(_COMMIT_NAME) is not None:
                raise CheckpointExistsError(
                    f"{self._remote.url} has a {_COMMIT_NAME}, so there is a model, which is never written over; "
                    "choose another path"
                )
            left = _marked(self._remote.read(MARKER_NAME))
            self._require_absent(weights, left)
            if left:
                logger.warning("removing what an unfinished export left at %s: %d files", self._remote.url, len(left))
                self._remove(left)
            self._mark(weights)

    def announce(self, staging: Path) -> None:
        """Name all files of the staging folder in the marker.

        Raises:
            CheckpointExistsError: one of them would be written over.
        """
        names = list(walk_files(staging))
        with as_write_error(self._remote.url):
            self._require_alone()
            self._require_absent(names, [])
            self._mark(names)

    def put(self, staging: Path, names: Sequence[str]) -> None:
        """Upload this rank's files, but for the one that makes the export count."""
        with as_write_error(self._remote.url):
            for name in names:
                if name != _COMMIT_NAME:
                    self._remote.put_file(staging / name, name)

    def commit(self, staging: Path) -> None:
        """See that all is there, and make it count."""
        with as_write_error(self._remote.url):
            self._require_alone()
            found = self._remote.sizes("")
            sizes = {name: (staging / name).stat().st_size for name in self._names if name != _COMMIT_NAME}
            if lost := [(name, size) for name, size in sizes.items() if found.get(name) != size]:
                name, size = lost[0]
                raise CheckpointWriteError(
                    f"{self._remote.url}/{name} was put with {size} bytes, the store says {found.get(name, 'nothing')} "
                    f"({len(lost)} such files); nothing became visible"
                )
            self._remote.put_file(staging / _COMMIT_NAME, _COMMIT_NAME)
        self._committed = True
        try:
            self._remote.remove_file(MARKER_NAME)
        except CheckpointError as error:
            logger.warning("%s is complete, but its %s stays: %s", self._remote.url, MARKER_NAME, error)

    def undo(self, agreed: bool) -> None:
        """Remove what was put, as far as the store lets us; the marker stays unless ``agreed`` that nobody goes on.

        What counts already stays: somebody may be reading it.
        """
        if self._committed:
            return
        try:
            if not self._alone():
                return
            self._remove(self._names)
            if agreed:
                self._remote.remove_file(MARKER_NAME)
        except (CheckpointError, OSError) as error:
            logger.warning("parts of a failed export stay at %s until the next one: %s", self._remote.url, error)

    def _require_absent(self, names: Sequence[str], left: Sequence[str]) -> None:
        """See that nothing there but ``left`` would be written over, or be taken for weights of the export."""
        ours, cleared = ({PurePosixPath(name).parts[0] for name in some} for some in (names, left))
        present = set(self._remote.names()) - cleared
        if others := sorted(name for name in present if name in ours or name.endswith(WEIGHT_SUFFIXES)):
            raise CheckpointExistsError(
                f"{self._remote.url} has {others[:5]}, which no unfinished export left there, and an export would "
                "write over, or be taken for; remove them or choose another path"
            )

    def _mark(self, names: Sequence[str]) -> None:
        self._names = list(names)
        marker = json.dumps({"export": self._id, "files": self._names}, indent=1)
        self._remote.put_bytes(MARKER_NAME, marker.encode())

    def _alone(self) -> bool:
        """Whether the marker is still that of this export."""
        return self._id.encode() in (self._remote.read(MARKER_NAME) or b"")

    def _require_alone(self) -> None:
        if not self._alone():
            raise CheckpointWriteError(
                f"another export to {self._remote.url} has begun, and removed the files of this one; "
                "give each a URL of its own"
            )

    def _remove(self, names: Iterable[str]) -> None:
        """The config first: nothing that is half removed looks complete."""
        for name in sorted(names, key=lambda name: name != _COMMIT_NAME):
            self._remote.remove_file(name)


def _marked(marker: bytes | None) -> list[str]:
    """The names in a marker, which comes from elsewhere: none that leads out of the folder, none if it is damaged."""
    try:
        names = [] if marker is None else [str(name) for name in json.loads(marker)["files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [name for name in names if name and "" not in name.split("/") and not {".", ".."} & set(name.split("/"))]
