"""`WatchedProcess`: a program over all its starts, with a pause after each end and a budget of
restarts.

`WatchedServer` and `WatchedMirror` say how the program is started, and whether it works.
"""

import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import ClassVar

from ...utils.config import require_range
from ...utils.errors import ServerError
from ...utils.guard import end_guarded, start_guarded
from ...utils.logging import get_logger
from ...utils.processes import ProcessId
from ...utils.threads import on_daemon_thread
from ..servers.client import ServerClient
from .records import log_tail
from .spec import Identity, ServerSpec

logger = get_logger(__name__)

_LONGEST_PAUSE_S = 60.0
_LOOK_EVERY_S = 5.0
_LOOK_LIMIT_S = 5.0
"""Time limit of a look at a server, during which the keeper looks at no other one."""
_UNANSWERED = 3
"""Requests without an answer in a row, after which a server is asked for one token."""
_KILL_S = 5.0
_KEPT_LOGS = 5
_MIRROR = Path(sys.executable).with_name("holdfast-weights")
_OF_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
}
_PORT_TAKEN = "ddress already in use"


@dataclass(frozen=True)
class WatchLimits:
    """When a server is given up.

    Attributes:
        start_timeout_s: longest time until it answers.
        max_restarts: restarts within ``restart_window_s``. One more end, and the server is failed.
        restart_window_s: the time that the restarts are counted in.
        hang_timeout_s: longest time for one token, and longest silence.
        stop_timeout_s: time between SIGTERM and SIGKILL of its processes.

    Raises:
        ConfigError: a value is out of range.
    """

    start_timeout_s: float = 1800.0
    max_restarts: int = 5
    restart_window_s: float = 3600.0
    hang_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        require_range("max_restarts", self.max_restarts, low=0)
        for name in ("start_timeout_s", "restart_window_s", "hang_timeout_s", "stop_timeout_s"):
            require_range(name, getattr(self, name), low=0.01)

    @property
    def end_timeout_s(self) -> float:
        """Time for a guard to end them."""
        return self.stop_timeout_s + _KILL_S


class ProcessState(StrEnum):
    """State of a program."""

    STARTING = "starting"
    """It runs, and does not answer yet."""
    UP = "up"
    """It answers."""
    WAITING = "waiting"
    """It has ended, and is started again after a pause."""
    FAILED = "failed"
    """It has used up its restarts."""


class WatchedProcess(ABC):
    """A program that is kept running. One thread calls `step`, and any thread reads the attributes.

    Attributes:
        name: name for people.
        state: its state.
        since: Unix time of the last change of the state.
        error: why it ended last. None while it is up.
        restarts: number of restarts so far.
        started_in_s: seconds from the last start until it answered.
        lost_port: whether the last start ended because another program had its port.
        url: address of the current start.
        log: log file of the current start.
        guard: its guard. None if nothing runs.
        guard_started: start time of its guard, by which a later job knows the process.
        if_missing: what to do if there is no such program.
    """

    if_missing: ClassVar[str]

    def __init__(self, name: str, logs: Path, host: str, limits: WatchLimits) -> None:
        self.name = name
        self.state = ProcessState.WAITING
        self.since = time.time()
        self.error: str | None = None
        self.restarts = 0
        self.started_in_s = 0.0
        self.lost_port = False
        self.url = ""
        self.log: Path | None = None
        self.guard_started: str | None = None
        self._logs = logs
        self._host = host
        self._limits = limits
        self.guard: Popen[bytes] | None = None
        self._began = 0.0
        self._start_at = 0.0
        self._ends: deque[float] = deque(maxlen=limits.max_restarts + 1)
        self._ended = 0  # how often it did, not counting ends because of `hold`

    def step(self, hold: bool) -> bool:
        """Start the program if it is time, or look at it. Returns whether its state has changed.

        While ``hold``, nothing is started, and a program that is starting ends until later.

        Raises:
            OSError: the program cannot be started.
        """
        before = self.state
        now = time.monotonic()
        if self.state is ProcessState.WAITING and now >= self._start_at and not hold:
            self._start()
            return True
        if self.state is ProcessState.STARTING and hold:
            self._end_guard()
            self._note(ProcessState.WAITING, self.error)
            return True
        if self.state in (ProcessState.STARTING, ProcessState.UP):
            problem = self._problem(now)
            if problem is not None:
                self.note_end(problem)
        return self.state is not before

    def note_end(self, problem: str) -> None:
        """Note that the program has ended or was not started, end what is left of it, and decide
        when it is started again.
        """
        started = self.state is ProcessState.STARTING
        self._note(ProcessState.WAITING, problem)
        self._end_guard()

        now = time.monotonic()
        self.lost_port = started and _PORT_TAKEN in self.log_tail()
        self._ends.append(now)
        self._ended += 1
        recent = [end for end in self._ends if now - end <= self._limits.restart_window_s]
        if len(recent) > self._limits.max_restarts:
            self._note(ProcessState.FAILED, problem)
            return
        pause_s = min(2.0 ** (len(recent) - 1), _LONGEST_PAUSE_S)
        self._start_at = now + pause_s

    def take_guard(self) -> Popen[bytes] | None:
        """Return the guard of the current start, for whoever ends it. The process is not watched
        any more.
        """
        guard = self.guard
        self.guard = None
        return guard

    def log_tail(self) -> str:
        """The last lines of the current log, without keys."""
        return log_tail(self.log, self._keys())

    def describe(self) -> str:
        """Name, state, last error and the end of the log."""
        text = f"{self.name} is {self.state}"
        if self.error:
            text += f": {self.error}"
        if self.log is not None:
            text += f"; {self.log} ends with\n{self.log_tail()}"
        return text

    # Parts of `step`

    def _start(self) -> None:
        port = _free_port(self._host)
        command, variables = self._program(port)
        self.restarts = self._ended

        # Each start has a log of its own. A full disk must not stop the server.
        self.log = _new_log(self._logs, self.name)
        with open(self.log or os.devnull, "ab") as output:
            environment = {**_own_environment(), **variables}
            timeout_s = self._limits.stop_timeout_s
            self.guard = start_guarded(command, output, environment, timeout_s)
        self.guard_started = ProcessId.of(self.guard.pid).started
        self.url = f"http://{self._host}:{port}"
        self._began = time.monotonic()
        self._note(ProcessState.STARTING, self.error)

    def _problem(self, now: float) -> str | None:
        """Why the program must be started again, or None."""
        assert self.guard is not None
        code = self.guard.poll()
        if code is not None:
            return f"it ended with exit code {code}"
        if self.state is ProcessState.UP:
            return self._hang(now)
        if self._answers():
            self.started_in_s = now - self._began
            self._note(ProcessState.UP, None)
            return None
        if now - self._began > self._limits.start_timeout_s:
            return f"it did not answer within {self._limits.start_timeout_s:g} s after its start"
        return None

    def _end_guard(self) -> None:
        guard = self.take_guard()
        if guard is not None:
            end_guarded(guard, timeout_s=self._limits.end_timeout_s)

    def _note(self, state: ProcessState, error: str | None) -> None:
        self.state = state
        self.error = error
        self.since = time.time()
        level = logger.info if error is None else logger.warning
        level("%s is %s%s", self.name, state, f" ({error})" if error else f" at {self.url}")

    # What depends on the program

    @abstractmethod
    def _program(self, port: int) -> tuple[list[str], Mapping[str, str]]:
        """The command of a new start, and variables to add to its environment."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it answers since its start."""

    def _keys(self) -> tuple[str, ...]:
        """Keys of the current start."""
        return ()

    def _hang(self, now: float) -> str | None:
        """Why the running program does not work, or None."""
        return None


