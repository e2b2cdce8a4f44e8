"""Rewards of the included workflows: a user's function in a `CallPool`, with a fallback."""

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ...utils.errors import CallLost, ConfigError, RolloutError
from ...utils.logging import get_logger
from .call_pool import CallPool

logger = get_logger(__name__)

RewardFn = Callable[..., float]
"""``reward_fn(prompt, completion, prompt_ids, completion_ids, **data)`` with AReaL's arguments:
texts (None if there is no tokenizer), token ids, and the sample of the dataset. It must be a
top-level function, because it is pickled.
"""

# if the first calls all fail, this many, the function itself is wrong
_CALLS_TO_JUDGE_BY = 16


class Rewards:
    """Call a reward function and survive its failures. Without ``pool``, the calls run in a new
    one.

    A completion gets ``lost_reward`` if the function raises, returns no finite number, or hangs or
    ends its process twice. A failure is logged as a warning and counted in `stats`. The run ends
    only if the first 16 calls all fail.
    """

    def __init__(
        self, reward_fn: RewardFn, tokenizer: Any, pool: CallPool | None, lost_reward: float
    ) -> None:
        self.pool = pool or CallPool()
        self.lost_reward = lost_reward
        self._reward_fn = reward_fn
        self._tokenizer = tokenizer
        self._counts = {"returned": 0, "raised": 0, "lost": 0}

    async def reward(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        data: Mapping[str, Any],
        engine: Any = None,
    ) -> float:
        """Compute the reward of one completion, or take it from the records of an `EpisodeEngine`.
        Raises RolloutError if no process can be started, or the first 16 calls all fail.
        """
        prompt = decode(prompt_ids, self._tokenizer)
        completion = decode(completion_ids, self._tokenizer)
        work = partial(self._reward_fn, prompt, completion, prompt_ids, completion_ids, **data)
        try:
            reward = await recorded_call(engine, self._finite, work)
        except (ConfigError, RolloutError):  # no fault of the function
            raise
        except Exception as error:  # a user's function may raise anything
            return self.lose(error)
        self._counts["returned"] += 1
        return reward

    async def _finite(self, work: Callable[[], float]) -> float:
        reward = float(await self.pool.call(work))
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}; expected a finite number")
        return reward

    def lose(self, error: Exception) -> float:
        """Count a failed call and return its reward, or raise as `reward` does."""
        kind = "lost" if isinstance(error, CallLost) else "raised"
        self._counts[kind] += 1

        n_calls = sum(self._counts.values())
        error_type = type(error).__name__
        if not self._counts["returned"] and n_calls >= _CALLS_TO_JUDGE_BY:
            raise RolloutError(
                f"{self._reward_fn} has failed each of its first {_CALLS_TO_JUDGE_BY} calls, the "
                f"last one with {error_type}: {error}"
            ) from error
        logger.warning("a reward counts as %g: %s: %s", self.lost_reward, error_type, error)
        return self.lost_reward

    def stats(self) -> dict[str, float]:
        """Number of failed calls: ``rewards/raised``, and ``rewards/lost`` (it hung or ended its
        process).
        """
        return {f"rewards/{name}": float(self._counts[name]) for name in ("raised", "lost")}


async def recorded_call(
    engine: Any, fn: Callable[..., Awaitable[Any]], *args: Any, **options: Any
) -> Any:
    """``engine.call(fn, *args, **options)``, or the call alone with an engine that records nothing,
    such as a test's, or None.
    """
    if hasattr(engine, "call"):
        return await engine.call(fn, *args, **options)
    return await fn(*args)


def decode(ids: list[int], tokenizer: Any) -> str | None:
    """The text of ``ids``, or None if there is no tokenizer."""
    if tokenizer is None:
        return None
    return tokenizer.decode(ids)
