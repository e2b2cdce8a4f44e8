"""What every test of a real SGLang server checks: its label, and its log-probabilities against a
forward of transformers.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2

from holdfast.engine.servers import SGLangServer
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    ServerStatus,
    weights_label,
)
from tests.engine.servers.sglang_calls import ADMIN_KEY, API_KEY
from tests.limits import stretched
from tests.live.trainer import PROMPT, Trainer, sample
from tests.live_sglang.live_server import LiveServer

TOLERANCE = 1e-5
"""Largest difference of a log-probability, in float32. 1e-6 is usual, and other weights differ by
1e-2 and more.
"""


def client_of(live: LiveServer) -> SGLangServer:
    """A client with the keys of the server."""
    return SGLangServer(live.url, api_key=API_KEY, admin_key=ADMIN_KEY, timeout_s=stretched(60))


def as_started(live: LiveServer) -> bool:
    """Whether nothing was published to a server since its start, as it says itself."""
    headers = {"Authorization": f"Bearer {API_KEY}"}

    def ask(path: str) -> Any:
        answer = httpx2.get(live.url + path, headers=headers, timeout=stretched(60))
        return answer.raise_for_status().json()

    has_base_alone = len(ask("/v1/models")["data"]) == 1
    return has_base_alone and ask("/model_info")["weight_version"] == "default"


def assert_serves(client: SGLangServer, trainer: Trainer) -> None:
    """Check that it samples with the last version, reports exactly that version, and is not
    paused.
    """
    label = weights_label(trainer.folder, trainer.version)
    assert client.status() == ServerStatus(label, paused=False)
    response = sample(client)
    assert set(response.output_versions) == {trainer.version}
    error = trainer.error(response)
    print(f"version {trainer.version} is served, largest difference {error:.1e}")
    assert error < TOLERANCE


def complete(
    client: SGLangServer, ids: Sequence[int] = PROMPT, tokens: int = 12, **sampling: Any
) -> ModelResponse:
    """Complete a prompt with sampling parameters."""
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, **sampling)
    return asyncio.run(client.agenerate(ModelRequest(ids, gconfig)))
