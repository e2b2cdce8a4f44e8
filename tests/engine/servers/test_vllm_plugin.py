"""A vLLM server with the plugin: refused updates change nothing, and an update left open is
closed.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import ServerStatus, weights_label
from holdfast.utils.errors import PoisonedServerError, PublishError
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed
from tests.limits import stretched

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """A vLLM with ``holdfast_disk``."""
    with FakeServer("vllm", tmp_path, plugin=True) as server:
        yield server


def client(fake: FakeServer) -> VLLMServer:
    return VLLMServer(fake.url, timeout_s=stretched(20), transfer="holdfast_disk")


def damage(folder: Path) -> None:
    """Change the last byte of the weights."""
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_an_update_is_checked_by_the_plugin(fake: FakeServer, tmp_path: Path) -> None:
    server, folder = client(fake), publish_hashed(tmp_path, 1)
    assert server.update_weights_from_disk(folder, 1) == 1
    routes = ("/start_weight_update", "/update_weights", "/finish_weight_update")
    expected = [
        "GET /is_paused",
        "POST /pause?mode=keep&clear_cache=true",
        "GET /weight_info",
        *(f"POST {route}" for route in routes),
    ]
    assert fake.calls()[: len(expected)] == expected
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)


def test_a_refused_folder_leaves_the_server_serving(fake: FakeServer, tmp_path: Path) -> None:
    server, folder, bad = (
        client(fake),
        publish_hashed(tmp_path, 1),
        Path(publish_hashed(tmp_path, 2)),
    )
    server.update_weights_from_disk(folder, 1)
    damage(bad)
    with pytest.raises(
        PublishError, match=r"(?s)it goes on with the weights it has: .*has digest xxh3_128:"
    ) as caught:
        server.update_weights_from_disk(str(bad), 2)
    assert not isinstance(caught.value, PoisonedServerError)
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)


@pytest.mark.parametrize("call", ["/reset_prefix_cache", "/update_weight_version", "/resume"])
def test_a_server_with_newer_weights_than_its_label_is_not_resumed_by_a_refusal(
    call: str, fake: FakeServer, tmp_path: Path
) -> None:
    server = client(fake)
    server.update_weights_from_disk(publish_hashed(tmp_path, 1), 1)

    # Version 2 is loaded, and the update fails afterwards.
    fake.tell(fail={call: 1})
    with pytest.raises(PublishError, match="told to fail"):
        server.update_weights_from_disk(publish_hashed(tmp_path, 2), 2)
    fake.tell()

    # Another client knows only what the server says.
    bad = publish_hashed(tmp_path, 3)
    damage(Path(bad))
    with pytest.raises(PublishError, match=r"it stays paused as before.*has digest xxh3_128:"):
        client(fake).update_weights_from_disk(bad, 3)
    assert fake.state()["paused"] and fake.state()["version"] == 2

    # A sound version repairs it.
    folder = publish_hashed(tmp_path, 4)
    server.update_weights_from_disk(folder, 4)
    assert server.status() == ServerStatus(weights_label(folder, 4), paused=False)


def test_an_update_that_a_killed_publisher_left_open_is_closed(
    fake: FakeServer, tmp_path: Path
) -> None:
    server, folder = client(fake), publish_hashed(tmp_path, 1)
    httpx2.post(f"{fake.url}/start_weight_update").raise_for_status()
    assert server.update_weights_from_disk(folder, 1) == 1


def test_a_load_that_fails_after_the_check_leaves_the_server_paused(
    fake: FakeServer, tmp_path: Path
) -> None:
    server, folder = client(fake), publish_hashed(tmp_path, 1)
    fake.tell(fail={"/update_weights": 1})
    with pytest.raises(PoisonedServerError, match="do not resume it"):
        server.update_weights_from_disk(folder, 1)
    assert server.status().paused
    assert server.update_weights_from_disk(folder, 1) == 1


def test_a_server_without_the_plugin_is_named(tmp_path: Path) -> None:
    with (
        FakeServer("vllm", tmp_path) as fake,
        pytest.raises(PublishError, match="install holdfast-vllm beside vLLM"),
    ):
        client(fake).update_weights_from_disk(publish_hashed(tmp_path, 1), 1)
