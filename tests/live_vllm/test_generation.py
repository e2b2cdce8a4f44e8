"""Information of a real vLLM server about its sampled tokens."""

import asyncio

import pytest

from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ModelResponse
from holdfast.utils.errors import PromptError, ServerError
from tests.live.trainer import (
    PROMPT,
    TOLERANCE,
    Trainer,
    folder_logprobs,
    sample,
    sample_later,
)
from tests.live_vllm.live_server import LiveServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

both = pytest.mark.parametrize("name", ["stock", "plugin"])


@both
def test_tokens_sampled_across_an_update_name_their_version(
    name: str, trainer: Trainer, clients: dict[str, VLLMServer], live_servers: dict[str, LiveServer]
) -> None:
    client, live = clients[name], live_servers[name]
    trainer.publish([client])
    old, before = trainer.version, live.generated_tokens()

    async def sample_and_publish() -> list[ModelResponse]:
        answers = [
            asyncio.create_task(sample_later(client, tokens=1500, seed=seed)) for seed in range(3)
        ]
        while True:  # until they wait for the update with some tokens sampled
            await asyncio.to_thread(live.post, "/pause?mode=keep")
            if await asyncio.to_thread(live.generated_tokens) > before:
                break
            await asyncio.to_thread(live.post, "/resume")
        await asyncio.to_thread(trainer.publish, [client])
        return await asyncio.gather(*answers)

    responses = asyncio.run(sample_and_publish())
    for response in responses:
        assert response.output_versions == sorted(response.output_versions)
        assert trainer.error(response) < TOLERANCE
    seen = [set(response.output_versions) for response in responses]
    both_versions = {old, trainer.version}
    assert both_versions in seen and all(versions <= both_versions for versions in seen), (
        "one may begin after the update"
    )


@both
def test_a_seed_repeats_a_completion(
    name: str, trainer: Trainer, clients: dict[str, VLLMServer]
) -> None:
    trainer.publish([clients[name]])
    first, again, other = (sample(clients[name], seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first.output_tokens != other.output_tokens


def test_log_probabilities_are_those_at_the_temperature(
    trainer: Trainer, clients: dict[str, VLLMServer]
) -> None:
    client = clients["stock"]
    client.check_generation(GenerationHyperparameters(temperature=0.5))
    folder = trainer.publish([client])
    response = sample(client, temperature=0.5)
    expected = folder_logprobs(folder, [*PROMPT, *response.output_tokens], temperature=0.5)[
        len(PROMPT) :
    ]
    assert (
        max(abs(a - b) for a, b in zip(response.output_logprobs, expected, strict=True)) < TOLERANCE
    )


def test_a_server_with_raw_log_probabilities_is_refused(
    trainer: Trainer, clients: dict[str, VLLMServer]
) -> None:
    client = clients["plugin"]
    trainer.publish([client])
    client.check_generation(GenerationHyperparameters(temperature=1.0))
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
        client.check_generation(GenerationHyperparameters(temperature=0.5))


BAD_PROMPTS = {
    "has 97 at place 0 of its token ids; expected integers from 0 to 96": [97],
    "has -1 at place 1 of its token ids": [1, -1],
    "is empty": [],
    "the server takes 2048 tokens in all": [1] * 2048,
}


def test_prompts_that_might_kill_the_server_are_not_sent(
    trainer: Trainer, clients: dict[str, VLLMServer]
) -> None:
    client = clients["stock"]
    trainer.publish([client])
    one_token = GenerationHyperparameters(max_new_tokens=1)
    for message, ids in BAD_PROMPTS.items():
        with pytest.raises(PromptError, match=message):
            asyncio.run(client.agenerate(ModelRequest(ids, one_token)))
    longest = asyncio.run(client.agenerate(ModelRequest([96] * 2047, one_token)))
    assert longest.output_versions == [trainer.version]
