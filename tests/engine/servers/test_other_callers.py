"""A server that another client pauses is neither left paused by an update, nor taken for one that
hangs.
"""

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.engine.servers.api import weights_label
from holdfast.utils.errors import ServerError, SlowServerError
from holdfast.utils.threads import on_daemon_thread
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.scripted import write_published
from tests.limits import stretched, wait_until

pytestmark = pytest.mark.timeout(90)

LIMIT_S = stretched(20)


def token_s() -> float:
    """Time for the one token."""
    return stretched(1.0)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def fake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with FakeServer(request.param, tmp_path_factory.mktemp("record")) as fake:
        yield fake


@pytest.fixture
def client(fake: FakeServer) -> VLLMServer | SGLangServer:
    """The client of a keeper, which knows the server by its name."""
    fake.tell()
    kind = VLLMServer if fake._kind == "vllm" else SGLangServer
    return kind(fake.url, served_name="/model", timeout_s=LIMIT_S)


def copy_of(client: Any) -> Any:
    """The client of another process."""
    return pickle.loads(pickle.dumps(client))


def pause(client: Any) -> None:
    with client._calls("", LIMIT_S) as calls:
        client._pause(calls, "pause")


def resume(client: Any) -> None:
    with client._calls("", LIMIT_S) as calls:
        client._go_on(calls)


def ask_for_token(fake: FakeServer, client: Any) -> "Future[None]":
    """Ask for one token, on a thread. Returns once the request has reached the server."""
    path = "/inference/v1/generate" if fake._kind == "vllm" else "/generate"
    before = fake.calls().count(f"POST {path}")
    fake.tell(slow={path: token_s() / 4})
    asked = on_daemon_thread(partial(client.require_token, token_s()), "one token")
    wait_until(lambda: fake.calls().count(f"POST {path}") > before)
    return asked


def test_a_server_that_is_paused_while_it_is_asked_for_a_token_does_not_hang(
    fake: FakeServer, client: Any
) -> None:
    asked = ask_for_token(fake, client)
    pause(copy_of(client))
    assert asked.exception(LIMIT_S) is None
    resume(copy_of(client))


def test_a_server_that_is_updated_while_it_is_asked_for_a_token_does_not_hang(
    fake: FakeServer, client: Any, tmp_path: Path
) -> None:
    asked = ask_for_token(fake, client)
    pause(client)
    with client._updating:
        assert asked.exception(LIMIT_S) is None
    resume(client)

    # The update has ended, but the token has waited too long for it.
    asked = ask_for_token(fake, client)
    trainer = copy_of(client)
    pause(trainer)
    late = threading.Timer(token_s(), partial(load, trainer, tmp_path, 3))
    late.start()
    assert asked.exception(LIMIT_S) is None
    late.join()


def test_a_server_whose_engine_hangs_is_found_out(fake: FakeServer, client: Any) -> None:
    path = "/inference/v1/generate" if fake._kind == "vllm" else "/generate"
    fake.tell(slow={path: 600.0})
    with pytest.raises(SlowServerError, match="asked for one token"):
        client.require_token(token_s())
    fake.tell()


def load(client: Any, folder: Path, version: int) -> Path:
    published = write_published(folder / "weights", version)
    client.update_weights_from_disk(str(published), version)
    return published


def test_an_update_ends_the_pause_of_another_client(
    fake: FakeServer, client: Any, tmp_path: Path
) -> None:
    pause(copy_of(client))
    assert client.status().paused
    published = load(client, tmp_path, 4)
    assert client.status().label == weights_label(published, 4)
    assert not fake.state()["paused"]
    client.require_name(LIMIT_S)
    load(client, tmp_path, 5)


def test_a_server_of_another_name_is_not_taken_for_one_that_has_started(client: Any) -> None:
    stranger = copy_of(client)
    stranger.served_name = "mine"
    with pytest.raises(ServerError, match="another server answers at this URL"):
        stranger.require_name(LIMIT_S)


def test_a_server_of_another_name_is_not_touched_though_it_is_paused(
    fake: FakeServer, client: Any, tmp_path: Path
) -> None:
    pause(client)
    stranger = copy_of(client)
    stranger.served_name = "mine"
    before = len(fake.calls())
    with pytest.raises(ServerError, match="another server answers at this URL"):
        load(stranger, tmp_path, 6)
    asked = "/v1/models" if fake._kind == "vllm" else "/server_info"
    assert fake.calls()[before:] == [f"GET {asked}"]
    assert fake.state()["paused"]
    resume(client)
