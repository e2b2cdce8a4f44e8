"""`Journal`: what happened to a run, as one JSON object per line.

The leader appends, and reads it only to tell how much of the run's time was goodput.

    <trial>/journal.jsonl    {"event": "step", "time": 1790000000.1, "step": 12} ...

No run depends on the journal: a line that cannot be written is a warning, and nothing is fsynced. A
kill loses no line, a power cut may lose the last ones. A month of steps of ten seconds takes 20 MB.
"""

import atexit
import json
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...utils.errors import Preempted, Terminated
from ...utils.files import open_regular
from ...utils.json_lines import find_back, read_lines
from ...utils.logging import get_logger

logger = get_logger(__name__)

JOURNAL_NAME = "journal.jsonl"

Event = dict[str, Any]
"""A line of the journal."""

BOUNDS = ("attempt", "start", "stop", "loss", "failed", "returned", "end")
"""Kinds of events with which attempts begin and end."""
EVENTS = (*BOUNDS, "step", "save")
"""All kinds of events."""


class Journal:
    """The journal of one run. Events before `open` are dropped."""

    def __init__(self, trial_root: Path) -> None:
        self.path = trial_root.absolute() / JOURNAL_NAME
        self._fd: int | None = None
        self._torn = False
        self._failing = False
        self._started_by: int | None = None

    def open(self) -> None:
        """Begin to append. A second call does nothing."""
        if self._fd is not None:
            return
        try:
            self._fd = open_regular(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            end = os.lseek(self._fd, 0, os.SEEK_END)
            # A power cut may have cut the last line.
            self._torn = end > 0 and os.pread(self._fd, 1, end - 1) != b"\n"
        except OSError as error:
            self._warn(error)

    def note(self, event: str, **facts: Any) -> None:
        """Append an event. If it cannot be written, it is lost. Later events are still tried."""
        if self._fd is None:
            return
        # One write, so that a kill cannot tear the line. It begins by ending a torn one.
        try:
            entry = json.dumps({"event": event, "time": round(time.time(), 3), **facts})
            line = b"\n" * self._torn + entry.encode() + b"\n"
            self._torn = os.write(self._fd, line) < len(line)
        except OSError as error:
            self._warn(error)
        else:
            self._failing = False

    def begin(self, **facts: Any) -> None:
        """Append that an attempt begins to start its workers or to load. It may end before it
        reaches `start`.
        """
        self.note("attempt", host=socket.gethostname(), pid=os.getpid(), **facts)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Append the error that the block raises, for blocks whose errors `close` does not see."""
        try:
            yield
        except Preempted:
            raise  # recorded as a stop
        except Terminated:
            self.note("stop", reason="SIGTERM")
            self.note("end", how="exited", error=None)
            raise
        except BaseException as error:
            self.note("failed", error=_described(error))
            raise

    def start(self, **facts: Any) -> None:
        """Append that an attempt has loaded and trains. `close`, or the exit of the process,
        appends its end.
        """
        self.note("start", **facts)
        self._started_by = os.getpid()
        atexit.register(self._end_of_process)

    def close(self) -> None:
        """Append the end of the attempt. Called during the handling of an exception, it appends
        that error too.
        """
        self._end("closed", sys.exc_info()[1])

    def _end(self, how: str, error: BaseException | None) -> None:
        # An attempt that never loaded has no start, and so no end.
        if self._started_by is not None:
            self.note("end", how=how, error=None if error is None else _described(error))
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._started_by = None
        atexit.unregister(self._end_of_process)

    def _end_of_process(self) -> None:
        # A forked child inherits the registration. The error is the one that Python has printed.
        if os.getpid() == self._started_by:
            self._end("exited", getattr(sys, "last_value", None))

    def _warn(self, error: OSError) -> None:
        if not self._failing:
            logger.warning("cannot write %s: %s", self.path, error)
        self._failing = True


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:1000]
    except Exception:  # the class of a user may fail in __str__
        return type(error).__name__


def read_journal(
    trial_root: Path,
    events: Collection[str],
    *,
    ends_of: str | None = None,
    last_bytes: int | None = None,
    since: int = 0,
    until: int | None = None,
    must_read: bool = False,
) -> Iterator[Event]:
    """Yield the events of some kinds, oldest first. Yields nothing if there is no journal (a run of
    an older version).

    An event that lacks a fact, or has a fact of an unexpected type, is left out with a warning.

    Args:
        trial_root: folder of the run.
        events: kinds of events.
        ends_of: of consecutive events of this kind, yield only the first and the last.
        last_bytes: read only this many bytes at the end of the journal. None reads all.
        since: byte offset at which to begin.
        until: byte offset of the line at which to end. None means the end of the journal.
        must_read: raise OSError, after its warning, if the journal cannot be read.
    """
    path = trial_root / JOURNAL_NAME
    # Lazy: the file is opened when the first event is asked for, inside of ``try``.
    lines = read_lines(
        path,
        "event",
        like=_begins(events),
        ends_of=None if ends_of is None else _begins([ends_of]),
        last_bytes=last_bytes,
        since=since,
        until=until,
    )
    try:
        for event in lines:
            wrong = _wrong_fact(event)
            if wrong:
                logger.warning("%s: a line has %s, and is left out", path, wrong)
            else:
                yield event
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("cannot read %s: %s", path, error)
        if must_read:
            raise


def last_start(trial_root: Path) -> tuple[int, dict[str, Any]] | None:
    """Byte offset and event of the last attempt that has loaded. None if there is none."""
    try:
        for at in find_back(trial_root / JOURNAL_NAME, b'{"event": "start"'):
            event = next(read_journal(trial_root, ["start"], since=at), None)
            if event is not None:
                return at, event
    except OSError:  # `read_journal` has logged it, or there is no journal
        pass
    return None


def _begins(events: Collection[str]) -> re.Pattern[bytes]:
    kinds = "|".join(events).encode()
    return re.compile(rb'\{"event": "(?:' + kinds + rb')"')


_MOST = 1e11
"""Upper limit for times and counts. As seconds since the epoch it is a year that calendars can
still represent.
"""
_NUMBER = (int, float)
_FACTS: dict[str, type | tuple[type, ...]] = {
    "time": _NUMBER,
    "load_s": _NUMBER,
    "process_started": _NUMBER,
    "blocked_s": _NUMBER,
    "step": int,
    "pid": int,
    "world_size": int,
    "recorded": int,
    "total_steps": int,
    "supervised": bool,
    "failed_in_a_row": int,
    "host": str,
    "error": str,
    "reason": str,
    "how": str,
    "mirror": str,
    "keep": dict,
}
_NEEDED = {"step": ("step",), "save": ("blocked_s", "failed_in_a_row")}
"""Facts that events of a kind always have, besides the time."""


def _wrong_fact(event: dict[str, Any]) -> str | None:
    for name in ("time", *_NEEDED.get(event["event"], ())):
        if event.get(name) is None:
            return f"no {name}"
    # Facts that are unknown here may be those of a newer version.
    for name, fact in event.items():
        kinds = _FACTS.get(name)
        if kinds is None or fact is None:
            continue
        is_too_large = isinstance(fact, _NUMBER) and not -1 <= fact <= _MOST
        if not isinstance(fact, kinds) or is_too_large:
            return f"{name} {str(fact)[:50]!r}"
    return None
