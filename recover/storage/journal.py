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
from ...utils.json_lines import read_lines, to_line
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
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
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
    trial_root: Path, events: Collection[str], *, last_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """The events of some kinds, oldest first; none where there is no journal (a run of an older version)."""
    wanted = re.compile(rb'\{"event": "(?:' + "|".join(events).encode() + rb')"')
    try:
        yield from read_lines(trial_root / JOURNAL_NAME, "event", like=wanted, last_bytes=last_bytes)
    except (FileNotFoundError, IsADirectoryError):
        return
