"""Adapters in a model: its adapted layers, the model without them, and the facts that a checkpoint
stores with them.

peft replaces each adapted layer: ``q_proj`` becomes a module with ``q_proj.base_layer``,
``q_proj.lora_A`` and ``q_proj.lora_B``, so that no tensor has its name in the files any more.
`plain_view` restores the modules and names of the architecture, over the same parameters.

peft is not imported here: if a model has layers of peft, other code has imported it.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...utils.compat.torch_private import children_of, replace_members
from ...utils.compat.transformers_private import forget_adapters
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ..memory.tensors import clean_name
from ..training.unsharded import unsharded_view


@dataclass(frozen=True)
class Adapter:
    """One pair of low-rank matrices: the layer computes with ``W + scaling * B @ A``."""

    name: str  # of the adapter, for peft ("default")
    a: Tensor  # ``[rank, in]``, live (sharded)
    b: Tensor  # ``[out, rank]``
    scaling: float  # alpha / rank
    transposed: bool  # W is ``[in, out]``, as GPT-2 keeps it

    def rows(self, first: int, last: int, a: Tensor, b: Tensor) -> Tensor:
        """Rows ``[first, last)`` of ``scaling * B @ A``, with the shape of W, for the whole values
        ``a`` and ``b``.
        """
        if self.transposed:
            delta = a[:, first:last].T @ b.T
        else:
            delta = b[first:last] @ a
        return delta * self.scaling


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model in a ``PeftModel``, or any other module itself."""
    outer = cast(Any, model)
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return outer.get_base_model()
    return outer


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Name -> layer of peft, for every module that any method of peft has replaced."""
    peft_utils = sys.modules.get("peft.tuners.tuners_utils")
    if peft_utils is None:
        return {}
    layers = (peft_utils.BaseTunerLayer, sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper)
    return {name: module for name, module in model.named_modules() if isinstance(module, layers)}


def adapters_of(layer: Any) -> list[Adapter]:
    """The active adapters of a layer that are not merged into its weight yet.

    Raises CheckpointMismatchError if the layer is not a linear layer with plain LoRA.
    """
    problem = _not_plain(layer)
    if problem is not None:
        raise CheckpointMismatchError(
            f"a {type(layer).__name__} of peft {problem}, which is not merged here; export "
            "model.merge_and_unload(), or save the adapters with PEFT's save_pretrained"
        )
    if layer.merged:
        return []
    return [
        Adapter(
            name=name,
            a=layer.lora_A[name].weight,
            b=layer.lora_B[name].weight,
            scaling=float(layer.scaling[name]),
            transposed=bool(layer.fan_in_fan_out),
        )
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


def _not_plain(layer: Any) -> str | None:
    """The reason why a layer of peft is more than ``W + s B A``, if it is."""
    # Subclasses and variants (DoRA ...) compute with further values.
    lora = sys.modules.get("peft.tuners.lora")
    if lora is None or type(layer) is not lora.Linear:
        return "is no linear layer with LoRA"
    if layer.lora_variant:
        variant = next(iter(layer.lora_variant.values()))
        return f"is a variant of LoRA ({type(variant).__name__})"
    if any(layer.lora_bias.values()):
        return "adapts the bias, too"
    return None


def plain_view(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with the modules and names of its architecture, over the same parameters. Itself
    without adapters.

    A view for questions and for loading, as `unsharded_view` is. Its values are those of the base,
    without the adapters. If peft trains a whole layer (``modules_to_save``), the view has the
    trained one. Also takes a ``PeftModel``. Raises CheckpointMismatchError if a layer of peft is
    not plain LoRA.
    """
    return _view(model, _plain_name)


def base_view(model: PreTrainedModel) -> PreTrainedModel:
    """`plain_view` of the frozen weights, for any tuner. If a whole layer is trained, the view has
    the original.
    """
    return _view(model, _original_name)


def _view(model: PreTrainedModel, name_of: Callable[[str, Any], str]) -> PreTrainedModel:
    model = transformers_model(model)
    if not adapted_layers(model):
        return model
    view = unsharded_view(model)

    # The plain layer takes the place of peft's in its parent, whose other children stay.
    for name, layer in adapted_layers(view).items():
        plain = view.get_submodule(name_of(name, layer))
        parent_name, _, own = name.rpartition(".")
        parent = view.get_submodule(parent_name)
        replace_members(parent, children=children_of(parent) | {own: plain})
    forget_adapters(view)
    return view


def _original_name(name: str, layer: Any) -> str:
    """Name of the module that peft has put its layer around, or of a layer without one."""
    for child in ("base_layer", "original_module"):
        if child in children_of(layer):
            name = f"{name}.{child}"
    return name


def _plain_name(name: str, layer: Any) -> str:
    """Name of the module that replaces a layer of peft in the plain model."""
    if hasattr(layer, "modules_to_save"):
        return f"{name}.modules_to_save.{layer.active_adapters[0]}"
    adapters_of(layer)  # raises if the layer is not plain
    return f"{name}.base_layer"


