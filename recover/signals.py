"""Signals that ask the run to stop, from their handlers to the next step boundary.

A signal handler runs between any two instructions of the main thread (a call into C, such as a
collective, delays it). It therefore only sets an attribute and writes to standard error. Everything
else happens at the next step boundary (see `holdfast.recover.triggers`).

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
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any

from ..utils.errors import ConfigError
from ..utils.helper_group import HelperGroup
from ..utils.logging import get_logger
from ..utils.stopping import forget_stop, note_stop

logger = get_logger(__name__)

_CRASHES = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}
"""Signals that cannot be caught, or after which a snapshot is worthless."""
_INTERRUPTED = b"\nholdfast: finishing the step, then a snapshot; Ctrl-C again stops at once\n"


class StopSignals:
    """Handlers of the signals that ask the run to stop.

    Args:
        names: names such as ``"SIGTERM"``. Earlier handlers are not called, because most would end
            the process. `uninstall` restores them.
        request: called with the name of each signal, from its handler.

    Raises:
        ConfigError: a name is unknown, or of a signal after which no snapshot can be made.
    """

    def __init__(self, names: Sequence[str], request: Callable[[str], None]) -> None:
        self._signals = [_signal_number(name) for name in names]
        self._request = request
        self._listening = False
        self._interrupted = False  # by SIGINT
        self._granted = False  # a step boundary has answered
        self._unanswered: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}  # earlier handlers
        self._pid = os.getpid()
        self._main_thread = 0

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
        self._pid = os.getpid()
        self._main_thread = threading.get_ident()
        self._listening = True
        _installed.add(self)
        for number in self._signals:
            before = signal.signal(number, self._on_signal)
            if before != self._on_signal:
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
        forget_stop()
        if threading.current_thread() is threading.main_thread():
            self._put_back()
        unanswered = self._unanswered
        self._unanswered = None
        if unanswered is not None:
            error = error or sys.exc_info()[1]
            if error is not None:
                traceback.print_exception(error)
            logger.warning("%s came too late for a snapshot and is passed on", unanswered.name)
            signal.pthread_kill(self._main_thread, unanswered)

    def grant(self) -> None:
        """Note that the run stops at this step boundary, so that later signals need no answer."""
        self._granted = True
        self._unanswered = None
        forget_stop()

    def give_up_in_child(self) -> None:
        """Restore the default handlers in a forked child, which could not end in a long call or a
        blocking read.
        """
        for number, before in self._replaced.items():
            if number != signal.SIGINT and signal.getsignal(number) == self._on_signal:
                ignored = before == signal.SIG_IGN
                signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        self._unanswered = None
        forget_stop()

    def _put_back(self) -> None:
        for number, before in self._replaced.items():
            if signal.getsignal(number) in (self._on_signal, self._on_lost_child):
                # A handler that was not installed from Python is None, and cannot be put back.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        _installed.discard(self)

    def _pass_on(self, number: signal.Signals, frame: FrameType | None) -> None:
        self._put_back()
        before = self._replaced.get(number)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # No locks and no logging here: the interrupted code may hold the locks.
        received = signal.Signals(number)
        if not self._listening:
            self._pass_on(received, frame)
            return
        if received == signal.SIGINT:
            if self._interrupted:
                self._unanswered = None
                raise KeyboardInterrupt
            self._interrupted = True
            # Ctrl-C reaches the job's forked children too, which say nothing.
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    os.write(2, _INTERRUPTED)
        if not self._granted:
            self._unanswered = received
            note_stop(received.name)
        self._go_on_without_children()
        self._request(received.name)

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


def _signal_number(name: str) -> signal.Signals:
    number = signal.Signals.__members__.get(name)
    if number is None or name in _CRASHES:
        known = ", ".join(sorted(set(signal.Signals.__members__) - _CRASHES))
        raise ConfigError(
            f"config key 'recover.stop_signals' has {name!r}; expected one of {known}"
        )
    return number


# Forks and spawns. Python cannot unregister a hook, so all hooks first look at `_installed`.

_installed: set[StopSignals] = set()
"""Objects whose handlers are in place."""
_helpers = HelperGroup()
_forking = threading.local()


@cache
def _watch_forks() -> None:
    os.register_at_fork(
        before=_hold_signals,
        after_in_parent=_let_signals,
        after_in_child=_let_signals_in_child,
    )
    # multiprocessing starts fork servers, spawned processes and its tracker here, and runs no hook
    # of `fork`.
    multiprocessing.util.spawnv_passfds = _spawn_helper


_spawn = multiprocessing.util.spawnv_passfds


def _spawn_helper(path: bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
    # The tracker outlives this process, to clean up.
    is_tracker = "resource_tracker" in os.fsdecode(args[-1])
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
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _let_signals_in_child() -> None:
    if _installed:
        _helpers.enter()
    for stop in _installed:
        stop.give_up_in_child()
    _installed.clear()
    _let_signals()
