"""Rotary frequencies fixed by the configuration, so that a sequence never depends on its
neighbours.

Two kinds of scaling choose frequencies by length. transformers uses the longest sequence of a
packed row or padded batch, so a short sequence next to a long one gets other log-probabilities than
alone:

- ``longrope`` has short factors up to ``original_max_position_embeddings`` tokens and long factors
  beyond.
- ``dynamic`` raises the base for sequences beyond ``max_position_embeddings``.

Inference servers cannot change frequencies under their cache, so they choose once, at startup.
`fix_frequencies` makes the same choice as vLLM:

- ``longrope``: the long factors if ``max_model_len`` exceeds the original length, else the short
  ones.
- ``dynamic``: the unchanged base up to ``max_position_embeddings`` tokens. If ``max_model_len``
  exceeds that, vLLM has no frequencies, so the base for ``factor * max_position_embeddings`` tokens
  is used, as in SGLang.

Without ``max_model_len`` the original length is the limit.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.errors import ConfigError

_LONGROPE = ("longrope", "su")
_ORIGINAL = "original_max_position_embeddings"
_MOST = "max_position_embeddings"


def fix_frequencies(model: PreTrainedModel, max_model_len: int | None) -> None:
    """Give every rotary module of ``model``, on meta, one set of frequencies for all lengths up to
    ``max_model_len``.

    The modules get their own configs. ``model.config``, which is exported, does not change.

    Raises:
        ConfigError: custom code of the model chooses frequencies by length, and ``max_model_len``
            exceeds the length up to which the choice is the same for all sequences.
    """
    modules = list(_rotary_modules(model))
    for module in modules:
        if any(_by_length(kind) for kind in _kinds(module).values()):
            _fix(module, max_model_len)
    if modules or max_model_len is None:
        return

    # The model's own code chooses frequencies, in which nothing can be fixed.
    for key, boundary in length_boundaries(model.config).items():
        if max_model_len > boundary:
            raise ConfigError(
                f"config key 'max_model_len' is {max_model_len}, but the code of "
                f"{type(model).__name__} chooses its rotary frequencies by the longest sequence "
                f"of a micro-batch, beyond {boundary} tokens (its {key!r}); set 'max_model_len' "
                f"to {boundary} or less"
            )


def longest_sequence(model: PreTrainedModel, max_model_len: int | None) -> int | None:
    """Most tokens of a sequence: ``max_model_len``, or without it the length limit of the
    frequencies (None: no limit).

    Call it after `fix_frequencies`.
    """
    if max_model_len is not None:
        return max_model_len
    modules = list(_rotary_modules(model))
    if not modules:
        return min(length_boundaries(model.config).values(), default=None)

    boundaries = []
    for module in modules:
        for layer_type, kind in _kinds(module).items():
            if kind in _LONGROPE:
                boundaries.append(_parameters(module.config, layer_type)[_ORIGINAL])
    return min(boundaries, default=None)


def length_boundaries(config: PretrainedConfig) -> dict[str, int]:
    """Config keys with the length beyond which transformers changes frequencies. Empty for most
    models.
    """
    text = config.get_text_config(decoder=True)
    found = {}
    for scaling in _scalings(text):
        key = _ORIGINAL if _kind(scaling) in _LONGROPE else _MOST
        of_model = getattr(text, key, None)
        length = of_model or scaling.get(key) or getattr(text, _MOST, None)
        if length is not None:
            found[key] = int(length)
    return found


def move_boundary(
    config: PretrainedConfig,
    key: str,
    length: int,
) -> None:
    """Change a twin's config so that frequencies change beyond ``length`` tokens. ``key`` is one of
    `length_boundaries`."""
    text = config.get_text_config(decoder=True)
    if hasattr(text, key):
        setattr(text, key, length)
    if key != _ORIGINAL:
        return
    for scaling in _scalings(text):
        if _kind(scaling) in _LONGROPE:
            scaling[key] = length
            scaling["attention_factor"] = 1.0


def _rotary_modules(model: nn.Module) -> Iterator[Any]:
    """Modules that choose their frequencies with transformers' ``dynamic_rope_update``."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(module, "rope_type") and isinstance(config, PretrainedConfig):
            yield module


def _kinds(module: Any) -> dict[str | None, str]:
    """Kinds of scaling by layer type, with the key None if all layers have the same."""
    if isinstance(module.rope_type, dict):
        return module.rope_type
    return {None: module.rope_type}


def _by_length(kind: str | None) -> bool:
    return kind is not None and (kind in _LONGROPE or "dynamic" in kind)


def _fix(module: Any, max_model_len: int | None) -> None:
    config = copy.deepcopy(module.config)
    module.config = config
    for layer_type, kind in list(_kinds(module).items()):
        if not _by_length(kind):
            continue
        parameters = _parameters(config, layer_type)
        if kind not in _LONGROPE:
            buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
            n_frequencies = getattr(module, buffer).shape[-1]
            _describe_as_longrope(parameters, n_frequencies, config.max_position_embeddings)
            kinds = {**_kinds(module), layer_type: "longrope"}
            module.rope_type = "longrope" if layer_type is None else kinds

        # Now there are two sets of frequencies. Both become the chosen one.
        is_long = max_model_len is not None and max_model_len > parameters[_ORIGINAL]
        _take_one_of_both(parameters, "long" if is_long else "short")


def _take_one_of_both(parameters: dict[str, Any], chosen: str) -> None:
    # PhiMoE alone has an ``mscale``.
    for what in ("factor", "mscale"):
        key = f"{chosen}_{what}"
        if key in parameters:
            parameters[f"short_{what}"] = parameters[key]
            parameters[f"long_{what}"] = parameters[key]


def _describe_as_longrope(
    parameters: dict[str, Any],
    n_frequencies: int,
    original: int,
) -> None:
    # ``dynamic`` divides frequency i by a power of the stretch. Its base stays: some models look
    # modules up by it.
    factor = parameters["factor"]
    dim = 2 * n_frequencies
    stretch = (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    long_factor = [stretch ** (2 * i / dim) for i in range(n_frequencies)]
    parameters |= {
        "rope_type": "longrope",
        "short_factor": [1.0] * n_frequencies,
        "long_factor": long_factor,
        "attention_factor": 1.0,
        _ORIGINAL: original,
    }


def _parameters(config: PretrainedConfig, layer_type: str | None) -> dict[str, Any]:
    parameters: Any = config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _scalings(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Config entries that describe a scaling by length, also under the names of older configs."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(given, dict):
        return
    # One for all layers, or one for each kind of layers. With ``alpha`` no length counts.
    for scaling in (given, *given.values()):
        if not isinstance(scaling, dict) or scaling.get("alpha"):
            continue
        if _by_length(_kind(scaling)):
            yield scaling


def _kind(scaling: dict[str, Any]) -> str | None:
    return scaling.get("rope_type") or scaling.get("type")
