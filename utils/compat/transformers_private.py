"""Private names of transformers: loading, converting and initialising models, and their rules for
weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from . import privates, require

_RULES = (
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
)

NAMES = privates(
    {
        "load folders as from_pretrained does": [
            "transformers:PreTrainedModel._load_pretrained_model"
            "(model, state_dict, checkpoint_files, load_config)",
            "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys(loading_info)",
            "transformers.modeling_utils:LoadStateDictConfig(weight_mapping)",
            "transformers.conversion_mapping:get_model_conversion_mapping(model)",
            "transformers.conversion_mapping:get_checkpoint_conversion_mapping(model_type)",
            "transformers.conversion_mapping:"
            "register_checkpoint_conversion_mapping(model_type_or_class_name, mapping, overwrite)",
            *(f"transformers:PreTrainedModel.{name}" for name in _RULES),
        ],
        "name and convert weights as save_pretrained does": [
            "transformers.core_model_loading:revert_weight_conversion(model, state_dict)",
            "transformers:PreTrainedModel._keys_to_ignore_on_save",
        ],
        "know what stays in float32": ["transformers:PreTrainedModel._get_dtype_plan(dtype)"],
        "build a second model without weights": [
            "transformers:PreTrainedModel._from_config(config)"
        ],
        "draw weights": ["transformers:PreTrainedModel._init_weights(module)"],
        "shard a model block by block": ["transformers:PreTrainedModel._no_split_modules"],
        "tell models with adapters": ["transformers:PreTrainedModel._hf_peft_config_loaded"],
        "check packing and choose the attention": [
            "transformers:PretrainedConfig._attn_implementation"
        ],
        "tell which heads an architecture has": [
            "transformers:AutoModelForCausalLM._model_mapping"
        ],
        "export a model's own code": [
            "transformers.dynamic_module_utils:custom_object_save(obj, folder)"
        ],
    }
)
require("transformers", NAMES)
PARALLEL = privates(
    {
        "share a model's matrices or experts between ranks (transformers has it from 5.23 on)": [
            "transformers:PreTrainedModel._resolve_parallel_plans(distributed_config)",
            "transformers.distributed.tensor_parallel:apply_tensor_parallelism"
            "(model, tp_mesh, tp_plan)",
            "transformers.distributed.expert_parallel:"
            "apply_expert_parallelism(model, ep_mesh, tp_mesh, plan, ep_implementation)",
        ],
    }
)
"""Names that only meshes with tensor or expert parallelism need, so that older releases work
without them.
"""

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import LoadStateDictConfig


def build_from_config(
    model_class: Any, config: PretrainedConfig, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """Build a model with new weights on the default device. ``options`` are those of
    ``from_config``.
    """
    return model_class._from_config(config, dtype=dtype, **options)


def load_state(model: PreTrainedModel, tensors: Mapping[str, Any]) -> Any:
    """Fill ``model`` like `from_pretrained`, and return its report: ``missing_keys``,
    ``unexpected_keys``, ``mismatched_keys`` and ``conversion_errors``.

    Args:
        model: its parameters and buffers are replaced.
        tensors: name in the folder -> tensor, or an object that supports ``[...]`` and ``to``.
    """
    config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))  # type: ignore[arg-type]
    found, _ = PreTrainedModel._load_pretrained_model(model, dict(tensors), None, config)
    return found


def loading_rules(model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """Return the class attributes on how a folder may name a model's tensors, and which tensors
    keep their dtype.
    """
    return {name: getattr(model_class, name) for name in ("base_model_prefix", *_RULES)}


def convert_like(model_class: type[PreTrainedModel], other: type[PreTrainedModel]) -> None:
    """Give ``model_class`` the conversions that transformers has for the name of the class
    ``other``, if it has any.
    """
    conversions = get_checkpoint_conversion_mapping(other.__name__)
    if conversions is not None:
        register_checkpoint_conversion_mapping(model_class.__name__, conversions, overwrite=True)


def drop_tolerated_keys(model: PreTrainedModel, found: Any) -> None:
    """Remove the keys that transformers tolerates from the report of `load_state`."""
    model._adjust_missing_and_unexpected_keys(found)


def conversions_of(model: PreTrainedModel) -> list[Any]:
    """Return the conversions that were applied when ``model`` was loaded. ``save_pretrained``
    reverts them.
    """
    return list(getattr(model, "_weight_conversions", ()))


def set_conversions(model: PreTrainedModel, conversions: list[Any]) -> None:
    """Set the conversions that ``save_pretrained`` and `revert_weight_conversion` revert."""
    model._weight_conversions = conversions  # type: ignore[assignment]


def keys_not_saved(model: PreTrainedModel) -> list[str]:
    """Return the ``state_dict`` keys that ``save_pretrained`` leaves out."""
    return list(getattr(model, "_keys_to_ignore_on_save", None) or ())


def float32_patterns(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return patterns of ``state_dict`` keys -> dtype, for tensors that keep another dtype in a
    model loaded in ``dtype``.
    """
    # transformers writes a star for any text, as a shell does.
    plan = model._get_dtype_plan(dtype)
    return {pattern.replace("*", ".*"): kept for pattern, kept in plan.items()}


