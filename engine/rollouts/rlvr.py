"""`RLVRWorkflow`: one completion of a prompt and a verifiable reward of it, ``n_samples`` times."""

import asyncio
from collections.abc import Mapping
from typing import Any

from ..servers.api import GenerationHyperparameters, ModelRequest
from .call_pool import CallPool
from .rewards import RewardFn, Rewards
from .trajectory import TokenSequence, Trajectory, to_trajectory
from .workflow import EpisodeEngine, encode_prompt


class RLVRWorkflow:
    """Samples a prompt ``gconfig.n_samples`` times; the group is one trajectory.

    Args:
        reward_fn: see `RewardFn`; `Rewards` says what becomes of one that fails.
        gconfig: how to sample.
        tokenizer: applies the chat template to the samples' ``messages``, and decodes for ``reward_fn``. None: samples
            have ``input_ids``.
        pool: where rewards are computed; None makes one, with its own defaults.
        lost_reward: of a completion whose reward raises, hangs or ends its process.
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
        """End the processes that compute rewards."""
        self._rewards.pool.close()
