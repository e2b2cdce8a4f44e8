"""The task of the examples: copy three digits, ``"123="`` -> ``"123"`` and the end token.

A model of 84 thousand parameters learns it from scratch in seconds on a CPU, by supervised
fine-tuning (`sft_sample`) and by reinforcement (`reward`). All functions are deterministic, so that
two processes, or two starts of a killed job, get the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import tiny_models
import torch
from tasks import Item
from tiny_models import EOS_ID, SPECIAL_TOKENS, write_tiny_qwen3
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from holdfast.engine import Batch
from holdfast.utils.errors import ConfigError

VOCABULARY = (*SPECIAL_TOKENS, *"0123456789", "=")
"""15 tokens, one per character. The index is the token id."""
N_DIGITS = 3
MAX_NEW_TOKENS = N_DIGITS + 2
"""Room for the digits, the end token and one more, so that the model can unlearn answers that are
too long.
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '=' if message['role'] == 'user' else eos_token }}{% endfor %}"
)


class Prompt(TypedDict):
    """One prompt of the dataset: its token ids and the expected digits."""

    prompt_ids: list[int]
    answer: str


def encode(text: str) -> list[int]:
    """Return the token ids of digits and ``=``, equal to the tokenizer's."""
    return [VOCABULARY.index(character) for character in text]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character.

    Its chat template puts ``=`` after the user's message and the end token after the assistant's.
    """
    return tiny_models.make_tokenizer(VOCABULARY, CHAT_TEMPLATE)


def write_model_folder(
    folder: str | Path,
    layers: int = 2,
    hidden: int = 64,
    for_vllm: bool = False,
) -> Path:
    """Write the model folder of a tiny Qwen3 with this tokenizer. See `write_tiny_qwen3`."""
    return write_tiny_qwen3(folder, make_tokenizer(), layers, hidden, for_vllm)


def require_copy_tokenizer(folder: str | Path) -> None:
    """Raise ConfigError unless the model folder's tokenizer gives the token ids of this task."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Prompts are encoded here, without the tokenizer.
    found = tokenizer("123=", add_special_tokens=False).input_ids
    expected = encode("123=")
    if found != expected or tokenizer.eos_token_id != EOS_ID:
        raise ConfigError(
            f"the tokenizer in {folder} makes {found} of '123=' with end token "
            f"{tokenizer.eos_token_id}; this example needs {expected} with {EOS_ID}: leave the "
            "model's path empty, or write a task for your model"
        )


class CopyPrompts:
    """A map-style dataset of ``n`` prompts, drawn with ``seed``.

    Attributes:
        fingerprint: identifies the dataset for the data cursor.
    """

    def __init__(self, n: int, seed: int) -> None:
        rng = np.random.RandomState(seed)
        self._numbers = rng.randint(0, 10**N_DIGITS, size=n)
        self.fingerprint = f"copy {N_DIGITS} digits, seed {seed}"

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int, /) -> Prompt:
        answer = f"{self._numbers[index]:0{N_DIGITS}d}"
        return {"prompt_ids": encode(f"{answer}="), "answer": answer}


def reward(completion_ids: Sequence[int], answer: str) -> float:
    """Return 0.8 x the share of right digits, plus 0.2 if the end token follows directly after the
    last digit.

    Args:
        completion_ids: generated tokens after the prompt, up to and including the end token.
        answer: the expected digits.
    """
    expected = encode(answer)
    n_digits = len(expected)
    # A completion may be shorter or longer than the answer.
    pairs = zip(completion_ids, expected, strict=False)
    n_right = sum(given == digit for given, digit in pairs)
    right = n_right / n_digits

    # The first end token must be the one after the digits.
    ended = EOS_ID in completion_ids and list(completion_ids).index(EOS_ID) == n_digits
    return 0.8 * right + 0.2 * ended


class CopyTask:
    """The copy task for the GRPO jobs (`tasks.Task`).

    There are only a thousand different prompts. Held-out prompts are drawn with another seed, but a
    long run has seen them.

    Args:
        n: see `CopyPrompts`.
        seed: see `CopyPrompts`.
        tokenizer: the model's tokenizer, checked with `require_copy_tokenizer`.
    """

    max_new_tokens = MAX_NEW_TOKENS

    def __init__(self, n: int, seed: int, tokenizer: object) -> None:
        self._training = CopyPrompts(n, seed)
        self._held_out = CopyPrompts(n, seed + 1)

    def item(self, number: int, held_out: bool = False) -> Item:
        """See `tasks.Task`."""
        prompts = self._held_out if held_out else self._training
        prompt = prompts[number]
        answer = prompt["answer"]
        return {
            "prompt_ids": prompt["prompt_ids"],
            "answer_ids": [*encode(answer), EOS_ID],
            "data": {"task": "copy", "answer": answer},
        }

    def rewards(
        self,
        items: Sequence[Item],
        answers: Sequence[list[int]],
    ) -> list[float]:
        """See `reward`."""
        pairs = zip(items, answers, strict=True)
        return [reward(ids, item["data"]["answer"]) for item, ids in pairs]

    def stats(self) -> dict[str, float]:
        """Return no statistics."""
        return {}


def sft_sample(prompt: Prompt) -> dict[str, list[int]]:
    """Return ``input_ids`` (prompt, answer, end token) and a ``loss_mask`` that is 1 on answer and
    end token.
    """
    prompt_ids = prompt["prompt_ids"]
    answer_ids = [*encode(prompt["answer"]), EOS_ID]
    return {
        "input_ids": prompt_ids + answer_ids,
        "loss_mask": [0] * len(prompt_ids) + [1] * len(answer_ids),
    }


def sft_collate(prompts: Sequence[Prompt]) -> Batch:
    """Collate prompts to ``[batch, 8]`` int64: ``input_ids``, ``attention_mask``, ``loss_mask``."""
    samples = [sft_sample(prompt) for prompt in prompts]
    input_ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {
        # No sample is padded.
        "attention_mask": torch.ones_like(input_ids),
        "input_ids": input_ids,
        "loss_mask": torch.tensor([sample["loss_mask"] for sample in samples]),
    }
