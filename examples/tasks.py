"""The interface of tasks for the GRPO jobs, and the rollout worker that samples and rewards their
answers.

A task numbers its items. The same number is the same item in every process and at every start, so
the data cursor of a job is a number, and the driver needs nothing else. The task itself exists only
in the rollout worker.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NotRequired, Protocol, TypedDict

import torch
from rollout import RolloutWorker
from torch.nn.utils.rnn import pad_sequence

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

    def rewards(
        self,
        items: Sequence[Item],
        answers: Sequence[list[int]],
    ) -> list[float]:
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
        self._n = n
        self.fingerprint = fingerprint

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
        self,
        make_task: Callable[[Any], Task],
        tokenizer_path: str,
        log_level: str = "WARNING",
    ) -> None:
        super().__init__(tokenizer_path, log_level)
        self.task = make_task(self.tokenizer)

    def sample(
        self,
        numbers: Sequence[int],
        n_samples: int,
        temperature: float,
        seed: int,
    ) -> tuple[Batch, dict[str, float]]:
        """Sample ``n_samples`` answers to each item. Returns `generate`'s batch with ``rewards``
        ``[B]``, and stats.
        """
        items = self._items(numbers)
        batch = self._answer(items, n_samples, temperature, seed)

        # A row per sample, samples of an item next to each other.
        by_row = []
        for item in items:
            by_row += [item] * n_samples
        rewards = self.task.rewards(by_row, _answers(batch))
        batch["rewards"] = torch.tensor(rewards)
        return batch, self.task.stats()

    def evaluate(
        self,
        n_items: int,
        temperature: float,
        seed: int,
    ) -> dict[str, float]:
        """Return the share of right answers to the first ``n_items`` held-out items, overall and by
        name.

        The policy gives one answer per item, greedily at temperature 0.
        """
        items = self._items(range(n_items), held_out=True)
        batch = self._answer(items, 1, temperature, seed)
        answers = _answers(batch)
        rewards = self.task.rewards(items, answers)

        # Scores of all items, and of the items of each name.
        scores: dict[str, list[float]] = {"held_out": []}
        for item, reward in zip(items, rewards, strict=True):
            name = f"held_out/{item['data']['task']}"
            right = float(reward == 1.0)
            scores["held_out"].append(right)
            scores.setdefault(name, []).append(right)

        stats = {}
        for name, own in scores.items():
            stats[name] = sum(own) / len(own)
        return stats

    def answers(self, n_items: int) -> list[str]:
        """Return the likeliest answers to the first ``n_items`` held-out items as text."""
        items = self._items(range(n_items), held_out=True)

        # At temperature 0 the seed does not matter.
        batch = self._answer(items, 1, 0.0, 0)
        answers = _answers(batch)
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True)

    def demonstrate(self, numbers: Sequence[int]) -> Batch:
        """Return items with their right answers, for supervised fine-tuning: right-padded ``[B,
        S]`` int64 tensors ``input_ids``, ``attention_mask`` and ``loss_mask``, which is 1 on the
        answer.
        """
        items = self._items(numbers)
        input_ids = []
        attention_mask = []
        loss_mask = []
        for item in items:
            prompt = item["prompt_ids"]
            answer = item["answer_ids"]
            ids = prompt + answer
            input_ids.append(ids)
            attention_mask.append([1] * len(ids))
            # Only the answer is taught.
            mask = [0] * len(prompt) + [1] * len(answer)
            loss_mask.append(mask)

        batch = {
            "input_ids": _padded(input_ids),
            "attention_mask": _padded(attention_mask),
            "loss_mask": _padded(loss_mask),
        }
        return with_images(batch, _images(items))

    def _items(self, numbers: Iterable[int], held_out: bool = False) -> list[Item]:
        return [self.task.item(number, held_out) for number in numbers]

    def _answer(
        self,
        items: Sequence[Item],
        n_samples: int,
        temperature: float,
        seed: int,
    ) -> Batch:
        prompts = [item["prompt_ids"] for item in items]
        limit = self.task.max_new_tokens
        images = _images(items)
        return self.generate(prompts, n_samples, limit, temperature, seed, images)


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """``[B, S]``, with zeros at the right."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True)


def _images(items: Sequence[Item]) -> list[Batch] | None:
    # All items of a task have images, or none has.
    found = [item["images"] for item in items if "images" in item]
    return found or None


def _answers(batch: Batch) -> list[list[int]]:
    """The sampled tokens of each row."""
    answers = []
    sampled = batch["loss_mask"].bool()
    for row, mask in zip(batch["input_ids"], sampled, strict=True):
        answers.append(row[mask].tolist())
    return answers
