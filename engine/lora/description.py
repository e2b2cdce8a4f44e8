"""Adapters as plain data beside their tensors: enough to merge them, or to make a folder of PEFT, without the model."""

import json
from typing import Any

from torch import nn

from ...utils.errors import CheckpointMismatchError
from .layers import plain_adapters, transformers_model


def describe_adapters(model: nn.Module) -> dict[str, Any] | None:
    """What a checkpoint says of the adapters of a model; None of one that has none, several, or others than plain LoRA,
    or that does not know their config.

    Returns:
        ``name`` of the adapter, ``config`` (what PEFT's ``adapter_config.json`` holds), and ``scaling``: name of an
        adapted layer in the plain model -> alpha / rank.
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
    if name not in configs:  # they were put into a part of the model, which alone knows of it
        return None
    config = json.loads(json.dumps(configs[name].to_dict() | {"inference_mode": True}, default=_plain))
    scaling = {weight.removesuffix(".weight"): adapter.scaling for weight, (adapter,) in adapted.items()}
    return {"name": name, "config": config, "scaling": scaling}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
