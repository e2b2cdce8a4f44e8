"""Completions of token ids: tokens, log-probabilities and versions agree with the server's own
record.
"""

import asyncio
import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp import web

from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    GenerationServer,
    ModelRequest,
    ModelResponse,
)
from holdfast.utils.errors import ServerError, UnreachableServerError
from tests.engine.rollouts.servers import Echo, make_executor, make_loader
from tests.engine.servers.fake_weights import hashed_token
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed, publish_model, tiny_model
from tests.engine.servers.gateway import Gateway
from tests.limits import stretched
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

CLIENTS: dict[str, type[VLLMServer | SGLangServer]] = {"vllm": VLLMServer, "sglang": SGLangServer}
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


@pytest.fixture(params=slow_but(["vllm"], CLIENTS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fake(kind: str, tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(kind, tmp_path, token_s=0.002) as server:
        yield server


@pytest.fixture
def server(kind: str, fake: FakeServer, tmp_path: Path) -> VLLMServer | SGLangServer:
    """A client of a server that serves version 1."""
    client = CLIENTS[kind](fake.url)
    assert client.update_weights_from_disk(publish_hashed(tmp_path / "w", 1), 1) == 1
    return client


def request(prompt: int = 1, **options: Any) -> ModelRequest:
    options = {"max_new_tokens": 8} | options
    return ModelRequest(
        [prompt, 2, 3], GenerationHyperparameters(**options), seed=prompt, rid=f"r{prompt}"
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(stretched(20)):
        while not condition():
            await asyncio.sleep(0.01)


async def generated(fake: FakeServer, tokens: int) -> None:
    """Wait until ``tokens`` tokens have been sampled."""
    await until(lambda: len(fake.tokens()) >= tokens)


def as_recorded(fake: FakeServer, response: ModelResponse, rid: str) -> bool:
    record = [token for token in fake.tokens() if token["rid"] == rid]
    assert not any(token["mixed"] for token in record)
    own = zip(
        response.output_tokens, response.output_logprobs, response.output_versions, strict=True
    )
    return [(token["token"], token["logprob"], token["version"]) for token in record] == list(own)


def test_a_completion_is_what_the_server_sampled(
    server: VLLMServer | SGLangServer, fake: FakeServer
) -> None:
    assert isinstance(server, GenerationServer)
    response = asyncio.run(server.agenerate(request()))
    assert response.stop_reason == "length" and response.input_tokens == [1, 2, 3]
    assert response.output_tokens == [hashed_token([1, 2, 3], 1, 1, place)[0] for place in range(8)]
    assert response.output_versions == [1] * 8 and as_recorded(fake, response, "r1")
    stop = response.output_tokens[4]
    stopped = asyncio.run(server.agenerate(request(stop_token_ids=[stop])))
    assert stopped.output_tokens == response.output_tokens[:5] and stopped.stop_reason == "stop"


def sglang_server(fake: FakeServer, tmp_path: Path) -> SGLangServer:
    client = SGLangServer(fake.url)
    client.update_weights_from_disk(publish_hashed(tmp_path / "w", 1), 1)
    return client


def test_sglang_ends_a_completion_at_its_stop_tokens(tmp_path: Path) -> None:
    tokens = [hashed_token([1, 2, 3], 1, 1, place)[0] for place in range(8)]
    with FakeServer("sglang", tmp_path) as fake:
        server = sglang_server(fake, tmp_path)
        stopped = asyncio.run(server.agenerate(request(stop_token_ids=[tokens[4]])))
        assert stopped.output_tokens == tokens[:5] and stopped.stop_reason == "stop"
        late = asyncio.run(server.agenerate(request(stop_token_ids=[tokens[1]], min_new_tokens=3)))
        assert (
            late.output_tokens == [tokens[0], tokens[1] + 1, *tokens[2:]]
            and late.stop_reason == "length"
        )


def test_sglang_ends_at_the_end_of_sequence_token_of_its_model_only_beside_stop_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [hashed_token([1, 2, 3], 1, 1, place)[0] for place in range(8)]
    with FakeServer("sglang", tmp_path, eos=tokens[2]) as fake:
        server = sglang_server(fake, tmp_path)
        whole = asyncio.run(server.agenerate(request(min_new_tokens=8)))
        assert whole.output_tokens == tokens and whole.stop_reason == "length"
        for _ in range(2):
            ended = asyncio.run(server.agenerate(request(stop_token_ids=[tokens[4]])))
            assert ended.output_tokens == tokens[:3] and ended.stop_reason == "stop"
        told = [record.message for record in caplog.records if "end-of-sequence" in record.message]
        assert len(told) == 1 and f"ends completions at token {tokens[2]}, " in told[0]
        caplog.clear()
        asyncio.run(server.agenerate(request(stop_token_ids=[tokens[4], tokens[2]])))
        assert not caplog.records


@pytest.mark.parametrize("matched", ["NaN happened", 5])
def test_a_completion_that_stopped_at_something_else_is_refused(
    matched: Any, tmp_path: Path
) -> None:
    """SGLang replaces a token outside the vocabulary by a stop token and says that a text was
    found.
    """

    async def changed(asked: web.Request) -> web.StreamResponse | None:
        if asked.path != "/generate":
            return None
        async with httpx2.AsyncClient() as client:
            answer = (await client.post(fake.url + "/generate", json=await asked.json())).json()
        answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": matched}
        return web.json_response(answer)

    with FakeServer("sglang", tmp_path) as fake, Gateway(fake.url, answer=changed) as gateway:
        sglang_server(fake, tmp_path)
        with pytest.raises(
            ServerError,
            match=rf"cannot be used: .* stopped at {matched!r}; expected its last token",
        ):
            asyncio.run(SGLangServer(gateway.url).agenerate(request()))


@pytest.mark.parametrize("odd", [None, -math.inf], ids=repr)
def test_a_log_probability_that_is_no_finite_number_is_refused(
    odd: Any, kind: str, server: VLLMServer | SGLangServer, fake: FakeServer
) -> None:
    async def changed(asked: web.Request) -> web.StreamResponse | None:
        if asked.path != GENERATE[kind]:
            return None
        async with httpx2.AsyncClient() as client:
            answer = (await client.post(fake.url + asked.path, json=await asked.json())).json()
        if kind == "vllm":
            answer["choices"][0]["logprobs"]["content"][1]["logprob"] = odd
        else:
            answer["meta_info"]["output_token_logprobs"][1][0] = odd
        return web.json_response(answer)

    with Gateway(fake.url, answer=changed) as gateway:
        message = (
            rf"^{gateway.url}: a completion cannot be used: .* of completion token 1 is {odd!r}; "
            "expected a finite number"
        )
        with pytest.raises(ServerError, match=message):
            asyncio.run(CLIENTS[kind](gateway.url).agenerate(request()))


def test_versions_are_exact_across_an_update_in_flight(
    server: VLLMServer | SGLangServer, fake: FakeServer, tmp_path: Path
) -> None:
    # Before the requests, which must not end first.
    folders = {version: publish_hashed(tmp_path / "w", version) for version in (2, 3)}

    async def update_meanwhile() -> list[ModelResponse]:
        flying = [
            asyncio.create_task(server.agenerate(request(n, max_new_tokens=1000))) for n in range(6)
        ]
        for version, folder in folders.items():
            await generated(fake, 100 * version)
            await asyncio.to_thread(server.update_weights_from_disk, folder, version)
        return await asyncio.gather(*flying)

    responses = asyncio.run(update_meanwhile())
    assert all(as_recorded(fake, response, f"r{n}") for n, response in enumerate(responses))
    assert {version for response in responses for version in response.output_versions} == {1, 2, 3}
    assert all(
        response.output_versions == sorted(response.output_versions) for response in responses
    )


def test_no_cached_prefix_of_older_weights_is_used(
    server: VLLMServer | SGLangServer, fake: FakeServer, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        if version > 1:
            server.update_weights_from_disk(publish_hashed(tmp_path / "w", version), version)
        responses = [asyncio.run(server.agenerate(request())) for _ in range(2)]
        assert {v for response in responses for v in response.output_versions} == {version}
    assert not any(token["mixed"] for token in fake.tokens())


def test_a_request_to_a_paused_server_is_answered_by_the_next_version(
    kind: str, server: VLLMServer | SGLangServer, fake: FakeServer, tmp_path: Path
) -> None:
    pause = {
        "vllm": ("/pause?mode=keep", {}),
        "sglang": ("/pause_generation", {"mode": "retract"}),
    }[kind]
    httpx2.post(fake.url + pause[0], json=pause[1])

    async def wait_and_update() -> ModelResponse:
        waiting = asyncio.create_task(server.agenerate(request()))
        await until(lambda: f"POST {GENERATE[kind]}" in fake.calls())
        await asyncio.to_thread(
            server.update_weights_from_disk, publish_hashed(tmp_path / "w", 2), 2
        )
        return await waiting

    assert asyncio.run(wait_and_update()).output_versions == [2] * 8


def test_an_invalid_completion_is_an_error_that_names_the_server(
    kind: str, server: VLLMServer | SGLangServer, fake: FakeServer
) -> None:
    fake.tell(fail={GENERATE[kind]: 1})
    with pytest.raises(
        ServerError, match=rf"{fake.url}: POST {GENERATE[kind]} was answered with 500"
    ):
        asyncio.run(server.agenerate(request()))

    async def abort() -> None:
        flying = asyncio.create_task(server.agenerate(request(max_new_tokens=10_000)))
        await generated(fake, 20)
        pause = {
            "vllm": ("/pause?mode=abort", {}),
            "sglang": ("/pause_generation", {"mode": "abort"}),
        }[kind]
        httpx2.post(fake.url + pause[0], json=pause[1])
        await flying

    with pytest.raises(
        ServerError, match=r"a completion cannot be used: .* ended with 'abort'; expected"
    ):
        asyncio.run(abort())
    fake.restart()
    with pytest.raises(
        ServerError,
        match=r"labelled 'default', which nobody published: the server has been restarted",
    ):
        asyncio.run(server.agenerate(request()))
    fake.kill()
    with pytest.raises(UnreachableServerError, match="found no server there"):
        asyncio.run(server.agenerate(request()))
    hasty = CLIENTS[kind](server.url, generation_timeout_s=0.3)
    fake.restart()
    fake.tell(slow={GENERATE[kind]: 60.0})
    with pytest.raises(ServerError, match=r"was not answered, all together within 0\.3 s"):
        asyncio.run(hasty.agenerate(request()))


def test_a_completion_that_is_cut_off_is_asked_for_again(
    server: VLLMServer | SGLangServer, fake: FakeServer, tmp_path: Path
) -> None:
    folder = publish_hashed(tmp_path / "w", 2)

    async def kill_meanwhile() -> ModelResponse:
        flying = asyncio.create_task(server.agenerate(request(max_new_tokens=10_000)))
        await generated(fake, 20)
        await asyncio.to_thread(fake.restart)
        return await flying

    with pytest.raises(ServerError):  # from the restarted server, which serves no published weights
        asyncio.run(kill_meanwhile())
    server.update_weights_from_disk(folder, 2)
    assert asyncio.run(server.agenerate(request())).output_versions == [2] * 8


def test_a_cancelled_completion_ends_at_the_server(
    server: VLLMServer | SGLangServer, fake: FakeServer
) -> None:
    async def cancel() -> None:
        flying = asyncio.create_task(server.agenerate(request(max_new_tokens=1_000_000)))
        await generated(fake, 20)
        assert fake.state()["in_flight"] == 1
        flying.cancel()
        await until(lambda: fake.state()["in_flight"] == 0)

    asyncio.run(cancel())


def n_sockets() -> int:
    gc.collect()
    n = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            n += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return n


def test_a_loop_that_ends_closes_its_connections(
    server: VLLMServer | SGLangServer, recwarn: pytest.WarningsRecorder
) -> None:
    before = n_sockets()
    for n in range(3):
        asyncio.run(server.agenerate(request(n)))
    assert n_sockets() == before, "asyncio.run"
    for _ in range(2):
        with make_executor([server], Echo(), make_loader(1)) as executor:
            executor.set_version(1)
            executor.next_batch(1)
    assert n_sockets() == before, "RolloutExecutor.close"
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning)]

    # A loop that was closed only, without what `asyncio.run` does before.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(server.agenerate(request()))
    loop.close()
    del loop
    asyncio.run(server.agenerate(request()))
    assert n_sockets() == before


PLAIN, TEMPERED = GenerationHyperparameters(), GenerationHyperparameters(temperature=0.5)
RAW = {"vllm": {"processed_logprobs": False}, "sglang": {"original_logprob": True}}


@pytest.mark.parametrize("dtype", slow_but(["float32"], [None, "float32", "bfloat16"]))
def test_log_probabilities_without_the_temperature_are_refused(
    kind: str, dtype: str | None, tmp_path: Path
) -> None:
    folder = {"folder": publish_model(tmp_path / "w", 1, tiny_model())} if dtype else {}
    with FakeServer(kind, tmp_path, dtype=dtype, **folder, **RAW[kind]) as raw:
        server = CLIENTS[kind](raw.url)
        server.check_generation(PLAIN)
        advice = {
            "vllm": "--logprobs-mode processed_logprobs",
            "sglang": "without SGLANG_RETURN_ORIGINAL_LOGPROB",
        }
        with pytest.raises(
            ServerError, match=rf"temperature is left out; start the server .*{advice[kind]}"
        ):
            server.check_generation(TEMPERED)
    with FakeServer(kind, tmp_path, dtype=dtype, **folder) as good:
        CLIENTS[kind](good.url).check_generation(TEMPERED)


def test_a_key_is_sent_where_it_is_needed(kind: str, tmp_path: Path) -> None:
    keys: Any = {"api_key": "key"} if kind == "vllm" else {"api_key": "key", "admin_key": "master"}
    with FakeServer(kind, tmp_path, **keys) as fake:
        server = CLIENTS[kind](fake.url, **keys)
        server.check_generation(PLAIN)
        assert server.update_weights_from_disk(publish_hashed(tmp_path / "w", 1), 1) == 1
        assert asyncio.run(server.agenerate(request())).output_versions == [1] * 8
        with pytest.raises(ServerError, match="answered with 401"):
            CLIENTS[kind](fake.url).check_generation(PLAIN)
