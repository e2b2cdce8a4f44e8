"""The timeline of a process: what pieces of work that overlap, such as rollout tickets, do at each
moment, for the traces of chosen steps.

torch.profiler shows what a thread does. Tickets share one thread and mostly wait, so that it cannot
show them. Nothing is kept unless somebody is going to trace a step of this process.
"""

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from .logging import get_logger

logger = get_logger(__name__)

_EVENTS = b'"traceEvents": ['
_BASE = re.compile(rb'"baseTimeNanoseconds": (\d+)')
# above every process id of Linux, and no number of a GPU: these are the other processes of a trace
_PROCESS = 2**22 + 1
_FIRST_TRACK = _PROCESS + 1


class _Moment(NamedTuple):
    time_ns: int  # monotonic
    phase: str  # that begins then


class Life:
    """The phases of one piece of work, of which one is at each moment.

    Args:
        details: what a viewer shows with each phase.
    """

    def __init__(self, **details: Any) -> None:
        self.details = details
        self.moments: list[_Moment] = []
        self.ended_ns: int | None = None

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before. Nothing happens if it is the present one, or if
        the life has ended.
        """
        if self.ended_ns is not None:
            return
        if not self.moments or self.moments[-1].phase != phase:
            self.moments.append(_Moment(time.monotonic_ns(), phase))


class Timeline:
    """The lives that go on, and those that ended during the present trace."""

    def __init__(self) -> None:
        self._readers: WeakSet[object] = WeakSet()
        self._going_on: set[Life] = set()
        self._ended: list[Life] = []
        self._is_traced = False
        # Lives end on the thread of the rollouts, and a trace on that of training.
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether somebody is going to read lives. Others need not begin one."""
        return bool(self._readers)

    def turn_on(self, reader: object) -> None:
        """Keep lives until `turn_off`, or until ``reader`` is gone."""
        self._readers.add(reader)

    def turn_off(self, reader: object) -> None:
        """Keep no lives for ``reader``."""
        self._readers.discard(reader)

    def begin(self, life: Life, phase: str) -> None:
        """Add a life that begins with ``phase``."""
        life.enter(phase)
        with self._lock:
            self._going_on.add(life)

    def end(self, life: Life) -> None:
        """End a life. Without a trace it is forgotten."""
        life.ended_ns = time.monotonic_ns()
        with self._lock:
            self._going_on.discard(life)
            if self._is_traced:
                self._ended.append(life)

    def start_trace(self) -> None:
        """Keep lives that end from now on."""
        self._is_traced = True

    def stop_trace(self) -> list[Life]:
        """Return the lives that ended during the trace, and those that go on."""
        with self._lock:
            lives = [*self._ended, *self._going_on]
            self._ended = []
            self._is_traced = False
        return lives


timeline = Timeline()
"""The timeline of this process, as torch has one profiler a process."""


def add_lives(trace: Path, name: str, lives: list[Life], until_ns: int) -> None:
    """Add lives to a trace of torch.profiler, as the process ``name`` in the viewer. What comes
    after ``until_ns`` (monotonic) is left out.

    A life has a track for itself as long as it goes on: the first one that is free. Its times are
    those of the profiler: microseconds of the Unix time since ``baseTimeNanoseconds``. A file
    without this key, or without a list of events, stays as it is, with a warning.
    """
    if not lives:
        return
    contents = trace.read_bytes()
    base = _BASE.search(contents)
    head, found, tail = contents.partition(_EVENTS)
    if base is None or not found:
        logger.warning("no %s in %s: its format is not known", name, trace)
        return

    # Text goes in front of the first event, because a trace of a large step takes long to parse.
    to_unix_ns = time.time_ns() - time.monotonic_ns()
    events = _events(name, lives, until_ns, to_unix_ns - int(base[1]))
    lines = [json.dumps(event, default=str) + ",\n" for event in events]
    added = "".join(lines).encode()
    trace.write_bytes(head + found + added + tail)


def _events(
    name: str, lives: Iterable[Life], until_ns: int, shift_ns: int
) -> Iterator[dict[str, Any]]:
    """Yield events in the Chrome trace format. ``shift_ns`` makes their clock of monotonic time."""
    yield _name("process_name", name, _FIRST_TRACK)
    free_from_ns: list[int] = []
    for life in sorted(lives, key=_began_ns):
        # A life that goes on is cut where the trace ends.
        ended_ns = until_ns
        if life.ended_ns is not None:
            ended_ns = min(life.ended_ns, until_ns)

        # The first track that is free, or a new one.
        slot = 0
        while slot < len(free_from_ns) and free_from_ns[slot] > _began_ns(life):
            slot += 1
        track = _FIRST_TRACK + slot
        if slot == len(free_from_ns):
            free_from_ns.append(ended_ns)
            yield _name("thread_name", f"slot {slot}", track)
        free_from_ns[slot] = ended_ns

        # A phase ends where the next one begins.
        moments = [moment for moment in life.moments if moment.time_ns <= ended_ns]
        ends_ns = [moment.time_ns for moment in moments[1:]]
        ends_ns.append(ended_ns)
        for moment, end_ns in zip(moments, ends_ns, strict=True):
            yield {
                "ph": "X",
                "cat": "life",
                "name": moment.phase,
                "pid": _PROCESS,
                "tid": track,
                "ts": (moment.time_ns + shift_ns) / 1000,
                "dur": (end_ns - moment.time_ns) / 1000,
                "args": life.details,
            }


def _began_ns(life: Life) -> int:
    return life.moments[0].time_ns


def _name(what: str, name: str, track: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": what,
        "pid": _PROCESS,
        "tid": track,
        "args": {"name": name},
    }
