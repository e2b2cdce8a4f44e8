"""Processes: exact identity, certain end, death together with the parent or when a lease ends, and
their share of the cores.

Linux only. Elsewhere no process counts as alive, and leases never end.
"""

import contextlib
import ctypes
import inspect
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import ConfigError
from .launch import launch_environment

_RUN_ID = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1
_SIGEV_SIGNAL = 0
_TIMER_ABSTIME = 1

MOST_READING_THREADS = 8
"""Limit of the threads that read one file. More are no faster, neither from the page cache nor from
a disk.
"""


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine. Its start time tells it from a later one with the same pid."""

    pid: int
    started: str | None

    @staticmethod
    def current() -> "ProcessId":
        """Return this process."""
        return ProcessId.of(os.getpid())

    @staticmethod
    def of(pid: int) -> "ProcessId":
        """Return the process that has this pid now."""
        return ProcessId(pid, _start_time(pid))

    def alive(self) -> bool:
        """Return whether the process still runs. A zombie does not."""
        return self.started is not None and _start_time(self.pid) == self.started

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        if self.alive():
            # It may end between the look and the signal.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of ``pid`` (field 22), or None when it does not run."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return fields[19]


def _stat(process: int | str) -> list[str] | None:
    """The fields of proc(5) stat from the third on. None if the process ended, if ``/proc`` is
    missing, or if it hides the processes of other users (``hidepid=1``).
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None

    # The second field is the name in brackets, which may hold brackets and spaces itself.
    _, _, rest = text.rpartition(")")
    return rest.split()


def processes_of_group(group: int) -> list[ProcessId]:
    """Return the running processes of a process group."""
    members: list[ProcessId] = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(folder.name)
        # The third field is the state, the fifth the group.
        if fields is not None and fields[0] not in "ZX" and int(fields[2]) == group:
            members.append(ProcessId(int(folder.name), fields[19]))
    return members


def descendants(pid: int) -> list[ProcessId]:
    """Return the running children of a process, their children, and so on."""
    children: dict[int, list[ProcessId]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(folder.name)
        # The fourth field is the parent.
        if fields is not None and fields[0] not in "ZX":
            child = ProcessId(int(folder.name), fields[19])
            children.setdefault(int(fields[1]), []).append(child)

    found: list[ProcessId] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [child.pid for child in below]
    return found


def process_started_at() -> float:
    """Return the Unix time of this process's start, to 10 ms and equal at every call. Elsewhere, of
    the first call.
    """
    return _started_at(os.getpid())


# two readings of the clocks differ by microseconds, which would reverse the order of close events
@cache
def _started_at(pid: int) -> float:
    ticks = _start_time(pid)
    if ticks is None:
        return time.time()
    started_s = int(ticks) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return time.time() - age_s


def thread_cpu_s(native_id: int) -> float | None:
    """Return a thread's processor time in seconds, to 10 ms. None if the thread has ended."""
    fields = _stat(f"self/task/{native_id}")
    if fields is None:
        return None
    # Fields 14 and 15: clock ticks in user mode and in the kernel.
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def still_alive(processes: Sequence[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until no process runs, at most ``timeout_s``, and return those that still run."""
    end = time.monotonic() + timeout_s
    pause_s = 0.002
    while True:
        alive = [process for process in processes if process.alive()]
        if not alive or time.monotonic() >= end:
            return alive
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def end_processes(
    processes: Sequence[ProcessId], grace_s: float, timeout_s: float
) -> list[ProcessId]:
    """Wait ``grace_s``, kill the processes that still run, and return those that still run
    ``timeout_s`` later.
    """
    alive = still_alive(processes, grace_s)
    for process in alive:
        process.kill()
    return still_alive(alive, timeout_s)


def refuse_import_of_script() -> None:
    """Refuse to begin a job while a helper process of ``multiprocessing`` imports the script.

    Raises:
        ConfigError: it does.
    """
    frame = inspect.currentframe()
    while frame is not None:
        # The script has this name there, and its functions have it after the import, too.
        of_script = frame.f_globals.get("__name__") == "__mp_main__"
        if of_script and frame.f_code.co_name == "<module>":
            raise ConfigError(
                "a helper process, of a CallPool for example, imports the script, which begins the "
                'job again there; put all that begins it below `if __name__ == "__main__":`'
            )
        frame = frame.f_back


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGKILL when its parent ends. OSError if the kernel
    refuses.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")

    # The parent may have ended just before the call, which would then never send the signal.
    if os.getppid() != parent:
        os._exit(1)


def die_with_torchrun() -> None:
    """Let this rank end when its torchrun is killed (see `die_with_parent`). Otherwise it would run
    beside the ranks of the next start. A process that a rank has started is not affected.
    """
    if _RUN_ID not in os.environ:
        return
    try:
        of_parent = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return
    # torchrun gives its ranks what it does not have itself.
    if f"{_RUN_ID}=".encode() not in of_parent:
        die_with_parent()


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
    """Kernel timer that kills this process at a set time unless it is extended. OSError if the
    kernel refuses it.

    A rank whose node lost its connection to the driver is then gone when the driver has waited long
    enough, even if the rank is stopped, waits for a dead file server, or holds the interpreter
    lock.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        if sys.platform.startswith("linux"):
            self._timer = ctypes.c_void_p()
            event = ctypes.byref(_Event(None, signal.SIGKILL, _SIGEV_SIGNAL, b""))
            timer = ctypes.byref(self._timer)
            _call("timer_create", time.CLOCK_BOOTTIME, event, timer)

    def now(self) -> float:
        """Return seconds on the lease's clock, which continues while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def put_off(self, until: float) -> None:
        """Move the time at which the process is killed to ``until``, on the lease's clock."""
        if self._timer is not None:  # the first timer of a process may have the id 0
            # Once, without an interval.
            whole_s = int(until)
            rest_ns = int((until - whole_s) * 1e9)
            spec = _Spec(0, 0, whole_s, rest_ns)
            _call("timer_settime", self._timer, _TIMER_ABSTIME, ctypes.byref(spec), None)


def _call(name: str, *args: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, name):  # glibc before 2.34
        library = ctypes.CDLL("librt.so.1", use_errno=True)
    if getattr(library, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} failed: {os.strerror(number)}")


def reading_threads() -> int:
    """Return the number of threads with which this rank should read a file: its share of the host's
    cores.

    At least 1, at most `MOST_READING_THREADS`. If this process may run on fewer cores than its
    parent, its launcher has already given it a share (``torchrun --numa-binding``, ``taskset``).
    Without ``LOCAL_WORLD_SIZE`` all ranks are assumed to be on this host.
    ``torch.get_num_threads()`` is not used: torchrun and Ray set it to 1 so that the ranks'
    computations do not disturb each other, but reading threads spend their time in the kernel.
    """
    # The import of torch takes long, and commands that only read files do not need it.
    from .distributed import get_world_size

    cores = os.sched_getaffinity(0)
    has_share = cores < os.sched_getaffinity(os.getppid())
    ranks = 1
    if not has_share:
        # The ranks of this host share the cores.
        ranks = int(launch_environment().get("LOCAL_WORLD_SIZE") or get_world_size())
    return min(max(len(cores) // ranks, 1), MOST_READING_THREADS)
