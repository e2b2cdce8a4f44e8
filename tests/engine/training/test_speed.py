"""Tokens per second and model FLOPs utilization, against counts of torch and formulas by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from holdfast.engine.training.speed import _windows, parameter_flops, peak_flops
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import loss_tokens, make_batch, make_engine, nll, rows
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(120)

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CONFIGS = {
    "dense": Qwen3Config(**SIZES, head_dim=32),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
}
N_TOKENS = 96


def _torch_flops(config: PreTrainedConfig) -> float:
    """What torch counts in matrix products of a forward and a backward."""
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(0, 512, (1, N_TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_formula_counts_what_torch_counts_in_a_forward_and_backward(
    kind: str, tmp_path: Path
) -> None:
    config = CONFIGS[kind]
    write_model_folder(tmp_path, config)
    engine = make_engine(tmp_path)
    engine.train_batch(make_batch(), nll, loss_tokens)
    assert engine._routers.top_k == (2 if kind == "experts" else 1)

    dense, experts = parameter_flops(engine.model)
    per_token = dense + engine._routers.top_k * experts
    found = N_TOKENS * per_token + engine._speed.attention_flops([N_TOKENS])
    assert found == pytest.approx(_torch_flops(config), rel=0.01)
    engine.destroy()


def test_a_rank_whose_batch_has_no_share_of_the_loss_knows_the_experts_of_a_token(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path, CONFIGS["experts"])
    engine = make_engine(tmp_path)
    engine.forward_batch(make_batch())  # nothing is recorded, as with a share of 0
    assert engine._routers.top_k == 2
    engine.destroy()


def test_a_frozen_parameter_takes_four_operations_and_a_tied_head_counts_once() -> None:
    model = build_reference(tiny_qwen3(tied=True))
    n_params = sum(param.numel() for param in model.parameters())
    assert parameter_flops(model) == (6 * n_params, 0)

    head: Any = build_reference(tiny_qwen3(tied=False))
    n_embedded = head.model.embed_tokens.weight.numel()
    assert parameter_flops(head) == (6 * n_params, 0), "an embedding is only looked up"
    head.lm_head.weight.requires_grad_(False)
    assert parameter_flops(head) == (6 * n_params - 2 * n_embedded, 0)


@pytest.mark.parametrize("window", [None, 4])
def test_a_window_limits_the_keys_of_attention(window: int | None, tmp_path: Path) -> None:
    write_model_folder(tmp_path, MistralConfig(**SIZES, sliding_window=window))
    engine = make_engine(tmp_path)
    pairs = 10 * min(10, window or 10) + 3 * 3
    assert engine._speed.attention_flops([10, 3]) == 12 * 2 * 128 * pairs
    engine.destroy()


def test_layers_of_a_kind_that_is_not_known_have_no_keys_to_count() -> None:
    text = SimpleNamespace(sliding_window=4, layer_types=["full_attention", "linear_attention"])
    text.layer_types.append("sliding_attention")
    assert _windows(text) == [None, 4]
    for kind in ("mlp", "moe", "hybrid", "indexed_attention", "compressed_sparse_attention"):
        text.layer_types[1] = kind
        assert _windows(text) is None


def _speed_of_ranks(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(folder)
    batch = make_batch()
    stats = engine.train_batch(rows(batch, slice(rank * 4, rank * 4 + 4)), nll, loss_tokens)
    assert stats["tokens_per_second"] > 0 and "mfu" not in stats, "a CPU has no known peak"

    # With a peak, the quotient of both is that of the operations of all ranks.
    peak = 1e9
    engine._speed._peak = peak
    stats = engine.train_batch(rows(batch, slice(rank * 4, rank * 4 + 4)), nll, loss_tokens)
    lengths = batch["attention_mask"].sum(1).tolist()
    dense, _ = parameter_flops(engine.model)
    flops = dense * sum(lengths) + engine._speed.attention_flops(lengths)
    expected = flops / sum(lengths) / peak
    assert stats["mfu"] / stats["tokens_per_second"] == pytest.approx(expected)
    engine.destroy()


def test_the_tokens_and_operations_of_all_ranks_count(tmp_path: Path) -> None:
    write_model_folder(tmp_path, tiny_qwen3())
    run_ranks(_speed_of_ranks, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H200", 989e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(
    name: str, peak: float | None
) -> None:
    assert peak_flops(name) == peak
