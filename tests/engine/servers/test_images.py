"""Requests with images: what is sent, what servers make of it (after their sources), and answers
that are refused.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, PromptImages
from holdfast.utils.errors import PromptError, ServerError
from tests.engine.processors import IMAGE, picture
from tests.engine.servers.fake_images import Eyes
from tests.engine.servers.fake_routes import FakeRoutes
from tests.engine.servers.fake_weights import hashed_token
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

Client = VLLMServer | SGLangServer
CLIENTS: dict[str, type[Client]] = {"vllm": VLLMServer, "sglang": SGLangServer}
GENERATE = {"vllm": "POST /inference/v1/generate", "sglang": "POST /generate"}
SHORT = [5, IMAGE, 6, IMAGE, 7]
EXPANDED = [5, IMAGE, IMAGE, 6, *[IMAGE] * 4, 7]


def request(**options: Any) -> ModelRequest:
    """Two images, of two and four tokens."""
    images = PromptImages(SHORT, [picture(1, 56, 28), picture(2, 56, 56)], [IMAGE])
    return replace(
        ModelRequest(EXPANDED, GenerationHyperparameters(max_new_tokens=3), 1, "r1", images=images),
        **options,
    )


@pytest.fixture(scope="module", params=slow_but(["vllm"], CLIENTS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def fake(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(kind, tmp_path_factory.mktemp(kind), eyes=Eyes(IMAGE, limit=2)) as server:
        yield server


@pytest.fixture(scope="module")
def server(kind: str, fake: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Client:
    client = CLIENTS[kind](fake.url)
    client.update_weights_from_disk(publish_hashed(tmp_path_factory.mktemp("w"), 1), 1)
    return client


def sent(kind: str, fake: FakeServer) -> list[Any]:
    return [
        json.loads(line["body"]) for line in fake.record() if line.get("call") == GENERATE[kind]
    ]


def refusal(server: Client, sent: ModelRequest, error: type[Exception] = PromptError) -> str:
    with pytest.raises(error) as caught:
        asyncio.run(server.agenerate(sent))
    return str(caught.value)


def test_the_server_gets_placeholders_and_files_and_samples_no_image_token(
    kind: str, fake: FakeServer, server: Client
) -> None:
    first, _ = hashed_token(EXPANDED, 1, 1, 0)
    asked = request(images=replace(request().images, forbidden=[IMAGE, first]))  # type: ignore[type-var]
    response = asyncio.run(server.agenerate(asked))
    assert response.input_tokens == EXPANDED and response.output_versions == [1, 1, 1]
    assert response.output_tokens == [
        first + 1,
        *(hashed_token(EXPANDED, 1, 1, place)[0] for place in (1, 2)),
    ]
    body = sent(kind, fake)[-1]
    assert asked.images is not None
    urls = (
        body["image_data"] if kind == "sglang" else [part["url"] for part in body["content_parts"]]
    )
    assert urls == asked.images.urls and urls[0].startswith("data:image/png;base64,iVBOR")
    assert body["input_ids" if kind == "sglang" else "token_ids"] == SHORT
    assert body["sampling_params"]["logit_bias"] == {str(IMAGE): -100.0, str(first): -100.0}


def test_a_server_that_reads_the_images_in_another_way_is_refused_at_once(
    kind: str, fake: FakeServer, server: Client
) -> None:
    refused = refusal(server, request(input_ids=[*EXPANDED[:7], 7]))
    assert (
        f"prompt r1 with 2 image(s) has 9 tokens on {fake.url} and 8 by the processor here"
        in refused
    )
    assert f"differs from place 7 on ([{IMAGE}, 7], here [7])" in refused
    again = request(images=PromptImages(EXPANDED, request().images.files, [IMAGE]))  # type: ignore[union-attr]
    if kind == "vllm":  # which expands ids that were expanded before
        assert "has 13 tokens on" in refusal(server, again)
    else:
        assert "was answered with 500" in refusal(server, again, ServerError)
    fake.tell(ignores_bias=True)
    first, _ = hashed_token(EXPANDED, 1, 1, 0)
    forbidding = request(images=replace(request().images, forbidden=[first]))  # type: ignore[type-var]
    assert f"{fake.url} sampled [{first}], tokens that stand for images" in refusal(
        server, forbidding
    )
    fake.tell()


def test_images_read_in_another_way_are_told_before_their_routed_experts(tmp_path: Path) -> None:
    routes = FakeRoutes()
    with FakeServer("vllm", tmp_path, eyes=Eyes(IMAGE), routes=routes) as fake:
        server = VLLMServer(fake.url)
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", 1, routes.config), 1)
        refused = refusal(server, request(input_ids=[*EXPANDED[:7], 7], routes_from=0))
        assert "has 9 tokens on" in refused
        response = asyncio.run(server.agenerate(request(routes_from=0)))
        assert response.routed_experts is not None and len(response.routed_experts) == 11


def test_images_that_a_server_does_not_take_are_errors_of_that_server(server: Client) -> None:
    files = request().images.files  # type: ignore[union-attr]
    bad = {
        "At most 2 image(s) may be provided in one prompt": PromptImages(
            [IMAGE] * 3, [*files, files[0]]
        ),
        "Failed to load image": PromptImages(SHORT, [files[0], files[1][:200]]),
        "Failed to apply prompt replacement": PromptImages([5, IMAGE], files),
    }
    for message, images in bad.items():
        assert message in refusal(server, request(images=images), ServerError)
