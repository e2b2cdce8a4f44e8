"""Workflows: the protocol, with AReaL's names (``areal/api/workflow_api.py``), and two that are
included.

A conversation is one growing sequence of tokens. Sampled tokens are never decoded and encoded
again, so their log-probabilities belong to the tokens that are trained on. Answers of tools are in
the sequence, but not in the loss.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ...utils.config import require_range
from ...utils.errors import CallLost, ConfigError
from ..servers.api import GenerationHyperparameters, ModelRequest, ModelResponse, PromptImages
from .call_pool import CallPool
from .images import add_images, encode_prompt, restore_images
from .rewards import RewardFn, Rewards, decode, recorded_call
from .trajectory import TokenSequence, Trajectory, to_trajectory


class EpisodeEngine(Protocol):
    """Interface of a workflow to the servers, for one ticket."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt on some server, or return the recorded answer if the ticket asked the
        same before a kill.

        The request's seed is hashed with the seed of the ticket. If it is None, the seed is derived
        from the request and from how often the episode has asked the same before, so it depends on
        no order of calls.

        Raises:
            RolloutError: no server answered in all attempts.
        """
        ...

    async def call(
        self, fn: Callable[..., Any], /, *args: Any, once: bool = False, **kwargs: Any
    ) -> Any:
        """Return ``fn(*args, **kwargs)``, awaited if it is awaitable, or its recorded result.

            found = await engine.call(pool.call, search, query)
            sent = await engine.call(pool.call_once, send_mail, text, once=True)

        A call is known by the name of its function, its arguments, and how often the episode has
        made the same one before. It is recorded when it returns, so one that a kill interrupts is
        made again: at least once. With ``once`` an intent is on disk before the call, so that it is
        made at most once. Do not use it for a sandbox or a simulator that the episode builds up: a
        recorded call would leave it without this step.

        Args:
            fn: a function with a name, whose arguments can be pickled and whose result has Python's
                own numbers, strings, lists, tuples and dicts (no Enum), else nothing is recorded.
                A recorded result is returned as a copy, with Python's numbers for numpy's. What
                the function captures, and the object of a method, are not part of the call.
            once: whether the call has an effect outside.

        Raises:
            CallLost: with ``once``, the call was begun before a kill, and whether it took effect is
                not known.
            ConfigError: with ``once``, nothing can be recorded, so the call was not made.
            Exception: any error of ``fn``, which is not recorded.
        """
        ...

    def random(self, n: int) -> random.Random:
        """A generator for draws of the workflow, seeded by the ticket and ``n``. Number your
        siblings.
        """
        ...


class RolloutWorkflow(Protocol):
    """A user's episode: sample completions, compute rewards, return a trajectory."""

    async def arun_episode(self, engine: EpisodeEngine, data: Any) -> Trajectory | None:
        """Sample one ticket.

        It runs on a thread of the training process. Put work of more than a few milliseconds into a
        `CallPool`. Do not draw from the global generators (``random``, ``np.random``, ``torch``),
        which belong to the training. Draw from ``engine.random``.

        After a kill it runs again from its start. ``engine.agenerate`` and ``engine.call`` return
        what was recorded as long as it asks the same.

        Args:
            engine: completes prompts.
            data: sample of the dataset.

        Returns:
            the trajectory to train on. None rejects the ticket, and another ticket replaces it.

        A workflow whose trajectories have an `IMAGE_DIGEST` also needs ``restore_images(trajectory,
        data)``, which adds the pixels that the ledger leaves out.
        """
        ...


ToolFn = Callable[..., Sequence[int] | str | None]
"""``tool_fn(conversation, completion, conversation_ids, completion_ids, **data)``, a top-level
function.

It gets the last completion and everything before. It returns the tool's answer in the format of the
model, followed by the start of the model's next turn: token ids, or a text if there is a tokenizer.
None ends the episode.
"""


