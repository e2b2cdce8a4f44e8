"""A vLLM server serves the published weights, or the publisher gets an error. It never resumes with
partial weights.
"""

import asyncio
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    ObservableServer,
    ServerStatus,
    weights_label,
)
from holdfast.utils.errors import (
    ConfigError,
    PoisonedServerError,
    PublishError,
    SlowServerError,
    UnreachableServerError,
    WrongContentError,
)
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import (
    PROMPT,
    model_logprobs,
    publish_hashed,
    publish_model,
    step,
    tiny_model,
)
from tests.limits import stretched
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

CYCLE = [
    "POST /pause?mode=keep&clear_cache=true",
    "GET /weight_info",
    "POST /collective_rpc",
    "POST /reset_prefix_cache",
    "POST /update_weight_version",
    "POST /resume",
    "GET /weight_info",
    "GET /is_paused",
]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """A vLLM without a model."""
    with FakeServer("vllm", tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """A vLLM that computes in bfloat16."""
    with FakeServer("vllm", tmp_path_factory.mktemp("record"), dtype="bfloat16") as server:
        yield server


def request(max_new_tokens: int = 8, seed: int = 1) -> ModelRequest:
    return ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=max_new_tokens), seed)


def complete(server: VLLMServer, seed: int) -> ModelResponse:
    return asyncio.run(server.agenerate(request(seed=seed)))


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + stretched(20)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def serves(server: VLLMServer, folder: str, version: int) -> bool:
    return server.status() == ServerStatus(weights_label(folder, version), paused=False)


def test_three_versions_are_served_as_the_trainer_computes_them(tmp_path: Path) -> None:
    model = tiny_model()
    with FakeServer("vllm", tmp_path, dtype="float32") as fake:
        server = VLLMServer(fake.url)
        assert isinstance(server, ObservableServer) and server.status() == ServerStatus(
            None, paused=False
        )
        for version in (1, 2, 3):
            step(model, 1e-3)
            folder = publish_model(tmp_path / "w", version, model)
            assert server.update_weights_from_disk(folder, version) == version
            assert serves(server, folder, version)
            with server._calls("", 30) as calls:
                answer = server._prompt_logprobs(calls, PROMPT)
            expected = model_logprobs(model, PROMPT)
            assert max(abs(a - b) for a, b in zip(answer, expected, strict=True)) < 1e-4
        assert fake.calls()[2:10] == CYCLE
        assert server.seconds.keys() == {
            "pause",
            "load",
            "reset cache",
            "label",
            "resume",
            "read back",
            "check",
        }
        assert all(seconds > 0 for seconds in server.seconds.values())


def test_a_server_that_keeps_its_old_weights_is_found_and_paused(tmp_path: Path) -> None:
    model = tiny_model()
    with FakeServer("vllm", tmp_path, dtype="float32") as fake:
        VLLMServer(fake.url).update_weights_from_disk(publish_model(tmp_path / "w", 1, model), 1)
        step(model, 1e-4)
        folder = publish_model(tmp_path / "w", 2, model)
        fake.tell(lie=1)
        server = VLLMServer(fake.url)  # a client of another publisher, without remembered answers
        with pytest.raises(
            WrongContentError,
            match=r"from the trainer's by \S+ on average, in float32 by at most 2e-05",
        ):
            server.update_weights_from_disk(folder, 2)
        assert server.status() == ServerStatus(None, paused=True)
        server.update_weights_from_disk(folder, 2)
        assert serves(server, folder, 2)


@pytest.mark.parametrize("case", slow_but([0], range(20)))
def test_a_skipped_update_is_found_in_bfloat16(
    case: int, tmp_path: Path, bfloat16: FakeServer
) -> None:
    model = tiny_model(case)
    server = VLLMServer(bfloat16.url)
    server.update_weights_from_disk(publish_model(tmp_path, 1, model, "bfloat16"), 1)
    step(model, 1e-6)
    folder = publish_model(tmp_path, 2, model, "bfloat16")
    bfloat16.tell(lie=1)
    with pytest.raises(
        WrongContentError,
        match="bit for bit that of the version before, although the weights are others",
    ):
        server.update_weights_from_disk(folder, 2)
    assert server.status().paused
    bfloat16.tell()
    server.update_weights_from_disk(folder, 2)
    server.update_weights_from_disk(folder, 2)  # the same answer from the same weights is correct
    assert serves(server, folder, 2)


