"""The dtype of each tensor in an export: the one that it has in a model that ``from_pretrained(dtype=...)`` loaded.

Training has float32 masters whatever the base folder has, so their dtype says nothing. Three things do: the dtype that
is asked for, or that of the base folder; the modules that transformers keeps in float32 where half precision is asked
for (router biases); and the tensors for which the model's code names a dtype (whole routers). The last are found by
building the model on the meta device in float64: a tensor that is not float64 then has a dtype of its own. That takes
10 to 100 ms, once a model, and changes torch's default dtype meanwhile.
"""

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.compat.transformers_private import build_from_config, float32_patterns
from ...utils.errors import CheckpointNotFoundError
from ..training.unsharded import unsharded_class
from .file_io import WeightReader

_TWIN_DTYPES = "_holdfast_twin_dtypes"
_ASKED = torch.float64
"""What no model has by itself."""


def file_dtypes(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype that an export stores each tensor in.

    Args:
        model: sharded or not.
        tensors: ``state_dict`` key -> parameter or buffer of ``model``.
        dtype: what ``from_pretrained`` would be asked for; None keeps each tensor's own, as ``save_pretrained`` does.
    """
    found = {key: tensor.dtype for key, tensor in tensors.items()}
    if dtype is None:
        return found
    kept = float32_patterns(model, dtype)
    own = own_dtypes(model)
    for key in (key for key, tensor in tensors.items() if tensor.is_floating_point()):
        planned = (kept[pattern] for pattern in kept if re.search(pattern, key))
        found[key] = next(planned, own.get(key, dtype))
    return found


def own_dtypes(model: PreTrainedModel) -> Mapping[str, torch.dtype]:
    """``state_dict`` key -> dtype, of the floating-point tensors for which the model's code names one."""
    return {key: dtype for key, dtype in _twin_dtypes(model).items() if dtype.is_floating_point and dtype != _ASKED}


def unknown_keys(model: PreTrainedModel, keys: Iterable[str]) -> list[str]:
    """Those of ``keys`` that the ``state_dict`` of another model of this class and config does not have.

    Empty for a class that takes more than a config, of which no other model can be built.
    """
    known = _twin_dtypes(model)
    return [key for key in keys if key not in known] if known else []


def _twin_dtypes(model: PreTrainedModel) -> Mapping[str, torch.dtype]:
    """``state_dict`` key -> dtype, of a model of the same class and config on meta that was asked for `_ASKED`.

    Found once and kept on the model, for exports in the background, which see a view of it and must not build another
    beside training. Empty for a class that takes more than a config.
    """
    if (known := getattr(model, _TWIN_DTYPES, None)) is not None:
        return known
    try:
        model_class: Any = unsharded_class(model)
        config = copy.deepcopy(model.config)
        with torch.device("meta"):
            state = build_from_config(model_class, config, _ASKED, attn_implementation="eager").state_dict()
    except TypeError:
        state = {}
    found = {key: value.dtype for key, value in state.items() if isinstance(value, torch.Tensor)}
    setattr(model, _TWIN_DTYPES, found)
    return found


def set_config_dtype(config: PretrainedConfig, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Have ``config`` say of the files of an export of ``model`` what ``save_pretrained`` says of its own."""
    if dtype is not None:
        for part in (getattr(config, name) for name in config.sub_configs):
            if part is not None:
                part.dtype = dtype
    first = next((key, param) for key, param in model.named_parameters() if param.is_floating_point())
    (config.dtype,) = file_dtypes(model, dict([first]), dtype).values()


def base_dtype(model: PreTrainedModel, folder: str | os.PathLike[str]) -> torch.dtype:
    """What ``from_pretrained(folder, dtype="auto")`` takes: the dtype in the config, else the first one in the files.

    Args:
        model: built from the folder.
        folder: a local model folder, with or without weights; float32 when neither says anything.
    """
    config = type(model.config).from_pretrained(folder)  # of a multimodal folder, the part for the text
    if isinstance(config.dtype, torch.dtype) and config.dtype.itemsize > 1:  # eight bits are for quantized files
        return config.dtype
    try:
        with WeightReader(Path(folder)) as files:
            slots = files.layout()
    except CheckpointNotFoundError:
        return torch.float32
    ordered = (slots[key].dtype for key in sorted(slots, key=lambda key: (slots[key].file, key)))
    return next((dtype for dtype in ordered if dtype.is_floating_point and dtype.itemsize > 1), torch.float32)
