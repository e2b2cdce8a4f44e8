"""A process group for the helpers of this process, which a signal to the group of this process does
not reach.

torchrun, ``timeout`` and a terminal signal a whole process group. A process that finishes its step
first still needs the workers of its data loader. In a group of their own they behave as before:
they end by a signal to one of them, and may start a session of their own.

A guard keeps the group, because a helper that led the group could start no session. It is a small
Python process that waits for the end of the process that it belongs to. If that process was killed,
the guard ends the group, which the launcher does not know: SIGTERM, and SIGKILL 5 s later. After a
normal exit it ends nothing.
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.util import Finalize

from .logging import get_logger

logger = get_logger(__name__)

_START_S = 30.0
_GUARD = """
import os, signal, time
if os.fork():
    os._exit(0)  # the guard is no child of the process, which may wait for all its children
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
if not os.read(0, 1):
    os.killpg(0, signal.SIGTERM)
    time.sleep(5)
    os.killpg(0, signal.SIGKILL)
"""
_AFTER_DAEMONS = -100
"""Priority of a finalizer that runs when multiprocessing has ended its daemons."""


class HelperGroup:
    """Process group of the helpers of this process. The first call of `number` starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number: int | None = None
        self._pipe: int | None = None
        self._impossible = False

    def number(self) -> int | None:
        """Return the number of the group. None if no guard can be started."""
        with self._lock:
            lost = self._number is not None and not _is_alive(self._number)
            if lost:
                self._forget()
            if self._number is None and not self._impossible:
                self._start()
            return self._number

    def enter(self) -> None:
        """Move this process, which was just forked, into the group of its parent."""
        if self._number is not None:
            with suppress(OSError):  # the group has ended, or belongs to another session
                os.setpgid(0, self._number)
        self._forget()
        self._impossible = False
        self._lock = threading.Lock()  # a thread of the parent may have held the old one

    def _start(self) -> None:
        command = [sys.executable or "python3", "-I", "-S", "-c", _GUARD]
        nowhere = subprocess.DEVNULL
        reading, writing = os.pipe()
        try:
            leader = subprocess.Popen(
                command, stdin=reading, stdout=nowhere, stderr=nowhere, process_group=0
            )
            problem = leader.wait(_START_S) or None
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = error
        finally:
            os.close(reading)

        self._pipe = writing
        if problem is not None:
            logger.warning(
                "signals to the process group will end helper processes: their guard failed (%s)",
                problem,
            )
            self._impossible = True
            self._forget()
            return
        self._number = leader.pid
        Finalize(None, self._end_normally, exitpriority=_AFTER_DAEMONS)

    def _end_normally(self) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # the guard was killed
                os.write(self._pipe, b"x")

    def _forget(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
        self._number = None
        self._pipe = None


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
