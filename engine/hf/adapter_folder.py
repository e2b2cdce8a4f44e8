"""PEFT folders with adapters: ``adapter_model.safetensors`` and ``adapter_config.json``.

The layers themselves are in `engine.lora.adapters`. `engine.servers.adapters` gives such folders to
servers.

``PeftModel.from_pretrained`` and vLLM load such a folder on top of the base model. Adapters are
small: every rank gathers or reads all of them. All methods of PEFT that adapt layers can be saved
(LoRA, DoRA, IA3, ``modules_to_save``), from any ``PeftModel``, but only plain LoRA can be loaded.
"""

import copy
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...utils.atomic_folder import as_write_error, staged_folder
from ...utils.distributed import RankGroup, all_ranks_succeed, get_rank
from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
)
from ...utils.files import StrPath, fsync_file, walk_files
from ...utils.remote import FETCH_FIRST, require_local
from ..api import HFExportOptions
from ..lora.adapters import adapted_layers, plain_adapters
from ..memory.offloaded import require_onloaded
from ..memory.tensors import clean_name, reshard
from ..memory.weight_changes import changing_weights
from ..training.unsharded import unsharded_view
from ..training.weights import keep_own_shard
from .safetensors_layout import ADAPTER_NAME
from .shard_ranges import whole_tensor

WEIGHTS = "adapter_model.safetensors"
CONFIG = ADAPTER_NAME
ROOT = "base_model.model."
"""PEFT's name for the model inside a PeftModel."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Begins of PEFT's ``init_lora_weights`` that also change the weights of the base."""


def save_adapters(
    model: nn.Module,
    path: StrPath,
    options: HFExportOptions,
    *,
    group: RankGroup = None,
    finish: Callable[[], None] | None = None,
) -> None:
    """Write the adapters of a model as a new PEFT folder. Every rank of ``group`` calls this.

        save_adapters(model, "exports/step_100", HFExportOptions(tokenizer=tokenizer))

    Args:
        model: with layers of peft, sharded or not, or a ``PeftModel``.
        path: the folder to create, not a URL (ConfigError). It must not exist, or be empty
            (CheckpointExistsError).
        options: ``dtype``, ``tokenizer`` and ``processor`` are used. Without a dtype the adapters
            stay as they are.
        group: control group.
        finish: called on every rank when the adapters are read and nothing is visible yet.

    Raises:
        CheckpointMismatchError: see `adapter_tensors`.
        CheckpointWriteError: rank 0 could not write.
        PeerError: another rank failed.
    """
    folder = require_local(path, "saving adapters", "give a local folder, and upload it then")
    with staged_folder(folder, group) as staging:
        write_adapters(model, staging, options, group=group)
        if finish is not None:
            finish()


def write_adapters(
    model: nn.Module,
    folder: Path,
    options: HFExportOptions,
    *,
    group: RankGroup,
) -> list[str]:
    """Write the files of `save_adapters` into a folder that the caller commits. Returns the files
    to describe.
    """
    with all_ranks_succeed(f"preparing {folder}", group):
        tensors = adapter_tensors(model)
    whole = {name: whole_tensor(tensor, group) for name, tensor in tensors.items()}
    with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
        if get_rank(group) != 0:
            return []

        # Counters in ``modules_to_save`` keep their dtype.
        if options.dtype is not None:
            for name, tensor in whole.items():
                if tensor.is_floating_point():
                    whole[name] = tensor.to(options.dtype)

        # The weights come last, because they are made durable by themselves.
        config = copy.deepcopy(_peft_config(model))
        config.inference_mode = True
        _sort_sets(config)
        config.save_pretrained(str(folder))
        for part in (options.tokenizer, options.processor):
            if part is not None:
                part.save_pretrained(folder)
        for name in walk_files(folder):
            fsync_file(folder / name)
        write_adapter_weights(folder, whole)
        return list(walk_files(folder))


def _sort_sets(config: Any) -> None:
    """Give sets an order, because theirs differs between processes."""
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, name, sorted(value))


