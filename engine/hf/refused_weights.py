"""Refuse folders with other weights than the plain ones that a load reads, and say what to do.

Holdfast trains float32 parameters. Quantized tensors have other names, shapes and dtypes than the
model's. A load would call them unexpected, or cast packed bytes as if they were weights.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...utils.errors import CheckpointMismatchError, ConfigError
from ..model_folder import read_raw_config
from .safetensors_layout import ADAPTER_NAME, INDEX_NAME, WEIGHTS_NAME

_CONFIGS = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Method -> the config class of transformers that dequantizes on load."""

_NAMES = {
    "mxfp4": r"_proj_(blocks|scales)$",
    "fp8": r"\.weight_scale_inv$",
    "GPTQ or AWQ": r"\.(qweight|qzeros|g_idx)$",
    "bitsandbytes": r"\.(absmax|quant_map|quant_state\..+|SCB)$",
    "compressed-tensors": r"\.weight_(packed|scale)$",
}
"""Method -> pattern of names that only its tensors have."""


def refuse_other_weights(folder: Path) -> None:
    """Raise CheckpointMismatchError if `from_pretrained` would load other weights from ``folder``
    than the usual files have.
    """
    if (folder / ADAPTER_NAME).is_file() and (folder / "config.json").is_file():
        raise CheckpointMismatchError(
            f"{folder} also holds an adapter ({ADAPTER_NAME}), which from_pretrained adds to the "
            "weights; merge it into them (PeftModel.merge_and_unload, save_pretrained), or use a "
            "copy of the folder without its files"
        )
    usual = WEIGHTS_NAME if (folder / WEIGHTS_NAME).is_file() else INDEX_NAME
    named = read_raw_config(folder).get("transformers_weights")
    if named not in (None, usual):
        raise CheckpointMismatchError(
            f"{folder}/config.json names {named!r} as its weights (transformers_weights); expected "
            f"{usual}; load the model with transformers and save it again"
        )


def refuse_quantized(folder: Path, tensors: Iterable[str] = ()) -> None:
    """Raise ConfigError if ``config.json`` or the names of ``tensors`` show quantized weights in
    ``folder``.
    """
    method = _declared(read_raw_config(folder)) or _named(tensors)
    if method is None:
        return
    problem = (
        f"{folder} holds weights that are quantized with {method}; "
        "expected plain ones, in bfloat16 or float32"
    )

    # The lines that dequantize, if transformers can.
    imported = ""
    then = ""
    if method in _CONFIGS:
        imported = f", {_CONFIGS[method]}"
        option = f"quantization_config={_CONFIGS[method]}(dequantize=True)"
    elif method == "bitsandbytes":
        option = "device_map='auto'"
        then = ".dequantize()"
    else:
        raise ConfigError(
            f"{problem}. Use the weights that it was made from; its model card usually names them"
        )
    # Without save_original_format=False the tensors would get their quantized names again.
    raise ConfigError(
        f"{problem}. Dequantize it once (this takes the package accelerate) and use the new "
        "folder, with the tokenizer's files of the old one:\n    from transformers import "
        f"AutoModelForCausalLM{imported}\n    model = "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='bfloat16', "
        f"{option}){then}\n    model.save_pretrained('<new folder>', save_original_format=False)"
    )


def _named(tensors: Iterable[str]) -> str | None:
    """The method that the name of a tensor shows."""
    for name in tensors:
        for method, pattern in _NAMES.items():
            if re.search(pattern, name):
                return method
    return None


def _declared(config: Any) -> str | None:
    if not isinstance(config, Mapping):
        return None
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, Mapping) and found:
            bits = found.get("load_in_4bit") or found.get("load_in_8bit")
            return str(found.get("quant_method") or ("bitsandbytes" if bits else key))

    # The config of a part of the model.
    for value in config.values():
        method = _declared(value)
        if method is not None:
            return method
    return None
