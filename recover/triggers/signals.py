"""Reasons to snapshot and stop: a signal, a notice from outside, or a deadline.

A signal handler runs between any two instructions of the main thread (a call into C, such as a collective, delays it).
It therefore only sets an attribute and writes to standard error. Everything else happens at the next step boundary, in
`StopRequests.due`, which costs microseconds, and at most once a second the time of the notices.

Forked children (the workers of a data loader) get the default handlers back inside `fork`, so that they end at once.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from types import FrameType
from typing import Any

from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ...utils.processes import process_started_at

logger = get_logger(__name__)

UNMEASURED_SAVE_S = 60.0
"""Assumed duration of a save before one has been measured."""
SAVE_MARGIN = 1.5
"""A save may take this many times the longest recent one: storage is slowest while many jobs are preempted."""
SLACK_S = 5.0
"""Additional seconds, to agree on the stop and to exit."""
_NOTICE_POLL_S = 1.0

_CRASHES = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}
"""Signals that cannot be caught, or after which a snapshot is worthless."""
_INTERRUPTED = b"\nholdfast: finishing the step, then a snapshot; Ctrl-C again stops at once\n"

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*")
_FORMS = (
    "a duration from the start of the process with its units ('90m', '3h30m', '2d', '5400s'), or a time "
    "('2026-11-20T18:00', local unless it has an offset as '+01:00')"
)


@dataclass(frozen=True)
class StopNotice:
    """A request to stop the run.

    Attributes:
        reason: text for the log and the user.
        by: Unix time when the process will be ended, if known.
    """

    reason: str
    by: float | None = None

    def __str__(self) -> str:
        return self.reason if self.by is None else f"{self.reason}, which ends the process at {_local_time(self.by)}"


class StopRequests:
    """Collects requests to stop, and decides at every step boundary whether the run must.

    Args:
        signals: names such as ``"SIGTERM"``. Earlier handlers are not called, because most would end the process.
            `uninstall` restores them.
        must_save_by: a deadline for `parse_deadline`, or None.
        notices: functions that report a request from outside, called at most once a second. Each must return soon and
            not raise.
        clock: returns Unix time.

    Raises:
        ConfigError: a signal is unknown or cannot be caught, or ``must_save_by`` is not a deadline, or it was over when
            this process started. A deadline that passed later, during a recovery, stops the run at its next step.
    """

    def __init__(
        self,
        signals: Sequence[str],
        must_save_by: str | None,
        notices: Sequence[Callable[[], StopNotice | None]] = (),
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._signals = [_signal_number(name) for name in signals]
        self._must_save_by = must_save_by
        self.deadline = None if must_save_by is None else parse_deadline(must_save_by, process_started_at())
        self._notices, self._clock = tuple(notices), clock
        self._noticed_s = -_NOTICE_POLL_S
        self._requested: StopNotice | None = None
        self._interrupted = False
        self._unanswered: signal.Signals | None = None
        self._granted = False
        self._listening = False
        self._replaced: dict[signal.Signals, Any] = {}
        self._pid, self._main_thread = os.getpid(), 0

    def install(self) -> None:
        """Handle the signals from now on. A second call, or a call outside the main thread, does nothing."""
        if threading.current_thread() is not threading.main_thread():
            logger.debug("not in the main thread: signals are left to it")
            return
        if self._listening:
            return
        _watch_forks()
        self._pid, self._main_thread = os.getpid(), threading.get_ident()
        self._listening = True
        _installed.add(self)
        for number in self._signals:
            if (before := signal.signal(number, self._on_signal)) != self._on_signal:
                self._replaced[number] = before

    def uninstall(self) -> None:
        """Restore the earlier handlers, except where another one has replaced ours.

        Python allows this in the main thread only. After a call from another thread, the next signal is passed on to
        the earlier handler, and that handler is restored at that moment.

        A signal that no step boundary has answered is sent again, to the earlier handlers: a process that was asked to
        end must not live on because a worker was lost at the same time and the job starts another attempt.
        """
        if not self._listening:
            return
        self._listening = False
        if threading.current_thread() is threading.main_thread():
            self._put_back()
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None:
            logger.warning("%s came too late for a snapshot and is passed on", unanswered.name)
            signal.pthread_kill(self._main_thread, unanswered)

    def _put_back(self) -> None:
        for number, before in self._replaced.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if before is None else before)  # None: not installed from Python
        _installed.discard(self)

    def _pass_on(self, number: signal.Signals, frame: FrameType | None) -> None:
        self._put_back()
        before = self._replaced.get(number)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def give_up_in_child(self) -> None:
        """Restore the default handlers in a forked child.

        Python handlers only run between two instructions, so a child in a long call or a blocking read would not end
        when its parent ends it.
        """
        for number, before in self._replaced.items():
            if number != signal.SIGINT and signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN if before == signal.SIG_IGN else signal.SIG_DFL)
        self._unanswered = None

    def request(self, notice: StopNotice) -> None:
        """Request a stop at the next step boundary, from any thread or signal handler. The first reason is kept."""
        self._requested = self._requested or notice

    def grant(self) -> None:
        """Note that the run stops at this step boundary, so that later signals need no answer."""
        self._granted = True
        self._unanswered = None

    def due(self, save_s: float, step_s: float, n_saves: int = 1) -> str | None:
        """Return the reason to snapshot and stop now, before another step. None if the run may continue.

        A signal, a request or a notice stops the run at once. A deadline stops it if a save that starts after one more
        step might not end in time.

        Args:
            save_s: seconds of the longest recent save. 0 if none was measured, which counts as `UNMEASURED_SAVE_S`.
            step_s: seconds of the longest recent step.
            n_saves: number of saves that may have to end before the deadline, one after the other.
        """
        self._ask_notices()
        if self._requested is not None:
            return str(self._requested)
        if self.deadline is None:
            return None
        save_s = n_saves * (save_s or UNMEASURED_SAVE_S)
        if self._clock() + step_s + save_s * SAVE_MARGIN + SLACK_S < self.deadline:
            return None
        return (
            f"recover.must_save_by {self._must_save_by!r}, which is {_local_time(self.deadline)}, is too near for "
            f"another step of {step_s:.1f} s and then a save of {save_s:.1f} s"
        )

    def _ask_notices(self) -> None:
        now_s = time.monotonic()
        if now_s - self._noticed_s < _NOTICE_POLL_S:
            return
        self._noticed_s = now_s
        for notice in self._notices:
            if (found := notice()) is not None:
                self.request(found)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # No locks and no logging here: the interrupted code may hold the locks.
        if not self._listening:
            self._pass_on(signal.Signals(number), frame)
            return
        if number == signal.SIGINT:  # Ctrl-C reaches the job's forked children too: they leave the first one to it
            if self._interrupted:
                self._unanswered = None
                raise KeyboardInterrupt
            self._interrupted = True
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    os.write(2, _INTERRUPTED)
        if not self._granted:
            self._unanswered = signal.Signals(number)
        self.request(StopNotice(signal.Signals(number).name))


_installed: set[StopRequests] = set()
"""Objects whose handlers are in place."""
_forking = threading.local()


@cache
def _watch_forks() -> None:
    # Python cannot unregister these hooks, so each of them first looks whether there is anything to do.
    os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals, after_in_child=_let_signals_in_child)


def _hold_signals() -> None:
    # Block signals during the fork: Python clears pending ones in the child.
    if _installed:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _let_signals() -> None:
    if (mask := _forking.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _let_signals_in_child() -> None:
    for stop in _installed:
        stop.give_up_in_child()
    _let_signals()


def parse_deadline(text: str, after: float) -> float:
    """Parse a deadline into Unix time.

    Args:
        text: a duration since the start of this process, with units (``"90m"``, ``"3h30m"``, ``"2d"``, ``"5400s"``), or
            an ISO time, local unless it has an offset.
        after: Unix time that the deadline must be later than.

    Raises:
        ConfigError: ``text`` cannot be parsed, or the deadline is over.
    """
    deadline = _parse(text.strip())
    if deadline is None:
        raise ConfigError(f"config key 'recover.must_save_by' is {text!r}; expected {_FORMS}")
    if deadline <= after:
        raise ConfigError(
            f"config key 'recover.must_save_by' is {text!r}, which was over at {_local_time(deadline)}; expected "
            f"something to come: {_FORMS}"
        )
    return deadline


def _parse(text: str) -> float | None:
    if text and (match := _UNITS.fullmatch(text)):
        days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
        return process_started_at() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if _TIME.fullmatch(text):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(text).timestamp()
    return None


def _signal_number(name: str) -> signal.Signals:
    number = signal.Signals.__members__.get(name)
    if number is None or name in _CRASHES:
        known = ", ".join(sorted(set(signal.Signals.__members__) - _CRASHES))
        raise ConfigError(f"config key 'recover.stop_signals' has {name!r}; expected one of {known}")
    return number


def _local_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().isoformat(timespec="seconds")
