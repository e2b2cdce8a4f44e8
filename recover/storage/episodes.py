"""`EpisodeLogs`: one `RecordLog` for each registered object that follows one, in the leader.

    <trial>/recover/episodes/<registered name>/<number>-<id>-<parent>.log

The truth about unfinished episodes is a generation plus the records since its capture. The order,
and what a kill leaves:

1. `EpisodeLogs.follow`, after a restore: the object reads the file that its state names and all
   descendants, and begins a new file. Reading again finds the same.
2. `EpisodeLogs.rotate`, before anything is captured: records from now on are in a new file, whose
   id is in the captured state. If the generation is never committed, the file still descends from
   the one before.
3. `EpisodeLogs.keep`, after the commit: files older than the one of the generation *before* are
   deleted. So the newest two generations have their records.

Only the job that holds the lock of the folder calls these methods. One that has lost it appends to
a file that nobody else writes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote, unquote

from ...utils.record_log import RecordLog

FOLDER = "episodes"
SOON_S = 5.0
"""How long an end without waiting is held up by a disk that hangs."""


@runtime_checkable
class FollowsLog(Protocol):
    """A registered object whose state is a snapshot plus the records of a log since then."""

    def follow_log(self, log: RecordLog | None, went_back: bool) -> None:
        """Read the log and begin to append. Called once by every `RecoverHandler.load`, after
        ``load_state_dict`` if there was something to restore.

        The object calls ``log.read(parent)`` and ``log.start(parent)``. ``parent`` is the id from
        the restored state, None if that state names no log, and `NO_PARENT` in a fresh run. From
        now on its ``state_dict`` holds ``log.id``.

        Args:
            log: not started yet. None if the configuration wants no log, and in processes other
                than the leader. It is closed by the handler.
            went_back: whether ``recover.resume_path`` chose the generation, so that the run may
                leave the records since then for another branch.
        """
        ...


class EpisodeLogs:
    """The logs of one run.

    Args:
        recover_root: folder of the generations.
        sync_s: see `RecordLog`. None makes no logs.
    """

    def __init__(self, recover_root: Path, sync_s: float | None) -> None:
        self.root = recover_root.absolute() / FOLDER
        self._sync_s = sync_s
        self._logs: dict[str, RecordLog] = {}
        self._kept: dict[str, str] = {}  # ids that the newest generation names

    def follow(self, stateful: Mapping[str, Any], is_leader: bool, went_back: bool) -> None:
        """Give every object in ``stateful`` that follows a log its own one. Every caller of the
        handler calls it, and only the leader has logs.

        Raises OSError if a folder cannot be listed, and what an object raises.
        """
        self.close(SOON_S)
        for name, thing in stateful.items():
            if not isinstance(thing, FollowsLog):
                continue
            if not is_leader or self._sync_s is None:
                thing.follow_log(None, went_back)
                continue

            # The object reads the log from the id in its state on, and starts it there.
            folder = self.root / folder_name(name)
            log = RecordLog(folder, self._sync_s)
            self._logs[name] = log
            thing.follow_log(log, went_back)
            self._kept[name] = log.parent

    @property
    def n_read(self) -> int | None:
        """Number of records that `follow` has read. None without a log."""
        if not self._logs:
            return None
        n_read = 0
        for log in self._logs.values():
            n_read += log.counts.records
        return n_read

    def rotate(self) -> dict[str, str]:
        """Begin the next file of each log. Returns their ids by registered name. Never fails or
        waits.
        """
        ids = {}
        for name, log in self._logs.items():
            ids[name] = log.rotate()
        return ids

    def keep(self, ids: Mapping[str, str]) -> None:
        """Delete files that no longer matter, after the commit of a generation that names ``ids``.

        A file that cannot be deleted is logged and stays.
        """
        for name, log_id in ids.items():
            log = self._logs.get(name)
            if log is None:  # closed meanwhile
                continue
            log.delete_before(self._kept[name])
            self._kept[name] = log_id

    def close(self, timeout_s: float) -> None:
        """Sync and close all logs, each within ``timeout_s``. Their objects may still append, in
        vain.
        """
        for log in self._logs.values():
            log.close(timeout_s)
        self._logs.clear()


def folder_name(name: str) -> str:
    """Return the folder of a registered name: percent-encoded, so that it is one visible name."""
    encoded = quote(name, safe="")
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    return encoded or "%"


def registered_name(folder: str) -> str:
    """Return the name that `folder_name` encoded."""
    if folder == "%":
        return ""
    return unquote(folder)
