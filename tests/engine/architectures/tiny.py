"""Tiny configs of the architectures that `AutoModelForCausalLM` knows, made from the default config
of each.

Every size with a known name gets a small value, in nested configs too. One layer of each kind is
kept (layers differ by their entries in per-layer lists). `_EXCEPTIONS` has additional values that
some model types need.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE, FIRST_TOKEN, LAST_TOKEN = 96, 8, 79
"""Tokens of text. Special tokens (image, end of sequence ...) are smaller or larger."""

_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MOST_LAYERS = 4


def _each(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


_LAYER_COUNTS = _each(
    2,
    "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers depth num_blocks conf_num_hidden_layers",
)
_SIZES: dict[str, int] = {
    **_each(
        VOCAB_SIZE,
        (
            "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size "
            "audio_vocab_size"
        ),
    ),
    **_LAYER_COUNTS,
    **_each(
        32,
        "hidden_size d_model n_embd dim embedding_size emb_dim embedding_dim input_embedding_size "
        "output_embedding_size word_embed_proj_dim lru_width backbone_hidden_size "
        "hidden_size_global out_hidden_size audio_channel encoder_hash_byte_group_vocab "
        "pronunciation_vocab_size shape_vocab_size pronunciation_embed_dim shape_embed_dim "
        "adapter_in_dim adapter_out_dim adapter_input_size",
    ),
    **_each(
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads conf_num_attention_heads index_n_heads linear_num_value_heads "
        "linear_num_heads num_query_groups mamba_n_heads mamba_num_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts zero_expert_num",
    ),
    **_each(
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads "
        "num_global_key_value_heads num_experts_per_tok num_experts_per_token moe_k moe_topk "
        "top_k_experts",
    ),
    **_each(
        8,
        "head_dim kv_channels d_kv attention_head_size attention_head_dim swa_head_dim "
        "index_head_dim global_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
        "v_head_dim qk_nope_head_dim qk_rope_head_dim dim_head d_head mamba_d_state state_size "
        "ssm_state_size mamba_chunk_size chunk_size hidden_size_per_layer_input",
    ),
    **_each(
        48,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner ffn_hidden_size "
        "dff dim_ff mlp_dim moe_intermediate_size expert_ffn_hidden_size "
        "shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size intermediate_size_mlp dense_intermediate_size "
        "feed_forward_size moe_shared_expert_intermediate_size",
    ),
    **_each(
        64,
        "max_position_embeddings n_positions max_seq_len n_ctx model_max_length context_length "
        "max_target_positions max_source_positions",
    ),
    **_each(
        16,
        (
            "q_lora_rank kv_lora_rank o_lora_rank laurel_rank hc_lowrank router_hidden_size "
            "qk_head_dim"
        ),
    ),
    **_each(16, "mamba_d_head mamba_head_dim mamba_headdim time_step_rank mamba_dt_rank"),
    **_each(
        4, "rotary_dim sliding_window attention_window_size local_attention attention_chunk_size"
    ),
    **_each(1, "n_group topk_group num_expert_group first_k_dense_replace n_groups mamba_n_groups"),
}
_WHERE_NONE = ("head_dim", "num_key_value_heads")
"""Keys that some models use as they are when they are None."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_SHORT_CONVOLUTIONS = ["conv", "full_attention"] * 2
_HYBRID = ["linear_attention", "hybrid"] * 2
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 16, "per_layer_config": {}},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "intermediate_size": [48] * 4,
        "num_kv_shared_layers": 2,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": _SHORT_CONVOLUTIONS, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": _SHORT_CONVOLUTIONS},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        **_INDEXER,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 2,
    },
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "hash_seed": 1,
    },
    "rwkv": {"attention_hidden_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": _HYBRID,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": _HYBRID,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "n_mamba_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> keys of its config."""

_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
}
"""Model type -> arguments that its default config needs."""


def model_types() -> list[str]:
    """Every model type that `AutoModelForCausalLM` builds, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of ``model_type`` whose model has some ten thousand parameters."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class.from_dict(_shrunk(_defaults(config_class, model_type)))


def _defaults(config_class: type[PreTrainedConfig], model_type: str) -> dict[str, Any]:
    values = config_class(**_NEEDED.get(model_type, {})).to_dict()
    return {
        key: value
        for key, value in values.items()
        if key not in ("transformers_version", "architectures")
    }


def _shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with small sizes."""
    count = next((values[key] for key in _LAYER_COUNTS if isinstance(values.get(key), int)), None)
    kept = _kept_layers(values, count) if count else []
    small = {key: _shrunk_value(key, value, count, kept) for key, value in values.items()}
    small |= {
        key: len(kept)
        for key in (*_LAYER_COUNTS, "num_kv_shared_layers")
        if kept and values.get(key) == count
    }
    if values.get("is_decoder") is False:
        small["is_decoder"] = True  # encoders, as causal LMs
    if "kv_lora_rank" in values:  # multi-head latent attention has no groups of heads
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small | _EXCEPTIONS.get(values.get("model_type", ""), {})


def _kept_layers(values: Mapping[str, Any], count: int) -> list[int]:
    """Numbers of layers that all differ, at least two."""
    lists = [value for value in values.values() if _is_per_layer(value, count)]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(str([entries[layer] for entries in lists]), layer)
    kept = sorted(kinds.values())[:_MOST_LAYERS]
    return kept if len(kept) > 1 else [0, 1]


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def _shrunk_value(key: str, value: Any, count: int | None, kept: list[int]) -> Any:
    if key == "per_layer_config" and value:  # {"05": {...}}: the differences of one layer
        return {
            str(kept.index(int(layer))): _shrunk(entry)
            for layer, entry in value.items()
            if int(layer) in kept
        }
    if isinstance(value, dict):
        return _shrunk(value) if "model_type" in value else value
    if count and _is_per_layer(value, count):
        return [_shrunk_value(key, value[layer], None, []) for layer in kept]
    if key in _SPECIAL_TOKENS:
        return _SPECIAL_TOKENS[key]
    if key in _SIZES and isinstance(value, int) and value > 0:
        return _SIZES[key]
    if key in _WHERE_NONE and value is None:
        return _SIZES[key]
    return value