class MultiTurnWorkflow:
    """Alternate completions of the model and calls of a tool, ``gconfig.n_samples`` times per
    prompt.

        gconfig = GenerationHyperparameters(
            n_samples=8, max_new_tokens=1024, stop_token_ids=[tokenizer.eos_token_id]
        )
        workflow = MultiTurnWorkflow(reward_fn, tool_fn, gconfig, tokenizer, max_turns=4)

    An episode ends if the tool returns None, if a completion or the conversation reaches its length
    limit (``truncated``), or after ``max_turns``. An answer of the tool that does not fit into
    ``max_tokens`` is left out. The reward function gets everything after the
    prompt as the completion. If a tool call hangs or ends its process twice, the episode ends with
    ``lost_reward``.

    Args:
        reward_fn: see `RewardFn`.
        tool_fn: see `ToolFn`. It runs in the pool.
        gconfig: sampling parameters. ``max_new_tokens`` applies to each turn.
        tokenizer: applies the chat template to the ``messages`` of a sample, and decodes for the
            functions. None: the samples have ``input_ids``, or there is a ``processor``.
        max_turns: most completions of an episode.
        max_tokens: longest conversation, including the prompt. None: no limit, and the server must
            never reach its own.
        pool: pool for rewards and tools. None: a new one with default limits.
        lost_reward: reward if a tool or reward call fails.
        processor: processor of a model that sees. The samples have ``messages`` and ``images``, see
            `encode_prompt`.
        tool_once: whether the tool has an outside effect. It is then called at most once, see
            `EpisodeEngine.call`, and a call whose effect is not known ends the episode with
            ``lost_reward``.
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
        processor: Any = None,
        tool_once: bool = False,
    ) -> None:
        require_range("max_turns", max_turns, low=1)
        require_range("max_tokens", max_tokens, low=1)
        # The processor has the tokenizer of its model.
        if tokenizer is None and processor is not None:
            tokenizer = processor.tokenizer
        self._tool_fn = tool_fn
        self._gconfig = gconfig
        self._tokenizer = tokenizer
        self._processor = processor
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._tool_once = tool_once
        self._rewards = Rewards(reward_fn, tokenizer, pool, lost_reward)
        # one thread, because tokenizers are not safe in several
        self._encoder = ThreadPoolExecutor(1, "images")

    async def arun_episode(self, engine: EpisodeEngine, data: Mapping[str, Any]) -> Trajectory:
        """See `RolloutWorkflow`. The samples of a prompt are one trajectory."""
        processor = self._processor
        encoded = None
        images = None
        if processor is None:
            prompt = _encode_text(data, self._tokenizer)
        else:
            # Decoding images takes long, so it runs on another thread than the episodes.
            loop = asyncio.get_running_loop()
            encoded = await loop.run_in_executor(self._encoder, encode_prompt, processor, data)
            prompt = encoded.input_ids
            images = encoded.images

        conversations = [
            self._converse(engine, prompt, images, data) for _ in range(self._gconfig.n_samples)
        ]
        samples = await asyncio.gather(*conversations)
        sequences = [sequence for sequence, _ in samples]
        rewards = [reward for _, reward in samples]
        trajectory = to_trajectory(sequences, rewards)
        if encoded is None:
            return trajectory
        return add_images(trajectory, encoded)

    def restore_images(self, trajectory: Trajectory, data: Mapping[str, Any]) -> Trajectory:
        """Add the pixels to a trajectory from a ledger. PromptError if the images of the sample
        have changed.
        """
        if self._processor is None:
            raise ConfigError(
                "the rollouts were sampled with images; give the workflow its processor"
            )
        return restore_images(self._processor, trajectory, data)

    async def _converse(
        self,
        engine: EpisodeEngine,
        prompt: list[int],
        images: PromptImages | None,
        data: Mapping[str, Any],
    ) -> tuple[TokenSequence, float]:
        sequence = TokenSequence()
        sequence.extend_given(prompt)
        for turn in range(self._max_turns):
            # The completion must fit into what is left of the conversation.
            before = list(sequence.input_ids)
            room = self._gconfig.max_new_tokens
            if self._max_tokens is not None:
                room = min(room, self._max_tokens - len(before))
            if room < max(1, self._gconfig.min_new_tokens):
                sequence.truncated = True
                break

            gconfig = replace(self._gconfig, max_new_tokens=room)
            shown = None
            if images is not None:
                shown = images.followed_by(before[len(prompt) :])
            known = sequence.n_routed or None
            request = ModelRequest(before, gconfig, images=shown, routes_from=known)
            response = await engine.agenerate(request)
            sequence.extend_sampled(response)
            if sequence.truncated or turn == self._max_turns - 1:
                break

            # A tool that hangs or crashes ends the episode, not the run.
            try:
                said = await self._ask_tool(engine, before, response.output_tokens, data)
            except CallLost as error:
                return sequence, self._rewards.lose(error)
            if said is None:
                break

            # An answer that does not fit is left out.
            length = len(sequence.input_ids) + len(said)
            if self._max_tokens is not None and length > self._max_tokens:
                sequence.truncated = True
                break
            sequence.extend_given(said)

        # The reward function sees all turns after the prompt as one completion.
        completion = sequence.input_ids[len(prompt) :]
        reward = await self._rewards.reward(prompt, completion, data, engine)
        return sequence, reward

    async def _ask_tool(
        self,
        engine: EpisodeEngine,
        before: list[int],
        completion: list[int],
        data: Mapping[str, Any],
    ) -> list[int] | None:
        conversation = decode(before, self._tokenizer)
        text = decode(completion, self._tokenizer)
        work = partial(self._tool_fn, conversation, text, before, completion, **data)
        options = {"once": True} if self._tool_once else {}
        said = await recorded_call(engine, self._call_tool, work, **options)

        # None, token ids, or a text.
        if not isinstance(said, str):
            return said
        if self._tokenizer is None:
            raise ConfigError(
                f"the tool said {said!r}, but there is no tokenizer; it must return token ids"
            )
        return self._tokenizer.encode(said, add_special_tokens=False)

    async def _call_tool(
        self, work: Callable[[], Sequence[int] | str | None]
    ) -> list[int] | str | None:
        call = self._rewards.pool.call_once if self._tool_once else self._rewards.pool.call
        said = await call(work)
        if said is None:
            return said
        if isinstance(said, str):
            return str.__str__(said)  # an Enum or np.str_ could not be recorded
        return [int(token) for token in said]

    def stats(self) -> dict[str, float]:
        """See `Rewards.stats`."""
        return self._rewards.stats()

    def close(self) -> None:
        """End the processes of the pool."""
        self._rewards.pool.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)


class RLVRWorkflow(MultiTurnWorkflow):
    """Sample a prompt ``gconfig.n_samples`` times, with a verifiable reward for each completion.

        gconfig = GenerationHyperparameters(
            n_samples=8, max_new_tokens=1024, stop_token_ids=[tokenizer.eos_token_id]
        )
        workflow = RLVRWorkflow(reward_fn, gconfig, tokenizer)

    The arguments are those of `MultiTurnWorkflow`: this is its case of one turn.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any = None,
        pool: CallPool | None = None,
        lost_reward: float = 0.0,
        processor: Any = None,
    ) -> None:
        super().__init__(
            reward_fn,
            _no_tool,
            gconfig,
            tokenizer,
            max_turns=1,
            pool=pool,
            lost_reward=lost_reward,
            processor=processor,
        )


def _no_tool(*_: object, **__: object) -> None:
    raise AssertionError("a conversation of one turn calls no tool")


def _encode_text(data: Mapping[str, Any], tokenizer: Any) -> list[int]:
    key = "input_ids" if tokenizer is None else "messages"
    if key not in data:
        raise ConfigError(f"the sample has no {key!r}; it has {sorted(data)}")
    if tokenizer is None:
        return [int(token) for token in data[key]]
    return tokenizer.apply_chat_template(
        data[key], add_generation_prompt=True, tokenize=True, return_dict=False
    )