def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Initialise the parameters and buffers of ``module`` itself, as in a new ``model``."""
    model._init_weights(module)


@contextmanager
def parameters_left_alone(model: PreTrainedModel) -> Iterator[None]:
    """Let `initialize_module` compute buffers alone. Parameters keep their values."""
    params = list(model.parameters())
    for param in params:
        param._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param in params:
            del param._is_hf_initialized  # type: ignore[attr-defined]


def unsplit_classes(model: PreTrainedModel) -> set[str]:
    """Return the class names of the repeated blocks, which belong on one device."""
    return set(model._no_split_modules or ())


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether transformers has added adapters (LoRA ...) to the model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def forget_adapters(view: PreTrainedModel) -> None:
    """Mark a view of a model, which leaves the adapters out, as a model without adapters."""
    view.__dict__["_hf_peft_config_loaded"] = False


def has_head(factory: Any, config: PretrainedConfig) -> bool:
    """Return whether an auto class (``AutoModelForCausalLM``) has a model for such a config."""
    return type(config) in factory._model_mapping


def class_with_head(factory: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the model class that an auto class has for this type of config, or None."""
    if not has_head(factory, config):
        return None
    found = factory._model_mapping[type(config)]

    # Some configs have several classes. The first is the usual one.
    if isinstance(found, tuple | list):
        return found[0]
    return found


def commit_of(config: PretrainedConfig) -> str | None:
    """Return the commit of the hub repository that a config was loaded from, or None for a local
    folder.
    """
    return getattr(config, "_commit_hash", None)


def attention_of(config: PretrainedConfig) -> str:
    """Return the name of the attention that a model was built with."""
    return str(config._attn_implementation)


def set_attention(model: PreTrainedModel, name: str, *, instead_of: str) -> None:
    """Replace the attention ``instead_of`` by ``name`` in the parts of a built model that use it.

    transformers' own ``set_attn_implementation`` does not reach configs that only inner modules
    have.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for part in _parts(config):
                if attention_of(part) == instead_of:
                    part._attn_implementation = {"": name}  # type: ignore[assignment]


def tensor_parallel_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return how transformers cuts each module and parameter over ``size`` ranks. Empty if it has
    no plan.

    Raises:
        UnsupportedVersionError: transformers is older than 5.23.
    """
    require("transformers", PARALLEL)
    from transformers.distributed import DistributedConfig

    if not model.tp_plan:
        return {}
    return model._resolve_parallel_plans(DistributedConfig(tp_size=size))[0]


def apply_parallel_plan(model: PreTrainedModel, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Cut parameters, and give modules a forward with collectives, as a plan of
    `tensor_parallel_plan` says.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, plan)


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    # A config of several modalities has one for each of them.
    yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PretrainedConfig):
            yield from _parts(part)


def plan_experts(model: PreTrainedModel, n_ranks: int) -> dict[str, str]:
    """Return how transformers splits the experts of a model: names of modules and of their
    parameters -> style.

    Rules for other modules are left out, because they are for ranks with the same data. Empty
    without a plan.

    Raises:
        UnsupportedVersionError: this transformers cannot split experts.
    """
    require("transformers", PARALLEL)
    from transformers.distributed import DistributedConfig

    if not model.ep_plan:
        return {}
    config = DistributedConfig(fsdp_size=n_ranks, ep_size=n_ranks)
    plan = model._resolve_parallel_plans(config)[1]

    # The styles of the experts' parameters, and of the modules that send tokens to them.
    styles = ("grouped_gemm", "ep_dispatch_experts")
    return {name: style for name, style in plan.items() if style in styles}


def split_experts(model: PreTrainedModel, mesh: Any, same_data: Any, plan: dict[str, str]) -> None:
    """Split experts over ``mesh`` by a plan of `plan_experts`. ``same_data``: mesh of the ranks
    with the same data.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    apply_expert_parallelism(model, mesh, same_data, plan, ep_implementation="all_to_all")
