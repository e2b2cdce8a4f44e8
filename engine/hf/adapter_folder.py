"""Adapters as a folder of PEFT: ``adapter_model.safetensors`` and ``adapter_config.json``.

``PeftModel.from_pretrained`` and vLLM load it beside the base model. Adapters are small: each rank gathers all of them,
which rank 0 writes, and reads all of them to keep its own rows.
"""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ...utils.atomic_folder import as_write_error, staged_folder
from ...utils.distributed import all_ranks_succeed, get_rank
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError, ConfigError
from ...utils.files import fsync_file, walk_files
from ...utils.remote import FETCH_FIRST, require_local
from ..api import HFExportOptions
from ..lora.layers import adapted_layers, plain_adapters
from ..training.model import keep_own_shard
from ..weight_changes import changing_weights
from .shard_ranges import whole_tensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ROOT = "base_model.model."
"""What PEFT calls the model inside of a PeftModel."""


def save_adapters(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    options: HFExportOptions,
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the adapters of a model as a new folder of PEFT; every rank of ``group`` calls this.

    Args:
        model: with LoRA layers, sharded or not, or a ``PeftModel``.
        path: the folder to create.
        options: ``dtype``, ``tokenizer`` and ``processor`` are used; without a dtype the adapters stay as they are.
        group: control group.
        gather_group: see `whole_tensor`.

    Raises:
        ConfigError: ``path`` is a URL.
        CheckpointExistsError: ``path`` exists.
        CheckpointMismatchError: the model has no adapters, or parameters that are trained and are none.
        CheckpointWriteError: rank 0 could not write.
        PeerError: another rank failed.
    """
    folder = require_local(path, "saving adapters", "give a local folder, and upload it then")
    with staged_folder(folder, group) as staging:
        with all_ranks_succeed(f"preparing {folder}", group):
            adapters = _named_adapters(model)
            _refuse_others(model, adapters)
        whole = {name: whole_tensor(tensor, gather_group) for name, tensor in adapters.items()}
        with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
            if get_rank(group) == 0:
                _write(staging, model, whole, options)


def _write(
    folder: Path, model: PreTrainedModel, adapters: Mapping[str, torch.Tensor], options: HFExportOptions
) -> None:
    values = {name: tensor.to(options.dtype or tensor.dtype).contiguous() for name, tensor in adapters.items()}
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    os.chmod(folder / WEIGHTS, 0o644)
    config = copy.deepcopy(_peft_config(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    for part in (options.tokenizer, options.processor):
        if part is not None:
            part.save_pretrained(folder)
    for name in walk_files(folder):
        fsync_file(folder / name)


def _peft_config(model: PreTrainedModel) -> Any:
    config: Any = model.peft_config  # type: ignore[attr-defined]
    return next(iter(config.values()))


def _named_adapters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Name in a folder of PEFT -> live tensor."""
    named = {}
    for weight, adapters in plain_adapters(model).items():
        if len(adapters) > 1:
            raise CheckpointMismatchError(f"{weight} has {len(adapters)} active adapters; a folder of PEFT holds one")
        layer = _ROOT + weight.removesuffix(".weight")
        named |= {f"{layer}.lora_A.weight": adapters[0].a, f"{layer}.lora_B.weight": adapters[0].b}
    if not named:
        raise CheckpointMismatchError(
            f"{type(model).__name__} has no LoRA adapters to save; use weight_format 'hf' for its weights"
        )
    return named


def _refuse_others(model: PreTrainedModel, adapters: Mapping[str, torch.Tensor]) -> None:
    known = {id(tensor) for tensor in adapters.values()}
    others = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in known]
    if others:
        raise CheckpointMismatchError(
            f"{others[0]} ({len(others)} such) is trained beside the adapters and would be missing; use weight_format "
            "'hf', which has all weights merged"
        )


def load_adapters(
    model: PreTrainedModel, path: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None
) -> None:
    """Load a folder of PEFT into the adapters of a model; every rank of ``group`` calls this.

    Raises:
        ConfigError: ``path`` is a URL.
        CheckpointNotFoundError: there is no such folder, or no adapters in it.
        CheckpointCorruptError: the file is damaged.
        CheckpointMismatchError: it holds other adapters than the model has, or of another scaling.
        PeerError: another rank failed. Nothing has changed then, nor with any other error.
    """
    folder = require_local(path, "loading", FETCH_FIRST)
    with all_ranks_succeed(f"reading {folder}", group):
        adapters = _named_adapters(model)
        values = _read(folder)
        _check(folder, model, adapters, values)
    with changing_weights(model), torch.no_grad():
        for name, tensor in adapters.items():
            keep_own_shard(tensor, values[name])


def _read(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{folder} has no {WEIGHTS}; expected a folder of PEFT") from error
    except SafetensorError as error:
        raise CheckpointCorruptError(f"{folder / WEIGHTS}: {error}") from error


def _check(
    folder: Path, model: PreTrainedModel, adapters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> None:
    from peft import LoraConfig, PeftConfig  # the model has layers of it

    if strangers := sorted(adapters.keys() ^ values.keys()):
        whose = "the folder" if strangers[0] in values else "the model"
        raise CheckpointMismatchError(f"{folder}: only {whose} has {strangers[0]} ({len(strangers)} differ)")
    for name, tensor in adapters.items():
        if values[name].shape != tensor.shape:
            raise CheckpointMismatchError(
                f"{folder}: {name} is {list(values[name].shape)}, the model's {list(tensor.shape)}; is lora_rank the "
                "same?"
            )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointCorruptError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"{folder} holds {config.peft_type} adapters; expected LoRA")
    own = next(iter(adapted_layers(model).values())).scaling.values()
    scaling = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    if scaling not in own and not (config.rank_pattern or config.alpha_pattern):
        raise CheckpointMismatchError(
            f"{folder}: adapters count {scaling:g} (alpha {config.lora_alpha}, rank {config.r}), here "
            f"{next(iter(own)):g}"
        )
