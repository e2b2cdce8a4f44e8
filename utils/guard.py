"""Guard of a program, such as an inference server, and of the processes that the program starts:
all end together.

`start_guarded` starts this file as the parent of the program, in a session of its own. The guard
ends everything when

- its keeper, the process that called `start_guarded`, has ended in whatever way,
- the program has ended, because its own processes may not notice that, or
- it gets SIGTERM.

Processes that have left the group of the program are ended too: those that lose their parent become
children of the guard (Linux only). If the guard itself is killed, `end_guarded` in the keeper ends
the group of the program.

Ray sends SIGKILL to the children of an actor that it ends, so that nobody could end the group. With
``sheltered`` the child is another process, the shelter, whose death the guard notices.

This file imports the standard library alone, because it runs as a script in a small process.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.1
_KILL_S = 30.0
"""Time after SIGKILL for processes to end."""
_TRACKERS_S = 3.0
_WITHOUT_GUARD_S = 5.0
"""Time between SIGTERM and SIGKILL for the processes of a guard that was killed."""


def start_guarded(
    command: Sequence[str | Path],
    output: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    stop_timeout_s: float = 10.0,
    sheltered: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a command under a guard of this process, and return the guard, or its shelter. It exits
    with the code of the command.

        server = start_guarded(["python", "-m", "vllm.entrypoints.openai.api_server"])
        end_guarded(server)

    Args:
        command: the program with its arguments.
        output: file for its output. None: the output of this process.
        env: its environment. None: the environment of this process.
        stop_timeout_s: time between SIGTERM and SIGKILL.
        sheltered: whether somebody else may kill the children of this process.

    Raises:
        FileNotFoundError: there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]}")
    # This file needs neither site-packages nor the environment of Python.
    python = [sys.executable, "-I", "-S"]
    options = [str(os.getpid()), str(stop_timeout_s), str(int(sheltered))]
    guard = [*python, __file__, *options]
    program = [str(part) for part in command]
    return subprocess.Popen(
        [*guard, *program],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=env,
        start_new_session=True,
    )


def end_guarded(*guards: subprocess.Popen[bytes], timeout_s: float = 15.0) -> None:
    """End programs and all their processes, at the same time. Those that still run after
    ``timeout_s`` get SIGKILL.
    """
    for guard in guards:
        guard.terminate()
    # All share one time limit.
    end = time.monotonic() + timeout_s
    for guard in guards:
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(max(end - time.monotonic(), 0))

        # A guard that exits by itself has ended the group.
        if guard.returncode is None or guard.returncode < 0:
            end_group(guard.pid, 0.0 if guard.returncode is None else _WITHOUT_GUARD_S)
            guard.wait()


def end_group(group: int, timeout_s: float) -> None:
    """End all processes of a group, with SIGKILL after ``timeout_s``.

    Python's trackers of shared memory come last, because they delete what the others leave there.
    """
    # Not at the top, because this file also runs as a script.
    from .processes import processes_of_group, still_alive

    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
    still_alive([one for one in processes_of_group(group) if not _is_tracker(one.pid)], timeout_s)
    for process in processes_of_group(group):
        if not _is_tracker(process.pid):
            process.kill()
    still_alive(processes_of_group(group), _TRACKERS_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def guarded_pid(guard: subprocess.Popen[bytes], sheltered: bool = False) -> int:
    """Return the process id of the program, or of the guard if the program does not run."""
    parent = guard.pid
    if sheltered:
        parent = next(iter(_children(parent)), parent)
    return next(iter(_children(parent)), parent)


class _Guard:
    def __init__(self, keeper: int, stop_timeout_s: float) -> None:
        self._keeper = keeper
        self._stop_timeout_s = stop_timeout_s
        self._told = False
        self._codes: dict[int, int] = {}
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self, command: list[str]) -> int:
        """Run a program until it ends or must end, end its processes, and return its exit code."""
        _adopt_orphans()
        # Until the keeper ends, a signal comes, or the program ends.
        # The object is kept: without a name, it would collect a program that ends at once itself.
        program = subprocess.Popen(command)
        while os.getppid() == self._keeper and not self._told:
            self._reap()
            if program.pid in self._codes:
                break
            time.sleep(_LOOK_EVERY_S)
        self.end_all()

        # A signal becomes an exit code as in a shell.
        code = self._codes.get(program.pid, 1)
        if code < 0:
            return 128 - code
        return code

    def _on_sigterm(self, *_: object) -> None:
        self._told = True

    def end_all(self) -> None:
        """End the group of this process, and all processes below it, but not itself."""
        # The whole group gets the signal, this process too.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        end = time.monotonic() + self._stop_timeout_s
        while self._reap() and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)

        # Each process that ends hands its children to this one, until there are none. Trackers of
        # shared memory end when the others have, and delete what those have left.
        now = time.monotonic()
        while self._reap() and time.monotonic() < now + _KILL_S:
            for pid in _children(os.getpid()):
                if _is_tracker(pid) and time.monotonic() < now + _TRACKERS_S:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_EVERY_S / 10)

    def _reap(self) -> bool:
        """Collect children that have ended. Whether others still run."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._codes[pid] = os.waitstatus_to_exitcode(status)


def _take_shelter(keeper: int) -> int:
    """Return in a child of this process, with the id of its keeper: this process, the shelter.

    The shelter passes SIGTERM on, tells the child when ``keeper`` has ended, and exits with the
    child. If the child was killed, its processes become those of the shelter, which ends them.
    """
    shelter = os.getpid()
    _adopt_orphans()
    # The child may end the group, this process too, before the handler is there.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    guard = os.fork()
    if guard == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return shelter

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(guard, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    is_kept = True
    while True:
        ended, status = os.waitpid(guard, os.WNOHANG)
        if ended:
            break
        if is_kept and os.getppid() != keeper:
            is_kept = False
            pass_on()
        time.sleep(_LOOK_EVERY_S)

    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _Guard(keeper, _WITHOUT_GUARD_S).end_all()
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _adopt_orphans() -> None:
    """Become the parent of processes below this one that lose theirs."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        pids = path.read_text().split()
    except OSError:  # it has ended, or the kernel does not tell
        return []
    return [int(child) for child in pids]


def _main(keeper: str, stop_timeout_s: str, sheltered: str, *command: str) -> int:
    keeper_pid = int(keeper)
    if int(sheltered):
        keeper_pid = _take_shelter(keeper_pid)
    return _Guard(keeper_pid, float(stop_timeout_s)).run(list(command))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
