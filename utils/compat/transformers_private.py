"""What transformers keeps to itself: how it loads, converts and initialises models, and what it knows of weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from . import Private, require

_LOAD = "load folders as from_pretrained does"
_EXPORT = "name and convert weights as save_pretrained does"
_RULES = (
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
)

NAMES = (
    Private(
        "transformers:PreTrainedModel._load_pretrained_model",
        _LOAD,
        ("model", "state_dict", "checkpoint_files", "load_config"),
    ),
    Private("transformers:PreTrainedModel._adjust_missing_and_unexpected_keys", _LOAD, ("loading_info",)),
    Private("transformers.modeling_utils:LoadStateDictConfig", _LOAD, ("weight_mapping",)),
    Private("transformers.conversion_mapping:get_model_conversion_mapping", _LOAD, ("model",)),
    Private("transformers.core_model_loading:revert_weight_conversion", _EXPORT, ("model", "state_dict")),
    *(Private(f"transformers:PreTrainedModel.{name}", _LOAD) for name in _RULES),
    Private("transformers:PreTrainedModel._keys_to_ignore_on_save", _EXPORT),
    Private("transformers:PreTrainedModel._get_dtype_plan", "know what stays in float32", ("dtype",)),
    Private("transformers:PreTrainedModel._from_config", "build a second model without weights", ("config",)),
    Private("transformers:PreTrainedModel._init_weights", "draw weights", ("module",)),
    Private("transformers:PreTrainedModel._no_split_modules", "shard a model block by block"),
    Private("transformers:PreTrainedModel._hf_peft_config_loaded", "tell models with adapters"),
    Private("transformers:PretrainedConfig._attn_implementation", "check packing and choose the attention"),
    Private("transformers:AutoModelForCausalLM._model_mapping", "tell which heads an architecture has"),
    Private("transformers.dynamic_module_utils:custom_object_save", "export a model's own code", ("obj", "folder")),
)
require("transformers", NAMES)

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import LoadStateDictConfig

__all__ = [
    "attention_of",
    "build_from_config",
    "class_with_head",
    "commit_of",
    "conversions_of",
    "custom_object_save",
    "drop_tolerated_keys",
    "float32_patterns",
    "forget_adapters",
    "has_adapters",
    "has_head",
    "initialize_module",
    "keys_not_saved",
    "load_state",
    "loading_rules",
    "revert_weight_conversion",
    "set_attention",
    "set_conversions",
    "unsplit_classes",
]


def build_from_config(
    model_class: Any, config: PretrainedConfig, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """A model with weights of its own, on the default device; ``options`` as ``attn_implementation``."""
    return model_class._from_config(config, dtype=dtype, **options)


def load_state(model: PreTrainedModel, tensors: Mapping[str, Any]) -> Any:
    """Fill ``model`` as `from_pretrained` does, and return what it found: ``missing_keys``, ``unexpected_keys``,
    ``mismatched_keys`` and ``conversion_errors``.

    Args:
        model: its own parameters and buffers are replaced.
        tensors: name in the folder -> tensor, or what can be indexed with ``[...]`` and moved with ``to``.
    """
    config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))  # type: ignore[arg-type]
    found, _ = PreTrainedModel._load_pretrained_model(model, dict(tensors), None, config)
    return found


def loading_rules(model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """Class attributes that say under which names a folder may have a model's tensors, and which dtypes they keep."""
    return {name: getattr(model_class, name) for name in ("base_model_prefix", *_RULES)}


def drop_tolerated_keys(model: PreTrainedModel, found: Any) -> None:
    """Take out of what `load_state` returned the keys that transformers neither misses nor reports."""
    model._adjust_missing_and_unexpected_keys(found)


def conversions_of(model: PreTrainedModel) -> list[Any]:
    """The conversions that were of use when ``model`` was loaded; ``save_pretrained`` reverts them."""
    return list(getattr(model, "_weight_conversions", ()))


def set_conversions(model: PreTrainedModel, conversions: list[Any]) -> None:
    """Have ``save_pretrained`` and `revert_weight_conversion` revert these."""
    model._weight_conversions = conversions  # type: ignore[assignment]


def keys_not_saved(model: PreTrainedModel) -> list[str]:
    """``state_dict`` keys that ``save_pretrained`` leaves out."""
    return list(getattr(model, "_keys_to_ignore_on_save", None) or ())


def float32_patterns(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Regular expression for ``state_dict`` keys -> dtype, of what has another one in a model loaded in ``dtype``."""
    return {pattern.replace("*", ".*"): kept for pattern, kept in model._get_dtype_plan(dtype).items()}


def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Draw the parameters, and compute the buffers, that ``module`` itself has in ``model``."""
    model._init_weights(module)


def unsplit_classes(model: PreTrainedModel) -> set[str]:
    """Names of the classes of modules that belong on one device: the repeated blocks."""
    return set(model._no_split_modules or ())


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether transformers has put adapters (LoRA ...) into the model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def forget_adapters(view: PreTrainedModel) -> None:
    """Have a view of a model, whose adapters it leaves out, taken for a model without them."""
    view.__dict__["_hf_peft_config_loaded"] = False


def has_head(factory: Any, config: PretrainedConfig) -> bool:
    """Whether an auto class (``AutoModelForCausalLM``) has a model for a config of this class."""
    return type(config) in factory._model_mapping


def class_with_head(factory: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """What an auto class makes for a config of this class; None if it makes nothing."""
    found = factory._model_mapping[type(config)] if has_head(factory, config) else None
    return found[0] if isinstance(found, tuple | list) else found


def commit_of(config: PretrainedConfig) -> str | None:
    """The commit of the hub's repository that a config was loaded from; None: not from the hub."""
    return getattr(config, "_commit_hash", None)


def attention_of(config: PretrainedConfig) -> str:
    """The name of the attention that a model was built with."""
    return str(config._attn_implementation)


def set_attention(model: PreTrainedModel, name: str, *, instead_of: str) -> None:
    """Have the parts of a built model that have one attention take another; no ``config.json`` says which.

    transformers' own ``set_attn_implementation`` does not reach configs that only modules inside have.
    """
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            for part in _parts(config):
                if attention_of(part) == instead_of:
                    part._attn_implementation = {"": name}  # type: ignore[assignment]  (of this part alone)


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PretrainedConfig):
            yield from _parts(part)
