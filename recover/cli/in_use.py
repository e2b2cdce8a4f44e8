"""Whether a job uses a run now, and the lock for commands that must not meet one.

The lock of a run does not always tell whether a job uses it. A file system without locks says
nothing. On some file systems (NFS with ``nolock``, some FUSE ones) a lock stays on its node, so
another node sees it as free. `use_of` therefore reads the journal too: if a job on another node
wrote to it recently and noted no end, the use is unknown.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from ...utils.errors import ConfigError
from ...utils.folder_lock import FolderLock, probe_lock
from ..storage.generations import LOCK_NAME
from ..storage.journal import JOURNAL_NAME
from .attempts import AttemptRecord, last_attempt
from .output import seconds_text

FRESH_S = 900.0
"""A job on another node counts as gone after writing nothing for this long. One step may take
several minutes.
"""

no_job_option = click.option(
    "--no-job",
    is_flag=True,
    help="Confirm that no job uses the run. Needed where the lock of the run cannot tell.",
)


@dataclass(frozen=True)
class Use:
    """Whether a job uses a run, as far as it is known."""

    held: bool  # a job uses the run
    doubt: str | None = None  # why the lock cannot tell. None if it can

    @property
    def known(self) -> bool | None:
        """Whether a job uses the run. None if that is unknown."""
        if self.held:
            return True
        return None if self.doubt else False


def use_of(trial_root: Path, last: AttemptRecord | None = None) -> Use:
    """Ask the lock and the journal of a run, without changing or locking anything.

    ``last`` is the last attempt, if the caller has read the journal before.
    """
    journal = trial_root / JOURNAL_NAME
    locked = probe_lock(trial_root / LOCK_NAME)
    if locked:
        return Use(True)

    # The lock says that nobody has it, or, on a file system without locks, nothing.
    no_locks = locked is None
    where = f"the lock in {trial_root} is free"
    if no_locks:
        where = f"the lock in {trial_root} cannot be asked"

    # The journal says whether the last job has ended.
    try:
        last = last or last_attempt(trial_root)
    except OSError as error:
        return Use(False, f"{where}, and the journal cannot be read: {error}")
    if last is None:
        doubt = f"{where}, and no journal tells of an attempt" if no_locks else None
        return Use(False, doubt)
    if last.ended is not None:
        return Use(False)

    # A job of this node would hold the lock, or is to be seen among the processes.
    if last.host == socket.gethostname():
        if no_locks and _runs(last.pid):
            return Use(
                True, f"{where}, and pid {last.pid}, that of the last job, runs on this node"
            )
        return Use(False)

    # Of a job on another node, only its traces are to be seen.
    age_s = time.time() - journal.stat().st_mtime
    if not no_locks and age_s > FRESH_S:
        return Use(False)
    reach = "" if no_locks else ", which may not reach other nodes"
    return Use(
        False,
        f"{where}{reach}, and a job on {last.host} (pid {last.pid}) has written to {JOURNAL_NAME} "
        f"{seconds_text(max(age_s, 0.0))} ago, and nothing of its end",
    )


def require_unused(trial_root: Path, no_job: bool) -> None:
    """Raise `ConfigError` if it is unknown whether a job uses the run, unless the user confirms
    that none does.
    """
    if no_job:
        return
    doubt = use_of(trial_root).doubt
    if doubt is not None:
        raise ConfigError(
            f"whether a job uses the run cannot be known: {doubt}. If none does, say so with "
            "--no-job"
        )


@contextmanager
def lock_run(trial_root: Path) -> Iterator[None]:
    """Hold the lock of a run during the block. Raises `FolderInUseError` if a job holds it."""
    lock = FolderLock(trial_root / LOCK_NAME)
    lock.acquire(0.0)
    try:
        yield
    finally:
        lock.release()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user
        return True
    return pid > 0
