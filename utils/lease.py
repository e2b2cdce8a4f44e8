"""Kernel timer that kills this process at a set time unless it is extended.

A rank whose node lost its connection to the driver is then gone when the driver has waited long enough, even if the
rank is stopped, waits for a dead file server, or holds the interpreter lock. Linux only; a no-op elsewhere.
"""

import ctypes
import os
import signal
import sys
import time

_SIGEV_SIGNAL = 0
_TIMER_ABSTIME = 1


class _Event(ctypes.Structure):
    """``struct sigevent`` of sigevent(3type). The rest of its 64 bytes is for threads."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class _Spec(ctypes.Structure):
    """``struct itimerspec``: interval and first expiry, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class Lease:
    """Time limit on the life of this process. Raises OSError if the kernel refuses the timer."""

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        if sys.platform.startswith("linux"):
            self._timer = ctypes.c_void_p()
            event = _Event(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
            _call("timer_create", time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer))

    def now(self) -> float:
        """Return seconds on the lease's clock, which continues while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def put_off(self, until: float) -> None:
        """Move the time at which the process is killed to ``until``, on the lease's clock."""
        if self._timer is not None:  # the first timer of a process may have the id 0
            whole_s = int(until)
            spec = _Spec(0, 0, whole_s, int((until - whole_s) * 1e9))
            _call("timer_settime", self._timer, _TIMER_ABSTIME, ctypes.byref(spec), None)


def _call(name: str, *args: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, name):  # glibc before 2.34
        library = ctypes.CDLL("librt.so.1", use_errno=True)
    if getattr(library, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name} failed: {os.strerror(ctypes.get_errno())}")
