"""Servers that sleep and wake up, alone and in a fleet, also if one refuses, dies or starts
again.
"""

import asyncio
import re
import time
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer
from holdfast.engine.servers import fleet as fleet_module
from holdfast.engine.servers.api import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    GenerationHyperparameters,
    ModelRequest,
    ServerState,
    ServerStatus,
    weights_label,
)
from holdfast.engine.servers.http import Calls
from holdfast.engine.servers.server_calls import DROPPED, Sleep
from holdfast.utils.errors import (
    BusyServerError,
    ConfigError,
    PublishError,
    ServerError,
    SlowServerError,
)
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed_adapters
from tests.engine.servers.scripted import PlainServer, ScriptedServer, write_published
from tests.limits import stretched, wait_until
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(90)

LIMIT_S = stretched(20)
CLIENTS: dict[str, Any] = {"vllm": VLLMServer, "sglang": SGLangServer}
REQUEST = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=4), seed=1)

both = pytest.mark.parametrize("kind", CLIENTS)


def client(fake: FakeServer, kind: str = "vllm", **options: Any) -> Any:
    return CLIENTS[kind](fake.url, **{"timeout_s": LIMIT_S} | options)


class Killed(BaseException):
    """Stands for the death of the process that makes the calls."""


class Cut:
    """Raises `Killed` after a number of calls to a server."""

    def __init__(self) -> None:
        self.never()

    def after(self, n_calls: int) -> None:
        self._left = n_calls

    def never(self) -> None:
        self._left = 10**9

    def made(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    cut, send = Cut(), Calls._send

    def counted(*args: Any, **options: Any) -> Any:
        answer = send(*args, **options)
        cut.made()
        return answer

    monkeypatch.setattr(Calls, "_send", counted)
    return cut


def serves(server: Any, folder: Path, version: int) -> bool:
    answer = asyncio.run(server.agenerate(REQUEST))
    return server.status() == ServerStatus(
        weights_label(folder, version), False
    ) and answer.output_versions == [version] * len(answer.output_tokens)


def test_the_label_of_a_server_tells_what_sleeps() -> None:
    for tags, changing in product((TAGS, (KV_CACHE,)), (False, True)):
        for weights in ("7-0123abcd", "default", DROPPED):
            asleep = Sleep(tags, weights, changing)
            assert Sleep.read(asleep.label) == asleep and Sleep.read(asleep.weights) == Sleep(
                (), weights
            )
    assert Sleep.read("7-0123abcd") == Sleep((), "7-0123abcd")


@both
def test_a_server_sleeps_and_an_update_wakes_it(kind: str, tmp_path: Path) -> None:
    with FakeServer(kind, tmp_path) as fake:
        server = client(fake, kind)
        for level in (1, 2):
            folder = write_published(tmp_path / "w", level)
            server.update_weights_from_disk(str(folder), level)
            assert serves(server, folder, level)
            server.sleep(level)
            server.sleep(level)
            slept = {*TAGS, "cuda_graph"} if kind == "sglang" else set(TAGS)
            assert set(fake.state()["asleep"]) == slept and fake.state()["paused"]
            assert (server.status().asleep, server.status().paused) == (TAGS, True)
            with pytest.raises(BusyServerError, match="sleeps, and takes requests after"):
                asyncio.run(server.agenerate(REQUEST))
            another = client(fake, kind)  # in another process, say
            assert another.status().asleep == TAGS
            another.wake_up((WEIGHTS,))
            assert set(fake.state()["asleep"]) == slept - {WEIGHTS} and another.status().asleep == (
                KV_CACHE,
            )
            folder = write_published(tmp_path / "w", version := level + 10)
            another.update_weights_from_disk(str(folder), version)
            assert fake.state()["asleep"] == [] and serves(another, folder, version)
            server.status()
            server.sleep(level)
            folder = write_published(tmp_path / "w", version := level + 20)
            server.update_weights_from_disk(str(folder), version)  # wakes the weights itself
            assert fake.state()["asleep"] == [] and serves(server, folder, version)
        assert fake.alive()


def test_the_order_of_the_calls(tmp_path: Path) -> None:
    with FakeServer("vllm", tmp_path) as fake:
        server = client(fake)
        server.sleep(2)
        seen = len(fake.calls())
        server.update_weights_from_disk(str(write_published(tmp_path / "w", 1)), 1)
        assert [
            call.partition(" ")[2] for call in fake.calls()[seen:] if call.startswith("POST")
        ] == [
            "/pause?mode=keep&clear_cache=true",
            "/sleep?level=1&mode=keep",
            "/wake_up?tags=weights",
            "/update_weight_version",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/wake_up?tags=kv_cache",
            "/update_weight_version",
            "/resume",
        ]


@pytest.mark.parametrize(("kind", "options"), [("vllm", {}), ("sglang", {"cpu_backup": True})])
def test_weights_that_were_kept_are_served_again_without_an_update(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_published(tmp_path / "w", 1)
    with FakeServer(kind, tmp_path, **options) as fake:
        server = client(fake, kind)
        server.update_weights_from_disk(str(folder), 1)
        server.sleep()
        server.wake_up((WEIGHTS,))
        server.wake_up((KV_CACHE,))
        server.wake_up()
        assert serves(server, folder, 1)
        server.sleep(level=2)
        server.wake_up((WEIGHTS,))
        with pytest.raises(ServerError, match="it has no weights, because they were not kept"):
            server.wake_up()
        assert fake.alive() and server.status().asleep == (KV_CACHE,)


@pytest.mark.parametrize("kind", slow_but(["vllm"], CLIENTS))
def test_a_request_in_flight_goes_on_with_the_weights_of_the_next_version(
    kind: str, tmp_path: Path
) -> None:
    async def run(server: Any, fake: FakeServer) -> list[int]:
        request = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=60), seed=1)
        answer = asyncio.create_task(server.agenerate(request))
        while len(fake.tokens()) < 5:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.sleep)
        await asyncio.to_thread(
            server.update_weights_from_disk, str(write_published(tmp_path / "w", 2)), 2
        )
        return (await answer).output_versions

    with FakeServer(kind, tmp_path, token_s=0.02) as fake:
        server = client(fake, kind)
        server.update_weights_from_disk(str(write_published(tmp_path / "w", 1)), 1)
        versions = asyncio.run(run(server, fake))
        assert versions == sorted(versions) and set(versions) == {1, 2}
        assert [token["version"] for token in fake.tokens() if token["rid"] == ""][-60:] == versions
        assert not any(token["mixed"] for token in fake.tokens())


