"""A job that waits for inference servers ends when it is asked to stop."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine.launch import ServerFolder
from holdfast.engine.rollouts.config import RolloutConfig
from holdfast.engine.rollouts.requests import RequestSender
from holdfast.engine.servers import ModelRequest, ServerFleet
from holdfast.recover.triggers import StopRequests
from holdfast.utils import stopping
from holdfast.utils.errors import HoldfastError, NoServerError, StopRequested
from holdfast.utils.stopping import require_no_stop
from tests.engine.rollouts.servers import Pool, make_executor
from tests.engine.servers.scripted import ScriptedServer, write_published
from tests.limits import stretched
from tests.recover.triggers.jobs import job
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

WAIT_S = 600.0
PATIENCE_S = 0.5


def update(folder: Path) -> None:
    """Publish, although no server has started."""
    fleet = ServerFleet(ServerFolder(folder / "servers"), server_wait_s=WAIT_S)
    with closing(fleet):
        fleet.update(write_published(folder / "weights", 1), 1, 5.0)


def wait_serving(folder: Path) -> None:
    """Wait for a server that does not come back."""
    fleet = ServerFleet(ServerFolder(folder / "servers"), probe_interval_s=None)
    with closing(fleet):
        fleet.wait_serving(1, WAIT_S)


def sample(folder: Path) -> None:
    """Sample, although no server is there."""
    with make_executor([], server_wait_s=WAIT_S, batch_timeout_s=WAIT_S) as executor:
        executor.set_version(0)
        executor.next_batch(0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.0)


def run(pipe: Connection, work: Callable[[Path], None], folder: Path) -> None:
    stopping.PATIENCE_S = PATIENCE_S
    stop = StopRequests(["SIGTERM"], None)
    stop.signals.install()
    pipe.send("waits")
    try:
        work(folder)
    except HoldfastError as error:
        pipe.send(str(error))
    stop.signals.grant()


@pytest.mark.parametrize("work", [update, wait_serving, sample])
def test_a_wait_for_servers_ends_with_a_signal(
    tmp_path: Path, work: Callable[[Path], None]
) -> None:
    (tmp_path / "servers").mkdir()
    with job(partial(run, work=work, folder=tmp_path), tmp_path) as running:
        assert running.receive() == "waits"
        assert not running.pipe.poll(1.0)
        running.send_signal(signal.SIGTERM)
        began = time.monotonic()
        message = running.receive()
        assert "SIGTERM came while the job waited for" in message
        assert PATIENCE_S - 0.2 < time.monotonic() - began < stretched(3.0)
        assert running.exit_code() == 0


def test_a_stop_that_was_answered_ends_no_later_wait() -> None:
    stop = StopRequests(["SIGUSR2"], None)
    stop.signals.install()
    try:
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(StopRequested, match="SIGUSR2 came while the job waited for a server"):
            require_no_stop("a server", 0.0)
        stop.signals.grant()
        require_no_stop("a server", 0.0)
        signal.raise_signal(signal.SIGUSR2)
        require_no_stop("a server", 0.0)
    finally:
        stop.signals.uninstall()


@pytest.fixture
def asked_long_ago(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The request to stop is older than the patience."""
    monkeypatch.setattr(stopping, "PATIENCE_S", PATIENCE_S)
    stopping.note_stop("SIGTERM")
    time.sleep(2 * PATIENCE_S)
    yield
    stopping.forget_stop()


def send(servers: Any) -> Any:
    """Send a request, which takes the answer as it is."""

    async def run() -> Any:
        config = RolloutConfig(server_wait_s=10 * PATIENCE_S)
        episode: Any = SimpleNamespace(server=None, failed=None, check=lambda *_: None)
        return await RequestSender(servers, config).send(ModelRequest([1]), episode)

    return asyncio.run(run())


class RefusingServer:
    """Refuses its first requests."""

    def __init__(self, refusals: int) -> None:
        self._refusals = refusals

    async def agenerate(self, request: Any) -> str:
        if self._refusals > 0:
            self._refusals -= 1
            raise NoServerError("nobody listens")
        return "answer"


def test_one_refusal_long_after_the_signal_does_not_end_the_step(asked_long_ago: None) -> None:
    assert send([RefusingServer(1)]) == "answer"
    began = time.monotonic()
    with pytest.raises(StopRequested):
        send([RefusingServer(1000)])
    assert time.monotonic() - began >= PATIENCE_S


def test_one_empty_look_long_after_the_signal_does_not_end_the_step(asked_long_ago: None) -> None:
    looks = [[], [RefusingServer(0)], [RefusingServer(0)]]
    assert send(Pool(lambda: looks.pop(0))) == "answer"


@pytest.mark.parametrize("why", slow_but(["updates"], ["sleeps", "updates"]))
def test_requests_wait_for_a_fleet_that_sleeps_or_updates_also_after_the_signal(
    asked_long_ago: None, why: str
) -> None:
    away_until = time.monotonic() + 2 * PATIENCE_S
    server: Any = RefusingServer(0)

    class Fleet(ServerFleet):
        def serving(self) -> list[Any]:
            if time.monotonic() < away_until:
                return []
            self._sleep_level = None
            return [server]

    with closing(Fleet([ScriptedServer()], probe_interval_s=None)) as fleet:
        if why == "sleeps":
            fleet._sleep_level = 1
        else:
            fleet._updating.acquire()
        assert send(fleet) == "answer"


def test_a_server_that_serves_is_not_waited_for_and_a_stop_changes_nothing(tmp_path: Path) -> None:
    stop = StopRequests(["SIGUSR2"], None)
    stop.signals.install()
    try:
        signal.raise_signal(signal.SIGUSR2)
        with closing(ServerFleet([ScriptedServer()], probe_interval_s=None)) as fleet:
            fleet.update(write_published(tmp_path, 1), 1, stretched(20))
            assert fleet.wait_serving(1, 0.0)
    finally:
        stop.signals.grant()
        stop.signals.uninstall()
