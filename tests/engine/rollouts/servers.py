"""Servers in the test's own process with answers that depend only on the request, and prompts for
them.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import xxhash

from holdfast.engine.rollouts import RolloutConfig, RolloutExecutor, Trajectory
from holdfast.engine.rollouts.trajectory import TokenSequence, to_trajectory
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ModelResponse
from holdfast.recover import ResumableDataLoader
from holdfast.utils.errors import ServerError
from tests.limits import stretched

N_PROMPTS = 24


class Prompts:
    """Sample i is the prompt ``[i, i + 1]``."""

    def __len__(self) -> int:
        return N_PROMPTS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index, index + 1], "answer": index % 5}


def make_loader(batch_size: int = 4, seed: int = 3) -> ResumableDataLoader:
    return ResumableDataLoader(Prompts(), batch_size, seed=seed)


def token(*parts: Any) -> int:
    """A token that depends on all of ``parts``."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) % 10


class Server:
    """Samples tokens from prompt, seed and position. With ``versioned`` also from the served
    version.

    Attributes:
        version: served version of the weights.
        delay: returns the seconds that each token takes.
        broken: whether every request fails.
        seen: all requests.
    """

    def __init__(
        self, version: int = 0, *, versioned: bool = False, jitter: int | None = None
    ) -> None:
        self.version, self.versioned, self.broken = version, versioned, False
        draw = random.Random(jitter)
        self.delay: Callable[[], float] = (
            (lambda: 0.0) if jitter is None else (lambda: draw.choice([0, 0, 0.001]))
        )
        self.seen: list[ModelRequest] = []
        self.name = f"server-{id(self) % 1000}"

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.seen.append(request)
        tokens, versions = [], []
        for position in range(min(4, request.gconfig.max_new_tokens)):
            await asyncio.sleep(self.delay())
            if self.broken:
                raise ServerError(f"{self.name} is broken")
            parts = (tuple(request.input_ids), request.seed, position)
            tokens.append(token(*parts, *([self.version] if self.versioned else [])))
            versions.append(self.version)
        return ModelResponse(
            list(request.input_ids), tokens, [-0.5] * len(tokens), versions, "stop"
        )


class Cut(Server):
    """Cuts every completion off at its length."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return replace(await super().agenerate(request), stop_reason="length")


class Echo:
    """A workflow with one completion, whose first token is its reward. Rejects completions
    according to ``rejects``.

    Attributes:
        gate: if set, episodes wait for it before they sample.
        indices: dataset indices of the episodes, in the order in which they began.
    """

    def __init__(
        self, rejects: Callable[[int], bool] = lambda index: False, n_samples: int = 1
    ) -> None:
        self.rejects, self.n_samples = rejects, n_samples
        self.gate: asyncio.Event | None = None
        self.indices: list[int] = []

    async def arun_episode(self, engine: Any, data: Any) -> Trajectory | None:
        prompt = data["input_ids"]
        self.indices.append(prompt[0])
        if self.gate is not None:
            await self.gate.wait()
        requests = [
            ModelRequest(prompt, GenerationHyperparameters(max_new_tokens=4))
            for _ in range(self.n_samples)
        ]
        sequences, rewards = [], []
        for response in await asyncio.gather(*map(engine.agenerate, requests)):
            sequence = TokenSequence()
            sequence.extend_given(prompt)
            sequence.extend_sampled(response)
            sequences.append(sequence)
            rewards.append(float(response.output_tokens[0]))
        return None if self.rejects(prompt[0]) else to_trajectory(sequences, rewards)


class Pool:
    """Servers of which some are usable now, as of a fleet that is not away."""

    is_away = False

    def __init__(self, serving: Callable[[], list[Any]]) -> None:
        self.serving = serving


def make_executor(
    servers: Any,
    workflow: Any = None,
    loader: ResumableDataLoader | None = None,
    accept: Any = None,
    **options: Any,
) -> RolloutExecutor:
    options.setdefault("batch_timeout_s", stretched(20))
    config = RolloutConfig(**options)
    return RolloutExecutor(
        config, loader or make_loader(), workflow or Echo(), servers, should_accept=accept
    )