def test_a_folder_without_a_probe_is_served_with_one_warning(
    fake: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = VLLMServer(fake.url)
    for version in (1, 2):
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", version), version)
    assert caplog.text.count("has no probe; what the server says is believed") == 1
    assert "POST /inference/v1/generate" not in fake.calls()


def test_a_failed_load_is_not_resumed_and_a_good_folder_repairs_it(
    fake: FakeServer, tmp_path: Path
) -> None:
    server, good, bad = (
        VLLMServer(fake.url),
        publish_hashed(tmp_path / "w", 1),
        publish_hashed(tmp_path / "w", 2),
    )
    server.update_weights_from_disk(good, 1)
    label, seen = weights_label(bad, 2), len(fake.calls())
    Path(bad, "manifest.json").rename(Path(bad, "elsewhere"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.engine.servers.client.weights_label", lambda *_: label)
        with pytest.raises(
            PoisonedServerError,
            match=r"POST /collective_rpc was answered with 500 .* do not resume it",
        ):
            server.update_weights_from_disk(bad, 2)
    assert fake.calls()[seen:] == CYCLE[:3]
    assert server.status() == ServerStatus(weights_label(good, 1), paused=True)
    third = publish_hashed(tmp_path / "w", 3)
    server.update_weights_from_disk(third, 3)
    assert serves(server, third, 3)
    assert complete(server, seed=1).output_versions == [3] * 8


def test_a_paused_server_of_a_killed_publisher_is_resumed_by_the_same_version(
    fake: FakeServer, tmp_path: Path
) -> None:
    server, folder = VLLMServer(fake.url), publish_hashed(tmp_path / "w", 1)
    server.update_weights_from_disk(folder, 1)
    httpx2.post(f"{fake.url}/pause?mode=keep")
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=True)
    server.update_weights_from_disk(folder, 1)
    assert serves(server, folder, 1)


def test_a_prefix_cache_that_is_not_reset_keeps_the_server_paused(tmp_path: Path) -> None:
    folder = publish_hashed(tmp_path / "w", 1)

    async def publish_meanwhile(fake: FakeServer, server: VLLMServer) -> None:
        running = asyncio.create_task(server.agenerate(request(max_new_tokens=100_000)))
        await asyncio.to_thread(wait_for, fake.tokens)
        with pytest.raises(
            PublishError, match=r"the prefix cache could not be reset.*the server stays paused"
        ):
            await asyncio.to_thread(server.update_weights_from_disk, folder, 1)
        running.cancel()

    with FakeServer("vllm", tmp_path, token_s=0.001) as fake:
        server = VLLMServer(fake.url)
        server.update_weights_from_disk(folder, 1)
        fake.tell(keep_caches=True)  # the requests in flight keep their caches, which take blocks
        asyncio.run(publish_meanwhile(fake, server))
        assert server.status().paused and fake.calls()[-3] == "POST /reset_prefix_cache"
        server.update_weights_from_disk(folder, 1)
        assert serves(server, folder, 1)


def test_unreachable_and_slow_servers_are_distinguished(fake: FakeServer, tmp_path: Path) -> None:
    folder = publish_hashed(tmp_path / "w", 1)
    hasty = VLLMServer(fake.url, timeout_s=stretched(3))
    fake.tell(slow={"/collective_rpc": 60.0})
    with pytest.raises(
        SlowServerError, match=r"version 1 from .*/v00000001: POST /collective_rpc was not answered"
    ):
        hasty.update_weights_from_disk(folder, 1)
    assert hasty.status().paused
    fake.tell(at_call=2)
    with pytest.raises(
        UnreachableServerError, match=r"POST /collective_rpc broke off .*it may have died"
    ):
        VLLMServer(fake.url).update_weights_from_disk(folder, 1)
    assert fake.died()
    with pytest.raises(
        UnreachableServerError, match=r"GET /weight_info found no server there .*start it"
    ):
        hasty.status()
    fake.restart()
    server = VLLMServer(fake.url)
    assert server.status() == ServerStatus(None, paused=False)
    server.update_weights_from_disk(folder, 1)
    assert serves(server, folder, 1)


@pytest.mark.parametrize("call", slow_but([2], range(7)))
def test_an_update_cut_off_at_any_call_is_repaired_by_the_next(
    call: int, fake: FakeServer, tmp_path: Path
) -> None:
    server = VLLMServer(fake.url)
    for version, when in enumerate(("before", "after"), start=1):
        folder = publish_hashed(tmp_path / "w", version)
        fake.tell(at_call=call, does="stop", when=when)
        with pytest.raises(SlowServerError):
            hasty = VLLMServer(fake.url, timeout_s=stretched(0.5))
            hasty.update_weights_from_disk(folder, version)
        fake.wake()
        fake.tell()  # also if it was cut off at an earlier call
        server.update_weights_from_disk(folder, version)
        assert serves(server, folder, version)


def test_an_answer_of_another_label_or_of_no_vllm_is_refused(
    fake: FakeServer, tmp_path: Path
) -> None:
    folder = publish_hashed(tmp_path / "w", 1)
    fake.tell(fail={"/resume": 1})
    with pytest.raises(PublishError, match=r"POST /resume was answered with 500 \(.*told to fail"):
        VLLMServer(fake.url).update_weights_from_disk(folder, 1)
    fake.tell(deaf=True)
    with pytest.raises(
        PublishError,
        match=r"says ServerStatus\(label='1-.*; expected the label 2-xxh3_128:.*, not paused",
    ):
        VLLMServer(fake.url).update_weights_from_disk(publish_hashed(tmp_path / "w", 2), 2)


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            {"dev_mode": False},
            r"/pause was answered with 404 .* start the server with VLLM_SERVER_DEV_MODE=1",
        ),
        ({"scale_out": False}, r"answered with 403 .*start the server with --enable-scale-out"),
        ({"api_key": "key"}, r"answered with 401 .* give the client its api_key"),
    ],
)
def test_a_server_started_without_a_needed_option_is_refused_with_advice(
    options: Any, expected: str, tmp_path: Path
) -> None:
    folder = publish_model(tmp_path / "w", 1, tiny_model())
    with (
        FakeServer("vllm", tmp_path, **options) as fake,
        pytest.raises(PublishError, match=expected),
    ):
        VLLMServer(fake.url).update_weights_from_disk(folder, 1)


