"""Prompts that a server cannot complete are refused before they are sent, because a real server
might die of them.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from holdfast.engine.rollouts import RLVRWorkflow
from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest
from holdfast.engine.servers.completions import PromptLimits, stated_limits
from holdfast.utils.errors import PromptError, RolloutError, ServerError, UnreachableServerError
from tests.engine.rollouts.servers import make_executor, make_loader
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed, publish_model, tiny_model
from tests.engine.servers.gateway import Gateway
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

Client = VLLMServer | SGLangServer
CLIENTS: dict[str, type[Client]] = {"vllm": VLLMServer, "sglang": SGLangServer}
LONGEST = {"vllm": 39, "sglang": 33}
"""Tokens of the longest prompt for a server that takes 40 tokens in all."""
KEPT_FREE = {"vllm": 0, "sglang": 2}
"""Tokens of its context that a server leaves free at the end of a completion."""
GENERATE = {"vllm": "POST /inference/v1/generate", "sglang": "POST /generate"}


def request(ids: Sequence[Any], **options: Any) -> ModelRequest:
    return ModelRequest(
        ids, GenerationHyperparameters(max_new_tokens=1, **options), seed=1, rid="ticket-7-0"
    )


def refusal(server: Client, ids: Sequence[Any], **options: Any) -> str:
    with pytest.raises(PromptError) as caught:
        asyncio.run(server.agenerate(request(ids, **options)))
    return str(caught.value)


@pytest.mark.parametrize("kind", slow_but(["vllm"], CLIENTS))
def test_prompts_that_a_server_has_no_room_or_words_for_are_not_sent(
    kind: str, tmp_path: Path
) -> None:
    folder = publish_model(tmp_path / "w", 1, tiny_model(), probe=False)  # a vocabulary of 64
    longest = LONGEST[kind]
    with FakeServer(kind, tmp_path, dtype="float32", folder=folder, max_model_len=40) as fake:
        server = CLIENTS[kind](fake.url)
        server.update_weights_from_disk(folder, 1)
        sent = fake.calls().count(GENERATE[kind])
        beyond = refusal(server, [1, 2, 64])
        assert beyond.startswith(f"prompt ticket-7-0 of 3 token(s) [1, 2, 64], for {fake.url},")
        assert "has 64 at place 2 of its token ids; expected integers from 0 to 63" in beyond
        assert "has -100 at place 1 of its token ids" in refusal(server, [1, -100])
        assert "has 64 at place 0 of its stop_token_ids" in refusal(
            server, [1], stop_token_ids=[64]
        )
        assert "has 1.0 at place 0 of its token ids" in refusal(server, [1.0])
        assert "is empty" in refusal(server, [])
        assert "leaves no room for a completion: the server takes 40 tokens in all" in refusal(
            server, [1] * (longest + 1)
        )
        assert fake.calls().count(GENERATE[kind]) == sent
        assert asyncio.run(
            server.agenerate(request([63] * longest, stop_token_ids=[63]))
        ).output_versions == [1]


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_completion_gets_the_room_that_is_left(kind: str, tmp_path: Path) -> None:
    """SGLang refuses a request for more tokens than that, and the default asks for 16,384."""
    with FakeServer(kind, tmp_path, max_model_len=40) as fake:
        server = CLIENTS[kind](fake.url)
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", 1), 1)
        for gconfig in (
            GenerationHyperparameters(),
            GenerationHyperparameters(min_new_tokens=35, stop_token_ids=[9]),
        ):
            response = asyncio.run(server.agenerate(ModelRequest([1, 2, 3] * 4, gconfig, seed=1)))
            assert len(response.output_tokens) == 40 - 12 - KEPT_FREE[kind]
            assert response.stop_reason == "length"
        refusal(server, [1] * (LONGEST[kind] + 1))
        fake._options["max_model_len"] = 80  # restarted with a larger limit
        fake.restart()
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", 2), 2)
        response = asyncio.run(
            server.agenerate(ModelRequest([1, 2, 3] * 4, GenerationHyperparameters(), seed=1))
        )
        assert len(response.output_tokens) == 80 - 12 - KEPT_FREE[kind]


def test_a_prompt_that_fits_the_context_and_not_the_memory_of_sglang_is_no_fault_of_the_server(
    tmp_path: Path,
) -> None:
    """Every other server would be asked, and the run end without the name of the sample."""
    with FakeServer("sglang", tmp_path, max_model_len=100, max_total_tokens=40) as fake:
        server = SGLangServer(fake.url)
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", 1), 1)
        problem = refusal(server, [1] * 34)
        assert problem.startswith("prompt ticket-7-0 of 34 token(s) [1, 1,")
        assert "exceeds the maximum allowed length (34 tokens)" in problem
        assert asyncio.run(server.agenerate(request([1] * 33))).output_versions == [1]


def test_limits_are_asked_for_once_and_again_when_a_prompt_breaks_them(tmp_path: Path) -> None:
    folder = publish_hashed(tmp_path / "w", 1)
    with FakeServer("vllm", tmp_path, max_model_len=8) as small:
        server = VLLMServer(small.url)
        server.update_weights_from_disk(folder, 1)
        for _ in range(3):
            asyncio.run(server.agenerate(request([1, 2])))
        assert small.calls().count("GET /v1/models") == 1
        refusal(server, [1] * 8)
        small._options["max_model_len"] = 9  # restarted with a larger limit
        small.restart()
        server.update_weights_from_disk(folder, 1)
        asyncio.run(server.agenerate(request([1] * 8)))
        small.kill()
        with pytest.raises(UnreachableServerError):
            asyncio.run(VLLMServer(small.url).agenerate(request([1])))


def test_a_server_that_was_restarted_with_a_longer_context_scores_longer_texts(
    tmp_path: Path,
) -> None:
    with FakeServer("vllm", tmp_path, max_model_len=8) as fake:
        server = VLLMServer(fake.url)
        assert len(server.prompt_logprobs([1] * 7)) == 6
        with pytest.raises(PromptError):
            server.prompt_logprobs([1] * 8)
        fake._options["max_model_len"] = 9
        fake.restart()
        assert len(server.prompt_logprobs([1] * 8)) == 7


def test_a_server_that_lists_no_model_is_refused_in_words() -> None:
    async def no_model(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    expected = pytest.raises(ServerError, match="it lists no model at /v1/models")
    with Gateway(answer=no_model) as gateway, expected:
        VLLMServer(gateway.url).served_model()


def test_a_server_that_does_not_state_its_limits_is_asked_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = publish_hashed(tmp_path / "w", 1)
    with FakeServer("vllm", tmp_path) as fake:
        fake.tell(fail={"/v1/models": 10})
        server = VLLMServer(fake.url)
        server.update_weights_from_disk(folder, 1)
        for _ in range(2):
            assert asyncio.run(server.agenerate(request([1] * 500))).output_versions == [1]
        assert caplog.text.count("does not say how long a prompt may be") == 1
        assert "has -1 at place 0 of its token ids; expected integers from 0 on" in refusal(
            server, [-1]
        )


def test_the_vocabulary_is_that_of_the_folder_told_last_or_of_the_one_the_server_names(
    tmp_path: Path,
) -> None:
    def config(name: str, **entries: Any) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(entries))
        return str(tmp_path / name)

    def stated(root: object) -> dict[str, Any]:
        return {"data": [{"root": root, "max_model_len": 16}]}

    plain, seeing = config("plain", vocab_size=10), config("seeing", text_config={"vocab_size": 20})
    assert stated_limits(stated(plain), None) == PromptLimits(10, 16)
    assert stated_limits(stated(seeing), None) == PromptLimits(20, 16)
    assert stated_limits(stated(plain), 30) == PromptLimits(30, 16)
    for unknown in ("Qwen/Qwen3-0.6B", config("none"), None, 7):
        assert stated_limits(stated(unknown), None) == PromptLimits(None, 16)
    for answer in ({}, {"data": []}, {"data": "no"}, {"data": [3]}):
        assert stated_limits(answer, None) == PromptLimits()


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    return 1.0


def test_a_rollout_with_such_a_prompt_ends_at_once_and_names_the_sample(tmp_path: Path) -> None:
    """No other server is asked, because it would die next."""
    folder = publish_hashed(tmp_path / "w", 1)
    with FakeServer("vllm", tmp_path, max_model_len=2) as fake:
        server = VLLMServer(fake.url)
        server.update_weights_from_disk(folder, 1)
        loader = make_loader(batch_size=1)
        workflow = RLVRWorkflow(reward, GenerationHyperparameters(max_new_tokens=1))
        with make_executor([server], workflow, loader) as executor:
            executor.set_version(0)
            expected = (
                r"ticket 0 of step 0 \(dataset index \d+\) cannot be finished: PromptError: "
                r"prompt ticket-0-[0-9a-f]{8}-0 of"
            )
            with pytest.raises(RolloutError, match=expected) as caught:
                executor.next_batch(0)
        workflow.close()
    assert re.search(r"takes 2 tokens in all", str(caught.value))
    assert GENERATE["vllm"] not in fake.calls()
