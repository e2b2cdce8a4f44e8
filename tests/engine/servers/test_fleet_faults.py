"""A server or publisher dies or stops at any HTTP call of an update: the next update reaches every
live server.
"""

import asyncio
import multiprocessing as mp
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import httpx2
import pytest

from examples.copy_task import write_model_folder
from holdfast.engine import WeightUpdateMeta
from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ServerState,
    ServerStatus,
    weights_label,
)
from holdfast.utils.errors import PublishError
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.scripted import write_published
from tests.engine.servers.test_publish import make_engine, publish
from tests.helpers import run_ranks
from tests.limits import stretched, wait_until
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

LIMIT_S = stretched(20)
CLIENTS = {"vllm": VLLMServer, "sglang": SGLangServer}
CALLS = {
    "vllm": [
        "pause",
        "weight_info",
        "collective_rpc",
        "reset_prefix_cache",
        "update_weight_version",
        "resume",
    ],
    "sglang": [
        "pause_generation",
        "model_info",
        "update_weights_from_disk",
        "continue_generation",
        "model_info",
    ],
}
"""Calls of one update, in order."""
CALLS["vllm"] += ["weight_info", "is_paused"]
SERVING, BEHIND, PAUSED, GONE = (
    ServerState.SERVING,
    ServerState.BEHIND,
    ServerState.PAUSED,
    ServerState.GONE,
)

