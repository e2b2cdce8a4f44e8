"""An SGLang server (a fake after its source): a refused load keeps it paused until a load
succeeds.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from holdfast.engine.servers import SGLangServer
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ObservableServer,
    ServerStatus,
    weights_label,
)
from holdfast.utils.errors import (
    PoisonedServerError,
    PublishError,
    SlowServerError,
    WrongContentError,
)
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed, publish_model, step, tiny_model

pytestmark = pytest.mark.timeout(60)

CYCLE = [
    "POST /pause_generation",
    "GET /model_info",
    "POST /update_weights_from_disk",
    "POST /continue_generation",
    "GET /model_info",
]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer("sglang", tmp_path) as server:
        yield server


def paused(fake: FakeServer) -> bool:
    return fake.state()["paused"]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_versions_are_served_and_a_skipped_update_is_found(dtype: str, tmp_path: Path) -> None:
    model = tiny_model()
    with FakeServer("sglang", tmp_path, dtype=dtype) as fake:
        server = SGLangServer(fake.url)
        assert isinstance(server, ObservableServer) and server.status() == ServerStatus(
            None, paused=False
        )
        for version in (1, 2):
            step(model, 1e-5)
            folder = publish_model(tmp_path / "w", version, model, dtype)
            assert server.update_weights_from_disk(folder, version) == version
            assert server.status() == ServerStatus(weights_label(folder, version), paused=False)
        assert fake.calls()[1:7] == [*CYCLE, "POST /generate"]
        step(model, 1e-5)
        folder = publish_model(tmp_path / "w", 3, model, dtype)
        fake.tell(lie=1)
        with pytest.raises(WrongContentError, match="It was paused again"):
            server.update_weights_from_disk(folder, 3)
        assert server.status().paused and paused(fake)
        server.update_weights_from_disk(folder, 3)
        assert not paused(fake)


@pytest.mark.parametrize("trouble", ["load", "flush"])
def test_a_refused_load_keeps_the_server_paused_until_one_succeeds(
    trouble: str, fake: FakeServer, tmp_path: Path
) -> None:
    """If the flush fails with 400, the weights are loaded, but the label is the old one."""
    server, first = SGLangServer(fake.url), publish_hashed(tmp_path / "w", 1)
    server.update_weights_from_disk(first, 1)
    second = publish_hashed(tmp_path / "w", 2)
    seen = len(fake.calls())
    if trouble == "flush":
        fake.tell(flush_fails=1)
    else:
        fake.tell(fail={"/update_weights_from_disk": 1})
    with pytest.raises(
        PoisonedServerError,
        match=r"disk was answered with [45]00 \(.*; its weights may be in pieces",
    ):
        server.update_weights_from_disk(second, 2)
    assert fake.calls()[seen:] == CYCLE[:3]
    assert server.status() == ServerStatus(weights_label(first, 1), paused=True) and paused(fake)
    third = publish_hashed(tmp_path / "w", 3)
    server.update_weights_from_disk(third, 3)
    assert server.status() == ServerStatus(weights_label(third, 3), paused=False)
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=4))
    assert asyncio.run(server.agenerate(request)).output_versions == [3] * 4


@pytest.mark.parametrize("damage", ["cut", "no header"])
def test_a_file_that_would_kill_the_server_is_found_before_it_is_told(
    damage: str, tmp_path: Path
) -> None:
    """SGLang reads the file once more to roll back, outside of what catches the error."""
    good, bad = (
        publish_model(tmp_path / "w", 1, tiny_model()),
        publish_model(tmp_path / "w", 2, tiny_model()),
    )
    file = next(Path(bad).glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1000] if damage == "cut" else b"\xff" * 8 + data[8:])
    with FakeServer("sglang", tmp_path, dtype="float32") as fake:
        server = SGLangServer(fake.url)
        server.update_weights_from_disk(good, 1)
        seen = len(fake.calls())
        with pytest.raises(
            PublishError, match=r"it was not told of .*model.safetensors.*publish again"
        ):
            server.update_weights_from_disk(bad, 2)
        assert fake.calls()[seen:] == [] and fake.alive()
        assert server.status() == ServerStatus(weights_label(good, 1), paused=False)


def test_a_folder_that_this_host_does_not_see_is_a_failed_publication(
    fake: FakeServer, tmp_path: Path
) -> None:
    with pytest.raises(PublishError, match=r"nowhere cannot be read here \(.*; it was not told"):
        SGLangServer(fake.url).update_weights_from_disk(str(tmp_path / "nowhere"), 1)
    assert fake.calls() == []


def test_a_restarted_server_is_not_reported_as_paused(fake: FakeServer, tmp_path: Path) -> None:
    server = SGLangServer(fake.url)
    fake.tell(flush_fails=1)
    with pytest.raises(PoisonedServerError):
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", 1), 1)
    assert server.status() == ServerStatus(None, paused=True)
    server.update_weights_from_disk(publish_hashed(tmp_path / "w", 2), 2)
    fake.tell(flush_fails=1)
    with pytest.raises(PoisonedServerError):
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", 3), 3)
    assert server.status().paused and server.status().label is not None
    fake.restart()
    assert server.status() == ServerStatus(None, paused=False)


def test_a_paused_server_of_a_killed_publisher_is_resumed(fake: FakeServer, tmp_path: Path) -> None:
    folder = publish_hashed(tmp_path / "w", 1)
    SGLangServer(fake.url).update_weights_from_disk(folder, 1)
    httpx2.post(f"{fake.url}/pause_generation", json={"mode": "retract"})
    SGLangServer(fake.url).update_weights_from_disk(folder, 1)
    assert not paused(fake)


@pytest.mark.slow
@pytest.mark.parametrize("call", range(4))
def test_an_update_cut_off_at_any_call_is_repaired_by_the_next(
    call: int, fake: FakeServer, tmp_path: Path
) -> None:
    server = SGLangServer(fake.url)
    for version, when in enumerate(("before", "after"), start=1):
        folder = publish_hashed(tmp_path / "w", version)
        fake.tell(at_call=call, does="stop", when=when)
        with pytest.raises(SlowServerError):
            SGLangServer(fake.url, timeout_s=0.5).update_weights_from_disk(folder, version)
        fake.wake()
        server.update_weights_from_disk(folder, version)
        assert server.status() == ServerStatus(
            weights_label(folder, version), paused=False
        ) and not paused(fake)