def plain_adapters(model: nn.Module) -> dict[str, list[Adapter]]:
    """Name of a weight in `plain_view` -> the adapters to add to it. Weights without adapters are
    left out.
    """
    if not adapted_layers(model):
        return {}

    # A view, because the live model may have other names (see `unsharded_view`).
    view = unsharded_view(transformers_model(model))
    found = {}
    for name, layer in adapted_layers(view).items():
        if hasattr(layer, "lora_A"):
            adapters = adapters_of(layer)
            if adapters:
                found[f"{name}.weight"] = adapters
    return found


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute as its base inside the block: the policy that training began with.

    Only the computation changes, no ``requires_grad`` and no value.
    """
    layers = list(adapted_layers(model).values())
    if not layers:
        yield
        return

    # Here, because the module imports peft, which is installed if the model has its layers.
    from ...utils.compat.peft_private import is_off, switch_off

    # Some may be off already, and stay off.
    before = [is_off(layer) for layer in layers]
    for layer in layers:
        switch_off(layer)
    try:
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            switch_off(layer, off)


def describe_adapters(model: nn.Module) -> dict[str, Any] | None:
    """Describe the adapters of a model: enough to merge plain LoRA, or to make a PEFT folder,
    without the model.

    Returns ``name`` of the adapter, ``config`` (the content of PEFT's ``adapter_config.json``), and
    ``scaling``: name of an adapted layer in the plain model -> alpha / rank. None if there are no
    adapters, several, others than plain LoRA, or no config for them.
    """
    # One adapter of plain LoRA can be described.
    try:
        adapted = plain_adapters(model)
    except CheckpointMismatchError:
        return None
    names = {adapter.name for adapters in adapted.values() for adapter in adapters}
    if len(names) != 1:
        return None
    (name,) = names

    # Only the part of the model that they were added to has their config.
    configs: Any = getattr(transformers_model(model), "peft_config", {})
    if name not in configs:
        return None
    config = configs[name].to_dict() | {"inference_mode": True}
    scaling = {}
    for weight, (adapter,) in adapted.items():
        scaling[clean_name(weight.removesuffix(".weight"))] = adapter.scaling
    return {
        "name": name,
        "config": json.loads(json.dumps(config, default=_plain)),
        "scaling": scaling,
    }


def adapter_settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The values that PEFT's layers use but no tensor holds, by the name of the layer in the model.

    Each is a dict with ``scaling`` (name of the adapter -> alpha / rank) and ``merged`` (names of
    the adapters that are merged into the layer's weight now). Raises ConfigError if merged adapters
    keep further values that a checkpoint does not hold, as those of DoRA do.
    """
    found = {}
    for name, layer in _tuned_layers(model).items():
        if layer.merged_adapters and _not_plain(layer):
            raise ConfigError(
                f"the adapters of {name} ({type(layer).__name__}) are merged into its weight, and "
                "keep values that a checkpoint does not hold; call unmerge_adapter() before a "
                "checkpoint"
            )
        scaling = getattr(layer, "scaling", {})
        scaling = {adapter: float(value) for adapter, value in scaling.items()}
        found[name] = {"scaling": scaling, "merged": list(layer.merged_adapters)}
    return found


def check_settings(model: nn.Module, saved: Any) -> None:
    """Raise CheckpointMismatchError if an adapter is scaled differently in the `adapter_settings`
    of a checkpoint.
    """
    if not _are_settings(saved):
        raise CheckpointCorruptError(
            "'adapters' of the checkpoint does not hold settings of adapters"
        )
    # Layers and adapters that only one side has are compared with the tensors, not here.
    for name, layer in _tuned_layers(model).items():
        if name not in saved:
            continue
        scaling = getattr(layer, "scaling", {})
        for adapter, there in saved[name]["scaling"].items():
            here = scaling.get(adapter)
            if here is not None and float(here) != there:
                raise CheckpointMismatchError(
                    f"the checkpoint has adapter {adapter!r} of {name} with scaling {there}, this "
                    f"model has {here}: lora_alpha (or use_rslora) is another one; set it as in "
                    "the run that wrote the checkpoint"
                )


def restore_merged(model: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Mark adapters as merged if the weights of the checkpoint contain them, else as not merged."""
    for name, layer in _tuned_layers(model).items():
        if name in saved:
            layer.merged_adapters = list(saved[name]["merged"])


def _are_settings(saved: Any) -> bool:
    """Whether ``saved``, of a file that may be damaged, has the form of `adapter_settings`."""
    if not isinstance(saved, dict):
        return False
    for layer in saved.values():
        if not isinstance(layer, dict):
            return False
        scaling = layer.get("scaling")
        if not isinstance(scaling, dict):
            return False
        merged = layer.get("merged")
        if not isinstance(merged, list):
            return False
        if not all(isinstance(value, float) for value in scaling.values()):
            return False
        if not all(isinstance(adapter, str) for adapter in merged):
            return False
    return True


def _tuned_layers(model: nn.Module) -> dict[str, Any]:
    """The layers whose adapters can be merged, by the names that checkpoints use."""
    layers = adapted_layers(model)
    return {
        clean_name(name): layer
        for name, layer in layers.items()
        if hasattr(layer, "merged_adapters")
    }


def _plain(value: Any) -> Any:
    """A value of peft's config that JSON does not have."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
