"""Completions of a real SGLang server: their ends, limits, log-probabilities and versions."""

import asyncio

import pytest

from holdfast.engine.api import UpdateType
from holdfast.engine.servers import SGLangServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelResponse
from holdfast.utils.errors import PromptError
from tests.engine.servers.call_table import CONTEXT, VOCABULARY
from tests.live.trainer import PROMPT, Trainer, folder_logprobs, sample, sample_later
from tests.live_sglang.checks import TOLERANCE, assert_serves, complete
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

GREEDY = 0.0


def test_a_completion_stops_at_a_stop_token_and_not_before_its_fewest_tokens(
    trainer: Trainer, client: SGLangServer
) -> None:
    trainer.publish([client])
    free = complete(client, tokens=40, temperature=GREEDY)
    assert (free.stop_reason, len(free.output_tokens)) == ("length", 40)

    # The last token that was not sampled before.
    tokens = free.output_tokens
    place = max(tokens.index(token) for token in set(tokens))
    stopped = complete(client, tokens=40, temperature=GREEDY, stop_token_ids=[tokens[place]])
    assert stopped.stop_reason == "stop"
    assert stopped.output_tokens == tokens[: place + 1]

    # A stop token may not be sampled before that.
    late = complete(
        client,
        tokens=40,
        temperature=GREEDY,
        stop_token_ids=[tokens[place]],
        min_new_tokens=place + 2,
    )
    assert len(late.output_tokens) > place + 1
    assert late.output_tokens[:place] == tokens[:place]
    assert tokens[place] not in late.output_tokens[: place + 2]


def test_log_probabilities_are_those_at_the_temperature(
    trainer: Trainer, client: SGLangServer
) -> None:
    client.check_generation(GenerationHyperparameters(temperature=0.5))
    folder = trainer.publish([client])
    response = sample(client, temperature=0.5)
    ids = [*PROMPT, *response.output_tokens]
    expected = folder_logprobs(folder, ids, temperature=0.5)[len(PROMPT) :]
    pairs = zip(response.output_logprobs, expected, strict=True)
    assert max(abs(told - computed) for told, computed in pairs) < TOLERANCE
    plain = folder_logprobs(folder, ids)[len(PROMPT) :]
    pairs = zip(response.output_logprobs, plain, strict=True)
    assert max(abs(told - computed) for told, computed in pairs) > 1000 * TOLERANCE


BAD_PROMPTS = {
    f"has {VOCABULARY} at place 0 of its token ids": [VOCABULARY],
    "has -1 at place 1 of its token ids": [1, -1],
    "is empty": [],
    f"{CONTEXT} tokens in all": [5] * CONTEXT,
    "keeps 6 of them free": [5] * (CONTEXT - 6),
}


@pytest.mark.parametrize("message", BAD_PROMPTS)
def test_prompts_that_the_server_cannot_complete_are_not_sent(
    message: str, trainer: Trainer, client: SGLangServer
) -> None:
    trainer.publish([client])
    with pytest.raises(PromptError, match=message):
        complete(client, BAD_PROMPTS[message], tokens=1)
    assert_serves(client, trainer)


def test_a_completion_is_as_long_as_the_context_allows(
    trainer: Trainer, client: SGLangServer
) -> None:
    trainer.publish([client])
    prompt = [5] * (CONTEXT - 20)
    response = complete(client, prompt, tokens=16384)
    assert response.stop_reason == "length"
    assert 10 < len(response.output_tokens) <= 20
    assert trainer.error(response) < TOLERANCE
    longest = complete(client, [5] * (CONTEXT - 7), tokens=16384)
    assert len(longest.output_tokens) >= 1


async def publish_meanwhile(
    live: LiveServer, client: SGLangServer, trainer: Trainer
) -> ModelResponse:
    """A response during which the next version was published."""
    with live.slow():
        running = asyncio.create_task(sample_later(client, tokens=200))
        while live.slow_steps() < 20:
            await asyncio.sleep(0.1)
        await asyncio.to_thread(trainer.publish, [client])
        assert not running.done()
    return await running


@pytest.mark.parametrize("way", ["disk", "xccl"])
def test_every_token_of_a_request_in_flight_names_the_version_that_sampled_it(
    way: UpdateType, trainer: Trainer, client: SGLangServer, live: LiveServer
) -> None:
    with trainer.publishing_by(way):
        trainer.publish([client])
        response = asyncio.run(publish_meanwhile(live, client, trainer))
    old = trainer.version - 1
    before = response.output_versions.count(old)
    assert response.output_versions == [old] * before + [trainer.version] * (200 - before)
    assert 20 <= before < 200

    # The old version explains no token of the new one.
    error = trainer.error(response)
    print(f"{before} tokens of the old version of 200, largest difference {error:.1e}")
    assert error < TOLERANCE
    ids = [*response.input_tokens, *response.output_tokens]
    stale = folder_logprobs(trainer.folder_of(old), ids)[len(PROMPT) + before :]
    pairs = zip(response.output_logprobs[before:], stale, strict=True)
    assert max(abs(told - computed) for told, computed in pairs) > 1000 * TOLERANCE
