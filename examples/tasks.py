"""The interface of tasks for the GRPO jobs, and the rollout worker that samples and rewards their
answers.

A task numbers its items. The same number is the same item in every process and at every start, so
the data cursor of a job is a number, and the driver needs nothing else. The task itself exists only
in the rollout worker.
"""

from collections.abc import Callable, Sequence
from typing import Any, NotRequired, Protocol, TypedDict

import torch
from rollout import RolloutWorker

from holdfast.engine.api import Batch
from holdfast.engine.training.batch import with_images


class Item(TypedDict):
    """One item of a task. The model sees only the prompt and the images.

    ``answer_ids`` is the target of supervised fine-tuning, including the end token. ``data`` is for
    the reward. ``images`` are the processor's tensors for the images of the prompt. All items of a
    task have some, or none has.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    data: dict[str, Any]
    images: NotRequired[Batch]


class Task(Protocol):
    """Items, and rewards for answers.

    Attributes:
        max_new_tokens: number of tokens after which an answer is cut off.
    """

    max_new_tokens: int

    def item(self, number: int, held_out: bool = False) -> Item:
        """Return item ``number`` of the training items or of the held-out items. The two sets are
        disjoint.
        """
        ...

    def rewards(self, items: Sequence[Item], answers: Sequence[list[int]]) -> list[float]:
        """Return the reward of each answer (1 if right). Answers are token ids including the end
        token.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Numbers for the log."""
        ...


class Numbers:
    """The dataset of a driver: ``n`` item numbers of the task with this ``fingerprint``."""

    def __init__(self, n: int, fingerprint: str) -> None:
        self._n, self.fingerprint = n, fingerprint

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int, /) -> int:
        return index


class TaskWorker(RolloutWorker):
    """A rollout worker with a task.

    Args:
        make_task: makes the task from the model's tokenizer. Called here, so that only this process
            has its imports.
        tokenizer_path: see `RolloutWorker`.
        log_level: see `RolloutWorker`.
    """

    def __init__(
        self, make_task: Callable[[Any], Task], tokenizer_path: str, log_level: str = "WARNING"
    ) -> None:
        super().__init__(tokenizer_path, log_level)
        self.task = make_task(self.tokenizer)

    def sample(
        self, numbers: Sequence[int], n_samples: int, temperature: float, seed: int
    ) -> tuple[Batch, dict[str, float]]:
        """Sample ``n_samples`` answers to each item. Returns `generate`'s batch with ``rewards``
        ``[B]``, and stats.
        """
        items = [self.task.item(number) for number in numbers]
        batch = self._answer(items, n_samples, temperature, seed)
        rewards = self.task.rewards(
            [item for item in items for _ in range(n_samples)], _answers(batch)
        )
        return {**batch, "rewards": torch.tensor(rewards)}, self.task.stats()

    def evaluate(self, n_items: int, temperature: float, seed: int) -> dict[str, float]:
        """Return the share of right answers to the first ``n_items`` held-out items, overall and by
        name.

        The policy gives one answer per item, greedily at temperature 0.
        """
        items = [self.task.item(number, held_out=True) for number in range(n_items)]
        batch = self._answer(items, 1, temperature, seed)
        right = [float(reward == 1.0) for reward in self.task.rewards(items, _answers(batch))]
        names = [item["data"]["task"] for item in items]
        stats = {"held_out": sum(right) / n_items}
        for name in dict.fromkeys(names):
            own = [score for score, its in zip(right, names, strict=True) if its == name]
            stats[f"held_out/{name}"] = sum(own) / len(own)
        return stats

    def answers(self, n_items: int) -> list[str]:
        """Return the likeliest answers to the first ``n_items`` held-out items as text."""
        items = [self.task.item(number, held_out=True) for number in range(n_items)]
        return self.tokenizer.batch_decode(
            _answers(self._answer(items, 1, 0.0, 0)), skip_special_tokens=True
        )

    def demonstrate(self, numbers: Sequence[int]) -> Batch:
        """Return items with their right answers, for supervised fine-tuning: right-padded ``[B,
        S]`` int64 tensors ``input_ids``, ``attention_mask`` and ``loss_mask``, which is 1 on the
        answer.
        """
        items = [self.task.item(number) for number in numbers]
        shape = (
            len(items),
            max(len(item["prompt_ids"]) + len(item["answer_ids"]) for item in items),
        )
        batch = {
            name: torch.zeros(shape, dtype=torch.int64)
            for name in ("input_ids", "attention_mask", "loss_mask")
        }
        for row, item in enumerate(items):
            start, ids = len(item["prompt_ids"]), item["prompt_ids"] + item["answer_ids"]
            batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
            batch["attention_mask"][row, : len(ids)] = 1
            batch["loss_mask"][row, start : len(ids)] = 1
        return with_images(batch, _images(items))

    def _answer(
        self, items: Sequence[Item], n_samples: int, temperature: float, seed: int
    ) -> Batch:
        prompts, images = [item["prompt_ids"] for item in items], _images(items)
        return self.generate(
            prompts, n_samples, self.task.max_new_tokens, temperature, seed, images
        )


def _images(items: Sequence[Item]) -> list[Batch] | None:
    return [item["images"] for item in items if "images" in item] or None


def _answers(batch: Batch) -> list[list[int]]:
    return [
        row[mask.bool()].tolist()
        for row, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)
    ]
