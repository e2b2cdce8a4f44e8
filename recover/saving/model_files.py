"""The small files of a model in a generation: config, generation config, tokenizer and the like.

A resume does not read them. With them `holdfast export` needs nothing but the generation. Rank 0
packs those of an engine into one file, so that a snapshot has only one more fsync.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...engine.hf.dtypes import base_dtype
from ...engine.hf.sidecars import small_files
from ...engine.lora.adapters import adapted_layers, transformers_model
from ...engine.model_folder import find_source_folder
from ...engine.training.unsharded import unsharded_view
from ...utils.errors import CheckpointCorruptError
from ...utils.logging import get_logger
from ...utils.manifest import read_manifest, verify_file
from ...utils.plain_values import pack_plain, read_plain

logger = get_logger(__name__)

_CONFIG = "config.json"
_LARGEST_BYTES = 64 << 20  # a larger file is no tokenizer


def model_files_name(engine: str) -> str:
    """Return the file of an engine: ``state/model_files_actor.pt``."""
    return f"state/model_files_{engine}.pt"


def pack_model_files(model: nn.Module) -> bytes | None:
    """Pack the small files of the folder that a model was loaded from, or its config if the folder
    is gone.

    None if an export needs no such files (adapters), or if the model is not one of transformers.
    """
    inner = transformers_model(model)
    if not isinstance(inner, PreTrainedModel) or adapted_layers(model):
        return None
    folder = find_source_folder(inner.config)
    files: dict[str, bytes] = {}
    dtype = None

    # The files as they are. A folder that cannot be read fails no snapshot.
    if folder is not None:
        try:
            for name, path in small_files(folder).items():
                if path.stat().st_size <= _LARGEST_BYTES:
                    files[name] = path.read_bytes()
            dtype = str(base_dtype(inner, folder)).removeprefix("torch.")
        except (OSError, ValueError) as error:
            logger.warning("generations have no copy of the small files of %s: %s", folder, error)
            files = {}

    # A model without a folder still has its config.
    if _CONFIG not in files:
        config = inner.config.to_dict()
        config["architectures"] = [type(unsharded_view(inner)).__name__]
        text = type(inner.config).from_dict(config).to_json_string()
        files[_CONFIG] = text.encode()

    # Plain values hold no bytes, but tensors.
    contents = {}
    for name, data in files.items():
        contents[name] = torch.tensor(bytearray(data), dtype=torch.uint8)
    return pack_plain("small files of the model", {"dtype": dtype, "files": contents})


@contextmanager
def unpacked_model_files(generation: Path, engine: str) -> Iterator[tuple[Path, str | None] | None]:
    """Yield a temporary folder with the small files of an engine, and the dtype of its exports if
    it is known.

    None if the generation has no such files: an older version wrote it. `CheckpointCorruptError` if
    they are damaged.
    """
    name = model_files_name(engine)
    path = generation / name
    entry = read_manifest(generation)["files"].get(name)
    if entry is None:
        yield None
        return
    verify_file(generation, name, entry)
    packed = read_plain(path)
    with TemporaryDirectory(prefix="holdfast-model-files-") as temporary:
        folder = Path(temporary)
        try:
            _write_files(packed["files"], folder)
            dtype = packed["dtype"]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
        yield folder, dtype


def _write_files(files: dict[str, Any], folder: Path) -> None:
    for name, content in files.items():
        path = PurePosixPath(name)
        leaves_the_folder = path.is_absolute() or ".." in path.parts
        if leaves_the_folder:
            raise ValueError(f"{name!r} is no name of a file in a folder")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.numpy().tobytes())