Client = VLLMServer | SGLangServer


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Kind of the servers. A test may override it."""
    return getattr(request, "param", "vllm")


@pytest.fixture
def fakes(kind: str, tmp_path: Path) -> Iterator[list[FakeServer]]:
    """Two servers."""
    with FakeServer(kind, tmp_path) as first, FakeServer(kind, tmp_path) as second:
        yield [first, second]


def clients(
    fakes: list[FakeServer], kind: str = "vllm", timeout_s: float = LIMIT_S
) -> list[Client]:
    return [CLIENTS[kind](fake.url, timeout_s=timeout_s) for fake in fakes]


def check_served(fakes: list[FakeServer], folder: Path, version: int, kind: str = "vllm") -> None:
    """Check that all servers report the folder, and that a completion comes from it."""
    request = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=4), seed=1)
    for fake, client in zip(fakes, clients(fakes, kind), strict=True):
        assert client.status() == ServerStatus(weights_label(folder, version), paused=False)
        assert asyncio.run(client.agenerate(request)).output_versions == [version] * 4
        assert [token["version"] for token in fake.tokens()[-4:]] == [version] * 4, (
            "what it says is not so"
        )


STRIKES = [
    (kind, does, call, when)
    for kind, calls in CALLS.items()
    for does, call, when in product(("die", "stop"), range(len(calls)), ("before", "after"))
]
FAST_STRIKES = [("vllm", "die", 2, "after")]


@pytest.mark.parametrize(
    "kind, does, call, when", slow_but(FAST_STRIKES, STRIKES), indirect=["kind"]
)
def test_a_server_struck_in_an_update_is_missed_and_then_caught_up(
    kind: str, does: str, call: int, when: str, fakes: list[FakeServer], tmp_path: Path
) -> None:
    struck, other = fakes
    servers = clients(fakes, kind)
    with closing(ServerFleet(servers, min_servers=1, probe_interval_s=None)) as fleet:
        fleet.update(write_published(tmp_path / "w", 1), 1, LIMIT_S)
        assert fleet.serving() == servers
        struck.tell(at_call=call, does=does, when=when)
        if does == "stop":  # it answers neither the update nor the status request after it
            servers[0].timeout_s, servers[0].status_timeout_s = 3.0, 1.0
        folder = write_published(tmp_path / "w", 2)
        fleet.update(folder, 2, LIMIT_S)
        assert [report.state for report in fleet.states()] == [GONE, SERVING]
        check_served([other], folder, 2, kind)
        with pytest.raises(PublishError, match=rf"confirmed by 1 of 2 .*{struck.url} is gone: "):
            fleet.update(folder, 2, LIMIT_S, min_servers=2)

        struck.restart() if does == "die" else struck.wake()
        servers[0].timeout_s, servers[0].status_timeout_s = LIMIT_S, 10.0
        folder = write_published(tmp_path / "w", 3)
        fleet.update(folder, 3, LIMIT_S, min_servers=2)
        assert fleet.serving() == servers
        check_served(fakes, folder, 3, kind)


@pytest.mark.parametrize("does", slow_but(["die"], ["die", "stop"]))
def test_the_prober_catches_up_with_a_server_that_comes_back(
    does: str, fakes: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.servers.fleet_member._SILENCE_S", 0.3)
    folder = write_published(tmp_path / "w", 1)
    with closing(ServerFleet(clients(fakes), probe_interval_s=0.05)) as fleet:
        fleet.update(folder, 1, LIMIT_S)
        fakes[0].kill() if does == "die" else fakes[0].stop()
        wait_until(lambda: [report.state for report in fleet.states()] == [GONE, SERVING])
        fakes[0].restart() if does == "die" else fakes[0].wake()
        assert fleet.wait_serving(2, LIMIT_S)
        check_served(fakes, folder, 1)


def _publish(urls: list[str], kind: str, folder: str, version: int) -> None:
    ServerFleet([CLIENTS[kind](url) for url in urls], probe_interval_s=None).update(
        folder, version, LIMIT_S
    )


NEXT_LIVES = {"same version": 2, "older version": 1, "newer version": 3}
DEATHS = [
    (kind, call, life) for kind, calls in CALLS.items() for call, life in product(calls, NEXT_LIVES)
]


@pytest.mark.parametrize(
    "kind, call, life",
    slow_but([("vllm", "collective_rpc", "older version")], DEATHS),
    indirect=["kind"],
)
def test_the_next_publisher_finds_no_server_paused_or_behind(
    kind: str, call: str, life: str, fakes: list[FakeServer], tmp_path: Path
) -> None:
    urls = [fake.url for fake in fakes]
    _publish(urls, kind, str(write_published(tmp_path / "w", 1)), 1)
    seen = len(fakes[0].calls())
    fakes[0].tell(slow={f"/{call}": 600.0})
    folder = write_published(tmp_path / "w", 2)
    publisher = mp.get_context("forkserver").Process(
        target=_publish, args=(urls, kind, str(folder), 2)
    )
    publisher.start()
    wait_until(lambda: any(f"/{call}" in made for made in fakes[0].calls()[seen:]))
    publisher.kill()
    publisher.join()
    fakes[0].tell()

    version = NEXT_LIVES[life]
    folder = write_published(tmp_path / "w", version, "of the next life")
    with closing(ServerFleet(servers := clients(fakes, kind))) as fleet:
        fleet.update(folder, version, LIMIT_S)
        assert fleet.serving() == servers
        check_served(fakes, folder, version, kind)


@pytest.mark.slow
def test_a_server_that_fails_to_load_is_caught_up_as_soon_as_it_can(
    fakes: list[FakeServer], tmp_path: Path
) -> None:
    with closing(ServerFleet(clients(fakes), min_servers=1, probe_interval_s=0.05)) as fleet:
        fakes[0].tell(fail={"/collective_rpc": 2})
        folder = write_published(tmp_path / "w", 1)
        fleet.update(folder, 1, LIMIT_S)
        assert fleet.wait_serving(2, LIMIT_S)
        check_served(fakes, folder, 1)
        assert all(fake.alive() for fake in fakes), "none was resumed with weights in pieces"


def _publish_trained_weights(
    rank: int, world_size: int, folder: str, root: str, urls: list[str]
) -> None:
    engine = make_engine(folder)
    servers = [VLLMServer(url) for url in urls]
    with closing(ServerFleet(servers, min_servers=1, probe_interval_s=0.05)) as fleet:
        engine.connect_engine(fleet, WeightUpdateMeta("disk", root))
        for version in (1, 2, 3):
            if version == 2 and rank == 0:
                httpx2.post(f"{urls[0]}/fake", json={"lie": 1}).raise_for_status()
            publish(engine, version)
        assert rank != 0 or fleet.wait_serving(2, LIMIT_S)
        engine.destroy()


@pytest.mark.slow
def test_a_server_that_lies_about_an_update_gets_no_requests_until_it_is_right(
    tmp_path: Path,
) -> None:
    folder, root = write_model_folder(tmp_path / "model"), tmp_path / "w"
    with (
        FakeServer("vllm", tmp_path, dtype="float32") as liar,
        FakeServer("vllm", tmp_path, dtype="float32") as other,
    ):
        run_ranks(_publish_trained_weights, 2, str(folder), str(root), [liar.url, other.url])
        newest = version_path(root, 3)
        for client in clients([liar, other]):
            assert client.status() == ServerStatus(weights_label(newest, 3), paused=False)
        for fake in (liar, other):
            assert fake.calls().count("POST /inference/v1/generate") >= 3, (
                "each update was checked by its contents"
            )
        withdrawn = "POST /pause?mode=abort&clear_cache=true"
        assert liar.calls().count(withdrawn) == 1 and withdrawn not in other.calls()


def test_a_server_that_accepts_and_never_answers_is_given_up_by_the_prober_soon(
    tmp_path: Path,
) -> None:
    """The call would last the whole limit of an update and block the prober's thread."""
    folder = write_published(tmp_path / "w", 1)
    with FakeServer("vllm", tmp_path) as fake:
        limit_s = stretched(0.5)
        server = VLLMServer(fake.url, timeout_s=stretched(300), status_timeout_s=limit_s)
        with closing(ServerFleet([server], probe_interval_s=0.1)) as fleet:
            fleet.update(folder, 1, LIMIT_S)
            fake.stop()
            wait_until(lambda: fleet.states()[0].state is GONE)
            expected = rf"GET /weight_info was not answered, all together within {limit_s:g} s"
            assert re.search(expected, fleet.states()[0].error or "")
            fake.restart()
            wait_until(lambda: fleet.states()[0].state is SERVING)
        check_served([fake], folder, 1)
