"""A real vLLM server with a tiny Qwen2.5-VL: prompts, log-probabilities and updates with images."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    OptimizerConfig,
    TrainEngineConfig,
    WeightUpdateMeta,
)
from holdfast.engine.rollouts.images import EncodedPrompt, encode_prompt
from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ModelResponse
from holdfast.utils.errors import PromptError, ServerError
from tests.engine.processors import IMAGE, make_processor, picture, write_served_folder
from tests.engine.test_fsdp_engine import loss_tokens, nll
from tests.limits import stretched
from tests.live.trainer import TOLERANCE
from tests.live_vllm.live_server import TORCHVISION, LiveServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(scratch: Path) -> Path:
    """Initial model of server and engine, with its processor."""
    write_served_folder(scratch / "seeing")
    return scratch / "seeing"


@pytest.fixture(scope="module")
def live(folder: Path, scratch: Path) -> Iterator[LiveServer]:
    """A server with raw log-probabilities that takes up to three images."""
    assert TORCHVISION.exists(), f"{TORCHVISION} is missing: make test-vllm makes it"
    server = LiveServer(
        folder, scratch, "--limit-mm-per-prompt", '{"image": 3, "video": 0}', sees=True
    )
    with server.running():
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> VLLMServer:
    """Its client."""
    return VLLMServer(live.url, timeout_s=stretched(60))


class Seer:
    """An engine that trains on images and publishes versions from 1 on."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        torch.set_num_threads(1)
        optimizer = OptimizerConfig(lr=1e-2)
        self.engine = FSDPEngine(
            TrainEngineConfig(
                path=str(folder), dtype="float32", train_vision=True, optimizer=optimizer
            )
        )
        self.engine.create_process_group()
        self.engine.initialize(
            None, FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1)
        )
        self._meta = WeightUpdateMeta(
            "disk", str(scratch / "seeing-weights"), timeout_s=stretched(120)
        )
        self.version = 0

    def publish(self, client: VLLMServer) -> None:
        """Train a step on images, so that the tower changes, and publish it."""
        prompt = make_prompt(1, 2)
        self.engine.train_batch(batch_of(prompt, [5, 6, 7, 8]), nll, loss_tokens)
        self.version += 1
        self.engine.set_version(self.version)
        self.engine.connect_engine([client], self._meta)
        self.engine.update_weights()

    def error(self, prompt: EncodedPrompt, response: ModelResponse) -> list[float]:
        """Differences between log-probabilities of a response and of the trainer's forward."""
        batch = batch_of(prompt, response.output_tokens)
        own = self.engine.forward_batch(batch)[0].tolist()[len(prompt.input_ids) :]
        return [abs(a - b) for a, b in zip(own, response.output_logprobs, strict=True)]


@pytest.fixture(scope="module")
def seer(folder: Path, scratch: Path) -> Iterator[Seer]:
    """One rank in this process."""
    seer = Seer(folder, scratch)
    yield seer
    seer.engine.destroy()


def make_prompt(*seeds: int, width: int = 56) -> EncodedPrompt:
    """A prompt with an image for each seed."""
    content = [{"type": "text", "text": "w1 w2"}, *[{"type": "image"}] * len(seeds)]
    images = [picture(seed, width, 28 * (1 + seed % 2)) for seed in seeds]
    return encode_prompt(
        make_processor(), {"messages": [{"role": "user", "content": content}], "images": images}
    )


def batch_of(prompt: EncodedPrompt, completion: Sequence[int]) -> Any:
    ids = torch.tensor([[*prompt.input_ids, *completion]])
    mask = torch.ones_like(ids)
    loss_mask = (torch.arange(ids.shape[1]) >= len(prompt.input_ids)).long()[None]
    images = {"multi_modal_input": [prompt.pixels], "mm_token_type_ids": (ids == IMAGE).long()}
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask, **images}


def request(prompt: EncodedPrompt, tokens: int = 24, seed: int = 1) -> ModelRequest:
    return ModelRequest(
        prompt.input_ids,
        GenerationHyperparameters(max_new_tokens=tokens),
        seed,
        images=prompt.images,
    )


def sample(client: VLLMServer, prompt: EncodedPrompt, **options: int) -> ModelResponse:
    return asyncio.run(client.agenerate(request(prompt, **options)))


@pytest.mark.parametrize("seeds", [(1,), (2, 3), (4, 4, 5)])
def test_log_probabilities_with_images_are_the_trainers(
    seeds: tuple[int, ...], client: VLLMServer, seer: Seer
) -> None:
    seer.publish(client)
    prompt = make_prompt(*seeds)
    response = sample(client, prompt)
    assert (
        response.input_tokens == prompt.input_ids
        and response.output_versions == [seer.version] * 24
    )
    assert max(seer.error(prompt, response)) < TOLERANCE
    blind = replace(
        prompt,
        pixels={
            name: value * 0 if "pixel" in name else value for name, value in prompt.pixels.items()
        },
    )
    assert max(seer.error(blind, response)) > 10 * TOLERANCE, "the images make no difference"


def test_an_update_forgets_images_that_the_old_tower_encoded(
    client: VLLMServer, seer: Seer
) -> None:
    prompt = make_prompt(6, 7)
    for _ in range(2):
        seer.publish(client)
        assert max(seer.error(prompt, sample(client, prompt))) < TOLERANCE


def test_a_prompt_in_flight_sees_its_images_again_after_an_update(
    client: VLLMServer, live: LiveServer, seer: Seer
) -> None:
    seer.publish(client)
    prompt, old, before = make_prompt(8, 9), seer.version, live.generated_tokens()

    async def sample_and_publish() -> ModelResponse:
        answer = asyncio.create_task(client.agenerate(request(prompt, tokens=1500)))
        while live.generated_tokens() == before:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(seer.publish, client)
        return await answer

    response = asyncio.run(sample_and_publish())
    assert set(response.output_versions) == {old, seer.version}
    after = response.output_versions.index(seer.version)
    assert max(seer.error(prompt, response)[after:]) < TOLERANCE


def test_image_tokens_and_others_are_excluded(client: VLLMServer, seer: Seer) -> None:
    seer.publish(client)
    prompt = make_prompt(1)
    assert prompt.images is not None
    most = replace(
        prompt,
        images=replace(
            prompt.images, forbidden=[token for token in range(96) if token not in (8, 9)]
        ),
    )
    assert set(sample(client, most).output_tokens) == {8, 9}


def test_other_prompts_and_images_are_refused(
    client: VLLMServer, seer: Seer, live: LiveServer
) -> None:
    seer.publish(client)
    prompt = make_prompt(1, 2)
    assert prompt.images is not None
    again = replace(prompt, images=replace(prompt.images, token_ids=prompt.input_ids))
    with pytest.raises(
        PromptError, match=r"with 2 image\(s\) has \d+ tokens on .* and \d+ by the processor here"
    ):
        sample(client, again)
    cut = replace(
        prompt, images=replace(prompt.images, files=[file[:300] for file in prompt.images.files])
    )
    with pytest.raises(ServerError, match=r"was answered with 400 .*Failed to load image"):
        sample(client, cut)
    with pytest.raises(
        ServerError, match=r"was answered with 400 .*At most 3 image\(s\) may be provided"
    ):
        sample(client, make_prompt(1, 2, 3, 4))
    fewer = replace(prompt, images=replace(prompt.images, token_ids=[5, IMAGE, 6]))
    with pytest.raises(
        ServerError, match=r"was answered with \d+ .*Failed to apply prompt replacement"
    ):
        sample(client, fewer)
    assert len(sample(client, prompt).output_tokens) == 24, "it still serves"
