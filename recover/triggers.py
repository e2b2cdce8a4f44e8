"""When to snapshot, and when to stop: a schedule, a signal, a notice from outside, or a deadline.

Epochs and steps are counted from the start of the run, so a restart does not shift them. Seconds
are counted on the clock of this process, from its last snapshot, so only one process decides: rank
0 under torchrun, the driver under Ray. A request to stop may reach any rank.

A signal handler runs between any two instructions of the main thread (a call into C, such as a
collective, delays it). It therefore only sets an attribute and writes to standard error. Everything
else happens at the next step boundary, in `StopRequests.due`, which costs microseconds, and at most
once a second the time of the notices.

The step needs its helpers until then. Forked children and the processes of ``multiprocessing``
(workers of a data loader, processes of a `CallPool`) start in a `HelperGroup`, because most signals
come to the whole process group. A signal to one of them ends it at once: forked children get the
default handlers back inside `fork`. If a helper is lost nevertheless while a stop is requested,
torch's handler of SIGCHLD no longer raises in the middle of the step. Programs that were started
with ``subprocess`` stay in the group of the job.
"""

import contextlib
import multiprocessing.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntFlag
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..engine.steps import StepInfo
from ..utils.config import require_range
from ..utils.errors import ConfigError
from ..utils.helper_group import HelperGroup
from ..utils.logging import get_logger
from ..utils.processes import process_started_at

if TYPE_CHECKING:
    from .config import RecoverConfig
    from .ranks import Ranks

logger = get_logger(__name__)

UNMEASURED_SAVE_S = 60.0
"""Assumed duration of a save before one has been measured."""
SAVE_MARGIN = 1.5
"""A save may take this many times the longest recent one: storage is slowest while many jobs are
preempted.
"""
SLACK_S = 5.0
"""Additional seconds, to agree on the stop and to exit."""
_NOTICE_POLL_S = 1.0
_RECENT = 8
"""Number of recent steps and saves whose longest one counts for a deadline."""

_CRASHES = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}
"""Signals that cannot be caught, or after which a snapshot is worthless."""
_INTERRUPTED = b"\nholdfast: finishing the step, then a snapshot; Ctrl-C again stops at once\n"

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*")
_FORMS = (
    "a duration from the start of the process with its units ('90m', '3h30m', '2d', '5400s'), or "
    "a time ('2026-11-20T18:00', local unless it has an offset as '+01:00')"
)


@dataclass(frozen=True)
class StopNotice:
    """A request to stop the run."""

    reason: str  # text for the log and the user
    by: float | None = None  # Unix time when the process will be ended, if known

    def __str__(self) -> str:
        return (
            self.reason
            if self.by is None
            else f"{self.reason}, which ends the process at {_local_time(self.by)}"
        )


class Wanted(IntFlag):
    """Actions after a step. Any caller may set `STOP` and `FORCE`, only the leader sets the other
    flags.
    """

    STOP = 1
    SNAPSHOT = 2
    EXPORT = 4
    SETTLE = 8  # writing in the background has ended, and its result can be collected
    FORCE = 16  # a snapshot although none is due. It must not fail


class Triggers:
    """Schedule, stop requests and pace of one run. A bad value in the configuration raises
    `ConfigError`.
    """

    def __init__(
        self, config: "RecoverConfig", notices: Sequence[Callable[[], StopNotice | None]]
    ) -> None:
        self.schedule = SnapshotSchedule(config.freq_epochs, config.freq_steps, config.freq_secs)
        self.stops = StopRequests(config.stop_signals, config.must_save_by, notices)
        self._n_saves = (
            2 if config.async_save else 1
        )  # the last one may have to wait for one that begins now
        self._saves_s, self._steps_s = deque([0.0], _RECENT), deque([0.0], _RECENT)
        self._step_began_s: float | None = None

    @property
    def save_s(self) -> float:
        """Seconds of the longest recent snapshot or export. 0.0 before the first."""
        return max(self._saves_s)

    def saved(self, seconds: float) -> None:
        """Note how long a snapshot or an export took."""
        self._saves_s.append(seconds)

    def step_begins(self) -> None:
        """Note that the next step begins now. The first step of a process is not measured: its
        start is unknown.
        """
        self._step_began_s = time.monotonic()

    def after_step(
        self, ranks: "Ranks", step_info: StepInfo, ask: Callable[[], Wanted]
    ) -> tuple[Wanted, str | None]:
        """Agree on the actions after a step, and on the reason to stop, if there is one. Costs one
        small tensor.

        ``ask`` returns further flags. It is called in every caller, and a failure in one is raised
        in all. A signal may reach only some ranks, or reach them at different steps: the result is
        the same on all.
        """
        if self._step_began_s is not None:
            self._steps_s.append(time.monotonic() - self._step_began_s)
            self._step_began_s = None
        reason: str | None = None

        def ask_here() -> int:
            nonlocal reason
            wanted = ask()
            if not ranks.is_leader:
                wanted &= Wanted.FORCE
            elif self.schedule.due(step_info):
                wanted |= Wanted.SNAPSHOT
            reason = self.stops.due(self.save_s, max(self._steps_s), self._n_saves)
            return wanted | Wanted.STOP if reason is not None else wanted

        wanted = Wanted(ranks.flags(ask_here))
        if Wanted.STOP in wanted:
            reason = next(told for told in ranks.here(lambda: reason) if told is not None)
            self.stops.grant()
        return wanted, reason


