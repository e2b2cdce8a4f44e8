"""`MultiTurnWorkflow`: a conversation of the model with tools, ``n_samples`` times.

A conversation is one sequence of tokens that only grows: what the model sampled is never decoded and encoded again, so
that log-probabilities belong to the tokens that are trained on. What tools say is in it, and not in the loss.
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
"""``tool_fn(conversation, completion, conversation_ids, completion_ids, **data)``: the completion that came last, and
all before it. Returns what is appended, in the form that the model expects of a tool's answer and with what makes it
speak again: token ids, or text with a tokenizer; None ends the episode. A top-level function."""


class MultiTurnWorkflow:
    """Has the model and a tool take turns.

    An episode ends when the tool says so, when a completion is cut off by its length or there is no room for another
    (``truncated`` says so in either case), or after ``max_turns``. The reward function then sees everything after the
    prompt as the completion. An episode whose tool hangs or ends its process, twice, ends there with ``lost_reward``.

    Args:
        reward_fn: see `RewardFn`; `Rewards` says what becomes of one that fails.
        tool_fn: see `ToolFn`; called in the pool too.
        gconfig: how to sample; ``max_new_tokens`` counts for each turn.
        tokenizer: as for `RLVRWorkflow`.
        max_turns: completions of an episode.
        max_tokens: length of the conversation, prompt included; None: the server's limit, which must not be met.
        pool: where rewards and tools are called; None makes one.
        lost_reward: see above.
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
        """How to sample after ``length`` tokens; None when there is no room for one more."""
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
        """End the processes that compute rewards and call tools."""
        self._rewards.pool.close()
