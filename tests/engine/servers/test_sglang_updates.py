"""An SGLang server (a fake after its source): a refused load keeps it paused until a load
succeeds.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from holdfast.engine.servers import SGLangServer, whole_folders
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ObservableServer,
    ServerStatus,
    weights_label,
)
from holdfast.engine.servers.content_check import PROBE_NAME
from holdfast.utils.errors import (
    PoisonedServerError,
    PublishError,
    SlowServerError,
    WrongContentError,
)
from holdfast.utils.manifest import MANIFEST_NAME, verify_folder
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed, publish_model, step, tiny_model
from tests.limits import stretched
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

CYCLE = [
    "POST /pause_generation",
    "GET /model_info",
    "POST /update_weights_from_disk",
    "POST /continue_generation",
    "GET /model_info",
    "GET /ready",
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
        assert fake.calls()[2:9] == [*CYCLE, "POST /generate"]
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


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a cut weight file": lambda folder: cut(folder / "model.safetensors"),
    "a changed byte of a weight": lambda folder: change(folder / "model.safetensors"),
    "a cut config": lambda folder: cut(folder / "config.json"),
    "a cut probe": lambda folder: cut(folder / PROBE_NAME),
    "a missing weight file": lambda folder: (folder / "model.safetensors").unlink(),
    "a further file": lambda folder: (folder / "other.safetensors").write_bytes(b"x"),
    "a changed manifest": lambda folder: change(folder / MANIFEST_NAME),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def change(file: Path) -> None:
    """Change one byte, and neither the size nor the time of the last change."""
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[-50] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("damage", slow_but(["a cut weight file", "a cut config"], DAMAGES))
def test_a_damaged_folder_is_found_before_the_server_is_told(damage: str, tmp_path: Path) -> None:
    """A damaged weight file would end it: it reads the file once more, outside of what catches the
    error.
    """
    good = publish_model(tmp_path / "w", 1, tiny_model())
    bad = publish_model(tmp_path / "w", 2, tiny_model(1))
    DAMAGES[damage](Path(bad))
    with FakeServer("sglang", tmp_path, dtype="float32") as fake:
        server = SGLangServer(fake.url)
        server.update_weights_from_disk(good, 1)
        seen = len(fake.calls())
        with pytest.raises(PublishError, match=r"v00000002.*ublish") as caught:
            server.update_weights_from_disk(bad, 2)
        assert not isinstance(caught.value, PoisonedServerError)
        assert fake.calls()[seen:] == [] and fake.alive()
        assert server.status() == ServerStatus(weights_label(good, 1), paused=False)


def test_a_folder_is_read_once_for_all_servers_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish_hashed(tmp_path / "w", 1)
    read: list[str] = []

    def counted(path: str) -> object:
        read.append(path)
        return verify_folder(path)

    monkeypatch.setattr(whole_folders, "verify_folder", counted)
    with FakeServer("sglang", tmp_path) as one, FakeServer("sglang", tmp_path) as other:
        servers = [SGLangServer(one.url), SGLangServer(other.url)]
        for server in servers:
            server.update_weights_from_disk(folder, 1)
            assert server.seconds["verify"] >= 0
        assert read == [folder]
        cut(Path(folder) / "model.safetensors")
        for server in servers:
            with pytest.raises(PublishError, match=r"it was not told of .*which would end it"):
                server.update_weights_from_disk(folder, 1)
        assert one.alive() and other.alive()


def test_a_folder_that_this_host_does_not_see_is_a_failed_publication(
    fake: FakeServer, tmp_path: Path
) -> None:
    with pytest.raises(PublishError, match=r"nowhere cannot be read here \(.*; it was not told"):
        SGLangServer(fake.url).update_weights_from_disk(str(tmp_path / "nowhere"), 1)
    assert fake.calls() == []


def test_a_restarted_server_is_not_reported_as_paused(fake: FakeServer, tmp_path: Path) -> None:
    server = SGLangServer(fake.url)
    for version, label in enumerate((None, weights_label(publish_hashed(tmp_path / "o", 1), 1))):
        fake.tell(flush_fails=1)
        with pytest.raises(PoisonedServerError):
            server.update_weights_from_disk(publish_hashed(tmp_path / "w", version), version)
        assert server.status().paused
        fake.restart()
        assert server.status() == ServerStatus(None, paused=False)
        if label is None:
            server.update_weights_from_disk(str(tmp_path / "o" / "v00000001"), 1)
            assert server.status().label is not None


def test_a_paused_server_of_a_killed_publisher_is_seen_and_resumed(
    fake: FakeServer, tmp_path: Path
) -> None:
    folder = publish_hashed(tmp_path / "w", 1)
    SGLangServer(fake.url).update_weights_from_disk(folder, 1)
    httpx2.post(f"{fake.url}/pause_generation", json={"mode": "retract"})
    server = SGLangServer(fake.url)
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=True)
    server.update_weights_from_disk(folder, 1)
    assert not paused(fake)


def test_a_server_that_was_found_unhealthy_while_paused_is_updated(
    fake: FakeServer, tmp_path: Path
) -> None:
    """It is not ready until the next look at its health, also after it was resumed."""
    server = SGLangServer(fake.url)
    httpx2.post(f"{fake.url}/pause_generation", json={"mode": "retract"})
    assert httpx2.get(f"{fake.url}/health").status_code == 503
    folder = publish_hashed(tmp_path / "w", 1)
    server.update_weights_from_disk(folder, 1)
    assert httpx2.get(f"{fake.url}/ready").status_code == 503
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)
    fake.tell(flush_fails=1)
    with pytest.raises(PoisonedServerError):
        server.update_weights_from_disk(folder, 1)
    assert server.status().paused


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
            hasty = SGLangServer(fake.url, timeout_s=stretched(0.5))
            hasty.update_weights_from_disk(folder, version)
        fake.wake()
        fake.tell()  # also if it was cut off at an earlier call
        server.update_weights_from_disk(folder, version)
        assert server.status() == ServerStatus(
            weights_label(folder, version), paused=False
        ) and not paused(fake)
