"""Items of reasoning-gym as a task: made by number, rewarded by its verifiers in a pool of processes.

Only the rollout worker and its pool import this file: ``import reasoning_gym`` takes seconds.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
from tasks import Item

from holdfast.engine.rollouts import CallPool
from holdfast.engine.rollouts.rewards import Rewards
from holdfast.utils.errors import ConfigError

_HELD_OUT_ONE_IN = 10
_TRIES = (8, 200)
"""Entries of a dataset among which to find a training item, and a held-out one."""


class ReasoningTask:
    """A mix of reasoning-gym's datasets: item ``i`` is of the dataset ``names[i % len(names)]``.

    A question is held out or trained on by a digest of its text, so that nothing is ever both. Another seed would not
    do: reasoning-gym seeds item i with ``seed + i``, so that neighbouring seeds share all items but one.

    Args:
        names: of the datasets.
        options: name -> options of the dataset (``max_terms`` ...).
        seed: of the items.
        counts: how many items there are to train on, and to judge by.
        tokenizer: with a chat template.
        max_new_tokens: see `tasks.Task`.
        answer_tags: ask for, and reward, what stands between ``<answer>`` and ``</answer>``; else the whole answer.
        wrong: share of training items whose ``answer_ids`` are another's, the same at every start.
        timeout_s: how long a verifier may take.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: Mapping[str, Mapping[str, Any]],
        seed: int,
        counts: tuple[int, int],
        tokenizer: Any,
        max_new_tokens: int,
        answer_tags: bool = False,
        wrong: float = 0.0,
        timeout_s: float = 15.0,
    ) -> None:
        known = reasoning_gym.factory.DATASETS
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"config key 'task' names {unknown[0]!r}, which reasoning-gym does not have; it "
                f"has {', '.join(sorted(known))}"
            )
        self.max_new_tokens, self._answer_tags = max_new_tokens, answer_tags
        self._names, self._tokenizer = list(names), tokenizer
        self._counts, self._wrong = counts, wrong
        # Some datasets make a list as long as their size at once, so that it cannot be boundless.
        size = max(tries * -(-count // len(names)) for tries, count in zip(_TRIES, counts, strict=True))
        self._datasets = {name: _open(name, seed, size, options.get(name, {})) for name in names}
        self._special = set(tokenizer.all_special_ids)
        self._rewards = Rewards(score, tokenizer, CallPool(n_processes=1, timeout_s=timeout_s), lost_reward=0.0)

    def item(self, number: int, held_out: bool = False) -> Item:
        """See `tasks.Task`."""
        name, entry = self._find(number, held_out)
        data = {"task": name, "entry": {"answer": entry["answer"], "metadata": entry["metadata"]}}
        data["answer_tags"] = self._answer_tags
        prompt_ids = self._encode(entry["question"])
        if not held_out and _share(number) < self._wrong:
            _, entry = self._find(number + len(self._names), held_out)
        answer = self._tokenizer.encode(entry["answer"], add_special_tokens=False) if entry["answer"] else []
        answer_ids = [*answer, self._tokenizer.eos_token_id]
        return {"prompt_ids": prompt_ids, "answer_ids": answer_ids, "data": data}

    def rewards(self, items: Sequence[Item], answers: Sequence[list[int]]) -> list[float]:
        """See `tasks.Task`; a verifier that fails costs its answer the reward, and is counted in `stats`."""
        return asyncio.run(self._score_all(items, answers))

    def stats(self) -> dict[str, float]:
        """See `Rewards.stats`."""
        return self._rewards.stats()

    def _find(self, number: int, held_out: bool) -> tuple[str, dict[str, Any]]:
        """Dataset and entry of an item: the first of its own candidates that is on the right side."""
        name, kinds = self._names[number % len(self._names)], len(self._names)
        dataset = self._datasets[name]
        for index in range(number // kinds, len(dataset), -(-self._counts[held_out] // kinds)):
            entry = dataset[index]
            if (zlib.crc32(entry["question"].encode()) % _HELD_OUT_ONE_IN == 0) == held_out:
                return name, entry
        kind = "held-out" if held_out else "training"
        raise ConfigError(f"{name!r} has too few questions for {kind} items; give it a wider range")

    async def _score_all(self, items: Sequence[Item], answers: Sequence[list[int]]) -> list[float]:
        said = [[token for token in ids if token not in self._special] for ids in answers]
        calls = zip(items, said, strict=True)
        return await asyncio.gather(
            *(self._rewards.reward(item["prompt_ids"], ids, item["data"]) for item, ids in calls)
        )

    def _encode(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        if self._answer_tags:
            messages.insert(0, {"role": "system", "content": SYSTEM_PROMPTS["default"]})
        # enable_thinking is Qwen3's; other templates do not look at it.
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=False
        )


def score(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    task: str,
    entry: dict[str, Any],
    answer_tags: bool,
) -> float:
    """1 if reasoning-gym's verifier gives an answer full marks, else 0; a top-level function, called in a `CallPool`.

    Its marks for a part (a letter in its place, a number that contains the right one) are not what an answer is judged
    by: in a run with them GRPO raised the rewards and lowered the share of right answers.
    """
    answer = extract_answer(completion) if answer_tags else completion.strip()
    return float(_verifier(task)(answer, entry) == 1.0)


def _share(number: int) -> float:
    """Evenly spread over 0 to 1, and always the same for a number."""
    return zlib.crc32(number.to_bytes(8, "little")) / (1 << 32)


@cache
def _verifier(name: str) -> Any:
    return reasoning_gym.get_score_answer_fn(name)


def _open(name: str, seed: int, size: int, options: Mapping[str, Any]) -> Any:
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, TypeError) as error:  # its own checks of values, and of keys
        raise ConfigError(f"config key 'task_options.{name}' is {dict(options)}: {error}") from error
