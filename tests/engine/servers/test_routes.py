"""Experts in the answers of servers: their tokens, their weights, and servers that return none."""

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ModelResponse
from holdfast.engine.servers.http import readable
from holdfast.engine.servers.routes import (
    RoutedLayers,
    checked_routes,
    decode_file,
    decode_flat,
)
from holdfast.utils.errors import ServerError
from tests.engine.servers.fake_routes import FakeRoutes
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed
from tests.engine.servers.test_completions import CLIENTS, PLAIN, generated

pytestmark = pytest.mark.timeout(60)

ROUTES = FakeRoutes()


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fake(kind: str, tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(kind, tmp_path, token_s=0.002, routes=ROUTES) as server:
        yield server


def serving(kind: str, fake: FakeServer, tmp_path: Path) -> VLLMServer | SGLangServer:
    client = CLIENTS[kind](fake.url)
    client.update_weights_from_disk(publish_hashed(tmp_path / "w", 1, ROUTES.config), 1)
    return client


def asked(start: int | None, count: int = 6, prompt: int = 1) -> ModelRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=count)
    return ModelRequest([prompt, 2, 3, 4], gconfig, seed=1, routes_from=start)


def expected(response: ModelResponse, start: int, routes: FakeRoutes = ROUTES) -> np.ndarray:
    """The experts that the fake took, by the weights of each token."""
    ids = [*response.input_tokens, *response.output_tokens[:-1]]
    versions = response.output_versions
    by = [versions[0]] * (len(response.input_tokens) - 1) + versions
    return routes.of(ids, by, start)


def test_an_answer_has_the_experts_of_the_tokens_that_were_asked_for(
    kind: str, fake: FakeServer, tmp_path: Path
) -> None:
    server = serving(kind, fake, tmp_path)
    for start, n_rows in ((0, 9), (3, 6)):
        response = asyncio.run(server.agenerate(asked(start)))
        routes = response.routed_experts
        assert routes is not None and routes.dtype == np.uint8 and routes.shape == (n_rows, 3, 2)
        assert np.array_equal(routes, expected(response, start))
    assert asyncio.run(server.agenerate(asked(None))).routed_experts is None


def test_tokens_keep_the_experts_of_the_weights_that_sampled_them(
    kind: str, fake: FakeServer, tmp_path: Path
) -> None:
    server = serving(kind, fake, tmp_path)
    # Before the request, which must not end first.
    folder = publish_hashed(tmp_path / "w", 2, ROUTES.config)

    async def update_meanwhile() -> ModelResponse:
        flying = asyncio.create_task(server.agenerate(asked(0, 600)))
        await generated(fake, 50)
        await asyncio.to_thread(server.update_weights_from_disk, folder, 2)
        return await flying

    response = asyncio.run(update_meanwhile())
    assert set(response.output_versions) == {1, 2}
    assert response.routed_experts is not None
    assert np.array_equal(response.routed_experts, expected(response, 0))


def test_a_server_that_returns_no_experts_is_told_apart(kind: str, tmp_path: Path) -> None:
    start = "start the server with --enable-return-routed-experts"
    with FakeServer(kind, tmp_path) as fake:
        server = serving(kind, fake, tmp_path / "without")
        server.check_generation(PLAIN)
        with pytest.raises(ServerError, match=f"returns no routed experts; {start}"):
            server.check_generation(PLAIN, routed_experts=True)
        with pytest.raises(ServerError, match=f"it has no routed experts, but None; {start}"):
            asyncio.run(server.agenerate(asked(0)))
    with FakeServer(kind, tmp_path, routes=FakeRoutes(broken=True)) as fake:
        server = serving(kind, fake, tmp_path / "broken")
        server.check_generation(PLAIN, routed_experts=True)
        with pytest.raises(ServerError, match=r"cannot be used: .* no token has routed experts"):
            asyncio.run(server.agenerate(asked(0)))


