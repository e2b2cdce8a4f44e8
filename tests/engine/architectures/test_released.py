"""Reductions of released configs change sizes and nothing else."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.engine.architectures.case import take_long_factors
from tests.engine.architectures.released import (
    class_name,
    context_boundary,
    model_names,
    model_type,
    read,
    reduced,
    seeing_names,
    tiny_config,
    tiny_values,
)
from tests.engine.architectures.tiny import FIRST_TOKEN, LAST_TOKEN, VOCAB_SIZE

LLAMA_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
)
"""The released LLaVA leaves them to the defaults of the library."""
PHI = "microsoft/Phi-3-mini-128k-instruct"


def _with(**changes: Any) -> dict[str, Any]:
    """The tiny values of Phi-3 with other reductions."""
    found = read(PHI)
    return reduced(
        found["config"], {"layers": 2, "sizes": {**found["reductions"]["sizes"], **changes}}
    )


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    if isinstance(value, dict):
        return {
            key: leaf
            for name, part in value.items()
            for key, leaf in _leaves(part, (*path, name)).items()
        }
    return {path: value}


def test_there_are_40_models_each_with_a_source_and_a_date() -> None:
    assert len(model_names()) == 40
    for name in [*model_names(), *seeing_names()]:
        assert read(name)["source"] and len(read(name)["date"]) == len("2026-01-01")


@pytest.mark.parametrize("name", [*model_names(), *seeing_names()])
def test_every_value_that_is_no_number_of_something_is_the_released_one(name: str) -> None:
    released, tiny = _leaves(read(name)["config"]), _leaves(tiny_values(name))
    for path, value in released.items():
        small = tiny[path]
        if isinstance(value, bool | float | None) or (
            isinstance(value, str) and len(small) == len(value)
        ):
            assert small == value, path
        elif isinstance(value, int):
            assert small == value or 0 < small < value, path
        elif value and not isinstance(
            value[0], int
        ):  # fewer layers or fewer pairs of rotary dimensions
            assert set(small) <= set(value) and 0 < len(small) <= len(value), path
            assert len(small) < len(value) or small == value, path
    added = {path[-1] for path in tiny.keys() - released.keys()}
    of_text = {"vocab_size", "max_position_embeddings"}
    assert added <= (
        of_text if name in model_names() else {*of_text, "image_seq_length", *LLAMA_SIZES}
    ), added


@pytest.mark.parametrize("name", model_names())
def test_the_tiny_config_is_of_the_released_class_and_keeps_ties_and_rope(name: str) -> None:
    config = tiny_config(name)
    full = CONFIG_MAPPING[model_type(name)].from_dict(read(name)["config"])
    assert type(config) is type(full) and config.architectures == [class_name(name)]
    small, large = (part.get_text_config(decoder=True) for part in (config, full))
    assert small.tie_word_embeddings == large.tie_word_embeddings
    for part in (small, large):
        part.standardize_rope_params()
    kinds = [_leaves(getattr(part, "rope_parameters", None) or {}) for part in (small, large)]
    assert kinds[0].keys() == kinds[1].keys()
    for path, value in kinds[1].items():
        if path[-1] in (
            "rope_type",
            "type",
            "factor",
            "rope_theta",
            "partial_rotary_factor",
            "attention_factor",
        ):
            assert kinds[0][path] == value, path
    assert small.vocab_size == VOCAB_SIZE and 16 <= context_boundary(name) <= 64


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": 1},
        {"tie_word_embeddings": 0},
        {"rms_norm_eps": 0},
        {"rope_scaling.type": "linear"},
        {"rope_theta": 100},
        {"hidden_size": 4096},
        {"hidden_size": 0},
        {"num_key_value_heads": True},
        {"bos_token_id": 1},
    ],
    ids=str,
)
def test_a_reduction_of_anything_other_than_a_size_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is no smaller size"):
        _with(**changes)


def test_context_lengths_that_shrink_by_different_ratios_are_refused() -> None:
    with pytest.raises(ValueError, match="shrink by other ratios"):
        reduced(
            read("openai/gpt-oss-20b")["config"],
            {"layers": 2, "sizes": {"max_position_embeddings": 64}},
        )
    with pytest.raises(ValueError, match="shrink by other ratios"):
        _with(original_max_position_embeddings=32)


def test_all_layers_or_one_are_refused() -> None:
    found = read(PHI)
    for count in (1, 32):
        with pytest.raises(ValueError, match=f"{count} of 32 layers"):
            reduced(found["config"], {**found["reductions"], "layers": count})


def test_rope_factors_are_released_ones_in_their_order_one_for_each_pair() -> None:
    released, tiny = read(PHI)["config"], tiny_values(PHI)
    for key in ("short_factor", "long_factor"):
        factors = tiny["rope_scaling"][key]
        assert len(factors) == tiny["hidden_size"] // tiny["num_attention_heads"] // 2
        assert factors == sorted(factors) and set(factors) <= set(released["rope_scaling"][key])


def test_equal_special_tokens_stay_equal_and_are_no_text() -> None:
    released, tiny = read(PHI)["config"], tiny_values(PHI)
    assert released["eos_token_id"] == released["pad_token_id"] != released["bos_token_id"]
    assert tiny["eos_token_id"] == tiny["pad_token_id"] == VOCAB_SIZE - 16
    assert tiny["bos_token_id"] == released["bos_token_id"] < FIRST_TOKEN


@torch.no_grad()
def test_the_reference_of_long_contexts_is_what_transformers_computes_at_the_end_of_one() -> None:
    torch.manual_seed(0)
    boundary = context_boundary(PHI)
    plain = AutoModelForCausalLM.from_config(tiny_config(PHI), dtype=torch.float32).eval()
    config = tiny_config(PHI)
    take_long_factors(config, boundary + 1)
    served = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    served.load_state_dict(plain.state_dict())
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (1, boundary + 1))
    expected = plain(input_ids=ids, use_cache=False).logits[
        0, :boundary
    ]  # long factors, because of the last token
    torch.testing.assert_close(
        served(input_ids=ids[:, :boundary], use_cache=False).logits[0], expected
    )
    assert not torch.allclose(
        plain(input_ids=ids[:, :boundary], use_cache=False).logits[0], expected, atol=1e-4
    )

    config = tiny_config(PHI)
    take_long_factors(config, boundary)
    assert config.rope_parameters == tiny_config(PHI).rope_parameters
