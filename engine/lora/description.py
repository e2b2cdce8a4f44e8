"""The facts about adapters that a checkpoint stores with their tensors.

- The description is enough to merge plain LoRA, or to make a PEFT folder, without the model.
- The settings are values that PEFT's layers use but no tensor holds: the scaling, and the merged adapters.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ..memory.tensors import clean_name
from .layers import adapted_layers, is_plain, plain_adapters, transformers_model


def describe_adapters(model: nn.Module) -> dict[str, Any] | None:
    """Describe the adapters of a model. None if there are none, several, others than plain LoRA, or no config for them.

    Returns ``name`` of the adapter, ``config`` (the content of PEFT's ``adapter_config.json``), and ``scaling``: name
    of an adapted layer in the plain model -> alpha / rank.
    """
    try:
        adapted = plain_adapters(model)
    except CheckpointMismatchError:
        return None
    names = {adapter.name for adapters in adapted.values() for adapter in adapters}
    if len(names) != 1:
        return None
    (name,) = names
    configs: Any = getattr(transformers_model(model), "peft_config", {})
    if name not in configs:  # only the part of the model that they were added to has it
        return None
    config = json.loads(json.dumps(configs[name].to_dict() | {"inference_mode": True}, default=_plain))
    scaling = {weight.removesuffix(".weight"): adapter.scaling for weight, (adapter,) in adapted.items()}
    return {"name": name, "config": config, "scaling": scaling}


def adapter_settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of each adapted layer, by its name in the model.

    Each is a dict with ``scaling`` (name of the adapter -> alpha / rank) and ``merged`` (names of the adapters that are
    merged into the layer's weight now).

    Raises:
        ConfigError: merged adapters keep further values that a checkpoint does not hold, as those of DoRA do.
    """
    found = {}
    for name, layer in _tuned_layers(model).items():
        if layer.merged_adapters and not is_plain(layer):
            raise ConfigError(
                f"the adapters of {name} ({type(layer).__name__}) are merged into its weight, and keep values that a "
                "checkpoint does not hold; call unmerge_adapter() before a checkpoint"
            )
        scaling = {adapter: float(value) for adapter, value in getattr(layer, "scaling", {}).items()}
        found[name] = {"scaling": scaling, "merged": list(layer.merged_adapters)}
    return found


def check_settings(model: nn.Module, saved: Any) -> None:
    """Raise CheckpointMismatchError if the scaling of an adapter differs from the settings in a checkpoint."""
    if not _are_settings(saved):
        raise CheckpointCorruptError("'adapters' of the checkpoint does not hold settings of adapters")
    for name, layer in _tuned_layers(model).items():
        for adapter, there in saved[name]["scaling"].items() if name in saved else ():
            here = getattr(layer, "scaling", {}).get(adapter)
            if here is not None and float(here) != there:
                raise CheckpointMismatchError(
                    f"the checkpoint has adapter {adapter!r} of {name} with scaling {there}, this model has {here}: "
                    "lora_alpha (or use_rslora) is another one; set it as in the run that wrote the checkpoint"
                )


def restore_merged(model: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Mark adapters as merged if the weights of the checkpoint contain them, else as not merged."""
    for name, layer in _tuned_layers(model).items():
        if name in saved:
            layer.merged_adapters = list(saved[name]["merged"])


def _are_settings(saved: Any) -> bool:
    return isinstance(saved, dict) and all(
        isinstance(layer, dict)
        and isinstance(scaling := layer.get("scaling"), dict)
        and all(isinstance(value, float) for value in scaling.values())
        and isinstance(merged := layer.get("merged"), list)
        and all(isinstance(adapter, str) for adapter in merged)
        for layer in saved.values()
    )


def _tuned_layers(model: nn.Module) -> dict[str, Any]:
    return {clean_name(n): layer for n, layer in adapted_layers(model).items() if hasattr(layer, "merged_adapters")}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
