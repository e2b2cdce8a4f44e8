"""`WatchedProcess`: a program that is kept running, with a pause after each end and a budget of
restarts.

`WatchedServer` and `WatchedMirror` say how the program is started, and whether it works.
"""

import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import ClassVar

from ...utils.config import require_at_least
from ...utils.errors import ServerError
from ...utils.logging import get_logger
from ...utils.threads import on_daemon_thread
from ...utils.timing import doubled
from ..servers.client import ServerClient
from .program import Launch, Program, Run
from .records import without_keys
from .spec import Identity, ServerSpec

logger = get_logger(__name__)

_LONGEST_PAUSE_S = 60.0
_LOOK_EVERY_S = 5.0
_LOOK_LIMIT_S = 5.0
"""Time limit of a look at a server, during which the keeper looks at no other one."""
_UNANSWERED = 3
"""Requests without an answer in a row, after which a server is asked for one token."""
_MIRROR = Path(sys.executable).with_name("holdfast-weights")
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
        require_at_least(
            self,
            max_restarts=0,
            start_timeout_s=0.01,
            restart_window_s=0.01,
            hang_timeout_s=0.01,
            stop_timeout_s=0.01,
        )


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
        blameless: whether the last start ended for a reason outside of the program: another one had
            its port, or its node was lost.
        run: the current start, or the last one. None before the first.
        if_missing: what to do if there is no such program.
    """

    if_missing: ClassVar[str]

    def __init__(self, name: str, folder: Path, limits: WatchLimits, launch: Launch) -> None:
        self.name = name
        self.state = ProcessState.WAITING
        self.since = time.time()
        self.error: str | None = None
        self.restarts = 0
        self.started_in_s = 0.0
        self.blameless = False
        self.run: Run | None = None
        self._folder = folder
        self._limits = limits
        self._launch = launch
        self._start_at = 0.0
        self._ends: deque[float] = deque(maxlen=limits.max_restarts + 1)
        self._ended = 0  # how often it did, not counting ends because of `hold`

    @property
    def url(self) -> str:
        """Address of the current start. Empty as long as it has none."""
        return "" if self.run is None else self.run.url

    @property
    def log(self) -> Path | None:
        """Log file of the current start."""
        return None if self.run is None else self.run.log

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
            self._end_run()
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
        self._end_run()

        now = time.monotonic()
        lost_port = started and _PORT_TAKEN in self.log_tail()
        self.blameless = lost_port or (self.run is not None and self.run.blameless)
        # A lost node says nothing about the program. A start that never began counts in any case.
        if self.run is None or not self.run.lost_node:
            self._ends.append(now)
        self._ended += 1
        recent = [end for end in self._ends if now - end <= self._limits.restart_window_s]
        if len(recent) > self._limits.max_restarts:
            self._note(ProcessState.FAILED, problem)
            self.give_up()
            return
        self._start_at = now + doubled(1.0, len(recent) - 1, _LONGEST_PAUSE_S)

    def give_up(self) -> None:
        """End the current start, and give up its place. The process is not watched any more."""
        self._end_run()
        if self.run is not None:
            self.run.release()

    def log_tail(self) -> str:
        """The last lines of the current log, without keys."""
        if self.run is None:
            return ""
        return without_keys(self.run.log_tail(), self._keys())

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
        program = self._program()
        self.restarts = self._ended
        self.run = self._launch(program, self.run)
        self._note(ProcessState.STARTING, self.error)

    def _problem(self, now: float) -> str | None:
        """Why the program must be started again, or None."""
        run = self.run
        assert run is not None
        problem = run.problem()
        if problem is not None:
            return problem
        if self.state is ProcessState.UP:
            return self._hang(now)

        # It may still wait for a place, which has a time limit of its own.
        if run.began is None:
            return None
        if self._answers():
            self.started_in_s = now - run.began
            self._note(ProcessState.UP, None)
            return None
        if now - run.began > self._limits.start_timeout_s:
            return f"it did not answer within {self._limits.start_timeout_s:g} s after its start"
        return None

    def _end_run(self) -> None:
        if self.run is not None:
            self.run.end()

    def _note(self, state: ProcessState, error: str | None) -> None:
        self.state = state
        self.error = error
        self.since = time.time()
        level = logger.info if error is None else logger.warning
        where = f" at {self.url}" if self.url else ""
        level("%s is %s%s", self.name, state, f" ({error})" if error else where)

    # What depends on the program

    @abstractmethod
    def _program(self) -> Program:
        """The program of a new start."""

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
        limits: WatchLimits,
        launch: Launch,
        gpus: str | None = None,
    ) -> None:
        super().__init__(f"server_{number}", folder, limits, launch)
        self.identity = Identity.new()
        self.client: ServerClient | None = None
        self.version: int | None = None
        self.mirror: WatchedMirror | None = None
        self._spec = spec
        self._gpus = gpus
        self._cache = folder / f"cache_{number}"
        self._looked_at = 0.0
        self._silent_since: float | None = None
        self._token: Future[None] | None = None

    def suspect(self) -> None:
        """Ask for one token soon, because requests were not answered."""
        if self.client is not None:
            self.client.connections.unanswered = _UNANSWERED

    def _program(self) -> Program:
        identity = Identity.new()
        self.identity = identity
        self.client = None
        self.version = None
        self._silent_since = None
        self._token = None
        variables = self._spec.variables(identity, str(self._cache))
        if self._gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self._gpus

        # Keys on the command line could be read by every user of the host.
        config = self._folder / f"{self.name}.yaml"
        return Program(
            self.name,
            partial(self._spec.command, identity=identity, config=str(config)),
            variables,
            self._folder,
            self._limits.stop_timeout_s,
            config,
            self._spec.config(identity),
        )

    def _keys(self) -> tuple[str, ...]:
        return (self.identity.key, self.identity.admin_key)

    def _answers(self) -> bool:
        if self.client is None:
            mirror = None if self.mirror is None else self.mirror.url
            self.client = self._spec.client(self.url, self.identity, mirror)
        try:
            self.client.require_name(_LOOK_LIMIT_S)
        except ServerError:
            return False
        return True

    def _hang(self, now: float) -> str | None:
        client = self.client
        assert client is not None
        if self.mirror is not None:
            client.mirror = self.mirror.url
        if now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now

        # A server whose engine is stuck still answers this. The silence begins with the first
        # look: this thread may not have looked for a while.
        if not self._answers():
            if self._silent_since is None:
                self._silent_since = now
            silent_s = now - self._silent_since
            if silent_s > self._limits.hang_timeout_s:
                return f"it has not answered for {silent_s:.0f} s"
            return None
        self._silent_since = None
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

    def __init__(self, published: Path, folder: Path, limits: WatchLimits, launch: Launch) -> None:
        super().__init__("mirror", folder, limits, launch)
        self._published = published
        self._local = folder / "mirror"

    def _program(self) -> Program:
        command = partial(_mirror_command, self._published, self._local)
        return Program(self.name, command, {}, self._folder, self._limits.stop_timeout_s)

    def _answers(self) -> bool:
        host, _, port = self.url.removeprefix("http://").partition(":")
        try:
            socket.create_connection((host, int(port)), _LOOK_LIMIT_S).close()
        except OSError:
            return False
        return True


def _mirror_command(published: Path, local: Path, host: str, port: int) -> list[str]:
    command = [str(_MIRROR), "mirror", str(published), str(local)]
    return [*command, "--listen", f"{host}:{port}"]
