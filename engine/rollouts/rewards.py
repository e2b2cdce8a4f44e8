"""Rewards of the ready workflows: a user's function in a `CallPool`, and what counts when it gives none."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...utils.errors import CallLost, ConfigError, RolloutError
from ...utils.logging import get_logger
from .call_pool import CallPool
from .workflow import decode

logger = get_logger(__name__)

RewardFn = Callable[..., float]
"""``reward_fn(prompt, completion, prompt_ids, completion_ids, **data)``: texts (None without a tokenizer), token ids,
and the sample of the dataset; AReaL's arguments. A top-level function, so that it can be pickled."""

_CALLS_TO_JUDGE_BY = 16
"""A function that has failed every call so far, this many, is wrong itself."""


class Rewards:
    """Calls a reward function. A call that fails costs its completion the reward, not the run.

    The completion gets ``lost_reward`` when the function raises, returns no finite number, or hangs or ends its process
    twice; a warning says so, and `stats` counts it. Only a function whose first 16 calls all fail ends the run: no
    completion is to blame then.

    Args:
        reward_fn: see `RewardFn`.
        tokenizer: for the texts.
        pool: where to call it; None makes one.
        lost_reward: see above.
    """

    def __init__(self, reward_fn: RewardFn, tokenizer: Any, pool: CallPool | None, lost_reward: float) -> None:
        self.pool = pool or CallPool()
        self.lost_reward = lost_reward
        self._reward_fn, self._tokenizer = reward_fn, tokenizer
        self._counts = {"returned": 0, "raised": 0, "lost": 0}

    async def reward(self, prompt_ids: list[int], completion_ids: list[int], data: Mapping[str, Any]) -> float:
        """Of one completion.

        Raises:
            RolloutError: the function has failed each of its first 16 calls.
            ConfigError: function or arguments cannot be pickled, or the pool is closed.
        """
        texts = decode(prompt_ids, self._tokenizer), decode(completion_ids, self._tokenizer)
        try:
            reward = _finite(await self.pool.call(self._reward_fn, *texts, prompt_ids, completion_ids, **data))
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's function raises
            return self.lose(error)
        self._counts["returned"] += 1
        return reward

    def lose(self, error: Exception) -> float:
        """Count a call that ended with ``error``; the reward in its place.

        Raises:
            RolloutError: see `reward`.
        """
        self._counts["lost" if isinstance(error, CallLost) else "raised"] += 1
        if not self._counts["returned"] and sum(self._counts.values()) >= _CALLS_TO_JUDGE_BY:
            raise RolloutError(
                f"{self._reward_fn} has failed each of its first {_CALLS_TO_JUDGE_BY} calls, the last one with "
                f"{type(error).__name__}: {error}"
            ) from error
        logger.warning("a reward counts as %g: %s: %s", self.lost_reward, type(error).__name__, error)
        return self.lost_reward

    def stats(self) -> dict[str, float]:
        """Rewards that were given in place of calls that failed, since this object was made: ``rewards/raised`` by the
        function, and ``rewards/lost``, which hung or ended their process."""
        return {f"rewards/{name}": float(self._counts[name]) for name in ("raised", "lost")}


def _finite(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}; expected a finite number")
    return value