def test_servers_that_cannot_sleep_say_how_to_start_them(tmp_path: Path) -> None:
    for kind, options, message in [
        (
            "vllm",
            {"dev_mode": False},
            r"GET /server_info was answered with 404 .*--enable-sleep-mode and VLLM_SERVER_",
        ),
        (
            "vllm",
            {"sleep_mode": False},
            "would free no memory while it sleeps; start the server with --enable-sleep-m",
        ),
        (
            "sglang",
            {"memory_saver": False},
            "would free no memory while it sleeps; start it with --enable-memory-save",
        ),
    ]:
        with FakeServer(kind, tmp_path, **options) as fake:
            server = client(fake, kind)
            with pytest.raises(ServerError, match=message):
                server.sleep()
            assert not fake.state()["paused"] and not fake.state()["asleep"]
    with FakeServer("vllm", tmp_path, sleep_mode=False, device="cpu") as fake:
        client(fake).sleep()  # for tests without a GPU
    with pytest.raises(ConfigError, match="'level' is 3"):
        client(fake).sleep(3)
    with pytest.raises(ConfigError, match="'tags' is 'cuda_graph'"):
        client(fake).wake_up(("cuda_graph",))


def test_a_server_that_cannot_wake_up_or_never_answers(tmp_path: Path) -> None:
    with FakeServer("vllm", tmp_path) as fake:
        server, folder = client(fake), write_published(tmp_path / "w", 1)
        server.sleep()
        fake.tell(fail={"/wake_up": 2})
        with pytest.raises(
            ServerError,
            match=r"POST /wake_up was answered with 500 .*is the memory that it needs free",
        ):
            server.wake_up()
        with pytest.raises(PublishError, match=r"POST /wake_up was answered with 500"):
            server.update_weights_from_disk(str(folder), 1)
        assert server.status().asleep == TAGS
        fake.tell(slow={"/wake_up": 60.0})
        with pytest.raises(SlowServerError, match="POST /wake_up was not answered"):
            client(fake, timeout_s=stretched(0.5)).wake_up()
        fake.tell()
        server.update_weights_from_disk(str(folder), 1)
        assert serves(server, folder, 1)