def require_adapters(model: PreTrainedModel) -> None:
    """Raise ConfigError unless plain LoRA is trained and nothing else, with one scaling, so that it
    can be published alone.
    """
    what = "WeightUpdateMeta type 'adapter' publishes LoRA adapters alone, but"
    if not plain_adapters(model):
        raise ConfigError(
            f"{what} {type(model).__name__} has none (config key 'use_lora'); publish by type "
            "'disk'"
        )
    others = _trained_beside(model, _named_adapters(model))
    if others:
        raise ConfigError(
            f"{what} {others[0]} ({len(others)} such) is trained beside them; publish by type "
            "'disk'"
        )

    # Servers read no patterns: they scale all layers alike.
    config = _peft_config(model)
    scaling = _scaling(config, config.lora_alpha, config.r)
    for weight, (adapter,) in plain_adapters(model).items():
        if adapter.scaling != scaling:
            raise ConfigError(
                f"{what} servers scale all of them by {scaling:g} (lora_alpha {config.lora_alpha}, "
                f"r {config.r}), and {weight} has {adapter.scaling:g}; train without "
                "alpha_pattern and rank_pattern, or publish by type 'disk'"
            )


def write_adapter_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and fsync the weights of a PEFT folder: name in the folder -> whole tensor."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    os.chmod(folder / WEIGHTS, 0o644)
    fsync_file(folder / WEIGHTS)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name in a PEFT folder -> live (sharded) tensor. CheckpointMismatchError if trained tensors
    cannot be stored.
    """
    require_onloaded(model)
    reshard(model)
    config = _peft_config(model)
    if config.is_prompt_learning:
        raise CheckpointMismatchError(
            f"{config.peft_type} is a prompt and no adapter of layers; use model.save_pretrained"
        )
    # installed, because the model has its layers
    from peft import get_peft_model_state_dict

    # peft looks for the names of modules among those of the tensors, and for every name of a tensor
    # that modules share.
    model = unsharded_view(model)
    live = model.state_dict(keep_vars=True)
    own = {"state_dict": live, "adapter_name": _adapter_name(model), "save_embedding_layers": False}
    found = get_peft_model_state_dict(model, **own)  # type: ignore[arg-type]
    others = _trained_beside(model, found)
    if others:
        raise CheckpointMismatchError(
            f"{others[0]} ({len(others)} such) is trained beside the adapters and would be "
            "missing; use weight_format 'hf', which has all weights merged"
        )

    # A PeftModel has all names of its folder, also those beside the model (VeRA's projections).
    is_peft_model = any(name.startswith(ROOT) for name in live)
    prefix = "" if is_peft_model else ROOT
    return {prefix + clean_name(name): tensor for name, tensor in found.items()}


def _trained_beside(model: nn.Module, adapters: Mapping[str, Tensor]) -> list[str]:
    known = {id(tensor) for tensor in adapters.values()}
    return [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and id(param) not in known
    ]


def _peft_config(model: nn.Module) -> Any:
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        raise CheckpointMismatchError(
            f"{type(model).__name__} has no adapters of PEFT to save; use weight_format 'hf' for "
            "its weights"
        )
    return configs[_adapter_name(model)]


def _adapter_name(model: nn.Module) -> str:
    configs: Any = getattr(model, "peft_config", {})
    active: set[str] = set()
    for layer in adapted_layers(model).values():
        active.update(layer.active_adapters)
    active = active or set(configs)
    if len(active) != 1:
        raise CheckpointMismatchError(
            f"{type(model).__name__} has {len(active)} active adapters "
            f"({', '.join(sorted(active))}); a folder of PEFT holds one"
        )
    return active.pop()


def _named_adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Name in a PEFT folder -> live tensor of the one active adapter, which must be plain LoRA."""
    _adapter_name(model)
    named = {}
    for weight, (adapter,) in plain_adapters(model).items():
        layer = f"{ROOT}{weight.removesuffix('.weight')}"
        named[f"{layer}.lora_A.weight"] = adapter.a
        named[f"{layer}.lora_B.weight"] = adapter.b
    return named


