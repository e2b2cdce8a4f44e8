"""What the wall time of a run was spent on, from its journal.

Every second of the run, from the start of its first process to the last line of its journal, is
counted once. The terms are those of Google's ml-goodput-measurement: goodput is the time of steps
that count, all other time is badput.
"""

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Literal, NamedTuple

from ...utils.files import open_regular
from .journal import EVENTS, JOURNAL_NAME, Event, read_journal

Kind = Literal["steps", "again", "blocked", "resources", "processes", "load", "ending", "down"]

_LONGEST_BYTES = 1 << 20
LOST = "lost_s"
"""Name of `WallTime.lost_s` in the statistics of steps."""
LABELS: dict[Kind, str] = {
    "steps": "steps that count",
    "again": "steps that were trained again",
    "blocked": "snapshots that blocked",
    "resources": "waiting for resources",
    "processes": "start of processes",
    "load": "load",
    "ending": "after the last step",
    "down": "down, or a step that was cut off",
}


def _no_time() -> dict[Kind, float]:
    return dict.fromkeys(LABELS, 0.0)


@dataclass
class WallTime:
    """Wall time of a run in seconds, by what it was spent on. ``seconds`` adds up to `total_s`."""

    seconds: dict[Kind, float] = field(default_factory=_no_time)
    n_attempts: int = 0  # that have loaded
    n_steps: int = 0  # that count
    n_again: int = 0  # steps that an attempt trained and a later one had to train again

    @property
    def total_s(self) -> float:
        """Wall time of the run, without the time since the last line of its journal."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the time that was spent on steps that count, 0 to 1."""
        return self.seconds["steps"] / max(self.total_s, 1e-9)

    @property
    def lost_s(self) -> float:
        """Time that starts and kills have cost: steps trained again, and until `load` returned."""
        kinds: tuple[Kind, ...] = ("again", "resources", "processes", "load", "down")
        return sum(self.seconds[kind] for kind in kinds)

    def statistics(self) -> dict[str, float]:
        """``goodput`` and ``lost_s``, as they are logged with each step."""
        return {"goodput": round(self.goodput, 4), LOST: round(self.lost_s, 3)}


class RunningTime:
    """Wall time of a run that goes on. Each look reads only the lines that the journal has got
    since the last one.

    Example::

        spent = RunningTime(trial_root)
        print(spent.read().goodput)
    """

    def __init__(self, trial_root: Path) -> None:
        self._trial_root = trial_root.absolute()
        self._account = TimeAccount()
        self._n_bytes = 0  # of the journal, that have been read: whole lines

    def read(self) -> WallTime:
        """Return the time up to the last line of the journal. Nothing without a journal.

        A journal that has become shorter is another one, and is read from its start. Lines that
        cannot be read are tried again by the next call.
        """
        path = self._trial_root / JOURNAL_NAME
        spent = self._account.spent
        n_added = 0
        try:
            journal = path.stat()
            if not S_ISREG(journal.st_mode) or journal.st_size == self._n_bytes:
                return spent
            if journal.st_size < self._n_bytes:
                self._forget()
            end = _end_of_lines(path, self._n_bytes, journal.st_size)
            new = read_journal(
                self._trial_root, EVENTS, since=self._n_bytes, until=end, must_read=True
            )
            for event in new:
                self._account.add(event)
                n_added += 1
        except OSError:
            if n_added:
                self._forget()
            return spent
        self._n_bytes = end
        return self._account.spent

    def _forget(self) -> None:
        self._account = TimeAccount()
        self._n_bytes = 0

    def with_step(self) -> WallTime:
        """`read`, and the time since then as a part of a step that counts: for the statistics of a
        step before its `dump`.
        """
        self.read()
        return self._account.with_step(time.time())