def test_a_failed_load_leaves_the_kv_cache_asleep_and_the_next_one_repairs_it(
    tmp_path: Path,
) -> None:
    good, bad = write_published(tmp_path / "w", 1), write_published(tmp_path / "w", 2)
    (bad / "model.safetensors").unlink()
    for options, transfer, advice in [
        ({}, None, "in pieces"),
        ({"plugin": True}, "holdfast_disk", "goes on sleeping"),
    ]:
        with FakeServer("vllm", tmp_path, **options) as fake:
            server = client(fake, transfer=transfer)
            server.update_weights_from_disk(str(good), 1)
            server.sleep()
            if transfer is None:
                fake.tell(fail={"/collective_rpc": 1})
            with pytest.raises(PublishError, match=advice):
                server.update_weights_from_disk(str(bad), 2)
            assert fake.state()["asleep"] == [KV_CACHE] and server.status().asleep == (KV_CACHE,)
            with pytest.raises(ServerError, match="an update was cut off"):
                server.wake_up()
            server.sleep()
            server.update_weights_from_disk(str(good), 1)
            assert serves(server, good, 1) and fake.alive()


def test_adapters_are_loaded_after_the_base_woke_up(tmp_path: Path) -> None:
    with (
        FakeServer("vllm", tmp_path, lora=True) as fake,
        closing(ServerFleet([client(fake)])) as fleet,
    ):
        fleet.update(publish_hashed_adapters(tmp_path / "w", 1), 1, LIMIT_S)
        with pytest.raises(ConfigError, match="level 2 drops the base model"):
            fleet.sleep(LIMIT_S, level=2)
        fleet.sleep(LIMIT_S)
        fleet.wake_up((WEIGHTS,), LIMIT_S)
        fleet.update(publish_hashed_adapters(tmp_path / "w", 2), 2, LIMIT_S)
        assert len(fleet.serving()) == 1 and fake.state()["asleep"] == []
        fleet.sleep(LIMIT_S)
        fleet.wake_up(timeout_s=LIMIT_S)
        assert len(fleet.serving()) == 1 and fake.state()["asleep"] == []
        fleet.close()
        server = client(fake)
        server.sleep(level=2)
        with pytest.raises(PublishError, match="it has no weights"):
            server.update_adapters_from_disk(publish_hashed_adapters(tmp_path / "w", 3), 3)
        assert fake.alive()


def test_the_base_of_adapters_is_kept_if_only_its_weights_woke_up(tmp_path: Path) -> None:
    """As at the end of a turn in which another server could not wake up."""
    with FakeServer("vllm", tmp_path, lora=True) as fake:
        server = client(fake)
        server.sleep()
        server.wake_up((WEIGHTS,))
        server.sleep()
        server.update_adapters_from_disk(publish_hashed_adapters(tmp_path / "w", 1), 1)
        assert fake.state()["asleep"] == [] and fake.alive()


@pytest.mark.slow
def test_the_base_of_adapters_is_kept_after_a_kill_at_any_call(tmp_path: Path, cut: Cut) -> None:
    with FakeServer("vllm", tmp_path, lora=True) as fake:
        for n_calls in range(1000):
            cut.after(n_calls)
            try:
                server = client(fake)
                server.sleep()
                server.wake_up((WEIGHTS,))
                server.update_adapters_from_disk(
                    publish_hashed_adapters(tmp_path / "w", n_calls), n_calls
                )
                break
            except Killed:
                cut.never()
            server = client(fake)
            server.sleep()
            server.update_adapters_from_disk(
                publish_hashed_adapters(tmp_path / "w", n_calls + 500), n_calls + 500
            )
            assert fake.state()["asleep"] == [] and fake.alive()
        assert n_calls > 15


def test_a_second_sleep_at_level_2_drops_weights_that_the_first_one_would_have_kept(
    tmp_path: Path,
) -> None:
    folder = write_published(tmp_path / "w", 1)
    with FakeServer("vllm", tmp_path) as fake:
        server = client(fake)
        server.update_weights_from_disk(str(folder), 1)
        fake.tell(fail={"/sleep": 1})
        with pytest.raises(ServerError, match=r"POST /sleep was answered with 500"):
            server.sleep()
        server.sleep(level=2)
        with pytest.raises(ServerError, match="it has no weights, because they were not kept"):
            server.wake_up()
        server.update_weights_from_disk(str(folder), 1)
        assert serves(server, folder, 1)