class SnapshotSchedule:
    """Decides after each step whether a snapshot is due: by epochs, steps or seconds, whichever
    comes first.

    See `RecoverConfig` for the frequencies. Steps count from 0: with ``freq_steps`` 10, steps 9,
    19, 29 ... are due. With ``freq_secs`` 0 every step is due. Without any frequency no step is. A
    value out of range raises `ConfigError`.
    """

    def __init__(
        self,
        freq_epochs: int | None = None,
        freq_steps: int | None = None,
        freq_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_range("freq_epochs", freq_epochs, low=1)
        require_range("freq_steps", freq_steps, low=1)
        require_range("freq_secs", freq_secs, low=0.0)
        self._freq_epochs, self._freq_steps, self._freq_secs = freq_epochs, freq_steps, freq_secs
        self._clock, self._last_s = clock, clock()
        self._last_step: int | None = None

    @property
    def is_ever_due(self) -> bool:
        """Whether there is a frequency."""
        return (self._freq_epochs, self._freq_steps, self._freq_secs) != (None, None, None)

    def due(self, step_info: StepInfo) -> bool:
        """Whether to snapshot the step that was just trained. False for the step that was marked
        last.

        Asking changes nothing, so asking twice (for an actor and a critic, say) gives the same
        answer.
        """
        if step_info.global_step == self._last_step:
            return False
        if self._freq_secs is not None and self._clock() - self._last_s >= self._freq_secs:
            return True
        if self._freq_steps is not None and (step_info.global_step + 1) % self._freq_steps == 0:
            return True
        epoch_ended = step_info.epoch_step == step_info.steps_per_epoch - 1
        return (
            self._freq_epochs is not None
            and epoch_ended
            and (step_info.epoch + 1) % self._freq_epochs == 0
        )

    def mark(self, step_info: StepInfo) -> None:
        """Restart the clock, because the step was restored, or staged: until its commit, all steps
        would be due.
        """
        self._last_s, self._last_step = self._clock(), step_info.global_step


class StopRequests:
    """Collects requests to stop, and decides at every step boundary whether the run must.

    Args:
        signals: names such as ``"SIGTERM"``. Earlier handlers are not called, because most would
            end the process. `uninstall` restores them.
        must_save_by: see `parse_deadline`. If it passes during a recovery, the run stops at its
            next step.
        notices: functions that report a request from outside, called at most once a second. Each
            must return soon and not raise.
        clock: returns Unix time.
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
        self.deadline = (
            None if must_save_by is None else parse_deadline(must_save_by, process_started_at())
        )
        self._notices, self._clock = tuple(notices), clock
        self._noticed_s = -_NOTICE_POLL_S
        self._requested: StopNotice | None = None
        self._interrupted = self._granted = self._listening = False
        self._unanswered: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}
        self._pid, self._main_thread = os.getpid(), 0

    def install(self) -> None:
        """Handle the signals from now on. A second call, or a call outside the main thread, does
        nothing.
        """
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

    def uninstall(self, error: BaseException | None = None) -> None:
        """Restore the earlier handlers, except where another one has replaced ours.

        Python allows this in the main thread only. After a call from another thread, the next
        signal is passed on to the earlier handler, and that handler is restored at that moment.

        A signal that no step boundary has answered is sent again, to the earlier handlers: a
        process that was asked to end must not live on because a worker was lost at the same time
        and the job starts another attempt. This ends most processes, so the traceback of ``error``
        is printed before.

        Args:
            error: why the handlers are given up. None: the exception that is being handled, if
                there is one.
        """
        if not self._listening:
            return
        self._listening = False
        if threading.current_thread() is threading.main_thread():
            self._put_back()
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None:
            error = error or sys.exc_info()[1]
            if error is not None:
                traceback.print_exception(error)
            logger.warning("%s came too late for a snapshot and is passed on", unanswered.name)
            signal.pthread_kill(self._main_thread, unanswered)

    def _put_back(self) -> None:
        for number, before in self._replaced.items():
            if signal.getsignal(number) in (self._on_signal, self._on_lost_child):
                signal.signal(
                    number, signal.SIG_DFL if before is None else before
                )  # None: not installed from Python
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
        """Restore the default handlers in a forked child, which could not end in a long call or a
        blocking read.
        """
        for number, before in self._replaced.items():
            if number != signal.SIGINT and signal.getsignal(number) == self._on_signal:
                signal.signal(
                    number, signal.SIG_IGN if before == signal.SIG_IGN else signal.SIG_DFL
                )
        self._unanswered = None

    def request(self, notice: StopNotice) -> None:
        """Request a stop at the next step boundary, from any thread or signal handler. The first
        reason is kept.
        """
        self._requested = self._requested or notice

    def grant(self) -> None:
        """Note that the run stops at this step boundary, so that later signals need no answer."""
        self._granted, self._unanswered = True, None

    def due(self, save_s: float, step_s: float, n_saves: int = 1) -> str | None:
        """Return the reason to snapshot and stop now, before another step. None if the run may
        continue.

        A signal, a request or a notice stops the run at once. A deadline stops it if ``n_saves``
        saves that start after one more step might not end in time. ``save_s`` is 0 if none was
        measured.
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
            f"recover.must_save_by {self._must_save_by!r}, which is {_local_time(self.deadline)}, "
            f"is too near for another step of {step_s:.1f} s and then a save of {save_s:.1f} s"
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
        if (
            number == signal.SIGINT
        ):  # Ctrl-C reaches the job's forked children too: they leave the first one to it
            if self._interrupted:
                self._unanswered = None
                raise KeyboardInterrupt
            self._interrupted = True
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    os.write(2, _INTERRUPTED)
        if not self._granted:
            self._unanswered = signal.Signals(number)
        self._go_on_without_children()
        self.request(StopNotice(signal.Signals(number).name))

    def _go_on_without_children(self) -> None:
        before = signal.getsignal(signal.SIGCHLD)
        if callable(before) and before not in (self._on_signal, self._on_lost_child):
            self._replaced[signal.SIGCHLD] = before
            signal.signal(signal.SIGCHLD, self._on_lost_child)

    def _on_lost_child(self, number: int, frame: FrameType | None) -> None:
        # torch's handler raises here if a worker of a loader was lost, and the step that runs may
        # not need the worker.
        try:
            self._replaced[signal.SIGCHLD](number, frame)
        except RuntimeError as error:
            with contextlib.suppress(OSError):
                os.write(2, f"\nholdfast: finishing the step, although {error}\n".encode())


_installed: set[StopRequests] = set()
"""Objects whose handlers are in place."""
_helpers = HelperGroup()
_forking = threading.local()


@cache
def _watch_forks() -> None:
    # Python cannot unregister a hook, so all hooks first look whether there is anything to do.
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_let_signals, after_in_child=_let_signals_in_child
    )
    # multiprocessing starts fork servers, spawned processes and its tracker here, and runs no hook
    # of `fork`.
    multiprocessing.util.spawnv_passfds = _spawn_helper


