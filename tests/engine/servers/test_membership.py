"""Servers are added to a fleet and removed from it in a run, which loses no ticket by it."""

import asyncio
import errno
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import pytest

from holdfast.engine.servers import ServerFleet, VLLMServer
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    ServerReport,
    ServerState,
)
from holdfast.utils.errors import (
    ConfigError,
    NoServerError,
    PublishError,
    RolloutError,
    ServerError,
    UnreachableServerError,
    WrongContentError,
)
from tests.engine.rollouts.servers import make_executor
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.scripted import (
    PlainServer,
    ScriptedServer,
    refuse,
    write_published,
)
from tests.limits import stretched, wait_until
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(90)

LIMIT_S = stretched(20)
REQUEST = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=2), seed=1)
STEPS = 6


@pytest.fixture
def published(tmp_path: Path) -> Callable[[int], Path]:
    """A function that writes the folder of a version."""
    return lambda version: write_published(tmp_path / "weights", version)


def names(fleet: ServerFleet) -> list[str]:
    return [server.name for server in fleet.serving()]


def test_an_added_server_gets_requests_once_it_has_the_newest_weights(
    published: Callable[[int], Path],
) -> None:
    old, new = ScriptedServer("old"), ScriptedServer("new")
    with closing(ServerFleet([old], probe_interval_s=0.05)) as fleet:
        fleet.update(published(1), 1, LIMIT_S)
        new.go.clear()
        fleet.add(new)
        assert new.began.wait(LIMIT_S)
        assert names(fleet) == ["old"], "it still has its first weights"
        new.go.set()
        wait_until(lambda: names(fleet) == ["old", "new"])
        fleet.update(published(2), 2, LIMIT_S)
        assert new.told == [1, 2]


def test_a_server_that_is_added_during_an_update_gets_its_version(
    published: Callable[[int], Path],
) -> None:
    old, new = ScriptedServer("old"), ScriptedServer("new")
    with closing(ServerFleet([old], probe_interval_s=0.05)) as fleet:
        old.go.clear()
        update = Thread(target=fleet.update, args=(published(1), 1, LIMIT_S))
        update.start()
        assert old.began.wait(LIMIT_S)
        fleet.add(new)
        old.go.set()
        update.join()
        wait_until(lambda: names(fleet) == ["old", "new"])
        assert new.told == [1]


def test_a_removed_server_gets_neither_requests_nor_updates(
    published: Callable[[int], Path],
) -> None:
    one, other = ScriptedServer("one"), ScriptedServer("other")
    with closing(ServerFleet([one, other], probe_interval_s=0.05)) as fleet:
        fleet.update(published(1), 1, LIMIT_S)
        fleet.remove("one")
        assert names(fleet) == ["other"]
        assert [report.name for report in fleet.states()] == ["other"]
        fleet.update(published(2), 2, LIMIT_S)
        assert one.told == [1]
        with pytest.raises(ConfigError, match=r"there is no inference server one; .*other"):
            fleet.remove("one")

        # It may come back, and then has to load.
        fleet.add(one)
        wait_until(lambda: names(fleet) == ["other", "one"])
        assert one.told == [1, 2]
        with pytest.raises(ConfigError, match="one is named twice"):
            fleet.add(ScriptedServer("one"))


def test_an_update_does_not_wait_for_a_server_that_was_removed(
    published: Callable[[int], Path],
) -> None:
    stuck, other = ScriptedServer("stuck"), ScriptedServer("other")
    with closing(ServerFleet([stuck, other], min_servers=1, probe_interval_s=None)) as fleet:
        stuck.go.clear()
        update = Thread(target=fleet.update, args=(published(1), 1, 600.0))
        update.start()
        assert stuck.began.wait(LIMIT_S)
        fleet.remove("stuck")
        update.join(LIMIT_S)
        assert not update.is_alive() and names(fleet) == ["other"]
        stuck.go.set()


