"""Shared parts of these jobs: a tiny Qwen3, a few texts, and a digest of the final state."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789+="]


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
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        attention_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **given,
    )
    return kind.from_config(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character."""
    # As `examples/tiny_models.py`, but this file needs no other.
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def sums(count: int) -> list[str]:
    """Return ``count`` texts like ``012+84=096``, all of the same length."""
    texts = []
    for i in range(count):
        j = i * 7 % 100
        texts.append(f"{i:03d}+{j:02d}={i + j:03d}")
    return texts


def token_rows(count: int) -> list[torch.Tensor]:
    """Return `sums` as int64 ``[10]`` token ids."""
    rows = []
    for text in sums(count):
        ids = [VOCABULARY.index(character) for character in text]
        rows.append(torch.tensor(ids))
    return rows


def digest(model: torch.nn.Module, optimizer: Any) -> str:
    """Return the SHA-256 of all trained weights and their moments. All ranks call it."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap Accelerate's optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sha = hashlib.sha256()
    for param in params:
        for value in (param, *optimizer.state[param].values()):
            if isinstance(value, torch.Tensor):
                whole: Any = value.detach()
                if hasattr(whole, "full_tensor"):
                    whole = whole.full_tensor()
                flat = whole.reshape(-1).view(torch.uint8)
                sha.update(flat.numpy().tobytes())

    # The optimizer has every trained weight.
    trained = [param for param in model.parameters() if param.requires_grad]
    n_trained = sum(map(torch.numel, trained))
    assert n_trained == sum(map(torch.numel, params))
    return sha.hexdigest()


def write_digest(folder: Path, after: str, model: Any, optimizer: Any) -> None:
    """Write `digest` to ``folder/digest.txt`` and print it, on rank 0. All ranks call it."""
    found = digest(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (folder / "digest.txt").write_text(found)
        print(f"weights and moments after {after}: {found}")