_spawn = multiprocessing.util.spawnv_passfds


def _spawn_helper(path: bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
    is_tracker = "resource_tracker" in os.fsdecode(
        args[-1]
    )  # it outlives this process, to clean up
    group = None if is_tracker or not _installed else _helpers.number()
    if group is None:
        return _spawn(path, args, passfds)
    process = subprocess.Popen(
        args, executable=path, pass_fds=passfds, process_group=group, restore_signals=False
    )
    process.returncode = 0  # multiprocessing waits for the process, this object must not
    return process.pid


def _hold_signals() -> None:
    # Block signals during the fork: Python clears pending ones in the child.
    if _installed:
        _helpers.number()
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _let_signals() -> None:
    if (mask := _forking.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _let_signals_in_child() -> None:
    if _installed:
        _helpers.enter()
    for stop in _installed:
        stop.give_up_in_child()
    _installed.clear()
    _let_signals()


def parse_deadline(text: str, after: float) -> float:
    """Parse ``recover.must_save_by`` into Unix time. Raises `ConfigError` unless it is a time later
    than ``after``.
    """
    deadline = _parse(text.strip())
    if deadline is None:
        raise ConfigError(f"config key 'recover.must_save_by' is {text!r}; expected {_FORMS}")
    if deadline <= after:
        raise ConfigError(
            f"config key 'recover.must_save_by' is {text!r}, which was over at "
            f"{_local_time(deadline)}; expected something to come: {_FORMS}"
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
        raise ConfigError(
            f"config key 'recover.stop_signals' has {name!r}; expected one of {known}"
        )
    return number


def _local_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().isoformat(timespec="seconds")