def load_adapters(
    model: PreTrainedModel,
    path: StrPath,
    *,
    group: RankGroup = None,
) -> None:
    """Load a PEFT folder into the adapters of a model: ``load_adapters(model,
    "exports/step_100")``, on every rank.

    Raises:
        ConfigError: ``path`` is a URL, or the adapters are none of LoRA.
        CheckpointNotFoundError: there is no such folder, or it has no adapters.
        CheckpointCorruptError: a file is damaged.
        CheckpointMismatchError: names, shapes or the scaling of the adapters differ from the
            model's, or they belong to a base that their ``init_lora_weights`` has changed.
        PeerError: another rank failed. The model is unchanged after this and after all other
            errors.
    """
    folder = require_local(path, "loading", FETCH_FIRST)
    with all_ranks_succeed(f"reading {folder}", group):
        require_onloaded(model)
        reshard(model)
        adapters = _named_adapters(model)
        values = _read(folder, model, adapters)
    with changing_weights(model), torch.no_grad():
        for name, tensor in adapters.items():
            keep_own_shard(tensor, values[name])


def _read(
    folder: Path,
    model: PreTrainedModel,
    adapters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    try:
        values = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{folder} has no {WEIGHTS}; expected a folder of PEFT"
        ) from error
    except SafetensorError as error:
        raise CheckpointCorruptError(f"{folder / WEIGHTS}: {error}") from error

    # Names and shapes must be those of the model.
    strangers = sorted(adapters.keys() ^ values.keys())
    if strangers:
        whose = "the folder" if strangers[0] in values else "the model"
        raise CheckpointMismatchError(
            f"{folder}: only {whose} has {strangers[0]} ({len(strangers)} differ)"
        )
    for name, tensor in adapters.items():
        if values[name].shape != tensor.shape:
            raise CheckpointMismatchError(
                f"{folder}: {name} is {list(values[name].shape)}, the model's "
                f"{list(tensor.shape)}; is lora_rank the same?"
            )

    _check_config(folder, model)
    return values


def _check_config(folder: Path, model: PreTrainedModel) -> None:
    """Compare the config of a folder's adapters with the adapters of the model."""
    # installed, because the model has its layers
    from peft import LoraConfig, PeftConfig

    # peft checks few values, and fails on others in its own ways.
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except KeyError as error:
        raise ConfigError(
            f"{folder / CONFIG} names a peft_type that the installed PEFT does not know, {error}; "
            "expected LORA"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointCorruptError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"{folder} holds {config.peft_type} adapters; expected LoRA")
    configs: Any = getattr(model, "peft_config", {})
    own = getattr(configs.get(_adapter_name(model)), "init_lora_weights", True)
    there = config.init_lora_weights
    if there != own and (_changes_base(there) or _changes_base(own)):
        raise CheckpointMismatchError(
            f"{folder}: adapters began with init_lora_weights {there!r}, here {own!r}; one of "
            "these also changes the base under them. Convert them by PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion"
        )

    for weight, (adapter,) in plain_adapters(model).items():
        layer = weight.removesuffix(".weight")
        try:
            rank = _value_of(layer, config.rank_pattern, config.r)
            alpha = _value_of(layer, config.alpha_pattern, config.lora_alpha)
            scaling = _scaling(config, alpha, rank)
        except (TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
            # Values may be of any type.
            raise CheckpointCorruptError(
                f"{folder / CONFIG}: r, lora_alpha, rank_pattern and alpha_pattern give no scaling "
                f"of {layer}: {error}"
            ) from error
        if scaling != adapter.scaling:
            raise CheckpointMismatchError(
                f"{folder}: adapters count {scaling:g} (alpha {alpha}, rank {rank}), here "
                f"{adapter.scaling:g}: {layer}"
            )


def _value_of(
    layer: str,
    pattern: Mapping[str, Any] | None,
    usual: Any,
) -> Any:
    """The value that a pattern of a config gives a layer, or the usual one."""
    # installed, because the model has its layers
    from peft.utils.other import get_pattern_key

    pattern = pattern or {}
    return pattern.get(get_pattern_key(list(pattern), layer), usual)


def _scaling(config: Any, alpha: float, rank: int) -> float:
    if config.use_rslora:
        return alpha / math.sqrt(rank)
    return alpha / rank


def _changes_base(init_lora_weights: bool | str) -> bool:
    return str(init_lora_weights).lower().startswith(_CHANGE_BASE)
