"""The task of the examples: copy three digits, ``"123="`` -> ``"123"`` and the end token.

A model of 84 thousand parameters learns it from scratch in seconds on a CPU, by supervised fine-tuning (`sft_sample`)
and by reinforcement (`reward`) alike. Everything here is a function of its arguments: two processes, or two starts of
a killed job, get the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from holdfast.engine import Batch
from holdfast.utils.errors import ConfigError
from holdfast.utils.files import commit_folder, fsync_file, remove_folder, staging_path, walk_files

VOCABULARY = ("<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "=")
"""15 tokens, one a character; the index is the token id."""
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
N_DIGITS = 3
PROMPT_TOKENS = N_DIGITS + 1
"""The digits and ``=``; every prompt is this long."""
SAMPLE_TOKENS = PROMPT_TOKENS + N_DIGITS + 1
"""Prompt, digits, end token; every sample of supervised fine-tuning is this long, so none needs padding."""
MAX_NEW_TOKENS = N_DIGITS + 2
"""Room for the digits, the end token, and one token too many: too long an answer must be possible to be unlearnt."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '=' if message['role'] == 'user' else eos_token }}{% endfor %}"
)


class Prompt(TypedDict):
    """One prompt of the dataset: its token ids, and the digits that are to follow."""

    prompt_ids: list[int]
    answer: str


def encode(text: str) -> list[int]:
    """Token ids of digits and ``=``; the same as the tokenizer gives."""
    return [VOCABULARY.index(character) for character in text]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character. Its chat template puts ``=`` after the user and the end token after the assistant."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model_folder(folder: str | Path, layers: int = 2, hidden: int = 64, for_vllm: bool = False) -> Path:
    """Make a folder with config and tokenizer of a tiny Qwen3, to be trained with ``init_from_scratch``.

    The folder appears complete; one that exists is left as it is, so any process may call this, at any start.

    Args:
        folder: where; its parents are made.
        layers: blocks of the model.
        hidden: its width, a multiple of 8.
        for_vllm: give it weights, drawn at random, and a head that is not tied to the embeddings: vLLM 0.32 reloads
            no model that it has started without weights, and on a CPU gives a tied head the wrong ones.

    Returns:
        ``folder``.
    """
    folder = Path(folder)
    if folder.exists():
        return folder
    staging = staging_path(folder)
    staging.mkdir(parents=True)
    special: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        max_position_embeddings=64,
        tie_word_embeddings=not for_vllm,
        dtype="float32",
        **special,
    )
    if for_vllm:
        AutoModelForCausalLM.from_config(config).save_pretrained(staging)
    config.save_pretrained(staging)
    GenerationConfig(**special, do_sample=False).save_pretrained(staging)
    make_tokenizer().save_pretrained(staging)
    for name in walk_files(staging):
        fsync_file(staging / name)
    try:
        commit_folder(staging, folder)
    except OSError:
        remove_folder(staging)
        if not folder.is_dir():  # else another process was faster, with the same contents
            raise
    return folder


def require_copy_tokenizer(folder: str | Path) -> None:
    """Raise ConfigError unless the model folder's tokenizer gives the token ids that this task is made of."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found, expected = tokenizer("123=", add_special_tokens=False).input_ids, encode("123=")
    if found != expected or tokenizer.eos_token_id != EOS_ID:
        raise ConfigError(
            f"the tokenizer in {folder} makes {found} of '123=' with end token {tokenizer.eos_token_id}; this example "
            f"needs {expected} with {EOS_ID}: leave the model's path empty, or write a task for your model"
        )


class CopyPrompts:
    """A map-style dataset of ``n`` prompts, drawn from ``seed``.

    Attributes:
        fingerprint: tells this dataset from another one, for the data cursor.
    """

    def __init__(self, n: int, seed: int) -> None:
        self._numbers = np.random.RandomState(seed).randint(0, 10**N_DIGITS, size=n)
        self.fingerprint = f"copy {N_DIGITS} digits, seed {seed}"

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int, /) -> Prompt:
        answer = f"{self._numbers[index]:0{N_DIGITS}d}"
        return {"prompt_ids": encode(f"{answer}="), "answer": answer}


def reward(completion_ids: Sequence[int], answer: str) -> float:
    """0.8 x the share of right digits + 0.2 if the end token stands exactly after the last; between 0 and 1.

    Args:
        completion_ids: what was generated after the prompt, up to and including the end token if there is one.
        answer: the digits.
    """
    expected = encode(answer)
    right = sum(int(a == b) for a, b in zip(completion_ids, expected, strict=False)) / len(expected)
    ended = list(completion_ids).index(EOS_ID) == len(expected) if EOS_ID in completion_ids else False
    return 0.8 * right + 0.2 * ended


def sft_sample(prompt: Prompt) -> dict[str, list[int]]:
    """Prompt, answer and end token as ``input_ids``, and a ``loss_mask`` that is 1 on answer and end token."""
    answer_ids = [*encode(prompt["answer"]), EOS_ID]
    return {
        "input_ids": prompt["prompt_ids"] + answer_ids,
        "loss_mask": [0] * len(prompt["prompt_ids"]) + [1] * len(answer_ids),
    }


def sft_collate(prompts: Sequence[Prompt]) -> Batch:
    """A ``[batch, 8]`` int64 batch of `sft_sample`: ``input_ids``, ``attention_mask``, ``loss_mask``."""
    samples = [{"attention_mask": [1] * SAMPLE_TOKENS, **sft_sample(prompt)} for prompt in prompts]
    return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}
