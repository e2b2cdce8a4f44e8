"""`RLVRWorkflow`: single completions with verifiable rewards."""

import asyncio
from collections.abc import Mapping
from typing import Any

from ..servers.api import GenerationHyperparameters, ModelRequest
from .call_pool import CallPool
from .rewards import RewardFn, Rewards
from .trajectory import TokenSequence, Trajectory, to_trajectory
from .workflow import EpisodeEngine, encode_prompt


class RLVRWorkflow:
    """Sample a prompt ``gconfig.n_samples`` times. The group is one trajectory.

        workflow = RLVRWorkflow(reward_fn, GenerationHyperparameters(n_samples=8, max_new_tokens=1024), tokenizer)

    Args:
        reward_fn, gconfig: see `RewardFn` and `GenerationHyperparameters`.
        tokenizer: applies the chat template to the ``messages`` of a sample, and decodes for ``reward_fn``. None: the
            samples have ``input_ids``.
        pool: pool for rewards. None: a new one with default limits.
        lost_reward: reward of a completion if ``reward_fn`` raises, hangs or ends its process.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any = None,
        pool: CallPool | None = None,
        lost_reward: float = 0.0,
    ) -> None:
        self._gconfig, self._tokenizer = gconfig, tokenizer
        self._rewards = Rewards(reward_fn, tokenizer, pool, lost_reward)

    async def arun_episode(self, engine: EpisodeEngine, data: Mapping[str, Any]) -> Trajectory:
        """See `RolloutWorkflow`."""
        prompt = encode_prompt(data, self._tokenizer)

        async def sample(number: int) -> tuple[TokenSequence, float]:
            response = await engine.agenerate(ModelRequest(prompt, self._gconfig, seed=number))
            sequence = TokenSequence()
            sequence.extend_given(prompt)
            sequence.extend_sampled(response)
            return sequence, await self._rewards.reward(prompt, response.output_tokens, data)

        samples = await asyncio.gather(*map(sample, range(self._gconfig.n_samples)))
        return to_trajectory([sequence for sequence, _ in samples], [reward for _, reward in samples])

    def stats(self) -> dict[str, float]:
        """See `Rewards.stats`."""
        return self._rewards.stats()

    def close(self) -> None:
        """End the processes of the pool."""
        self._rewards.pool.close()
