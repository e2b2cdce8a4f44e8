"""Rewards of the ready workflows: a user's function in a `CallPool`, and what counts when it gives none."""

from collections.abc import Callable, Mapping
from typing import Any

from ...utils.errors import CallLost
from ...utils.logging import get_logger
from .call_pool import CallPool
from .workflow import decode

logger = get_logger(__name__)

RewardFn = Callable[..., float]
"""``reward_fn(prompt, completion, prompt_ids, completion_ids, **data)``: texts (None without a tokenizer), token ids,
and the sample of the dataset; AReaL's arguments. A top-level function, so that it can be pickled."""


class Rewards:
    """Calls a reward function.

    A reward that hangs, or ends its process, twice is ``lost_reward``, with a warning: it is the completion that makes
    such functions hang. One that raises fails the ticket: a function that knows what a bad completion is worth returns
    it.

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

    async def reward(self, prompt_ids: list[int], completion_ids: list[int], data: Mapping[str, Any]) -> float:
        """Of one completion.

        Raises:
            Exception: whatever the function raised.
        """
        texts = decode(prompt_ids, self._tokenizer), decode(completion_ids, self._tokenizer)
        try:
            return float(await self.pool.call(self._reward_fn, *texts, prompt_ids, completion_ids, **data))
        except CallLost as error:
            logger.warning("a reward counts as %g: %s", self.lost_reward, error)
            return self.lost_reward
