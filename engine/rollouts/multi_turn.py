"""`MultiTurnWorkflow`: conversations of the model with tools.

A conversation is one growing sequence of tokens. Sampled tokens are never decoded and encoded again, so their
log-probabilities belong to the tokens that are trained on. Answers of tools are in the sequence, but not in the loss.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...utils.config import require_range
from ...utils.errors import CallLost, ConfigError
from ..servers.api import GenerationHyperparameters, ModelRequest
from .call_pool import CallPool
from .rewards import RewardFn, Rewards
from .trajectory import TokenSequence, Trajectory, to_trajectory
from .workflow import EpisodeEngine, decode, encode_prompt

ToolFn = Callable[..., Sequence[int] | str | None]
"""``tool_fn(conversation, completion, conversation_ids, completion_ids, **data)``, a top-level function.

It gets the last completion and everything before. It returns the tool's answer in the format of the model, followed by
the start of the model's next turn: token ids, or a text if there is a tokenizer. None ends the episode."""


class MultiTurnWorkflow:
    """Alternate completions of the model and calls of a tool, ``gconfig.n_samples`` times per prompt.

    An episode ends if the tool returns None, if a completion or the conversation reaches its length limit
    (``truncated``), or after ``max_turns``. The reward function gets everything after the prompt as the completion. If
    a tool call hangs or ends its process twice, the episode ends with ``lost_reward``.

    Args:
        reward_fn: see `RewardFn`.
        tool_fn: see `ToolFn`. It runs in the pool.
        gconfig: sampling parameters. ``max_new_tokens`` applies to each turn.
        tokenizer: as for `RLVRWorkflow`.
        max_turns: most completions of an episode.
        max_tokens: longest conversation, including the prompt. None: no limit, and the server must never reach its own.
        pool: pool for rewards and tools. None: a new one.
        lost_reward: reward if a tool or reward call fails.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        tool_fn: ToolFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any = None,
        *,
        max_turns: int = 8,
        max_tokens: int | None = None,
        pool: CallPool | None = None,
        lost_reward: float = 0.0,
    ) -> None:
        require_range("max_turns", max_turns, low=1)
        require_range("max_tokens", max_tokens, low=1)
        self._tool_fn, self._gconfig, self._tokenizer = tool_fn, gconfig, tokenizer
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._rewards = Rewards(reward_fn, tokenizer, pool, lost_reward)

    async def arun_episode(self, engine: EpisodeEngine, data: Mapping[str, Any]) -> Trajectory:
        """See `RolloutWorkflow`."""
        prompt = encode_prompt(data, self._tokenizer)
        conversations = (self._converse(engine, prompt, number, data) for number in range(self._gconfig.n_samples))
        samples = await asyncio.gather(*conversations)
        return to_trajectory([sequence for sequence, _ in samples], [reward for _, reward in samples])

    async def _converse(
        self, engine: EpisodeEngine, prompt: list[int], number: int, data: Mapping[str, Any]
    ) -> tuple[TokenSequence, float]:
        sequence = TokenSequence()
        sequence.extend_given(prompt)
        for turn in range(self._max_turns):
            if (gconfig := self._limited(len(sequence.input_ids))) is None:
                sequence.truncated = True
                break
            before = list(sequence.input_ids)
            request = ModelRequest(before, gconfig, seed=number * self._max_turns + turn)
            response = await engine.agenerate(request)
            sequence.extend_sampled(response)
            if sequence.truncated or turn == self._max_turns - 1:
                break
            try:
                said = await self._ask_tool(before, response.output_tokens, data)
            except CallLost as error:
                return sequence, self._rewards.lose(error)
            if said is None:
                break
            sequence.extend_given(said)
        return sequence, await self._rewards.reward(prompt, sequence.input_ids[len(prompt) :], data)

    def _limited(self, length: int) -> GenerationHyperparameters | None:
        """Sampling parameters after ``length`` tokens, or None if the conversation is full."""
        if self._max_tokens is None:
            return self._gconfig
        room = min(self._max_tokens - length, self._gconfig.max_new_tokens)
        if room < max(1, self._gconfig.min_new_tokens):
            return None
        return replace(self._gconfig, max_new_tokens=room)

    async def _ask_tool(self, before: list[int], completion: list[int], data: Mapping[str, Any]) -> list[int] | None:
        texts = decode(before, self._tokenizer), decode(completion, self._tokenizer)
        said = await self._rewards.pool.call(self._tool_fn, *texts, before, completion, **data)
        if not isinstance(said, str):
            return None if said is None else list(said)
        if self._tokenizer is None:
            raise ConfigError(f"the tool said {said!r}, but there is no tokenizer; it must return token ids")
        return self._tokenizer.encode(said, add_special_tokens=False)

    def stats(self) -> dict[str, float]:
        """See `Rewards.stats`."""
        return self._rewards.stats()

    def close(self) -> None:
        """End the processes of the pool."""
        self._rewards.pool.close()
