"""Tiny configs with the released values of much used causal language models.

Each file of ``released/`` is one model:

- ``model``: its name on the hub.
- ``source``, ``date``: the public file with the values, and when that file was last changed or
  read.
- ``config``: the released ``config.json``.
- ``left_out``: keys of that file about how weights are stored (``quantization_config``).
- ``reductions``: ``layers``, the number of layers that stay, and ``sizes``, dotted key -> smaller
  value.

`reduced` applies the reductions and refuses every other change, so that flags, activations, rope
types, ties and routing are as released:

- Lists (and patterns) with one entry a layer keep the first entries.
- A size of such a list replaces each entry.
- Rope factors, one for each pair of rotary dimensions, keep evenly spaced ones.
- The context length and the original one shrink by the same ratio.
- Ids of special tokens above the text move to the end of the small vocabulary. Equal ids stay
  equal.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.engine.architectures.tiny import FIRST_TOKEN, LAST_TOKEN, VOCAB_SIZE

FOLDER = Path(__file__).parent / "released"
WITH_IMAGES = " with images"
"""End of the names of models that are trained on images, too. Models that cannot be trained on text
alone are in ``released/seeing/``.
"""

_STORAGE = {"quantization_config"}
_LAYERS = ("num_hidden_layers", "n_layer")
_CONTEXTS = ("max_position_embeddings", "n_positions")
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_ROPE_FACTORS = ("short_factor", "long_factor")
_ROPES = ("rope_scaling", "rope_parameters")
_SIZE_NAMES = """
hidden_size n_embd intermediate_size moe_intermediate_size shared_expert_intermediate_size
moe_shared_expert_intermediate_size head_dim attention_head_dim global_head_dim q_lora_rank
kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim mrope_section index_head_dim
linear_key_head_dim linear_value_head_dim mamba_head_dim ssm_state_size out_hidden_size
num_attention_heads n_head num_key_value_heads num_global_key_value_heads index_n_heads
linear_num_key_heads linear_num_value_heads mamba_num_heads n_groups num_heads num_experts
num_local_experts n_routed_experts num_experts_per_tok experts_per_token top_k_experts moe_topk
n_group topk_group vocab_size vocab_size_per_layer_input org_vocab_size max_position_embeddings
n_positions n_ctx original_max_position_embeddings initial_context_length sliding_window index_topk
chunk_size depth num_hidden_layers patch_size image_size num_position_embeddings
position_embedding_size mm_tokens_per_image image_seq_length window_size
"""
"""Config keys that a reduction may change: sizes of the text model, then of the vision tower."""


def model_names() -> list[str]:
    """Names of the models with a file, sorted."""
    return sorted((path.stem.replace("--", "/") for path in FOLDER.glob("*.json")), key=str.lower)


def seeing_names() -> list[str]:
    """Names of the models that are trained on images, sorted."""
    found = [
        "google/gemma-3-27b-it",
        *(path.stem.replace("--", "/") for path in FOLDER.glob("seeing/*.json")),
    ]
    return sorted((name + WITH_IMAGES for name in found), key=str.lower)


def read(name: str) -> dict[str, Any]:
    """The file of a model.

    Raises:
        ValueError: the file does not have the form that the module describes.
    """
    name = name.removesuffix(WITH_IMAGES)
    file = f"{name.replace('/', '--')}.json"
    path = next(path for path in (FOLDER / file, FOLDER / "seeing" / file) if path.exists())
    found = json.loads(path.read_text(encoding="utf-8"))
    needed = {"model", "source", "date", "config", "reductions"}
    if not needed <= found.keys() <= needed | {"left_out"}:
        raise ValueError(
            f"{path.name}: has {sorted(found)}; expected {sorted(needed)} and what released.py "
            "names"
        )
    if found["model"] != name or not set(found.get("left_out", ())) <= _STORAGE:
        raise ValueError(
            f"{path.name}: is of {found['model']!r} and leaves out {found.get('left_out')}"
        )
    return found


def class_name(name: str) -> str:
    """The released class of a model."""
    return read(name)["config"]["architectures"][0]


def model_type(name: str) -> str:
    """The type of a model."""
    return read(name)["config"]["model_type"]


def tiny_values(name: str) -> dict[str, Any]:
    """The reduced values of a model (see `reduced`)."""
    return reduced(read(name)["config"], read(name)["reductions"])


def reduced(released: Mapping[str, Any], reductions: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a released ``config.json`` with other sizes.

    Raises:
        ValueError: a reduction changes something other than a size, or makes it larger.
    """
    values = _cut_layers(copy.deepcopy(dict(released)), reductions["layers"])
    for key, small in reductions["sizes"].items():
        _shrink(values, key, small)
    for part in _parts(values):
        _cut_rope_factors(part)
    _check_contexts(released, values)
    return _move_special_tokens(values)


