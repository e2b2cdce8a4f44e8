"""Put adapters into a model on meta, and initialise them when it has memory.

Adapters are added before the model is sharded, so that FSDP2 shards, gathers and reduces them with
their block. They are float32 and trained. The rest is frozen, in the dtype of the folder. The
initial values depend only on the seed and the layer's name, as for all initial weights (see
`training.model`).
"""

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...utils.errors import CheckpointMismatchError, ConfigError
from ..api import SaveLoadMeta
from ..config import ALL_LINEAR, TrainEngineConfig
from ..training.model import untrained_by_text
from ..training.value_model import body_name
from ..training.weights import keep_own_shard
from .adapters import adapted_layers, adapters_of


def add_adapters(
    model: PreTrainedModel, config: TrainEngineConfig, base: str, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Freeze ``model``, on meta and not sharded yet, and put LoRA layers into it. The head of a
    critic stays trained.

    ``base`` is the name of the base model in folders of the adapters, and ``dtypes`` has the dtype
    of each frozen parameter. Raises ConfigError if peft is not installed, or if
    ``config.target_modules`` names no layer, or one that LoRA cannot adapt.
    """
    peft = _import_peft()
    heads = [name for name, child in model.named_children() if name != body_name(model)]
    towers = untrained_by_text(model) if config.train_vision else []
    targets = _targets(model, config.target_modules, towers)

    # A name in a list stands for one module without its children, so towers need a pattern.
    takes_all = ALL_LINEAR in config.target_modules or not config.target_modules
    excluded: Any = heads if takes_all else None
    if towers:
        outside = list(towers)
        if takes_all:
            outside += heads
        excluded = rf"({'|'.join(map(re.escape, outside))})(\..*)?"
    named = dict(model.named_parameters())
    adapted = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        exclude_modules=excluded,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="TOKEN_CLS" if config.is_critic else "CAUSAL_LM",
    )

    # New layers have no memory yet, as the rest of the model has none.
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.add_adapter(adapted)
        adapted.base_model_name_or_path = base
        for name, layer in adapted_layers(model).items():
            _require_linear(model, name, layer)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"config key 'target_modules' is {config.target_modules}: {error}"
        ) from error

    # peft has frozen all of the model. The value head of a critic is trained.
    for name, param in named.items():
        if config.is_critic and name.partition(".")[0] in heads:
            param.requires_grad_(True)
        else:
            param.data = param.data.to(dtypes[name])


def require_base(config: TrainEngineConfig) -> None:
    """Raise ConfigError if the engine trains all weights, because its base is then gone."""
    if not config.use_lora:
        raise ConfigError(
            "config key 'use_lora' is false: without adapters the base is not there any more"
        )


def require_adapters_for(
    config: TrainEngineConfig, meta: SaveLoadMeta, *, loads: bool = False
) -> None:
    """Raise ConfigError if a PEFT folder cannot hold the weights, or if a load would replace the
    base of adapters.
    """
    if meta.weight_format == "peft" and (config.is_critic or not config.use_lora):
        unmet = "'use_lora' is false"
        if config.use_lora:
            unmet = "'is_critic' is true: its value head is no adapter"
        raise ConfigError(f"weight_format is 'peft', but config key {unmet}; use 'hf' or 'dcp'")
    if loads and meta.weight_format == "hf" and config.use_lora:
        raise ConfigError(
            "weight_format 'hf' would put another base under the adapters, which a checkpoint of "
            "this run could not be resumed on; name that folder as config key 'path', or load "
            "adapters with 'peft' or 'dcp'"
        )


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "config key 'use_lora' is true, which needs the package peft: pip install "
            "'holdfast[lora]'"
        ) from error
    return peft


def _targets(model: PreTrainedModel, names: list[str], towers: list[str]) -> list[str]:
    """Names of the layers to adapt: the last parts of the names of all linear layers but the
    head's, or ``names``.

    Layers in ``towers`` are not adapted.
    """
    inside = tuple(f"{tower}." for tower in towers)
    modules = {
        name: module
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside or "\0")
    }
    body = f"{body_name(model)}."
    linear = {
        name.rpartition(".")[2]
        for name, module in modules.items()
        if name.startswith(body) and isinstance(module, nn.Linear | Conv1D)
    }
    if not names or ALL_LINEAR in names:
        return sorted(linear)

    # peft ignores names that match no layer, if others do.
    for wanted in names:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in modules):
            where = ""
            if towers:
                where = " outside of its vision tower, where LoRA is not supported"
            raise ConfigError(
                f"config key 'target_modules' names {wanted!r}, which {type(model).__name__} does "
                f"not have{where}; its linear layers are {', '.join(sorted(linear))} (or "
                f"{ALL_LINEAR!r} for all of them)"
            )
    return sorted(names)


def _require_linear(model: PreTrainedModel, name: str, layer: Any) -> None:
    """Raise ConfigError if an adapted layer is not linear, or if its weight is used elsewhere."""
    try:
        adapters_of(layer)
    except CheckpointMismatchError:
        raise ConfigError(
            f"config key 'target_modules' takes in {name}, a "
            f"{type(layer.get_base_layer()).__name__}; name linear layers only"
        ) from None

    # The other user of a tied weight would compute without the adapter.
    weight = layer.get_base_layer().weight
    if sum(param is weight for _, param in model.named_parameters(remove_duplicate=False)) > 1:
        raise ConfigError(
            f"config key 'target_modules' takes in {name}, whose weight is tied to another one; "
            "leave it out"
        )


@torch.no_grad()
def draw_adapters(model: nn.Module, seed: int) -> None:
    """Initialise adapters as peft does: A uniform in ±sqrt(1 / in), B zero, so that the model
    computes as its base.

    A is drawn from the seed and the name of its layer. Each rank keeps its own rows.
    """
    for name, layer in adapted_layers(model).items():
        for adapter in adapters_of(layer):
            key = f"{seed}:{name}.lora_A"
            own_seed = xxhash.xxh3_64_intdigest(key.encode()) >> 1
            generator = torch.Generator().manual_seed(own_seed)

            # Kaiming's uniform with a = sqrt(5) is this bound: sqrt(6 / ((1 + 5) * in)).
            drawn = torch.empty(adapter.a.shape, dtype=torch.float32)
            bound = 1 / math.sqrt(drawn.shape[1])
            drawn.uniform_(-bound, bound, generator=generator)
            keep_own_shard(adapter.a, drawn)
            keep_own_shard(adapter.b, torch.zeros(adapter.b.shape))
