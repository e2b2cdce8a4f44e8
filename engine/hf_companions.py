"""What stands beside the weights in a Hugging Face folder: configs, code, tokenizer, files of the base model."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ..utils.errors import CheckpointNotFoundError
from ..utils.manifest import MANIFEST_NAME
from .hf_keys import file_dtype, unsharded_view

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")


def write_companions(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype | None,
    tokenizer: Any,
    processor: Any,
    base_model_path: str | os.PathLike[str] | None,
) -> None:
    """Write everything but the weights and their index, as ``save_pretrained`` does."""
    model = unsharded_view(model)
    config = copy.deepcopy(model.config)
    config.dtype = str(file_dtype(model.dtype, dtype)).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "use_cache"):
            part.use_cache = True  # training turns it off; servers want it
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    for part in (tokenizer, processor):
        if part is not None:
            part.save_pretrained(folder)
    if base_model_path is not None:
        _copy_base_files(Path(base_model_path), folder)


def _copy_base_files(base: Path, folder: Path) -> None:
    if not base.is_dir():
        raise CheckpointNotFoundError(f"base_model_path {base} is not a folder; expected a local model folder")
    for source in sorted(base.iterdir()):
        skipped = source.name.startswith(".") or source.name == MANIFEST_NAME or source.name.endswith(WEIGHT_SUFFIXES)
        if source.is_file() and not skipped and not (folder / source.name).exists():
            shutil.copyfile(source, folder / source.name)
