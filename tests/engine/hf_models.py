"""Tiny models of every architecture family the export knows, and how tests shard them."""

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 15,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = ("llama", "qwen3_tied", "qwen3_untied", "gemma", "gpt2", "qwen3_moe")


def tiny_config(name: str) -> PreTrainedConfig:
    """The config of a model with a few thousand parameters. No world size here divides its 15 rows
    of vocabulary.
    """
    match name:
        case "llama":
            return LlamaConfig(**_SIZES)
        case "qwen3_tied":
            return Qwen3Config(**_SIZES, tie_word_embeddings=True)
        case "qwen3_untied":
            return Qwen3Config(**_SIZES, tie_word_embeddings=False)
        case "gemma":
            return GemmaConfig(**_SIZES)
        case "gpt2":
            return GPT2Config(
                vocab_size=15,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=32,
                bos_token_id=1,
                eos_token_id=2,
            )
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
            )
    raise KeyError(name)


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """An unsharded fp32 model with random parameters, including norms and biases."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    """``fully_shard`` every block, then the root, over the default group."""
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module)
    fully_shard(model)
    return model
