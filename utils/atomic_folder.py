"""A folder that all ranks write and that becomes visible at once, complete and on stable storage, or not at all."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from .distributed import all_ranks_succeed, get_rank, rank_zero_decides
from .errors import CheckpointError, CheckpointExistsError, CheckpointWriteError
from .files import commit_folder, make_durably, remove_or_log, staging_path


@contextmanager
def staged_folder(final: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Yield a hidden sibling of ``final`` to write into; rename it to ``final`` when every rank left the block well.

    Every rank of ``group`` enters. Each fsyncs the files it writes; the folders are fsynced here. When any rank fails,
    all raise and the hidden folder is removed.

    Raises:
        CheckpointExistsError: ``final`` exists; nothing is ever written over.
        CheckpointWriteError: the file system refused.
    """
    staging = rank_zero_decides(lambda: open_staging(Path(final)), group)
    try:
        with all_ranks_succeed(f"writing {final}", group), as_write_error(final):
            yield staging
        rank_zero_decides(lambda: _commit(staging, Path(final)), group)
    except BaseException:
        if get_rank(group) == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def open_staging(final: Path) -> Path:
    """Make a hidden sibling of ``final`` to write into; removes those of killed writers of the same folder.

    Raises:
        CheckpointExistsError: ``final`` exists.
        CheckpointWriteError: the file system refused.
    """
    if os.path.lexists(final):
        raise CheckpointExistsError(f"{final} exists already and is never written over; choose another path")
    with as_write_error(final):
        make_durably(final.parent)
        for entry in os.listdir(final.parent):
            if re.fullmatch(rf"\.staging-{re.escape(final.name)}-[0-9a-f]{{12}}", entry):
                remove_or_log(final.parent / entry)
        staging = staging_path(final)
        staging.mkdir()
    return staging


def _commit(staging: Path, final: Path) -> None:
    with as_write_error(final):
        commit_folder(staging, final)


@contextmanager
def as_write_error(final: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the file system says in the block into a `CheckpointWriteError` that names ``final``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        outcome = "" if os.path.lexists(final) else "; nothing became visible"
        raise CheckpointWriteError(f"cannot write {final}: {error.strerror or error}{outcome}") from error