@pytest.mark.slow
def test_a_server_that_says_that_it_sleeps_and_is_awake_samples_nothing_before_a_load(
    tmp_path: Path,
) -> None:
    """A load was cut off, and then the sleep after it: its weights are in pieces, and requests are
    waiting.
    """
    folder = write_published(tmp_path / "w", 1)
    request = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=60), seed=1)
    bad = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "nothing")}}

    async def run(server: Any, fake: FakeServer) -> list[int]:
        answer = asyncio.create_task(server.agenerate(request))
        while len(fake.tokens()) < 5:
            await asyncio.sleep(0.01)
        with (
            server._calls("", LIMIT_S) as calls,
            pytest.raises(PublishError, match="answered with 500"),
        ):
            server._pause(calls, "pause")
            calls.post("load", "/collective_rpc", bad)
        fake.tell(fail={"/sleep": 1}, slow={"/update_weight_version": 0.3, "/pause": 0.3})
        with pytest.raises(ServerError, match="POST /sleep was answered with 500"):
            await asyncio.to_thread(server.sleep)
        assert server.status().asleep == TAGS and fake.state()["asleep"] == []
        await asyncio.to_thread(server.update_weights_from_disk, str(folder), 1)
        return (await answer).output_versions

    with FakeServer("vllm", tmp_path, token_s=0.02) as fake:
        server = client(fake)
        server.update_weights_from_disk(str(folder), 1)
        assert asyncio.run(run(server, fake)) == [1] * 60 and fake.alive()


