"""Tiny models of real architectures, written as Hugging Face folders without network."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

HAS_PLANS = hasattr(PreTrainedModel, "_resolve_parallel_plans")
"""Whether transformers is new enough (5.23) for tensor and expert parallelism."""
NEEDS_PLANS = pytest.mark.skipif(
    not HAS_PLANS, reason="this transformers cannot share matrices or experts"
)


def tiny_qwen3(
    tied: bool = True,
    vocab_size: int = 15,
    hidden_size: int = 32,
    layers: int = 2,
    max_length: int = 128,
) -> Qwen3Config:
    """A Qwen3 of a few thousand parameters. Neither 2 nor 4 divides the vocabulary."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def tiny_qwen3_moe() -> Qwen3MoeConfig:
    """A Qwen3-MoE whose matrices, experts and rows two or four ranks can share."""
    return Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def build_reference(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The whole model in float32 on the CPU, drawn from ``seed``, with weights large enough to
    matter.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model.eval()


def write_model_folder(folder: Path, config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Write config and weights of `build_reference` to ``folder`` and return the model."""
    model = build_reference(config, seed)
    model.save_pretrained(folder)
    return model