def _end_of_lines(path: Path, since: int, until: int) -> int:
    """Where the last whole line between two byte offsets ends. ``since`` if there is none."""
    start = max(since, until - _LONGEST_BYTES)
    with open(open_regular(path), "rb", buffering=0) as file:
        tail = os.pread(file.fileno(), until - start, start)
    newline = tail.rfind(b"\n")
    return since if newline < 0 else start + newline + 1


class _Step(NamedTuple):
    step: int
    seconds: float


class TimeAccount:
    """Adds up the events of a journal.

    Attributes:
        spent: the time up to the last event.
    """

    def __init__(self) -> None:
        self.spent = WallTime()
        self._cursor: float | None = None  # all time up to here has been spent on something
        self._steps: list[_Step] = []  # that count so far
        self._asked_at: float | None = None  # when a supervisor began the next attempt
        self._began_at: float | None = None  # when the next attempt began
        self._training = False  # whether an attempt has loaded and has not ended

    def add(self, event: Event) -> None:
        """Add the next event, of the kinds `EVENTS`.

        Where events are missing, their time goes to what the next one ends. If the clock was set
        back, the interval in which that happened is lost.
        """
        time = event["time"]
        if self._cursor is not None and time < self._cursor:
            self._cursor = time  # the clock was set back
        match event["event"]:
            case "attempt":
                self._begin_attempt(time, bool(event.get("supervised")))
            case "start":
                self._start(event)
            case "step":
                self._spend_step(event["step"], time)
            case "save":
                self._spend("blocked", time)
            case "end" | "failed" | "returned" if self._training:
                self._spend("ending", time)
                self._training = False
            case "loss" | "failed" if not self._training:
                # The start of an attempt that did not get as far as its first step.
                if self._began_at is not None:
                    self._spend("down", self._began_at)
                self._spend("processes", time)
                self._asked_at = None
                self._began_at = None
            case "loss":
                self._spend("down", time)
                self._training = False

    def with_step(self, until: float) -> WallTime:
        """`spent`, and the time from there to ``until`` as a part of a step that counts."""
        spent = replace(self.spent, seconds=dict(self.spent.seconds))
        if self._cursor is not None:
            spent.seconds["steps"] += max(0.0, until - self._cursor)
        return spent

    def _begin_attempt(self, time: float, supervised: bool) -> None:
        # Time up to here is spent when `start` says when the process began.
        self._training = False
        if self._began_at is None:
            self._began_at = time
        if supervised:
            self._asked_at = time
        if self._cursor is None and supervised:
            self._cursor = time

    def _start(self, event: Event) -> None:
        """Spend the time since the previous attempt, and take back the steps that were lost."""
        time = event["time"]
        load_at = time - (event.get("load_s") or 0.0)
        process_at = event.get("process_started") or load_at
        begin = process_at
        if self._asked_at is not None:
            begin = self._asked_at
        if self._cursor is None:
            self._cursor = begin

        # Phases in the order of their ends. Time before the cursor is counted already.
        self._spend("down", begin)
        self._spend("resources", process_at)
        self._spend("processes", load_at)
        self._spend("load", time)
        self._asked_at = None
        self._began_at = None
        self._training = True
        self.spent.n_attempts += 1

        # All steps after the resumed one are lost.
        resumed = event.get("step")
        last = -1 if resumed is None else resumed
        while self._steps and self._steps[-1].step > last:
            seconds = self._steps.pop().seconds
            self.spent.seconds["steps"] -= seconds
            self.spent.seconds["again"] += seconds
            self.spent.n_steps -= 1
            self.spent.n_again += 1

    def _spend_step(self, step: int, time: float) -> None:
        seconds = self._spend("steps", time)
        self._steps.append(_Step(step, seconds))
        self.spent.n_steps += 1
        self._training = True

    def _spend(self, kind: Kind, until: float) -> float:
        """Spend the time from the cursor to a moment. Returns its seconds."""
        if self._cursor is None:
            self._cursor = until
        seconds = max(0.0, until - self._cursor)
        self._cursor += seconds
        self.spent.seconds[kind] += seconds
        return seconds