def test_a_status_request_does_not_disturb_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that read the label before the server slept, and ends in the update."""
    folder = write_published(tmp_path / "w", 1)
    with FakeServer("vllm", tmp_path) as fake:
        server = client(fake)
        server.sleep()
        load = server._reset_prefix_cache
        monkeypatch.setattr(
            server,
            "_reset_prefix_cache",
            lambda calls: (load(calls), setattr(server, "_sleeps", False)),
        )
        server.update_weights_from_disk(str(folder), 1)
        assert fake.state()["asleep"] == [] and serves(server, folder, 1)


def test_a_client_notices_that_another_one_woke_the_server(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "w", 1)
    with FakeServer("vllm", tmp_path) as fake:
        server, copy = client(fake), client(fake)
        server.sleep()
        assert copy.status().asleep == TAGS
        with pytest.raises(BusyServerError, match="sleeps, and takes requests after"):
            asyncio.run(copy.agenerate(REQUEST))
        server.update_weights_from_disk(str(folder), 1)
        assert serves(copy, folder, 1)


LIVES = {"sleeps first": True, "publishes at once": False}


@pytest.mark.slow
@both
@pytest.mark.parametrize("sleeps", LIVES.values(), ids=LIVES)
@pytest.mark.parametrize("backup", [True, False], ids=["level 1", "level 2"])
def test_after_a_kill_at_any_call_the_next_life_serves_or_says_to_restart(
    kind: str, sleeps: bool, backup: bool, tmp_path: Path, cut: Cut
) -> None:
    options: dict[str, Any] = {"cpu_backup": backup} if kind == "sglang" else {}
    level, advised = 1 if backup else 2, 0

    def turn(fake: FakeServer, number: int) -> None:
        server, folder = client(fake, kind), write_published(tmp_path / "w", number)
        if sleeps:
            server.sleep(level)
        server.wake_up((WEIGHTS,))
        server.update_weights_from_disk(str(folder), number)
        assert serves(server, folder, number)
        server.sleep(level)

    with FakeServer(kind, tmp_path, **options) as fake:
        turn(fake, 1)
        for n_calls in range(1000):
            cut.after(n_calls)
            try:
                turn(fake, 2)
                break
            except Killed:
                cut.never()
            try:
                turn(fake, 3)
            except ServerError as error:
                assert kind == "sglang" and "was cut off while it fell asleep or woke up" in str(
                    error
                )
                assert fake.alive()
                advised += 1
                fake.restart()
                turn(fake, 3)
            assert fake.alive() and fake.state()["asleep"] != []
        assert n_calls > 15 and advised == {"vllm": 0, "sglang": 2 * 3}[kind]
        assert not any(token["mixed"] for token in fake.tokens())


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeServer]]:
    with FakeServer("vllm", tmp_path) as first, FakeServer("vllm", tmp_path) as second:
        yield [first, second]


def states(fleet: ServerFleet[Any]) -> list[str]:
    return [report.state.value for report in fleet.states()]


@pytest.mark.slow
def test_a_fleet_sleeps_and_wakes_up(
    fakes: list[FakeServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    folder = write_published(tmp_path / "w", 1)
    with closing(ServerFleet([client(fake) for fake in fakes], probe_interval_s=0.05)) as fleet:
        fleet.sleep(LIMIT_S)
        assert states(fleet) == ["asleep", "asleep"] and fleet.serving() == [], (
            "before anything was published"
        )
        with pytest.raises(
            ConfigError, match="the inference servers sleep, and something else may have the memory"
        ):
            fleet.update(folder, 1, LIMIT_S)
        fleet.wake_up((WEIGHTS,), LIMIT_S)
        assert states(fleet) == ["asleep", "asleep"] and fakes[0].state()["asleep"] == [KV_CACHE]
        fleet.update(folder, 1, LIMIT_S)
        assert len(fleet.serving()) == 2
        for level in (1, 2):
            fleet.sleep(LIMIT_S, level)
            assert fleet.stats()["servers_asleep"] == 2
            seen = [len(fake.calls()) for fake in fakes]
            wait_until(
                lambda seen=seen: all(
                    len(f.calls()) > n + 6 for f, n in zip(fakes, seen, strict=True)
                )
            )
            assert [fake.state()["asleep"] for fake in fakes] == [["kv_cache", "weights"]] * 2, (
                "the prober lets them be"
            )
            fleet.wake_up(timeout_s=LIMIT_S)
            assert (
                all(serves(server, folder, 1) for server in fleet.serving())
                and len(fleet.serving()) == 2
            )
    lines = "\n".join(
        record.getMessage() for record in caplog.records if record.levelname == "INFO"
    )
    assert re.search(r"inference server \S+ is asleep .*\(it was serving\)", lines)
    assert "2 of 2 inference servers did sleep, after" in lines
    assert [
        record
        for record in caplog.records
        if record.levelname == "WARNING" and "asleep" in record.message
    ] == []


@pytest.mark.slow
def test_a_server_that_starts_again_while_others_sleep_is_put_to_sleep(
    fakes: list[FakeServer], tmp_path: Path
) -> None:
    folder = write_published(tmp_path / "w", 1)
    with closing(
        ServerFleet([client(fake) for fake in fakes], min_servers=1, probe_interval_s=0.05)
    ) as fleet:
        fleet.update(folder, 1, LIMIT_S, min_servers=2)
        fleet.sleep(LIMIT_S)
        fakes[0].kill()
        wait_until(lambda: states(fleet) == ["gone", "asleep"])
        fleet.sleep(LIMIT_S)  # a dead server has no memory
        fakes[0].restart()
        wait_until(lambda: fakes[0].state()["asleep"] == ["kv_cache", "weights"])
        wait_until(lambda: states(fleet) == ["asleep", "asleep"])
        fakes[0].kill()
        fleet.wake_up((WEIGHTS,), LIMIT_S)
        fleet.update(folder := write_published(tmp_path / "w", 2), 2, LIMIT_S)
        assert states(fleet) == ["gone", "serving"]
        fakes[0].restart()
        assert fleet.wait_serving(2, LIMIT_S)
        assert all(serves(server, folder, 2) for server in fleet.serving())


@pytest.mark.slow
def test_a_fleet_names_the_servers_that_do_not_sleep_or_wake_up(
    fakes: list[FakeServer], tmp_path: Path
) -> None:
    folder, urls = write_published(tmp_path / "w", 1), [fake.url for fake in fakes]
    with closing(ServerFleet([client(fake) for fake in fakes], probe_interval_s=None)) as fleet:
        fleet.update(folder, 1, LIMIT_S)
        fakes[0].tell(fail={"/sleep": 1})
        with pytest.raises(
            ServerError,
            match=rf"1 of 2 inference servers may still have the memory.*{urls[0]} is a.*500",
        ):
            fleet.sleep(LIMIT_S)
        assert fleet.serving() == []
        fleet.sleep(LIMIT_S)
        fakes[1].tell(fail={"/wake_up": 1})
        with pytest.raises(
            ServerError,
            match=rf"1 of 2 inference servers woke up, 2 are needed: {urls[1]} is asleep",
        ):
            fleet.wake_up((WEIGHTS,), LIMIT_S)
        fakes[1].tell(fail={"/wake_up": 1})
        fleet.wake_up((WEIGHTS,), LIMIT_S, min_servers=1)
        fleet.update(folder, 1, LIMIT_S, min_servers=2)
        assert states(fleet) == ["serving", "serving"], "the update woke it up"
        fakes[0].stop()
        limit_s = stretched(3.0)
        with pytest.raises(
            ServerError, match=rf"{urls[0]} is gone: it did not sleep within {limit_s:g} s"
        ):
            fleet.sleep(limit_s)
        assert states(fleet) == ["gone", "asleep"]
        fakes[0].wake()
        fleet.sleep(LIMIT_S)
        assert fleet.states()[0].state is ServerState.ASLEEP
    with closing(ServerFleet([client(fake) for fake in fakes], probe_interval_s=0.05)) as fleet:
        fleet.update(folder, 1, LIMIT_S)
        fakes[1].tell(fail={"/sleep": 1})
        with pytest.raises(ServerError, match=rf"may still have the memory.*{urls[1]}"):
            fleet.sleep(LIMIT_S)
        wait_until(
            lambda: fakes[1].state()["asleep"] == ["kv_cache", "weights"]
        )  # the prober tries again
        wait_until(lambda: [str(report.error) for report in fleet.states()] == ["None", "None"])
    with pytest.raises(ConfigError, match="inference server plain, a PlainServer, cannot sleep"):
        ServerFleet([PlainServer()]).sleep()


class Sleeper(ScriptedServer):
    """A scripted server that can sleep."""

    asleep: tuple[str, ...] = ()

    def sleep(self, level: int = 1) -> None:
        self.asleep = TAGS

    def wake_up(self, tags: Collection[str] = TAGS) -> None:
        self.asleep = ()

    def status(self) -> ServerStatus:
        return replace(super().status(), asleep=self.asleep)

    def _load(self, path: str, version: int) -> int:
        self.asleep = ()
        return super()._load(path, version)


def test_an_update_that_was_told_before_does_not_wake_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, server = write_published(tmp_path / "w", 1), Sleeper()
    with closing(ServerFleet([server], probe_interval_s=None)) as fleet:
        published = fleet_module.published_folder

        def sleeps_meanwhile(*args: Any) -> Any:
            fleet.sleep(LIMIT_S)
            return published(*args)

        monkeypatch.setattr(fleet_module, "published_folder", sleeps_meanwhile)
        with pytest.raises(ConfigError, match="the inference servers sleep"):
            fleet.update(folder, 1, LIMIT_S)
        assert server.asleep == TAGS and server.told == []
        (member,) = fleet._members
        wanted = published(folder, 1, False, LIMIT_S)
        member.want(wanted)
        member.rest(TAGS)
        with pytest.raises(
            PublishError, match=r"it is not to load .* any more"
        ):  # its turn came after the sleep
            fleet_module._tell(member, wanted, time.monotonic() + LIMIT_S, None)
        assert server.told == []


def test_a_server_that_an_update_keeps_busy_is_not_taken_for_asleep(tmp_path: Path) -> None:
    server = Sleeper()
    with closing(ServerFleet([server], probe_interval_s=None)) as fleet:
        fleet.update(write_published(tmp_path / "w", 1), 1, LIMIT_S)
        (member,) = fleet._members
        member.busy.acquire()  # as an update or a probe does that does not end
        with pytest.raises(
            ServerError, match=r"scripted is gone: .*(has not answered|did not sleep)"
        ):
            fleet.sleep(0.1)
        assert states(fleet) == ["gone"]
        member.busy.release()
        wait_until(lambda: server.asleep == () or states(fleet) == ["asleep"])
        member.look_after(0.0)
        assert states(fleet) == ["asleep"] and server.asleep == TAGS
