"""The dtype of each tensor in an export: the same as in a model that ``from_pretrained(dtype=...)``
loaded.

Training keeps float32 masters, so their dtype says nothing. Three things decide:

- the requested dtype, or the dtype of the base folder,
- the modules that transformers keeps in float32 in half precision too (router biases),
- the tensors whose dtype the code of the model names (whole routers). To find them, the model is
  built on the meta device in float64: other dtypes come from the code. This takes 10 to 100 ms,
  once per model, and changes the default dtype of torch for that time.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.compat.transformers_private import build_from_config, float32_patterns
from ...utils.errors import CheckpointNotFoundError
from ...utils.files import StrPath
from ..memory.per_model import PerModel
from ..training.unsharded import original_of, unsharded_class
from .weight_files import WeightReader

# A dtype that no model has by itself.
_ASKED = torch.float64

_twin_dtypes = PerModel[Mapping[str, torch.dtype]](
    "twin_dtypes",
    "``state_dict`` key -> dtype in a new model of the same class and config, on meta. Set by "
    "`_built_dtypes` at the first question, which `adopt_base` asks, and ends with the model.",
)


def file_dtypes(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> dict[str, torch.dtype]:
    """``state_dict`` key -> dtype in an export. Without ``dtype`` tensors keep theirs, as in
    ``save_pretrained``.
    """
    found = {key: tensor.dtype for key, tensor in tensors.items()}
    if dtype is None:
        return found

    # transformers' own exceptions come first, then those of the code, then the requested dtype.
    kept = float32_patterns(model, dtype)
    own = own_dtypes(model)
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            planned = (kept[pattern] for pattern in kept if re.search(pattern, key))
            found[key] = next(planned, own.get(key, dtype))
    return found


def own_dtypes(model: PreTrainedModel) -> Mapping[str, torch.dtype]:
    """``state_dict`` key -> dtype, for floating-point tensors whose dtype the code of the model
    names.
    """
    return {
        key: dtype
        for key, dtype in _built_dtypes(model).items()
        if dtype.is_floating_point and dtype != _ASKED
    }


def unknown_keys(model: PreTrainedModel, keys: Iterable[str]) -> list[str]:
    """The ``keys`` that a new model of this class and config does not have. Empty if none can be
    built.
    """
    known = _built_dtypes(model)
    if not known:
        return []
    return [key for key in keys if key not in known]


def _built_dtypes(model: PreTrainedModel) -> Mapping[str, torch.dtype]:
    """``state_dict`` key -> dtype, for a new model on meta, built with `_ASKED`. Empty if a config
    does not suffice.

    Kept for the model, so that an export in the background need not build a model during training.
    """
    owner = original_of(model)
    known = _twin_dtypes.of(owner)
    if known is not None:
        return known
    try:
        model_class: Any = unsharded_class(model)
        config = copy.deepcopy(model.config)
        with torch.device("meta"):
            twin = build_from_config(model_class, config, _ASKED, attn_implementation="eager")
            state = twin.state_dict()
    except TypeError:
        state = {}
    dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    return _twin_dtypes.set(owner, dtypes)


def set_config_dtype(
    config: PretrainedConfig,
    model: PreTrainedModel,
    dtype: torch.dtype | None,
) -> None:
    """Set the dtypes in ``config`` as ``save_pretrained`` would for these weights."""
    if dtype is not None:
        for name in config.sub_configs:
            part = getattr(config, name)
            if part is not None:
                part.dtype = dtype

    # The first tensor speaks for all, as in transformers.
    for key, param in model.named_parameters():
        if param.is_floating_point():
            config.dtype = file_dtypes(model, {key: param}, dtype)[key]
            return


def base_dtype(model: PreTrainedModel, folder: StrPath) -> torch.dtype:
    """The dtype of ``from_pretrained(folder, dtype="auto")``: from the config, else from the first
    tensor of the files.

    float32 if neither names a dtype. ``model`` was built from the folder, a local one, with or
    without weights.
    """
    # Eight bits are for quantized files. Of a multimodal folder, this is the part for the text.
    config = type(model.config).from_pretrained(folder)
    if isinstance(config.dtype, torch.dtype) and config.dtype.itemsize > 1:
        return config.dtype
    try:
        with WeightReader(Path(folder)) as files:
            slots = files.layout()
    except CheckpointNotFoundError:
        return torch.float32
    ordered = sorted(slots, key=lambda key: (slots[key].file, key))
    dtypes = (slots[key].dtype for key in ordered)
    plain = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    return next(plain, torch.float32)