def test_a_client_travels_with_its_settings_and_shows_no_secret(tmp_path: Path) -> None:
    server = VLLMServer("http://me:hunter2@127.0.0.1:9/", timeout_s=0.2, dtype="bfloat16")
    copy = pickle.loads(pickle.dumps(server))
    assert (copy.url, copy.timeout_s, copy.dtype) == (
        "http://me:hunter2@127.0.0.1:9",
        0.2,
        "bfloat16",
    )
    assert copy.name == "http://127.0.0.1:9" and repr(copy) == "VLLMServer('http://127.0.0.1:9')"
    keyed = VLLMServer("http://127.0.0.1:9", api_key="hunter2", timeout_s=0.2)
    folder, told = publish_hashed(tmp_path, 1), [repr(keyed)]
    for client in (copy, keyed):
        for ask in (client.status, partial(client.update_weights_from_disk, folder, 1)):
            with pytest.raises(UnreachableServerError) as caught:
                ask()
            told.append("".join(traceback.format_exception(caught.value)))
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert "hunter2" not in "".join(told)
    with pytest.raises(
        ConfigError, match=r"server URL 'ftp://host' is unknown; expected http://host:port"
    ):
        VLLMServer("ftp://me:hunter2@host")
    with pytest.raises(ConfigError, match="with a user and with an api_key"):
        VLLMServer("http://me:hunter2@host", api_key="hunter3")
