"""Build a transformers model on the meta device, and fill it shard by shard.

A 70B model must never exist whole on any rank, so the model is built without memory, sharded, given memory for this
rank's shard only, and then filled: from a Hugging Face folder (`hf_import`), or from a seed. A seeded draw goes block
by block over a second, memory-less skeleton: one block at a time exists on the CPU, and the values depend on the seed
and the block's name alone, never on the number of ranks.

Buffers that no checkpoint holds (rotary frequencies) are garbage after ``to_empty``; they are computed again by the
model's own ``_init_weights``, once over zeros and once over ones: a buffer that the model leaves alone differs, and is
an error rather than a silent wrong answer.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ..utils.errors import ConfigError
from .config import TrainEngineConfig

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def require_model_folder(path: str) -> Path:
    """``path`` as it is, if it is a local folder of a Hugging Face model; ConfigError else."""
    if not path or not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"config key 'path' is {path!r}; expected a folder with the config.json of a Hugging Face model "
            "(`hf download <model> --local-dir <folder>` makes one)"
        )
    return Path(path)


def build_on_meta(config: TrainEngineConfig) -> PreTrainedModel:
    """The model of ``config.path`` in float32 without memory, with a language-model or a value head.

    Raises:
        ConfigError: ``path`` is no folder with a ``config.json``, or its architecture has no such head.
    """
    folder = require_model_folder(config.path)
    try:
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"config key 'path': {folder / 'config.json'} cannot be used: {error}") from error
    factory = AutoModelForTokenClassification if config.is_critic else AutoModelForCausalLM
    if config.is_critic:
        hf_config.num_labels = 1
        hf_config.tie_word_embeddings = False  # there is no output embedding left to tie
    try:
        with torch.device("meta"):
            model = factory.from_config(hf_config, dtype=torch.float32, attn_implementation=config.attn_impl)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{folder} ({hf_config.model_type}; config key 'path') cannot be built with config key 'attn_impl' "
            f"{config.attn_impl!r}: {error}"
        ) from error
    if config.disable_dropout:
        _disable_dropout(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _disable_dropout(model: PreTrainedModel) -> None:
    """Zero every probability of the modules; ``model.config``, which is exported, keeps the author's numbers.

    Some models read probabilities from their config in the forward, so the modules below get zeroed copies of it.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)  # the memo: id of each config in it -> its copy
    for copied in copies.values():
        if isinstance(copied, PretrainedConfig):
            _zero_dropout_attributes(copied)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if module is not model and isinstance(config := getattr(module, "config", None), PretrainedConfig):
            module.config = copies.get(id(config), config)
        _zero_dropout_attributes(module)


def _zero_dropout_attributes(thing: object) -> None:
    for name, value in vars(thing).items():
        if "drop" in name and isinstance(value, float):
            setattr(thing, name, 0.0)


def block_classes(model: PreTrainedModel, names: list[str] | None) -> tuple[type[nn.Module], ...]:
    """Classes of the repeated blocks: those named, or the ones transformers says not to split.

    Raises:
        ConfigError: a named class does not occur in the model.
    """
    wanted = set(names or model._no_split_modules or ())
    found = {type(module).__name__: type(module) for module in model.modules()}
    if names and (unknown := sorted(wanted - found.keys())):
        raise ConfigError(
            f"config key 'fsdp.wrap_policy.transformer_layer_cls_to_wrap' names {unknown[0]!r}, which "
            f"{type(model).__name__} does not contain; it contains {', '.join(sorted(found))}"
        )
    return tuple(found[name] for name in sorted(wanted & found.keys()))


def give_memory(model: PreTrainedModel, skeleton: PreTrainedModel, device: torch.device) -> None:
    """Allocate this rank's shard (uninitialised) and compute every buffer.

    Args:
        model: on meta, already sharded.
        skeleton: the same model on meta, not sharded; used up by this.
        device: where the shard goes.
    """
    model.to_empty(device=device)
    model.tie_weights()  # _apply may have untied what is tied
    for name, module in skeleton.named_modules():
        if module._buffers:
            _compute_buffers(name, module, model.get_submodule(name), skeleton._init_weights)


@torch.no_grad()
def _compute_buffers(name: str, source: nn.Module, target: nn.Module, init: Callable[[nn.Module], None]) -> None:
    source.to_empty(device="cpu", recurse=False)
    results = []
    for garbage in (0, 1):
        for buffer in source.buffers(recurse=False):
            buffer.fill_(garbage)
        init(source)
        results.append({key: buffer.clone() for key, buffer in source.named_buffers(recurse=False)})
    for key, buffer in results[0].items():
        if not torch.equal(buffer, results[1][key]):
            raise ConfigError(
                f"{type(source).__name__} at {name!r} does not compute its buffer {key!r} in _init_weights, so the "
                "model cannot be built on the meta device; upgrade transformers or report the architecture"
            )
        target.get_buffer(key).copy_(buffer)


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel, skeleton: PreTrainedModel, seed: int, blocks: tuple[type[nn.Module], ...]
) -> None:
    """Draw every parameter as transformers would, one block at a time; the same values at every world size.

    Args:
        model: sharded, with memory; each rank keeps its own rows.
        skeleton: the same model on meta, not sharded; used up by this.
        seed: together with a block's name, what the block is drawn from.
        blocks: the classes that are drawn whole (some models scale a block's inner weights).
    """
    for name, unit in _draw_units(skeleton, blocks):
        unit.to_empty(device="cpu")
        for drawn in unit.parameters():
            drawn.fill_(float("nan"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) >> 1)
            for module in reversed(list(unit.modules())):  # children before parents, as transformers does
                skeleton._init_weights(module)
        for key, drawn in unit.named_parameters(prefix=name):
            if drawn.isnan().any():
                raise ConfigError(f"{type(skeleton).__name__} does not draw {key!r} in _init_weights; load its weights")
            keep_own_shard(model.get_parameter(key), drawn)
        unit.to_empty(device="meta")


def _draw_units(skeleton: nn.Module, blocks: tuple[type[nn.Module], ...]) -> list[tuple[str, nn.Module]]:
    """The outermost blocks, and the outermost modules elsewhere that own parameters: together, every parameter."""
    units: list[tuple[str, nn.Module]] = []
    for name, module in skeleton.named_modules():
        inside = any(f"{name}.".startswith(f"{unit}." if unit else "") for unit, _ in units)
        if not inside and (isinstance(module, blocks) or next(module.parameters(recurse=False), None) is not None):
            units.append((name, module))
    return units


@torch.no_grad()
def keep_own_shard(param: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of ``full`` (the whole tensor, equal on all ranks) into ``param``; no communication."""
    if isinstance(param, DTensor):
        full = distribute_tensor(
            full.to(param.device), param.device_mesh, param.placements, src_data_rank=None
        ).to_local()
        param = param.to_local()
    param.copy_(full)
