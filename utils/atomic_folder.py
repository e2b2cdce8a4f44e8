"""Folders that all ranks write and that become visible at once, complete and on stable storage, or
not at all.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .distributed import RankGroup, all_ranks_succeed, get_rank, rank_zero_decides
from .errors import CheckpointExistsError
from .files import (
    StrPath,
    as_write_error,
    commit_folder,
    fsync_tree,
    is_free,
    make_durably,
    remove_or_log,
    staging_path,
)
from .manifest import require_outside_commits


@contextmanager
def staged_folder(
    final: StrPath, group: RankGroup = None, *, replace: bool = False
) -> Iterator[Path]:
    """Yield a hidden sibling of ``final`` to write into. Rename it to ``final`` after every rank
    has left the block.

    Every rank of ``group`` enters the block and fsyncs the files that it writes. The folders are
    fsynced here. If any rank fails, all ranks raise and the hidden folder is removed.

    Args:
        final: name of the finished folder.
        group: ranks that write.
        replace: allow ``final`` to exist. The old folder is renamed when the new one is complete,
            and removed afterwards. A reader finds the old folder, the new one, or for an instant
            none, and never a mixture.

    Raises:
        CheckpointExistsError: ``final`` is not empty and ``replace`` is False.
        ConfigError: ``final`` lies in a committed folder.
        CheckpointWriteError: the file system refused.
    """
    open_hidden = _open_over if replace else open_staging
    finish = _replace if replace else _commit
    staging = rank_zero_decides(lambda: open_hidden(Path(final)), group)
    try:
        with all_ranks_succeed(f"writing {final}", group), as_write_error(final):
            yield staging
        rank_zero_decides(lambda: finish(staging, Path(final)), group)
    except BaseException:
        if get_rank(group) == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def open_staging(final: Path) -> Path:
    """Create a hidden sibling of ``final`` to write into, and remove those that killed writers of
    ``final`` left.

    Raises as `staged_folder`.
    """
    with as_write_error(final):
        if not is_free(final):
            raise CheckpointExistsError(
                f"{final} exists already and is never written over; choose another path"
            )
        return _make_staging(final)


def _open_over(final: Path) -> Path:
    with as_write_error(final):
        if os.path.lexists(_aside(final)):  # the replacement of a writer that was killed
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
    # Undo an unfinished replacement, or remove the old folder after a finished one.
    if os.path.lexists(final):
        remove_or_log(_aside(final))
    else:
        os.rename(_aside(final), final)
