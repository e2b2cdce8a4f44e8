"""A vLLM server with the plugin: refused updates change nothing, and an update left open is closed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.servers import ServerFleet, VLLMServer
from holdfast.engine.servers.api import ServerState, ServerStatus, weights_label
from holdfast.engine.servers.broadcast import WeightSender
from holdfast.engine.servers.publish import publish_weights
from holdfast.utils.errors import ConfigError, PoisonedServerError, PublishError
from tests.engine.servers.fake_plugin import join, receive
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed, publish_model, step, tiny_model
from tests.engine.servers.scripted import PlainServer, wait_until
from tests.limits import stretched

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """A vLLM with ``holdfast_disk``."""
    with FakeServer("vllm", tmp_path, plugin=True) as server:
        yield server


def client(fake: FakeServer) -> VLLMServer:
    return VLLMServer(fake.url, timeout_s=stretched(20), transfer="holdfast_disk")


def test_an_update_is_checked_by_the_plugin(fake: FakeServer, tmp_path: Path) -> None:
    server, folder = client(fake), publish_hashed(tmp_path, 1)
    assert server.update_weights_from_disk(folder, 1) == 1
    routes = ("/start_weight_update", "/update_weights", "/finish_weight_update")
    expected = ["POST /pause?mode=keep&clear_cache=true", "GET /weight_info", *(f"POST {route}" for route in routes)]
    assert fake.calls()[: len(expected)] == expected
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)


def test_a_refused_folder_leaves_the_server_serving(fake: FakeServer, tmp_path: Path) -> None:
    server, folder, bad = client(fake), publish_hashed(tmp_path, 1), Path(publish_hashed(tmp_path, 2))
    server.update_weights_from_disk(folder, 1)
    (bad / "model.safetensors").write_bytes(b"VERSION 2")
    with pytest.raises(PublishError, match=r"(?s)it goes on with the weights it has: .*has digest xxh3_128:") as caught:
        server.update_weights_from_disk(str(bad), 2)
    assert not isinstance(caught.value, PoisonedServerError)
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)


def test_an_update_that_a_killed_publisher_left_open_is_closed(fake: FakeServer, tmp_path: Path) -> None:
    server, folder = client(fake), publish_hashed(tmp_path, 1)
    httpx2.post(f"{fake.url}/start_weight_update").raise_for_status()
    assert server.update_weights_from_disk(folder, 1) == 1


def test_a_load_that_fails_after_the_check_leaves_the_server_paused(fake: FakeServer, tmp_path: Path) -> None:
    server, folder = client(fake), publish_hashed(tmp_path, 1)
    fake.tell(fail={"/update_weights": 1})
    with pytest.raises(PoisonedServerError, match="do not resume it"):
        server.update_weights_from_disk(folder, 1)
    assert server.status().paused
    assert server.update_weights_from_disk(folder, 1) == 1


def test_a_server_without_the_plugin_is_named(tmp_path: Path) -> None:
    with FakeServer("vllm", tmp_path) as fake, pytest.raises(PublishError, match="install holdfast-vllm beside vLLM"):
        client(fake).update_weights_from_disk(publish_hashed(tmp_path, 1), 1)


def test_a_transfer_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="transfer"):
        VLLMServer("http://127.0.0.1:1", transfer="nccl")


def test_weights_of_a_folder_arrive_with_their_digest(fake: FakeServer, tmp_path: Path) -> None:
    sent = {"b": torch.randn(5, 3), "a": torch.arange(7, dtype=torch.bfloat16), "c": torch.tensor(2.0)}
    save_file({"a": sent["a"], "b": sent["b"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": sent["c"]}, tmp_path / "model-00002-of-00002.safetensors")
    sender = WeightSender(tmp_path, fake.url, workers=1, timeout_s=stretched(20))
    with ThreadPoolExecutor() as pool:
        received = pool.submit(lambda: receive(join(sender.init_info), sender.update_info))
        sender.connect()
        sender.send()
        tensors, digest = received.result(stretched(20))
    assert tensors.keys() == sent.keys()
    assert all(torch.equal(tensors[name], sent[name]) for name in sent)
    total = xxhash.xxh3_128()
    for tensor in tensors.values():
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    assert digest == total.digest()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[FakeServer]:
    """A vLLM with ``holdfast_broadcast`` that serves a model."""
    base = publish_model(tmp_path / "base", 0, tiny_model())
    with FakeServer("vllm", tmp_path, plugin=True, dtype="float32", folder=base) as server:
        yield server


def test_weights_that_are_broadcast_are_served(receiver: FakeServer, tmp_path: Path) -> None:
    model, server = tiny_model(), VLLMServer(receiver.url, timeout_s=stretched(20))
    with closing(ServerFleet([server], probe_interval_s=None)) as fleet:
        for version in (1, 2):
            step(model, 1e-3)
            folder = publish_model(tmp_path / "w", version, model)
            (report,) = fleet.update(folder, version, stretched(20), broadcast=True)
            assert report.state is ServerState.SERVING, "it has compared contents"
            assert server.status() == ServerStatus(weights_label(folder, version), paused=False)
    assert not any("collective_rpc" in call for call in receiver.calls())


def test_a_restarted_server_is_sent_the_weights_again(receiver: FakeServer, tmp_path: Path) -> None:
    server = VLLMServer(receiver.url, timeout_s=stretched(20))
    folder = publish_model(tmp_path / "w", 1, tiny_model(1))
    with closing(ServerFleet([server], probe_interval_s=0.05)) as fleet:
        fleet.update(folder, 1, stretched(20), broadcast=True)
        receiver.restart()
        wait_until(lambda: fleet.states()[0].state is not ServerState.SERVING)
        assert fleet.wait_serving(1, stretched(20))
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)


def test_weights_are_not_written_for_a_server_that_cannot_be_sent_any(tmp_path: Path) -> None:
    meta = WeightUpdateMeta("broadcast", str(tmp_path / "w"))
    with pytest.raises(ConfigError, match=r"inference server plain, a PlainServer, .* type 'disk'"):
        publish_weights(tiny_model(), meta, 1, [PlainServer()])
    assert not (tmp_path / "w").exists()
    with pytest.raises(ConfigError, match=r"type.*nccl"):
        WeightUpdateMeta("nccl", str(tmp_path / "w"))
