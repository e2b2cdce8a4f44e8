"""`ServerProcesses`: inference servers as processes of this host, started, watched and restarted by
one thread, the keeper.

Each server runs under a guard (`holdfast.utils.guard`), so it ends with this process in whatever
way that ends. If keeper and guard are killed together, the next start in the same folder ends what
is left, by the process groups in ``<host>.json``.

A server that has ended gets a new address, a new name and new keys, and begins with the base model.
The fleet removes the old one and has the new one load the newest weights before it gets requests.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from ...utils.config import require_range
from ...utils.errors import ConfigError, HoldfastError, RolloutError
from ...utils.files import StrPath
from ...utils.guard import end_group, end_guarded, guarded_pid
from ...utils.logging import get_logger
from ...utils.processes import ProcessId, processes_of_group
from ..servers.api import ServerReport, ServerState
from ..servers.client import ServerClient
from .records import BEAT_S, Record, read_records, suspect_file, write_private
from .spec import ServerSpec
from .watched import ProcessState, WatchedMirror, WatchedProcess, WatchedServer, WatchLimits

logger = get_logger(__name__)

_STEP_S = 0.2
_LEFTOVERS_S = 10.0
_ANY_ADDRESS = ("", "0.0.0.0", "::")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ServerProcesses:
    """Inference servers that this process keeps running. A `ServerSource` and a context manager.

        spec = ServerSpec("vllm", "/models/base", python=".venv-vllm/bin/python")
        with ServerProcesses(spec, 2, "/shared/runs/exp/trial/servers", gpus="2,3") as servers:
            fleet = ServerFleet(servers)
            engine.connect_engine(fleet, WeightUpdateMeta("disk", "/shared/weights"))

    In a torchrun job every rank may create it. The servers are those of the rank that calls `start`
    or enters the block.

    Args:
        spec: how to start a server.
        count: number of servers.
        folder: for logs (``<host>/server_<n>.<start>.log``), caches of compiled code, and
            ``<host>.json``.
        gpus: devices for all servers, ``"2,3"``. Each gets ``tensor_parallel_size`` of them. None:
            all servers see what this process sees.
        host: address that the servers listen on, and in their URLs.
        published: folder of published weights, of which this host gets a mirror for its servers.
        min_servers: the run ends if fewer servers are not failed.
        limits: when a server is restarted and given up.

    Raises:
        ConfigError: there are not enough GPUs, or a value is out of range.
    """

    def __init__(
        self,
        spec: ServerSpec,
        count: int,
        folder: StrPath,
        gpus: str | None = None,
        host: str = "127.0.0.1",
        published: StrPath | None = None,
        min_servers: int = 1,
        limits: WatchLimits = WatchLimits(),  # noqa: B008 - frozen
    ) -> None:
        require_range("count", count, low=1)
        require_range("min_servers", min_servers, low=1, high=count)
        if host in _ANY_ADDRESS:
            raise ConfigError(
                f"host is {host!r}, which makes a URL that other hosts cannot use; give the "
                "address of this host that the trainers reach"
            )
        self._spec = spec
        self._min_servers = min_servers
        self._limits = limits
        self._folder = Path(folder).absolute()
        self._host_name = socket.gethostname()

        # The servers, each with its GPUs.
        own_folder = self._folder / self._host_name
        shares = _shares(gpus, count, spec.tensor_parallel_size)
        self._servers = [
            WatchedServer(number, spec, own_folder, host, shares[number], limits)
            for number in range(count)
        ]
        self._processes: list[WatchedProcess] = [*self._servers]
        if published is not None:
            mirror = WatchedMirror(Path(published).absolute(), own_folder, host, limits)
            self._processes.insert(0, mirror)
            for server in self._servers:
                server.mirror = mirror

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
            raise ConfigError("these servers were started before; make other ServerProcesses")
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

    def __enter__(self) -> "ServerProcesses":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        """Process ids of the servers that run (``server_0`` ...), and of the ``mirror``."""
        found: dict[str, int] = {}
        for process in self._processes:
            guard = process.guard
            if guard is not None:
                found[process.name] = guarded_pid(guard)
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
            guards = [process.take_guard() for process in self._processes]
            running = [guard for guard in guards if guard is not None]
            end_guarded(*running, timeout_s=self._limits.end_timeout_s)
            self._ended = True
            self._try_to_write_record()

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
            if server.state is ProcessState.FAILED or (ended and not server.lost_port):
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
        write_private(
            self._folder / f"{self._host_name}.json",
            {
                "boot_id": _boot_id(),
                "keeper": [keeper.pid, keeper.started],
                "closed": self._ended,
                "beat": time.time(),
                "servers": [self._entry(server) for server in self._servers],
                "groups": [
                    [process.guard.pid, process.guard_started]
                    for process in self._processes
                    if process.guard is not None
                ],
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


def _shares(gpus: str | None, count: int, each: int) -> list[str | None]:
    """The devices of each server, in the notation of CUDA_VISIBLE_DEVICES."""
    if gpus is None:
        return [None] * count
    devices = gpus.split(",")
    if len(devices) != count * each:
        raise ConfigError(
            f"gpus names {len(devices)} devices, and {count} servers of {each} take {count * each}"
        )
    return [",".join(devices[number * each : (number + 1) * each]) for number in range(count)]


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return ""


def _end_leftovers(folder: Path, host: str) -> None:
    """End what an earlier keeper of this host has left running. ConfigError if it still runs."""
    record = read_records(folder).get(host)
    if record is None or record["closed"] or record["boot_id"] != _boot_id():
        return
    keeper = ProcessId(*record["keeper"])
    if keeper.alive():
        raise ConfigError(
            f"process {keeper.pid} of this host keeps servers in {folder}; end it first, or take "
            "another folder"
        )
    for group, started in record["groups"]:
        _end_group(group, started)


def _end_group(group: int, started: str | None) -> None:
    """End the processes of a group, if it is still the group of the guard that started then."""
    members = processes_of_group(group)
    if not members or started is None:
        return
    # A group keeps its number while one of its processes lives, so a younger leader is another one.
    leader = ProcessId.of(group)
    is_other = leader.started not in (None, started)
    is_older = any(int(member.started or 0) < int(started) for member in members)
    if is_other or is_older:
        return
    logger.warning("process group %d is left from an earlier job, and is ended", group)
    end_group(group, _LEFTOVERS_S)
