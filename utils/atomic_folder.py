"""A folder that all ranks write and that becomes visible at once, complete and on stable storage, or not at all."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from .distributed import all_ranks_succeed, get_rank, rank_zero_decides
from .errors import CheckpointExistsError
from .files import commit_folder, fsync_tree, is_free, make_durably, remove_or_log, staging_path
from .manifest import require_outside_commits
from .write_errors import as_write_error


@contextmanager
def staged_folder(
    final: str | os.PathLike[str], group: dist.ProcessGroup | None = None, *, replace: bool = False
) -> Iterator[Path]:
    """Yield a hidden sibling of ``final`` to write into; rename it to ``final`` when every rank left the block well.

    Every rank of ``group`` enters. Each fsyncs the files it writes; the folders are fsynced here. When any rank fails,
    all raise and the hidden folder is removed.

    Args:
        final: the folder that is to be.
        group: the ranks.
        replace: what is there already steps aside when the new folder is complete, and is removed after it. Who reads
            at that moment finds the old folder, the new one, or for an instant none; never a mixture.

    Raises:
        CheckpointExistsError: ``final`` exists and is no empty folder, without ``replace``.
        ConfigError: ``final`` lies in a committed folder.
        CheckpointWriteError: the file system refused.
    """
    staging = rank_zero_decides(lambda: (_open_over if replace else open_staging)(Path(final)), group)
    try:
        with all_ranks_succeed(f"writing {final}", group), as_write_error(final):
            yield staging
        rank_zero_decides(lambda: (_replace if replace else _commit)(staging, Path(final)), group)
    except BaseException:
        if get_rank(group) == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def open_staging(final: Path) -> Path:
    """Make a hidden sibling of ``final`` to write into; removes those of killed writers of the same folder.

    Raises:
        CheckpointExistsError: ``final`` exists and is no empty folder.
        ConfigError: ``final`` lies in a committed folder.
        CheckpointWriteError: the file system refused.
    """
    with as_write_error(final):
        if not is_free(final):
            raise CheckpointExistsError(f"{final} exists already and is never written over; choose another path")
        return _make_staging(final)


def _open_over(final: Path) -> Path:
    """`open_staging` where ``final`` may exist. What a writer that was killed between its two renames had put aside is
    put back first."""
    with as_write_error(final):
        if os.path.lexists(_aside(final)):
            _put_back(final)
        return _make_staging(final)


def _make_staging(final: Path) -> Path:
    require_outside_commits(final.parent)
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


def _replace(staging: Path, final: Path) -> None:
    if not os.path.lexists(final):
        _commit(staging, final)
        return
    with as_write_error(final):
        fsync_tree(staging)  # before anything of the old folder is touched
        os.rename(final, _aside(final))
        try:
            commit_folder(staging, final)
        except BaseException:
            _put_back(final)
            raise
    remove_or_log(_aside(final))


def _aside(final: Path) -> Path:
    return final.with_name(f".replaced-{final.name}")


def _put_back(final: Path) -> None:
    """Undo a replacement that was not finished; of one that was, remove the rest."""
    if os.path.lexists(final):
        remove_or_log(_aside(final))
    else:
        os.rename(_aside(final), final)
