"""Whether a job uses a run: what its lock says and, where a lock cannot be relied upon, what its journal does.

A file system without locks says nothing. One whose locks stay on the node that took them (NFS mounted with ``nolock``,
some of FUSE) says that a lock is free which another node holds, and cannot be told from others. So it is not known
whether a job goes on that has written to the journal from another node a moment ago, and nothing of its end.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import click

from ...utils.errors import ConfigError
from ...utils.folder_lock import probe_lock
from ..storage.journal import JOURNAL_NAME
from .attempts import last_attempt
from .output import seconds_text
from .places import LOCK_NAME

FRESH_S = 900.0
"""A job that was killed on another node is taken to be gone when it has written nothing for so long; a step may take a
few minutes."""

no_job_option = click.option(
    "--no-job", is_flag=True, help="No job uses the run: for a file system whose locks cannot tell."
)


@dataclass(frozen=True)
class Use:
    """What is known of a run's use.

    Attributes:
        held: a job uses it.
        doubt: why its lock does not tell whether one does; None: it does.
    """

    held: bool
    doubt: str | None = None

    @property
    def known(self) -> bool | None:
        """Whether a job uses it; None where that cannot be known."""
        return True if self.held else None if self.doubt else False


def use_of(trial_root: Path) -> Use:
    """What lock and journal of a run say now; nothing is made or locked by asking."""
    if locked := probe_lock(trial_root / LOCK_NAME):
        return Use(True)
    last, no_locks = last_attempt(trial_root), locked is None
    where = f"the lock in {trial_root} cannot be asked" if no_locks else f"the lock in {trial_root} is free"
    if last is None:
        unknown = no_locks and not (trial_root / JOURNAL_NAME).exists()
        return Use(False, f"{where}, and there is no journal" if unknown else None)
    if last.ended is not None:
        return Use(False)
    if last.host == socket.gethostname():
        if no_locks and _runs(last.pid):
            return Use(True, f"{where}, and pid {last.pid}, that of the last job, runs on this node")
        return Use(False)
    age_s = time.time() - (trial_root / JOURNAL_NAME).stat().st_mtime
    if not no_locks and age_s > FRESH_S:
        return Use(False)
    reach = "" if no_locks else ", which may not reach other nodes"
    return Use(
        False,
        f"{where}{reach}, and a job on {last.host} (pid {last.pid}) has written to {JOURNAL_NAME} "
        f"{seconds_text(max(age_s, 0.0))} ago, and nothing of its end",
    )


def require_unused(trial_root: Path, no_job: bool) -> None:
    """Raise `ConfigError` where it cannot be known that no job uses a run, unless the user does."""
    if not no_job and (doubt := use_of(trial_root).doubt) is not None:
        raise ConfigError(f"whether a job uses the run cannot be known: {doubt}. If none does, say so with --no-job")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return pid > 0
