"""A server with a mirror: the mirror makes the weights while the server still answers requests."""

import pickle
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import PublishedCopy, WeightUpdateMeta, publish_weights
from holdfast.engine.hf.versions import holds_delta_alone, published_versions, version_path
from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer
from holdfast.engine.servers.api import ServerStatus, weights_label
from holdfast.engine.servers.client import MIRROR_TOKEN
from holdfast.engine.servers.content_check import PROBE_NAME, WeightsProbe, read_weights_probe
from holdfast.utils.errors import ConfigError, NoServerError, PublishError, SlowServerError
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.faulty_mirror import FaultyMirror
from tests.engine.servers.folders import PROMPT, model_logprobs, publish_hashed, tiny_model
from tests.engine.servers.scripted import ScriptedServer
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

CLIENTS: dict[str, Any] = {"vllm": VLLMServer, "sglang": SGLangServer}
SERVED = "the server was not told, and goes on with the weights it has"


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[FaultyMirror]:
    with FaultyMirror(tmp_path / "w", tmp_path / "local") as running:
        yield running


def train(model: torch.nn.Module, seed: int) -> None:
    """Change a tenth of the weights, enough for the comparison of contents."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.02 * (torch.rand(param.shape, generator=generator) < 0.1))


def probe_of(model: Any) -> dict[str, bytes]:
    return {PROBE_NAME: WeightsProbe(PROMPT, model_logprobs(model, PROMPT), "float32").encode()}


@pytest.mark.parametrize("kind", slow_but(["vllm"], CLIENTS))
def test_deltas_are_served_like_full_versions(
    kind: str, tmp_path: Path, mirror: FaultyMirror
) -> None:
    model, copy, root = tiny_model(), PublishedCopy(), tmp_path / "w"
    with FakeServer(kind, tmp_path, dtype="float32") as fake:
        busy: list[bool] = []
        mirror.before = lambda: busy.append(fake.state()["paused"])
        server = CLIENTS[kind](fake.url, mirror=mirror.url)
        meta = WeightUpdateMeta("disk", str(root), delta=True, anchor_interval=2, keep=1)
        with closing(ServerFleet([server], probe_interval_s=None)) as fleet:
            for version in range(1, 6):
                train(model, version)
                done = publish_weights(
                    model, meta, version, fleet, extra_files=probe_of(model), copy=copy
                )
                label = weights_label(done.path, version)
                assert server.status() == ServerStatus(label, paused=False)
                assert mirror.asked[-1] == {"version": version, "label": label}
                assert holds_delta_alone(done.path) == (version in (2, 3, 5)), version
                stats = done.stats()
                assert stats["publish_delta"] == (version in (2, 3, 5))
                assert (
                    0
                    < stats["publish_compare_s"]
                    < stats["publish_write_s"]
                    < stats["publish_total_s"]
                )
                assert stats["update_prepare_s"] > 0
                if version > 1:
                    assert 0.05 < stats["publish_changed"] < 0.15
                if version in (2, 3, 5):
                    assert stats["publish_bytes"] < stats["publish_full_bytes"] / 4
                    assert done.path not in version_path(mirror.local, version).parents
        assert busy == [False] * 5, "it was paused before its weights were there"
        assert published_versions(root) == [4, 5]
        assert fake.state()["version"] == 5


def test_the_version_after_one_that_no_mirror_could_make_is_full(
    tmp_path: Path, mirror: FaultyMirror, caplog: pytest.LogCaptureFixture
) -> None:
    model, copy = tiny_model(), PublishedCopy()
    meta = WeightUpdateMeta("disk", str(tmp_path / "w"), delta=True, anchor_interval=0)
    deltas: list[float] = []

    def publish(version: int) -> None:
        train(model, version)
        deltas.append(publish_weights(model, meta, version, fleet, copy=copy).figures["delta"])

    with FakeServer("vllm", tmp_path) as fake:
        server = VLLMServer(fake.url, mirror=mirror.url)
        with closing(ServerFleet([server], probe_interval_s=None)) as fleet:
            publish(1)
            publish(2)
            mirror.refuses = "a delta is damaged"
            with pytest.raises(PublishError, match="a delta is damaged"):
                publish(3)
            mirror.refuses = ""
            publish(4)
            publish(5)
    assert deltas == [0, 1, 0, 1], "4 would build on 3"
    assert (
        caplog.text.count("weight version 3 was not confirmed, so the next one gets all weights")
        == 1
    )


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_mirror_works_without_deltas_and_a_copy_of_the_client_knows_it(
    kind: str, tmp_path: Path, mirror: FaultyMirror
) -> None:
    with FakeServer(kind, tmp_path) as fake:
        server = pickle.loads(pickle.dumps(CLIENTS[kind](fake.url, mirror=f"{mirror.url}/")))
        assert server.mirror == mirror.url
        folder = publish_hashed(tmp_path / "w", 1)
        assert server.update_weights_from_disk(folder, 1) == 1
        assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)
        assert version_path(mirror.local, 1).is_dir()


@pytest.mark.parametrize("kind", slow_but(["sglang"], CLIENTS))
def test_a_mirror_that_cannot_leaves_the_server_as_it_is(
    kind: str, tmp_path: Path, mirror: FaultyMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(kind, tmp_path) as fake:
        server = CLIENTS[kind](fake.url, mirror=mirror.url)
        first, second = publish_hashed(tmp_path / "w", 1), publish_hashed(tmp_path / "w", 2)
        server.update_weights_from_disk(first, 1)
        seen, status = len(fake.calls()), ServerStatus(weights_label(first, 1), paused=False)

        mirror.refuses = "the folder of version 1 is damaged, and there is no full version"
        with pytest.raises(
            PublishError,
            match=rf"version 2 .*/prepare was answered with 409 .*is damaged.*; {SERVED}",
        ):
            server.update_weights_from_disk(second, 2)
        mirror.refuses, mirror.answer = "", {"path": 7}
        with pytest.raises(
            PublishError, match=f"its mirror says that the weights are in 7; {SERVED}"
        ):
            server.update_weights_from_disk(second, 2)
        mirror.answer = None
        mirror.ask_for("secret")
        with pytest.raises(PublishError, match="was answered with 401"):
            server.update_weights_from_disk(second, 2)
        monkeypatch.setenv(MIRROR_TOKEN, "another")
        with pytest.raises(PublishError, match="was answered with 401") as caught:
            server.update_weights_from_disk(second, 2)
        assert "another" not in str(caught.value)
        monkeypatch.setenv(MIRROR_TOKEN, "secret")
        mirror.slow_s, server.timeout_s = 2.0, 0.5
        with pytest.raises(
            SlowServerError, match=r"/prepare was not answered, all together within 0\.5 s"
        ):
            server.update_weights_from_disk(second, 2)
        server.timeout_s = None
        elsewhere = CLIENTS[kind](fake.url, mirror="http://127.0.0.1:9")
        with pytest.raises(
            NoServerError, match=r"POST http://127\.0\.0\.1:9/prepare found no server there"
        ):
            elsewhere.update_weights_from_disk(second, 2)
        assert len(fake.calls()) == seen and server.status() == status

        mirror.slow_s = 0.0
        server.update_weights_from_disk(second, 2)
        assert server.status() == ServerStatus(weights_label(second, 2), paused=False)


def test_a_server_without_a_mirror_is_refused_before_anything_is_written(
    tmp_path: Path, mirror: FaultyMirror
) -> None:
    model, copy, root = tiny_model(), PublishedCopy(), tmp_path / "w"
    meta = WeightUpdateMeta("disk", str(root), delta=True)
    servers = [VLLMServer("http://127.0.0.1:9", mirror=mirror.url), ScriptedServer("plain")]
    with pytest.raises(
        ConfigError, match="inference server plain, a ScriptedServer, has no mirror, which makes"
    ):
        publish_weights(model, meta, 1, servers, copy=copy)
    assert not root.exists()
    for version in (1, 2):
        train(model, version)
        publish_weights(model, meta, version, [], extra_files=probe_of(model), copy=copy)
    path = version_path(root, 2)
    assert holds_delta_alone(path) and read_weights_probe(path) is not None
    fleet = ServerFleet(servers, probe_interval_s=None)  # as in the driver of a Ray job
    with pytest.raises(ConfigError, match="has no mirror"):
        fleet.update(path, 2, 1.0)


def test_the_url_of_a_mirror_is_checked() -> None:
    with pytest.raises(
        ConfigError, match=r"mirror URL '10\.0\.0\.5:9000' is unknown; expected http://host:port"
    ):
        VLLMServer("http://10.0.0.5:8000", mirror="10.0.0.5:9000")


def test_a_password_in_the_url_of_a_mirror_is_not_shown(tmp_path: Path) -> None:
    server = VLLMServer("http://127.0.0.1:9", mirror="http://user:hidden@127.0.0.1:9")
    with pytest.raises(NoServerError, match="/prepare found no server there") as caught:
        server.update_weights_from_disk(publish_hashed(tmp_path, 1), 1)
    assert "hidden" not in str(caught.value)


def test_the_probe_of_a_version_without_it_is_not_that_of_its_base(tmp_path: Path) -> None:
    model, copy, root = tiny_model(), PublishedCopy(), tmp_path / "w"
    meta = WeightUpdateMeta("disk", str(root), delta=True)
    publish_weights(model, meta, 1, [], extra_files=probe_of(model), copy=copy)
    publish_weights(model, meta, 2, [], extra_files=probe_of(model), copy=copy)
    assert (
        read_weights_probe(version_path(root, 2))
        == read_weights_probe(version_path(root, 1))
        is not None
    )
    publish_weights(model, meta, 3, [], copy=copy)
    assert read_weights_probe(version_path(root, 3)) is None
    shutil.rmtree(version_path(root, 1))
    assert read_weights_probe(version_path(root, 2)) is None, (
        "its file was deleted, by somebody else"
    )


def test_a_published_folder_can_be_the_base_of_the_next_job(tmp_path: Path) -> None:
    model, root, meta = (
        tiny_model(),
        tmp_path / "w",
        WeightUpdateMeta("disk", str(tmp_path / "w"), keep=3),
    )
    base = str(version_path(root, 1))
    publish_weights(model, meta, 1, [], extra_files=probe_of(model))
    train(model, 1)
    publish_weights(model, meta, 2, [], base_model_path=base, extra_files=probe_of(model))
    assert read_weights_probe(version_path(root, 2)) != read_weights_probe(base) is not None
    publish_weights(model, meta, 3, [], base_model_path=base)
    assert read_weights_probe(version_path(root, 3)) is None, (
        "the probe of the base is of other weights"
    )
