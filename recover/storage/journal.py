"""`Journal`: what happened to a run, for people: one JSON object a line, appended by the leader, never read by it.

    <trial>/journal.jsonl    {"event": "step", "time": 1790000000.1, "step": 12} ...

Nothing that a run does depends on it: a line that cannot be written is one warning, not an error, and nothing is
fsynced. A kill loses no line, a power cut may lose the last ones. A month of steps of ten seconds takes 20 MB.
"""

import atexit
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...utils.errors import Preempted
from ...utils.files import open_regular
from ...utils.json_lines import find_back, read_lines, to_line
from ...utils.logging import get_logger

logger = get_logger(__name__)

JOURNAL_NAME = "journal.jsonl"


class Journal:
    """The journal of one run; says nothing before `open`.

    Args:
        trial_root: the run's folder.
    """

    def __init__(self, trial_root: Path) -> None:
        self.path = trial_root / JOURNAL_NAME
        self._fd: int | None = None
        self._torn = False
        self._failing = False
        self._started_by: int | None = None

    def open(self) -> None:
        """Begin to append; a second call does nothing."""
        if self._fd is not None:
            return
        try:
            self._fd = open_regular(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            end = os.lseek(self._fd, 0, os.SEEK_END)
            self._torn = end > 0 and os.pread(self._fd, 1, end - 1) != b"\n"  # by a power cut
        except OSError as error:
            self._warn(error)

    def note(self, event: str, **facts: Any) -> None:
        """Append an event. One that cannot be written is lost; the next may find room again."""
        if self._fd is None:
            return
        try:
            line = b"\n" * self._torn + to_line({"event": event, "time": round(time.time(), 3), **facts})
            self._torn = os.write(self._fd, line) < len(line)
        except OSError as error:
            self._warn(error)
        else:
            self._failing = False

    def begin(self) -> None:
        """Append that an attempt begins: that its workers start, or that it loads. It may never come to `start`."""
        self.note("attempt", host=socket.gethostname(), pid=os.getpid())

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """`begin` and `telling`."""
        self.begin()
        with self.telling():
            yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Append the error that the block ends with, if any: of what `close` does not see."""
        try:
            yield
        except Preempted:
            raise  # noted as a stop
        except BaseException as error:
            self.note("failed", error=_described(error))
            raise

    def start(self, **facts: Any) -> None:
        """Append that an attempt has loaded and trains, whose end `close` appends, or else the end of the process."""
        self.note("start", **facts)
        self._started_by = os.getpid()
        atexit.register(self._end_of_process)

    def close(self) -> None:
        """Append the end of the attempt, with the error that ends it if this is called while one is handled."""
        self._end("closed", sys.exc_info()[1])

    def _end(self, how: str, error: BaseException | None) -> None:
        if self._started_by is not None:
            self.note("end", how=how, error=None if error is None else _described(error))
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._started_by = None
        atexit.unregister(self._end_of_process)

    def _end_of_process(self) -> None:
        """Nobody has closed the handler; a child of this process ends no attempt."""
        if os.getpid() == self._started_by:
            self._end("exited", getattr(sys, "last_value", None))

    def _warn(self, error: OSError) -> None:
        """Once for as long as it lasts."""
        if not self._failing:
            logger.warning("cannot write %s: %s", self.path, error)
        self._failing = True


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:1000]
    except Exception:  # of a user's class, whose text is its own code
        return type(error).__name__


def read_journal(
    trial_root: Path,
    events: Collection[str],
    *,
    ends_of: str | None = None,
    last_bytes: int | None = None,
    since: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the events of some kinds, oldest first; none where there is no journal (a run of an older version).

    An event that lacks a fact, or has one of another type than `Journal` writes, is left out with a warning.

    Args:
        trial_root: the run's folder.
        events: the kinds.
        ends_of: of events of this kind in a row, yield the first and the last.
        last_bytes: look only at so many bytes at the end of the journal; None: at all of them.
        since: where in the journal to begin.
    """
    path, row = trial_root / JOURNAL_NAME, None if ends_of is None else _begins([ends_of])
    try:
        for event in read_lines(path, "event", like=_begins(events), ends_of=row, last_bytes=last_bytes, since=since):
            if wrong := _wrong_fact(event):
                logger.warning("%s: a line has %s, and is left out", path, wrong)
            else:
                yield event
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("cannot read %s: %s", path, error)


def last_start(trial_root: Path) -> tuple[int, dict[str, Any]] | None:
    """Offset in the journal, and event, of the last attempt that has loaded; None if none has."""
    try:
        for at in find_back(trial_root / JOURNAL_NAME, b'{"event": "start"'):
            if (event := next(read_journal(trial_root, ["start"], since=at), None)) is not None:
                return at, event
    except OSError:  # `read_journal` has told, or there is none
        pass
    return None


def _begins(events: Collection[str]) -> re.Pattern[bytes]:
    return re.compile(rb'\{"event": "(?:' + "|".join(events).encode() + rb')"')


_MOST = 1e11
"""No time or count of a run is larger. As seconds of the epoch it is a year that calendars still know."""
_NUMBER, _COUNT, _TEXT = (int, float), (int,), (str,)
_FACTS: dict[str, tuple[type, ...]] = {
    **{"time": _NUMBER, "load_s": _NUMBER, "process_started": _NUMBER, "blocked_s": _NUMBER},
    **{"step": _COUNT, "pid": _COUNT, "world_size": _COUNT, "failed_in_a_row": _COUNT},
    **{"host": _TEXT, "error": _TEXT, "reason": _TEXT, "how": _TEXT, "mirror": _TEXT, "keep": (dict,)},
}
_NEEDED = {"step": ("step",), "save": ("blocked_s", "failed_in_a_row")}
"""Which facts the events of a kind always have, besides their time."""


def _wrong_fact(event: dict[str, Any]) -> str | None:
    for name in ("time", *_NEEDED.get(event["event"], ())):
        if event.get(name) is None:
            return f"no {name}"
    for name, kinds in _FACTS.items():
        fact = event.get(name)
        number = isinstance(fact, int | float)
        if fact is not None and (not isinstance(fact, kinds) or (number and not -1 <= fact <= _MOST)):
            return f"{name} {str(fact)[:50]!r}"
    return None
