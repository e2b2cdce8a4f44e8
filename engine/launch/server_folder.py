"""`ServerFolder`: servers of other processes, by the records that their keepers write into a shared
folder.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...utils.config import require_range
from ...utils.errors import ConfigError
from ...utils.files import StrPath
from ...utils.remote import without_secrets
from ..servers.api import ServerReport, ServerState
from ..servers.client import ServerClient
from ..servers.sglang import SGLangServer
from ..servers.vllm import VLLMServer
from .records import BEAT_S, Record, known_format, read_records, suspect_file

_UNANSWERED = 3


class ServerFolder:
    """The servers that ``holdfast serve`` keeps running, on any number of hosts. A `ServerSource`.

        fleet = ServerFleet(ServerFolder("/shared/runs/exp/trial/servers"), min_servers=2)

    Args:
        folder: ``servers`` in the folder of the run. It may not exist yet.
        stale_s: time without a new file of a host after which its servers are removed.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, folder: StrPath, stale_s: float = 60.0) -> None:
        require_range("stale_s", stale_s, low=2 * BEAT_S)
        self._folder = Path(folder).absolute()
        self._stale_s = stale_s
        # Of each host, the last beat and the time at which it was seen first. The clocks of two
        # hosts are not compared.
        self._beats: dict[str, tuple[float, float]] = {}
        self._records: dict[str, Record] = {}
        self._clients: dict[str, ServerClient] = {}
        self._absent: list[ServerReport] = []
        self._restarts = 0
        self._started_in_s = 0.0

    def servers(self) -> Sequence[ServerClient]:
        """See `ServerSource`. Servers may appear later, so missing ones are no error.

        Raises:
            ConfigError: a file has another format, or names a server that this version does not
                know.
            OSError: the folder cannot be read.
        """
        found: dict[str, ServerClient] = {}
        absent: list[ServerReport] = []
        restarts = 0
        started_in_s = 0.0
        # A file that cannot be read for a while counts as one without a new beat.
        self._records |= read_records(self._folder)
        for host, record in self._records.items():
            with known_format(self._folder, host):
                alive = self._beats_on(host, record["beat"]) and not record["closed"]
                for server in record["servers"]:
                    restarts += server["restarts"]
                    started_in_s = max(started_in_s, server["started_in_s"])
                    if alive and server["state"] == "up":
                        client = self._client(server)
                        found[server["served_name"]] = client
                        self._report_timeouts(host, server["name"], client)
                    else:
                        absent.append(_absent_report(host, server, alive))

        # The same server keeps its client, which knows what it has loaded.
        self._clients = found
        self._absent = absent
        self._restarts = restarts
        self._started_in_s = started_in_s
        return list(found.values())

    def absent(self) -> list[ServerReport]:
        """See `ServerSource`."""
        return self._absent

    def stats(self) -> dict[str, float]:
        """See `ServerSource`."""
        return {
            "servers_restarted": float(self._restarts),
            "server_start_s": self._started_in_s,
        }

    def hold(self, on: bool) -> None:
        """Raise ConfigError, because these servers are started without asking the trainer."""
        if on:
            raise ConfigError(
                "servers of `holdfast serve` cannot take turns with the trainer on the same GPUs; "
                "start them with ServerProcesses in the job"
            )

    def _beats_on(self, host: str, beat: float) -> bool:
        now = time.monotonic()
        seen, since = self._beats.get(host, (None, now))
        if beat != seen:
            self._beats[host] = (beat, now)
            return True
        return now - since <= self._stale_s

    def _client(self, server: Record) -> ServerClient:
        client = self._clients.get(server["served_name"])
        if client is None:
            return _new_client(server)
        client.mirror = server["mirror"]
        return client

    def _report_timeouts(self, host: str, name: str, client: ServerClient) -> None:
        if client.connections.unanswered < _UNANSWERED:
            return
        client.connections.unanswered = 0
        with suppress(OSError):  # the next requests are reported again
            suspect_file(self._folder, host, name).touch()


def _new_client(server: Record) -> ServerClient:
    options: Record = {
        "api_key": server["api_key"],
        "served_name": server["served_name"],
        "mirror": server["mirror"],
    }
    match server["kind"]:
        case "vllm":
            return VLLMServer(server["url"], transfer=server["transfer"], **options)
        case "sglang":
            return SGLangServer(server["url"], admin_key=server["admin_key"], **options)
    raise ConfigError(
        f"server {server['name']} is a {server['kind']!r}; expected 'vllm' or 'sglang'. Does "
        "another version of Holdfast keep it?"
    )


def _absent_report(host: str, server: Record, alive: bool) -> ServerReport:
    state = ServerState.STARTING if server["state"] == "starting" else ServerState.GONE
    error = server["error"] or f"it is {server['state']}"
    if not alive:
        state = ServerState.GONE
        error = "its `holdfast serve` gives no sign of life"
    return ServerReport(f"{server['name']} on {host}", state, None, without_secrets(error))
