"""Processes: exact identity, certain end, death with the parent or at a set time. For Linux only."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SIGEV_SIGNAL = 0
_TIMER_ABSTIME = 1


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine, told apart from a later one with the same pid by its start time."""

    pid: int
    started: str | None

    @staticmethod
    def current() -> "ProcessId":
        """Return this process."""
        return ProcessId(os.getpid(), _start_time(os.getpid()))

    def alive(self) -> bool:
        """Return whether the process still runs. A zombie does not."""
        return self.started is not None and _start_time(self.pid) == self.started

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal
                os.kill(self.pid, signal.SIGKILL)


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of ``pid`` (proc(5), field 22 of stat), or None when it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def process_started_at() -> float:
    """Unix time of this process's start, to about 10 ms, or without ``/proc`` of the first call. Always the same."""
    return _started_at(os.getpid())


@cache  # two readings of the clocks differ by microseconds, which would reverse the order of close events
def _started_at(pid: int) -> float:
    ticks = _start_time(pid)
    if ticks is None:
        return time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def thread_cpu_s(native_id: int) -> float | None:
    """Processor time of a thread of this process in seconds, to 10 ms. None if it ended, or without ``/proc``."""
    try:
        fields = Path(f"/proc/self/task/{native_id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime: fields 14 and 15


def still_alive(processes: Sequence[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until no process runs, at most ``timeout_s``, and return those that still run."""
    end, pause_s = time.monotonic() + timeout_s, 0.002
    while (alive := [process for process in processes if process.alive()]) and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return alive


def end_processes(processes: Sequence[ProcessId], grace_s: float, timeout_s: float) -> list[ProcessId]:
    """Wait ``grace_s``, kill the processes that still run, and return those that still run ``timeout_s`` later."""
    alive = still_alive(processes, grace_s)
    for process in alive:
        process.kill()
    return still_alive(alive, timeout_s)


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGKILL when its parent ends. Raises OSError if it refuses."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


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
    """Time limit on the life of this process: a timer of the kernel kills it at a set time unless it is extended.

    A rank whose node lost its connection to the driver is then gone when the driver has waited long enough, even if the
    rank is stopped, waits for a dead file server, or holds the interpreter lock. On other systems nothing happens.
    Raises OSError if the kernel refuses the timer.
    """

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
