"""Shared parts of these jobs: a tiny Qwen3, a few texts, and a digest of the final state."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from examples.tiny_models import SPECIAL_TOKENS, make_tokenizer

VOCABULARY = [*SPECIAL_TOKENS, *"0123456789+="]


def tiny_model(kind: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """Build a Qwen3 of some thousand parameters, with dropout: losing one random draw changes its
    final weights.

    Args:
        kind: class of transformers that builds the model.
        options: options of its config.
    """
    torch.manual_seed(0)
    given: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], **options}
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **given,
    )  # fmt: skip
    return kind.from_config(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character."""
    return make_tokenizer(VOCABULARY)


def sums(count: int) -> list[str]:
    """Return ``count`` texts like ``012+84=096``, all of the same length."""
    return [f"{i:03d}+{i * 7 % 100:02d}={i + i * 7 % 100:03d}" for i in range(count)]


def token_rows(count: int) -> list[torch.Tensor]:
    """Return `sums` as int64 ``[10]`` token ids."""
    return [
        torch.tensor([VOCABULARY.index(character) for character in text]) for text in sums(count)
    ]


def digest(model: torch.nn.Module, optimizer: Any) -> str:
    """Return the SHA-256 of all trained weights and their moments. All ranks call it."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap Accelerate's optimizer
    sha = hashlib.sha256()
    for param in _params(optimizer):
        for tensor in (
            param,
            *(
                value
                for value in optimizer.state[param].values()
                if isinstance(value, torch.Tensor)
            ),
        ):
            whole: Any = tensor.detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            sha.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    trained = (param for param in model.parameters() if param.requires_grad)
    assert sum(param.numel() for param in trained) == sum(
        param.numel() for param in _params(optimizer)
    )
    return sha.hexdigest()


def _params(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])
