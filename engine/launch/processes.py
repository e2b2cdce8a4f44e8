"""`ServerProcesses`: inference servers as processes of this host.

Each server runs under a guard (`holdfast.utils.guard`), so it ends with this process in whatever
way that ends.
"""

from functools import partial
from pathlib import Path

from ...utils.errors import ConfigError
from ...utils.files import StrPath
from .keeper import ServerKeeper
from .program import LocalRun, Program, Run
from .spec import ServerSpec
from .watched import WatchedMirror, WatchedServer, WatchLimits

_ANY_ADDRESS = ("", "0.0.0.0", "::")


class ServerProcesses(ServerKeeper):
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
        super().__init__(spec, count, folder, min_servers)
        if host in _ANY_ADDRESS:
            raise ConfigError(
                f"host is {host!r}, which makes a URL that other hosts cannot use; give the "
                "address of this host that the trainers reach"
            )

        # The servers, each with its GPUs.
        launch = partial(_launch, host)
        shares = _shares(gpus, count, spec.tensor_parallel_size)
        for number in range(count):
            server = WatchedServer(number, spec, self._own_folder, limits, launch, shares[number])
            self._servers.append(server)
        self._processes += self._servers
        if published is not None:
            folder = Path(published).absolute()
            mirror = WatchedMirror(folder, self._own_folder, limits, launch)
            self._processes.insert(0, mirror)
            for server in self._servers:
                server.mirror = mirror


def _launch(host: str, program: Program, before: Run | None) -> Run:
    return LocalRun(program, host)


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
