"""Export a sharded model to a URL: write a Hugging Face folder to a local disk, then put it file by file.

Stores have no rename. So ``config.json`` is put last, when the store says that all other files are there in their
sizes: nothing loads a model without it. Nothing that is there is written over, except files of an export that failed or
was killed, which is known by its ``.exporting`` (put first, removed last). The same export again puts every file again.
A URL has one writer at a time.

The files are written as those of any export (`write`), in a staging folder that is removed at the end. The next export
to the same URL with the same staging folder removes what a killed export left there.

Cost: room for one export on the disk of the staging folder, which is checked first; one write and one read of the
weights there, spread over the ranks. On several nodes all of them must see the staging folder, because rows of every
rank go into one file. Memory: what the backend takes for an upload (s3fs: ``max_concurrency`` parts of 50 MB) a rank.
"""

import os
import socket
import tempfile
import time
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
from ...utils.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError, ConfigError
from ...utils.files import bytes_digest, remove_or_log, require_free_space, walk_files
from ...utils.logging import get_logger
from ...utils.remote import RemoteFolder, without_secrets
from ...utils.write_errors import as_write_error
from ..api import HFExportOptions
from .safetensors_layout import INDEX_NAME
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
    started = time.monotonic()
    with all_ranks_succeed(f"preparing {without_secrets(url)}", group):
        remote = RemoteFolder(url, setting="path", error=CheckpointWriteError)
        plan = plan_export(model, options, get_rank(group), get_world_size(group), share_bytes=_MIN_FILE_BYTES)
    with _staging_folder(remote.url, plan.layout.total_bytes, options.staging_folder, group) as staging:
        weights = [file.name for file in plan.layout.files] + [INDEX_NAME] * (plan.layout.index is not None)
        rank_zero_decides(partial(_require_absent, remote, weights), group)  # before the weights are written
        names = write_planned(plan, model, staging, options, group=group, gather_group=gather_group)
        rank_zero_decides(partial(_begin, remote, staging), group)
        all_ranks_succeed_slowly(f"uploading to {remote.url}", partial(_put, remote, staging, names), group)
        rank_zero_decides(partial(_commit, remote, staging), group)
    seconds = time.monotonic() - started
    logger.info("exported to %s: %d bytes of weights in %.1f s", remote.url, plan.layout.total_bytes, seconds)


@contextmanager
def _staging_folder(
    url: str, needed_bytes: int, parent: str | os.PathLike[str] | None, group: dist.ProcessGroup | None
) -> Iterator[Path]:
    """Yield an empty folder with room for an export to ``url`` that all ranks see; it goes when the block ends."""

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


def _require_absent(remote: RemoteFolder, names: Iterable[str]) -> None:
    """Raise `CheckpointExistsError` if files would be written over, or weights be mixed with those of the export."""
    with as_write_error(remote.url):
        present = set(remote.names())
    if _COMMIT_NAME in present:
        raise CheckpointExistsError(
            f"{remote.url} has a {_COMMIT_NAME}, so there is a model, which is never written over; choose another path"
        )
    ours = {PurePosixPath(name).parts[0] for name in names}
    if others := sorted(
        name
        for name in present
        if (name in ours and MARKER_NAME not in present) or (name not in ours and name.endswith(WEIGHT_SUFFIXES))
    ):
        raise CheckpointExistsError(
            f"{remote.url} has {others[:5]}, which an export would write over, or be mixed with; remove them or choose "
            "another path"
        )


def _begin(remote: RemoteFolder, staging: Path) -> None:
    _require_absent(remote, walk_files(staging))
    with as_write_error(remote.url):
        remote.put_bytes(MARKER_NAME, b"")


def _put(remote: RemoteFolder, staging: Path, names: Sequence[str]) -> None:
    """Upload this rank's files, except the one that makes the export count."""
    with as_write_error(remote.url):
        for name in names:
            if name != _COMMIT_NAME:
                remote.put_file(staging / name, name)


def _commit(remote: RemoteFolder, staging: Path) -> None:
    """Check that all files are there, and make them count."""
    with as_write_error(remote.url):
        found = remote.sizes("")
        sizes = {name: (staging / name).stat().st_size for name in walk_files(staging) if name != _COMMIT_NAME}
        if lost := [(name, size) for name, size in sizes.items() if found.get(name) != size]:
            name, size = lost[0]
            raise CheckpointWriteError(
                f"{remote.url}/{name} was put with {size} bytes, the store says {found.get(name, 'nothing')} "
                f"({len(lost)} such files); nothing became visible"
            )
        remote.put_file(staging / _COMMIT_NAME, _COMMIT_NAME)
    try:
        remote.remove_file(MARKER_NAME)
    except CheckpointError as error:
        logger.warning("%s is complete, but its %s stays: %s", remote.url, MARKER_NAME, error)