def test_experts_above_255_take_two_bytes() -> None:
    many = FakeRoutes(n_experts=300)
    found = many.of(range(40), [1] * 40)
    assert found.max() > 255
    layers = RoutedLayers(many.n_layers, many.top_k, many.n_experts)
    from_file = asyncio.run(decode_file(many.as_file(found)))
    from_flat = asyncio.run(decode_flat(many.as_flat(found), layers))
    for decoded in (from_file, from_flat):
        assert decoded.dtype == np.uint16 and np.array_equal(decoded, found)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_local_experts": 8}, (3, 2, 8)),
        ({"text_config": ROUTES.config, "num_hidden_layers": 9}, (3, 2, 8)),
        ({"num_hidden_layers": 3}, None),
        (None, None),
    ],
)
def test_the_layers_of_a_model_are_read_from_its_config(
    config: Any, found: Any, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert RoutedLayers.of(tmp_path) == found


def test_a_long_answer_is_not_searched_once_a_token_has_experts() -> None:
    n_tokens = 8192
    routes = np.zeros((n_tokens, 48, 8), np.uint8)
    request = ModelRequest([1] * n_tokens, routes_from=0)
    response = ModelResponse([1] * n_tokens, [2], [-0.1], [1], "stop")

    def seconds() -> float:
        started = time.perf_counter()
        assert checked_routes(request, response, routes) is routes
        return time.perf_counter() - started

    # A choice of the last token counts. That of the first one ends the search.
    with pytest.raises(ValueError, match="no token has routed experts"):
        checked_routes(request, response, routes)
    routes[-1, -1] = range(8)
    whole = min(seconds() for _ in range(3))
    routes[0, -1] = range(8)
    assert min(seconds() for _ in range(3)) < whole / 5


def test_other_requests_go_on_while_the_experts_of_a_long_answer_are_decoded() -> None:
    layers = RoutedLayers(48, 8, 128)
    found = np.arange(1024 * 48 * 8).reshape(1024, 48, 8) % 128
    text = FakeRoutes(*layers).as_flat(found)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def decode() -> np.ndarray:
        counting = asyncio.create_task(count_turns())
        try:
            return await decode_flat(text, layers)
        finally:
            counting.cancel()

    assert np.array_equal(asyncio.run(decode()), found)
    assert turns >= len(text) / 2**16


@pytest.mark.parametrize("end", [2**16 - 4, 2**16, 2**16 + 2])
def test_base64_that_is_cut_off_or_goes_on_behind_its_end_is_refused(end: int) -> None:
    whole = base64.b64encode(bytes(2**17)).decode()
    for text in (f"{whole[: end - 2]}=={whole}", f"{whole[:end]}\n{whole}", whole[: end - 1]):
        with pytest.raises(ValueError, match=r"base64|padding|data|buffer|reshape"):
            asyncio.run(decode_flat(text, RoutedLayers(1, 1, 8)))


def test_experts_without_a_shape_are_refused() -> None:
    text = base64.b64encode(bytes(24)).decode()
    with pytest.raises(ValueError, match="no shape: no weights were published"):
        asyncio.run(decode_flat(text, None))
    with pytest.raises(ValueError, match="reshape"):
        asyncio.run(decode_flat(text, RoutedLayers(4, 2, 8)))
    with pytest.raises(ValueError, match="are 0 to 7; expected 0 to 6"):
        asyncio.run(decode_flat(ROUTES.as_flat(np.array([0, 7])), RoutedLayers(1, 2, 7)))


def file_of(header: bytes, body: bytes = b"") -> bytes:
    """A file of numpy whose header is this text."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def described(shape: str, dtype: str = "'|u1'") -> bytes:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()


UNREADABLE = {
    "nothing": (b"", "no file of numpy"),
    "a zip archive": (b"PK\x03\x04 cut off", "no file of numpy"),
    "another version": (b"\x93NUMPY\x09\x00\x02\x00{}", "no file of numpy"),
    "an open bracket": (file_of(b"{'descr': ("), "no file of numpy"),
    "unhashable": (file_of(b"{[]: 1}"), "no file of numpy"),
    "nested": (file_of(b"-" * 9000 + b"1"), "no file of numpy"),
    "too many numbers": (
        file_of(described("(1000000000000,)")),
        "are 0 bytes; expected 1000000000000 ",
    ),
    "a negative size": (file_of(described("(-1, -1)"), b"1"), ""),
    "objects": (file_of(described("(1,)", "'|O'"), bytes(8)), ""),
    "cut off": (file_of(described("(2, 3, 2)"), bytes(11)), "are 11 bytes; expected 12 for uint8"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_bytes_that_are_no_experts_are_an_error_of_the_answer(name: str) -> None:
    content, words = UNREADABLE[name]
    words = f"an answer cannot be used: ValueError: .*{words}"
    with pytest.raises(ServerError, match=words), readable("an answer", ServerError):
        asyncio.run(decode_file(base64.b64encode(content).decode()))
