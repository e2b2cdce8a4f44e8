"""`ServerKeeper`: inference servers that one thread, the keeper, starts, watches and restarts.

A server that has ended gets a new address, a new name and new keys, and begins with the base model.
The fleet removes the old one and has the new one load the newest weights before it gets requests.

If keeper and guard of a server are killed together, the next start in the same folder ends what is
left on this host, by the process groups in ``<host>.json``.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from ...utils.config import require_range
from ...utils.errors import ConfigError, HoldfastError, RolloutError
from ...utils.files import StrPath
from ...utils.logging import get_logger
from ...utils.processes import ProcessId
from ...utils.threads import on_daemon_thread
from ..servers.api import ServerReport, ServerState
from ..servers.client import ServerClient
from .program import end_left_group
from .records import (
    BEAT_S,
    Record,
    known_format,
    read_records,
    suspect_file,
    write_private,
)
from .spec import ServerSpec
from .watched import ProcessState, WatchedProcess, WatchedServer

logger = get_logger(__name__)

_STEP_S = 0.2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ServerKeeper:
    """Servers that this process keeps running. A `ServerSource` and a context manager.

    `ServerProcesses` and `RayServers` say where the servers run.
    """

    def __init__(self, spec: ServerSpec, count: int, folder: StrPath, min_servers: int) -> None:
        require_range("count", count, low=1)
        require_range("min_servers", min_servers, low=1, high=count)
        self._spec = spec
        self._min_servers = min_servers
        self._folder = Path(folder).absolute()
        self._host_name = socket.gethostname()
        self._own_folder = self._folder / self._host_name

        # The servers, and what they need. A subclass fills these.
        self._servers: list[WatchedServer] = []
        self._processes: list[WatchedProcess] = []

        # The keeper.
        self._all_were_up = False
        self._problem: HoldfastError | None = None
        self._hold = False
        self._stepping = threading.Lock()
        self._closed = threading.Event()
        self._ended = False  # after `_closed`, once nothing runs
        self._keeper: threading.Thread | None = None

    def start(self) -> None:
        """Start all servers, and return at once. Ends processes that an earlier job has left in the
        folder.

        Raises:
            ConfigError: another job keeps servers in this folder, the folder cannot be written, or
                they were started before.
        """
        if self._keeper is not None or self._closed.is_set():
            name = type(self).__name__
            raise ConfigError(f"these servers were started before; make other {name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _end_leftovers(self._folder, self._host_name)
            self._write_record()
        except OSError as error:
            raise ConfigError(
                f"folder {self._folder} of the servers cannot be used: {error}"
            ) from error
        self._keeper = threading.Thread(target=self._keep, name="inference servers", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End all servers and their processes. Nothing happens if they were not started."""
        if self._keeper is None:
            return
        self._closed.set()
        self._keeper.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # `ServerSource`

    def servers(self) -> Sequence[ServerClient]:
        """Clients of the servers that answer.

        Raises:
            ConfigError: `start` was not called, or a server ended before all of them answered for
                the first time. The message has the end of its log.
            RolloutError: fewer than ``min_servers`` are not failed.
        """
        if self._keeper is None:
            raise ConfigError("these servers were not started; call start()")
        if self._problem is not None:
            raise self._problem
        clients: list[ServerClient] = []
        for server in self._servers:
            if server.state is ProcessState.UP and server.client is not None:
                clients.append(server.client)
        return clients

    def absent(self) -> list[ServerReport]:
        """Reports on the servers that do not answer."""
        reports: list[ServerReport] = []
        for server in self._servers:
            state = server.state
            if state is ProcessState.UP:
                continue
            shown = ServerState.GONE
            if state is ProcessState.STARTING:
                shown = ServerState.STARTING
            error = server.error or f"it is {state}"
            if state is ProcessState.FAILED:
                error = f"it was restarted too often; {error}"
            reports.append(ServerReport(server.name, shown, None, error))
        return reports

    def stats(self) -> dict[str, float]:
        """``servers_restarted``: restarts so far. ``server_start_s``: seconds of the slowest of the
        last starts.
        """
        return {
            "servers_restarted": float(sum(server.restarts for server in self._servers)),
            "server_start_s": max(server.started_in_s for server in self._servers),
        }

    def hold(self, on: bool) -> None:
        """See `ServerSource`. With ``on``, return once no server is starting."""
        with self._stepping:
            self._hold = on
        while on and not self._closed.is_set():
            if not any(server.state is ProcessState.STARTING for server in self._servers):
                return
            time.sleep(_STEP_S)

    # For people and tests

    def pids(self) -> dict[str, int]:
        """Process ids of the servers that run (``server_0`` ...), and of the ``mirror``, on their
        hosts.
        """
        found: dict[str, int] = {}
        for process in self._processes:
            pid = None if process.run is None else process.run.pid()
            if pid is not None:
                found[process.name] = pid
        return found

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until all servers answer.

        Raises:
            ConfigError, RolloutError: see `servers`.
            TimeoutError: not all answer after ``timeout_s``.
        """
        end = time.monotonic() + timeout_s
        while len(self.servers()) < len(self._servers):
            if time.monotonic() > end:
                absent = "; ".join(str(report) for report in self.absent())
                raise TimeoutError(f"after {timeout_s:g} s, {absent}")
            time.sleep(_STEP_S)

    # The keeper

    def _keep(self) -> None:
        try:
            self._watch()
        except Exception as error:
            logger.exception("the servers are not watched any more, and end")
            self._give_up(RolloutError(f"the servers could not be watched: {error!r}"))
        finally:
            self._end_all()
            self._ended = True
            self._try_to_write_record()

    def _end_all(self) -> None:
        ends = [on_daemon_thread(one.give_up, one.name) for one in self._processes]
        for end, process in zip(ends, self._processes, strict=True):
            error = end.exception()  # once it has ended, within its time limit
            if error is not None:
                logger.error("%s could not be ended", process.name, exc_info=error)

    def _watch(self) -> None:
        written = time.monotonic()
        while not self._closed.wait(_STEP_S):
            for process in self._processes:
                if self._closed.is_set():
                    return
                try:
                    with self._stepping:
                        changed = process.step(self._hold)
                except OSError as error:
                    changed = True
                    self._note_no_start(process, error)
                self._judge()

                # After each step, because one may take many seconds.
                if changed or time.monotonic() - written > BEAT_S:
                    written = time.monotonic()
                    self._read_suspects()
                    self._try_to_write_record()

    def _judge(self) -> None:
        """Note whether the run can go on."""
        states = [server.state for server in self._servers]
        if not self._all_were_up:
            self._all_were_up = all(state is ProcessState.UP for state in states)
            ended = next(self._ended_at_the_start(), None)
            if ended is not None:
                self._give_up(
                    ConfigError(
                        f"{ended.describe()}\n"
                        "No server is started again before all have answered once"
                    )
                )
            return

        # Enough servers, and the mirror.
        failed = [process for process in self._processes if process.state is ProcessState.FAILED]
        left = len(states) - states.count(ProcessState.FAILED)
        if left < self._min_servers or len(failed) > states.count(ProcessState.FAILED):
            described = "\n".join(process.describe() for process in failed)
            self._give_up(
                RolloutError(
                    f"{left} inference servers are left, {self._min_servers} are needed; "
                    f"{described}"
                )
            )

    def _note_no_start(self, process: WatchedProcess, error: OSError) -> None:
        problem = f"it cannot be started: {error}"
        if self._all_were_up:  # the host may recover
            process.note_end(problem)
            return
        if isinstance(error, FileNotFoundError):
            problem += f"; {process.if_missing}"
        self._give_up(ConfigError(f"{process.name}: {problem}"))

    def _give_up(self, problem: HoldfastError) -> None:
        """End all servers. Whoever asks for them gets the error."""
        if self._problem is None:
            self._problem = problem
        self._closed.set()

    def _ended_at_the_start(self) -> Iterator[WatchedServer]:
        for server in self._servers:
            ended = server.state is ProcessState.WAITING and server.error is not None
            if server.state is ProcessState.FAILED or (ended and not server.blameless):
                yield server

    def _read_suspects(self) -> None:
        for server in self._servers:
            file = suspect_file(self._folder, self._host_name, server.name)
            with contextlib.suppress(OSError):
                file.unlink()
                server.suspect()

    # The record

    def _try_to_write_record(self) -> None:
        try:
            self._write_record()
        except OSError as error:
            logger.warning("the servers go on, but their record cannot be written: %s", error)

    def _write_record(self) -> None:
        keeper = ProcessId.current()
        runs = [process.run for process in self._processes if process.run is not None]
        groups = [run.local_group() for run in runs]
        write_private(
            self._folder / f"{self._host_name}.json",
            {
                "boot_id": _boot_id(),
                "keeper": [keeper.pid, keeper.started],
                "closed": self._ended,
                "beat": time.time(),
                "servers": [self._entry(server) for server in self._servers],
                "groups": [[group.pid, group.started] for group in groups if group is not None],
            },
        )

    def _entry(self, server: WatchedServer) -> Record:
        client = server.client
        return {
            "name": server.name,
            "kind": self._spec.kind,
            "transfer": self._spec.transfer,
            "state": server.state.value,
            "since": server.since,
            "error": server.error,
            "version": server.version,
            "restarts": server.restarts,
            "started_in_s": server.started_in_s,
            "log": None if server.log is None else str(server.log),
            "url": server.url,
            "mirror": None if client is None else client.mirror,
            "served_name": server.identity.name,
            "api_key": server.identity.key,
            "admin_key": server.identity.admin_key,
        }


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return ""


def _end_leftovers(folder: Path, host: str) -> None:
    """End what an earlier keeper of this host has left running. ConfigError if it still runs, or
    its record has another format.
    """
    record = read_records(folder).get(host)
    if record is None:
        return
    with known_format(folder, host):
        if record["closed"] or record["boot_id"] != _boot_id():
            return
        keeper = ProcessId(*record["keeper"])
        groups = [ProcessId(group, started) for group, started in record["groups"]]
    if keeper.alive():
        raise ConfigError(
            f"process {keeper.pid} of this host keeps servers in {folder}; end it first, or take "
            "another folder"
        )
    for group in groups:
        end_left_group(group)
