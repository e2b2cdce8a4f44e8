"""`Program`: what a keeper starts, such as an inference server. `Run`: one start of it.

A `LocalRun` is a process of this host under a guard. `holdfast.engine.launch.on_ray` has runs on
other nodes, which are a `LocalRun` there.
"""

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...utils.guard import end_group, end_guarded, guarded_pid, start_guarded
from ...utils.logging import get_logger
from ...utils.processes import ProcessId, processes_of_group
from .records import log_tail, write_private

logger = get_logger(__name__)

_KILL_S = 5.0
_LEFTOVERS_S = 10.0
_KEPT_LOGS = 5
_OF_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
}


@dataclass(frozen=True)
class Program:
    """How to start a program on any host. Picklable.

    Attributes:
        name: name for people and of its logs.
        command: returns the command for a host and a port.
        variables: variables to add to the environment.
        folder: for its logs.
        stop_timeout_s: time between SIGTERM and SIGKILL of its processes.
        private_file: file that is written before the start, for its owner alone.
        private: contents of this file. Empty: there is none.
    """

    name: str
    command: Callable[[str, int], list[str]]
    variables: Mapping[str, str]
    folder: Path
    stop_timeout_s: float
    private_file: Path = Path()
    private: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_timeout_s(self) -> float:
        """Time for a guard to end it."""
        return self.stop_timeout_s + _KILL_S


class Run(ABC):
    """One start of a program.

    Attributes:
        url: its address. Empty as long as it has none.
        log: its log file, on the host where it runs.
        began: time of the start on the monotonic clock. None: it waits for a place.
        blameless: whether it ended for a reason outside of the program.
        lost_node: whether it had begun, and its node was lost or is drained.
    """

    url: str = ""
    log: Path | None = None
    began: float | None = None
    blameless: bool = False
    lost_node: bool = False

    @abstractmethod
    def problem(self) -> str | None:
        """Why it does not run any more, or None."""

    @abstractmethod
    def end(self) -> None:
        """End all its processes. Nothing happens if they have ended."""

    @abstractmethod
    def pid(self) -> int | None:
        """Process id of the program on its host. None if it does not run."""

    def log_tail(self) -> str:
        """The last lines of its log, with its keys."""
        return log_tail(self.log)

    def local_group(self) -> ProcessId | None:
        """The leader of its process group, if it runs on this host without anybody who would end
        it.
        """
        return None

    @abstractmethod
    def release(self) -> None:
        """Give up its place, because it is not started again."""


Launch = Callable[[Program, Run | None], Run]
"""Starts a program, given its run before."""


class LocalRun(Run):
    """A process of this host, at a port that the kernel chooses.

    Args:
        program: the program.
        host: address that it listens on.
        sheltered: see `start_guarded`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, program: Program, host: str, sheltered: bool = False) -> None:
        self._end_timeout_s = program.end_timeout_s
        self._sheltered = sheltered
        self._ended = False
        port = _free_port(host)
        if program.private:
            program.private_file.parent.mkdir(parents=True, exist_ok=True)
            write_private(program.private_file, dict(program.private))

        # Each start has a log of its own. A full disk must not stop the server.
        self.log = _new_log(program.folder, program.name)
        with open(self.log or os.devnull, "ab") as output:
            self._guard = start_guarded(
                program.command(host, port),
                output,
                {**_own_environment(), **program.variables},
                program.stop_timeout_s,
                sheltered,
            )
        self.group = ProcessId.of(self._guard.pid)
        self.url = f"http://{host}:{port}"
        self.began = time.monotonic()

    def problem(self) -> str | None:
        """See `Run`."""
        code = self._guard.poll()
        if code is None:
            return None
        return f"it ended with exit code {code}"

    def end(self) -> None:
        """See `Run`."""
        if not self._ended:
            end_guarded(self._guard, timeout_s=self._end_timeout_s)
            self._ended = True

    def pid(self) -> int | None:
        """See `Run`."""
        if self._guard.returncode is not None:
            return None
        return guarded_pid(self._guard, self._sheltered)

    def local_group(self) -> ProcessId | None:
        """See `Run`."""
        return None if self._ended else self.group

    def release(self) -> None:
        """See `Run`. This host is not given back."""


def end_left_group(leader: ProcessId) -> None:
    """End the processes of a group, if it is still the group that ``leader`` has led."""
    members = processes_of_group(leader.pid)
    if not members or leader.started is None:
        return
    # A group keeps its number while one of its processes lives, so a younger leader is another one.
    now = ProcessId.of(leader.pid)
    is_other = now.started not in (None, leader.started)
    is_older = any(int(member.started or 0) < int(leader.started) for member in members)
    if is_other or is_older:
        return
    logger.warning("process group %d is left from an earlier start, and is ended", leader.pid)
    end_group(leader.pid, _LEFTOVERS_S)


def _own_environment() -> dict[str, str]:
    """The environment of this process without the rank that its launcher gave it, which torch would
    take for that of the server.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }


def _new_log(folder: Path, name: str) -> Path | None:
    """Create a log for the next start and delete old ones. None if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = sorted(int(path.name.split(".")[1]) for path in folder.glob(f"{name}.*.log"))
        for number in numbers[: 1 - _KEPT_LOGS]:
            (folder / f"{name}.{number}.log").unlink(missing_ok=True)
        log = folder / f"{name}.{max(numbers, default=0) + 1}.log"
        log.touch(0o600)  # a server may log its keys
    except (OSError, ValueError) as error:
        logger.warning("%s runs without a log: %s", name, error)
        return None
    return log


def _free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]