def tiny_config(name: str) -> PreTrainedConfig:
    """A config of the released model's class whose model has some ten thousand parameters."""
    values = tiny_values(name)
    return CONFIG_MAPPING[model_type(name)].from_dict(values)


def context_boundary(name: str) -> int:
    """Tokens of the tiny model's original context, or half of its context if it was not
    extended.
    """
    text = _text(tiny_values(name))
    found = [part[_ORIGINAL_CONTEXT] for part in (text, *_ropes(text)) if _ORIGINAL_CONTEXT in part]
    longest = next(text[key] for key in _CONTEXTS if key in text)
    return min(*found, longest) if found else longest // 2


def _text(values: Any) -> dict[str, Any]:
    return values.get("text_config", values)


def _parts(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        values,
        *(value for value in values.values() if isinstance(value, dict) and "model_type" in value),
    ]


def _ropes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [values[key] for key in _ROPES if isinstance(values.get(key), dict)]


def _cut_layers(values: dict[str, Any], count: int) -> dict[str, Any]:
    text = _text(values)
    key = next((key for key in _LAYERS if key in text), _LAYERS[0])
    before = text[key] if key in text else getattr(CONFIG_MAPPING[text["model_type"]](), key)
    if not 1 < count < before:
        raise ValueError(f"{count} of {before} layers")
    text[key] = count
    for name, value in text.items():
        if isinstance(value, list | str) and len(value) == before:
            text[name] = value[:count]
    return values


def _shrink(values: dict[str, Any], dotted: str, small: Any) -> None:
    *folders, key = dotted.split(".")
    part = values
    for folder in folders:
        part = part[folder]
    before = part[key] if key in part else getattr(CONFIG_MAPPING[part["model_type"]](), key)
    pairs = list(_pairs(before, small))
    if (
        key not in _SIZE_NAMES.split()
        or not pairs
        or not all(type(old) is type(new) is int and 0 < new < old for old, new in pairs)
    ):
        raise ValueError(f"{dotted}: {before} -> {small} is no smaller size")
    part[key] = (
        [small] * len(before) if isinstance(before, list) and isinstance(small, int) else small
    )


def _pairs(before: Any, small: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(before, list):
        smalls = small if isinstance(small, list) else [small] * len(before)
        return zip(before, smalls, strict=True)
    return iter([(before, small)])


def _cut_rope_factors(values: dict[str, Any]) -> None:
    heads = values.get("num_attention_heads")
    if not heads:
        return
    width = (
        values.get("qk_rope_head_dim") or values.get("head_dim") or values["hidden_size"] // heads
    )
    pairs = int(width * values.get("partial_rotary_factor", 1.0)) // 2
    for rope in _ropes(values):
        for key in _ROPE_FACTORS:
            if key in rope:
                factors = rope[key]
                rope[key] = [factors[place * len(factors) // pairs] for place in range(pairs)]


def _check_contexts(released: Mapping[str, Any], values: dict[str, Any]) -> None:
    before, after = _text(released), _text(values)
    for old, new in zip([before, *_ropes(before)], [after, *_ropes(after)], strict=True):
        if _ORIGINAL_CONTEXT in old:
            key = next(key for key in _CONTEXTS if key in before)
            if before[key] * new[_ORIGINAL_CONTEXT] != after[key] * old[_ORIGINAL_CONTEXT]:
                raise ValueError(f"{key} and {_ORIGINAL_CONTEXT} shrink by other ratios")


def _move_special_tokens(values: dict[str, Any]) -> dict[str, Any]:
    seen = sorted(
        {
            token
            for part in _parts(values)
            for token in _special_tokens(part)
            if token >= FIRST_TOKEN
        }
    )
    places = {token: LAST_TOKEN + 1 + place for place, token in enumerate(seen)}
    if len(places) > VOCAB_SIZE - LAST_TOKEN - 1:
        raise ValueError(
            f"{len(places)} special tokens; there is room for {VOCAB_SIZE - LAST_TOKEN - 1}"
        )
    for part in _parts(values):
        for key, value in part.items():
            if _is_token(key) and isinstance(value, list):
                part[key] = [places.get(token, token) for token in value]
            elif _is_token(key):
                part[key] = places.get(value, value)
    return values


def _special_tokens(values: dict[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if _is_token(key):
            yield from value if isinstance(value, list) else [] if value is None else [value]


def _is_token(key: str) -> bool:
    return key.endswith(("_token_id", "_token_index")) or key == "pad_id"