def test_a_server_that_is_removed_during_an_update_need_not_confirm_it(
    published: Callable[[int], Path],
) -> None:
    stuck, other = ScriptedServer("stuck"), ScriptedServer("other")
    with (
        closing(ServerFleet([stuck, other], probe_interval_s=None)) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        stuck.go.clear()
        update = pool.submit(fleet.update, published(1), 1, 600.0)
        assert stuck.began.wait(LIMIT_S)
        fleet.remove("stuck")
        assert [report.name for report in update.result(LIMIT_S)] == ["other"]
        assert names(fleet) == ["other"]
        stuck.go.set()


def test_all_servers_that_stay_must_confirm_although_one_that_confirmed_was_removed(
    published: Callable[[int], Path],
) -> None:
    removed, good = ScriptedServer("removed"), ScriptedServer("good")
    bad = ScriptedServer("bad", refuse)
    with (
        closing(ServerFleet([removed, good, bad], probe_interval_s=None)) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        bad.go.clear()
        update = pool.submit(fleet.update, published(1), 1, LIMIT_S)
        wait_until(lambda: set(names(fleet)) == {"removed", "good"})
        fleet.remove("removed")
        bad.go.set()
        with pytest.raises(PublishError, match="confirmed by 1 of 2 inference servers, 2 are need"):
            update.result(LIMIT_S)


def test_waking_up_does_not_wait_for_a_server_that_was_removed() -> None:
    stuck, other = SleepyServer("stuck"), SleepyServer("other")
    with (
        closing(ServerFleet([stuck, other], probe_interval_s=None)) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        fleet.sleep(LIMIT_S)
        stuck.go.clear()
        wake_up = pool.submit(fleet.wake_up, timeout_s=600.0)
        assert stuck.began.wait(LIMIT_S)
        fleet.remove("stuck")
        assert [report.name for report in wake_up.result(LIMIT_S)] == ["other"]
        stuck.go.set()


def test_a_server_that_is_added_again_while_its_removal_waits_keeps_its_requests(
    tmp_path: Path, published: Callable[[int], Path]
) -> None:
    with FakeServer("vllm", tmp_path, token_s=0.02) as server, ThreadPoolExecutor() as pool:
        client = VLLMServer(server.url)
        with closing(ServerFleet([client], probe_interval_s=0.05)) as fleet:
            fleet.update(published(1), 1, LIMIT_S)
            in_flight = pool.submit(ask, client, 40)
            wait_until(lambda: client.connections._in_flight)
            removal = pool.submit(fleet.remove, client.name, 600.0)
            wait_until(lambda: not fleet._members)
            fleet.add(client)
            removal.result(LIMIT_S)
            assert len(in_flight.result(LIMIT_S).output_tokens) == 40
            assert fleet.wait_serving(1, LIMIT_S)
            assert len(ask(client).output_tokens) == 2


def test_a_request_that_a_removal_cut_off_is_not_called_slow_if_the_server_is_added_at_once(
    tmp_path: Path,
) -> None:
    async def ask_and_cut_off(client: VLLMServer) -> None:
        connections = client.connections
        connections.open("first")
        request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=500), seed=1)
        answer = asyncio.create_task(client.agenerate(request))
        while not server.state()["in_flight"]:
            await asyncio.sleep(0.01)

        # The loop hears of the first two only afterwards.
        connections.drain("first", 0.0)
        connections.open("second")
        with pytest.raises(NoServerError, match="was cut off: the server was removed"):
            await answer
        assert connections.unanswered == 0

        # A removal of before does nothing any more.
        connections.drain("first", 0.0)
        assert (await client.agenerate(REQUEST)).output_tokens

    with FakeServer("vllm", tmp_path, token_s=0.05) as server:
        client = VLLMServer(server.url)
        client.update_weights_from_disk(str(write_published(tmp_path / "w", 1)), 1)
        asyncio.run(ask_and_cut_off(client))


def test_a_removed_server_that_is_still_asked_is_given_up_like_one_that_is_down(
    tmp_path: Path,
) -> None:
    with FakeServer("vllm", tmp_path) as server:
        client = VLLMServer(server.url)
        client.connections.open("fleet")
        client.connections.drain("fleet", 0.0)
        with make_executor([client], server_wait_s=0.3) as executor:
            executor.set_version(0)
            with pytest.raises(
                RolloutError, match=r"for 0\.3 s: .* not sent: the server was removed"
            ):
                executor.next_batch(0)


def test_more_confirmations_than_servers_are_refused_after_a_removal(
    published: Callable[[int], Path],
) -> None:
    servers = [ScriptedServer("one"), ScriptedServer("other")]
    with closing(ServerFleet(servers, min_servers=2, probe_interval_s=None)) as fleet:
        fleet.remove("one")
        with pytest.raises(ConfigError, match="min_servers is 2, but there are 1"):
            fleet.update(published(1), 1, LIMIT_S)


def test_a_server_that_cannot_take_the_published_type_is_not_added(tmp_path: Path) -> None:
    with closing(ServerFleet([PlainServer("one")], probe_interval_s=None)) as fleet:
        fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
        assert fleet._folder is not None
        fleet._folder = replace(fleet._folder, type="adapter")
        with pytest.raises(ConfigError, match="has no endpoint that loads adapters"):
            fleet.add(PlainServer("plain"))


def test_another_server_at_the_same_url_is_neither_paused_nor_loaded(
    tmp_path: Path, published: Callable[[int], Path]
) -> None:
    with FakeServer("vllm", tmp_path, served_name="theirs") as server:
        client = VLLMServer(server.url, served_name="mine")
        with closing(ServerFleet([client], probe_interval_s=0.05)) as fleet:
            with pytest.raises(PublishError, match="another server answers at this URL"):
                fleet.update(published(1), 1, LIMIT_S)
            wait_until(lambda: fleet.states()[0].state is ServerState.GONE)
            assert "serves ['theirs'], expected the model mine" in str(fleet.states()[0].error)
        assert {call.split("?")[0] for call in server.calls()} == {"GET /v1/models"}
        with pytest.raises(ServerError, match="does not exist"):
            ask(client)

        # The same client of its own server.
        own = VLLMServer(server.url, served_name="theirs")
        with closing(ServerFleet([own], probe_interval_s=None)) as fleet:
            fleet.update(published(1), 1, LIMIT_S)
            assert set(ask(own).output_versions) == {1}


def ask(client: VLLMServer, n_tokens: int = 2) -> ModelResponse:
    gconfig = GenerationHyperparameters(max_new_tokens=n_tokens)
    return asyncio.run(client.agenerate(replace(REQUEST, gconfig=gconfig)))


# Servers that come and go by themselves


@dataclass
class Source:
    """A `ServerSource` of a test."""

    up: list[Any] = field(default_factory=list)
    error: Exception | None = None
    held: list[bool] = field(default_factory=list)

    def servers(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return list(self.up)

    def absent(self) -> list[ServerReport]:
        return [ServerReport("server_9", ServerState.STARTING, None, "it is starting")]

    def stats(self) -> dict[str, float]:
        return {"servers_restarted": 3.0}

    def hold(self, on: bool) -> None:
        self.held.append(on)


def test_the_fleet_follows_its_source(published: Callable[[int], Path]) -> None:
    source = Source()
    with closing(ServerFleet(source, probe_interval_s=0.05)) as fleet:
        with pytest.raises(PublishError, match="server_9 is starting"):
            late = ServerFleet(source, probe_interval_s=None, server_wait_s=0.2)
            late.update(published(1), 1, LIMIT_S)

        # The first update waits for a server to start.
        update = Thread(target=fleet.update, args=(published(1), 1, LIMIT_S))
        update.start()
        first = ScriptedServer("first")
        source.up.append(first)
        update.join(LIMIT_S)
        assert names(fleet) == ["first"]
        assert fleet.stats()["servers_starting"] == 1.0
        assert fleet.stats()["servers_restarted"] == 3.0

        # A new one comes, and the first one goes.
        source.up.append(ScriptedServer("second"))
        wait_until(lambda: names(fleet) == ["first", "second"])
        source.up.remove(first)
        wait_until(lambda: names(fleet) == ["second"])

        # The run cannot go on.
        source.error = RolloutError("too few")
        wait_until(lambda: fleet._lost is not None)
        with pytest.raises(RolloutError, match="too few"):
            fleet.serving()
        with pytest.raises(RolloutError, match="too few"):
            fleet.update(published(2), 2, LIMIT_S)


def test_a_source_that_cannot_be_read_for_a_while_keeps_its_servers(
    published: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    source = Source([ScriptedServer("first")])
    with closing(ServerFleet(source, probe_interval_s=0.05)) as fleet:
        fleet.update(published(1), 1, LIMIT_S)
        source.error = OSError(errno.ESTALE, "Stale file handle")
        wait_until(lambda: "Stale file handle" in caplog.text)
        source.up.append(ScriptedServer("second"))
        time.sleep(0.3)
        assert names(fleet) == ["first"]
        source.error = None
        wait_until(lambda: names(fleet) == ["first", "second"])
        assert caplog.text.count("the list of servers cannot be read") == 1


class SleepyServer(ScriptedServer):
    """A server that can sleep. ``asleep`` says whether it does."""

    asleep = False

    def sleep(self, level: int = 1) -> None:
        self.asleep = True

    def wake_up(self, tags: object = ()) -> None:
        self.began.set()
        assert self.go.wait(LIMIT_S)
        self.asleep = False


def test_servers_that_have_started_since_the_last_update_sleep_too() -> None:
    first = SleepyServer("first")
    source = Source([first])
    with closing(ServerFleet(source, probe_interval_s=None)) as fleet:
        (report,) = fleet.sleep(LIMIT_S)[:1]
        assert (report.name, first.asleep, source.held) == ("first", True, [True])

        # The trainer has ended its turn, and the server has ended in it.
        source.up[:] = [SleepyServer("second")]
        (report,) = fleet.wake_up(("weights",), LIMIT_S)[:1]
        assert (report.name, source.held) == ("second", [True, False])

        source.error = RolloutError("too few")
        with pytest.raises(RolloutError, match="too few"):
            fleet.sleep(LIMIT_S)


class DyingServer(SleepyServer):
    """A server that leaves its source after an error, like one whose engine was killed."""

    def __init__(self, name: str, source: Source, successor: ScriptedServer | None = None) -> None:
        super().__init__(name)
        self._source, self._successor = source, successor
        self._ends = False
        self.error: ServerError = ServerError("POST /sleep was answered with 500")

    def sleep(self, level: int = 1) -> None:
        self._end()

    def wake_up(self, tags: object = ()) -> None:
        self._end()

    def _end(self) -> None:
        if not self._ends:
            Timer(0.3, self._source.up.remove, [self]).start()
            if self._successor is not None:
                Timer(0.6, self._source.up.append, [self._successor]).start()
        self._ends = True
        raise self.error


def test_a_server_that_does_not_sleep_may_have_its_memory_although_it_is_about_to_end() -> None:
    source = Source()
    source.up.append(DyingServer("first", source))
    with (
        closing(ServerFleet(source, probe_interval_s=0.05)) as fleet,
        pytest.raises(ServerError, match="may still have the memory"),
    ):
        fleet.sleep(LIMIT_S)


@pytest.mark.parametrize("error", [ServerError, UnreachableServerError])
def test_waking_up_waits_for_a_server_that_was_killed(
    published: Callable[[int], Path], error: type[ServerError]
) -> None:
    source = Source()
    dying = DyingServer("first", source, SleepyServer("first, started again"))
    dying.error = error("POST /wake_up failed")
    source.up.append(dying)
    with closing(ServerFleet(source, probe_interval_s=0.05)) as fleet:
        fleet.update(published(1), 1, LIMIT_S)
        reports = fleet.wake_up(("weights",), LIMIT_S)
        assert reports[0].name == "first, started again"


def test_as_many_servers_as_the_fleet_needs_wake_up() -> None:
    class Broken(SleepyServer):
        def wake_up(self, tags: object = ()) -> None:
            raise ServerError("POST /wake_up: 500")

    servers = [SleepyServer("first"), Broken("second")]
    with closing(ServerFleet(servers, min_servers=1, probe_interval_s=None)) as fleet:
        fleet.sleep(timeout_s=LIMIT_S)
        fleet.wake_up(("weights",), LIMIT_S)
        assert [server.asleep for server in servers] == [False, True]
        with pytest.raises(ServerError, match="1 of 2 inference servers woke up, 2 are needed"):
            fleet.wake_up(("weights",), LIMIT_S, min_servers=2)


def test_waking_up_waits_for_servers_that_start() -> None:
    with (
        closing(ServerFleet(Source(), probe_interval_s=None, server_wait_s=0.2)) as fleet,
        pytest.raises(PublishError, match="server_9 is starting"),
    ):
        fleet.wake_up(("weights",), LIMIT_S)


def test_an_update_goes_on_with_a_server_that_comes_back_in_it(
    published: Callable[[int], Path],
) -> None:
    source = Source([ScriptedServer("first")])
    with closing(ServerFleet(source, probe_interval_s=0.05)) as fleet:
        fleet.update(published(1), 1, LIMIT_S)
        ended = source.up.pop()
        ended.go.clear()
        update = Thread(target=fleet.update, args=(published(2), 2, LIMIT_S))
        update.start()
        source.up.append(ScriptedServer("first, started again"))
        update.join(LIMIT_S)
        assert names(fleet) == ["first, started again"]


def test_an_update_waits_for_a_server_whose_engine_was_killed_in_it(
    published: Callable[[int], Path],
) -> None:
    engine_is_dead = Event()

    def answer(version: int) -> None:
        if version == 2:
            engine_is_dead.set()
            raise PublishError("POST /pause was answered with 500")

    source = Source([ScriptedServer("first", answer)])
    with (
        closing(ServerFleet(source, probe_interval_s=0.05)) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        fleet.update(published(1), 1, LIMIT_S)
        update = pool.submit(fleet.update, published(2), 2, LIMIT_S)
        assert engine_is_dead.wait(LIMIT_S)
        wait_until(lambda: "500" in str(fleet.states()[0].error))
        source.up.clear()
        wait_until(lambda: not fleet._members)
        assert not update.done()
        source.up.append(ScriptedServer("first, started again"))
        update.result(LIMIT_S)
        assert names(fleet) == ["first, started again"]


def test_a_server_with_wrong_contents_is_not_waited_for(
    published: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.servers.fleet._END_S", 3600.0)

    def answer(version: int) -> None:
        raise WrongContentError("its answers are those of other weights")

    source = Source([ScriptedServer("first", answer)])
    with (
        closing(ServerFleet(source, probe_interval_s=0.05)) as fleet,
        pytest.raises(PublishError, match="other weights"),
    ):
        fleet.update(published(1), 1, LIMIT_S)


def test_a_server_that_refuses_an_update_and_does_not_end_is_an_error(
    published: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.servers.fleet._END_S", 0.5)
    source = Source([ScriptedServer("first", refuse)])
    with (
        closing(ServerFleet(source, probe_interval_s=0.05)) as fleet,
        pytest.raises(PublishError, match="version 1 cannot be loaded"),
    ):
        fleet.update(published(1), 1, LIMIT_S)


# Tickets


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[FakeServer]]:
    """Two servers whose tokens take a while."""
    with (
        FakeServer("vllm", tmp_path, token_s=0.05) as one,
        FakeServer("vllm", tmp_path, token_s=0.05) as other,
    ):
        yield [one, other]


def tickets(
    fleet: ServerFleet,
    published: Callable[[int], Path],
    disturb: Callable[[int], object],
    ahead: int = 0,
) -> list[Any]:
    """Tickets and tokens of a run, in the order in which they are trained."""
    trained: list[Any] = []
    executor = make_executor(fleet, max_head_offpolicyness=ahead, total_steps=STEPS)
    with executor:
        for step in range(STEPS):
            fleet.update(published(step), step, LIMIT_S)
            executor.set_version(step)
            disturb(step)
            for ticket, trajectory in executor.next_trajectories(step):
                tokens = trajectory["input_ids"].tolist() if ahead == 0 else None
                trained.append((ticket.number, ticket.step, ticket.index, tokens))
    return trained


@pytest.mark.slow
@pytest.mark.parametrize("drain_s", slow_but([0.0], [0.0, 30.0]), ids=["cut off", "drained"])
@pytest.mark.parametrize("ahead", slow_but([0], [0, 1]))
def test_tickets_are_those_of_a_run_in_which_no_server_was_removed(
    servers: list[FakeServer], published: Callable[[int], Path], drain_s: float, ahead: int
) -> None:
    one, other = (VLLMServer(server.url) for server in servers)

    def disturb(step: int) -> None:
        if step in (1, 4):
            wait_until(lambda: one.connections._in_flight)
            fleet.remove(one.name, drain_s)
            assert drain_s == 0.0 or not one.connections._in_flight
        if step == 3:
            fleet.add(one)

    with closing(ServerFleet([one, other], probe_interval_s=0.05)) as fleet:
        disturbed = tickets(fleet, published, disturb, ahead)
    with closing(ServerFleet([other], probe_interval_s=0.05)) as fleet:
        assert disturbed == tickets(fleet, published, lambda step: None, ahead)

    # No token is of the first weights, and none was mixed.
    tokens = [token for server in servers for token in server.tokens()]
    assert {token["version"] for token in tokens} <= set(range(STEPS))
    assert not any(token["mixed"] for token in tokens)