class WatchedServer(WatchedProcess):
    """An inference server.

    Attributes:
        client: client of the current start. Each start gets a new one.
        identity: what the server was started with.
        version: version of its weights, when it was asked last. None: unknown.
    """

    if_missing = "name the Python of an environment with vLLM or SGLang, or the servers' URLs"

    def __init__(
        self,
        number: int,
        spec: ServerSpec,
        folder: Path,
        host: str,
        gpus: str | None,
        limits: WatchLimits,
    ) -> None:
        super().__init__(f"server_{number}", folder, host, limits)
        self.identity = Identity.new()
        self.client: ServerClient | None = None
        self.version: int | None = None
        self.mirror: WatchedMirror | None = None
        self._spec = spec
        self._gpus = gpus
        self._cache = folder / f"cache_{number}"
        self._looked_at = 0.0
        self._answered_at = 0.0
        self._token: Future[None] | None = None

    def suspect(self) -> None:
        """Ask for one token soon, because requests were not answered."""
        if self.client is not None:
            self.client.connections.unanswered = _UNANSWERED

    def _program(self, port: int) -> tuple[list[str], Mapping[str, str]]:
        self.identity = Identity.new()
        self._token = None
        self.version = None
        variables = self._spec.variables(self.identity, str(self._cache))
        if self._gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self._gpus
        mirror = None if self.mirror is None else self.mirror.url
        self.client = self._spec.client(f"http://{self._host}:{port}", self.identity, mirror)
        return self._spec.command(self._host, port, self.identity), variables

    def _keys(self) -> tuple[str, ...]:
        return (self.identity.key, self.identity.admin_key)

    def _answers(self) -> bool:
        assert self.client is not None
        try:
            self.client.require_name(_LOOK_LIMIT_S)
        except ServerError:
            return False
        self._answered_at = time.monotonic()
        return True

    def _hang(self, now: float) -> str | None:
        client = self.client
        assert client is not None
        if self.mirror is not None:
            client.mirror = self.mirror.url
        if now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now

        # A server whose engine is stuck still answers this.
        if not self._answers():
            silent_s = now - self._answered_at
            if silent_s > self._limits.hang_timeout_s:
                return f"it has not answered for {silent_s:.0f} s"
            return None
        with suppress(ServerError):  # its engine loads weights, or hangs
            self.version = client.read_version(_LOOK_LIMIT_S)

        # So if requests had no answer in time, it has to complete a token.
        if self._token is None:
            if client.connections.unanswered >= _UNANSWERED:
                ask = partial(client.require_token, self._limits.hang_timeout_s)
                self._token = on_daemon_thread(ask, f"token of {self.name}")
        elif self._token.done():
            error = self._token.exception()
            self._token = None
            if error is not None:
                return f"it hangs: {error}"
            client.connections.unanswered = 0
        return None


class WatchedMirror(WatchedProcess):
    """A ``holdfast-weights mirror`` for the servers of this host."""

    if_missing = "install plugins/weights in the environment of the job"

    def __init__(self, published: Path, folder: Path, host: str, limits: WatchLimits) -> None:
        super().__init__("mirror", folder, host, limits)
        self._published = published
        self._local = folder / "mirror"

    def _program(self, port: int) -> tuple[list[str], Mapping[str, str]]:
        address = f"{self._host}:{port}"
        command = [str(_MIRROR), "mirror", str(self._published), str(self._local)]
        return [*command, "--listen", address], {}

    def _answers(self) -> bool:
        host, _, port = self.url.removeprefix("http://").partition(":")
        try:
            socket.create_connection((host, int(port)), _LOOK_LIMIT_S).close()
        except OSError:
            return False
        return True


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
