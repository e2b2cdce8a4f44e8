"""The other files of a Hugging Face folder: configs, code, tokenizer, files of the base model."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import (
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
)

from ...utils.compat.transformers_private import custom_object_save
from ...utils.distributed import RankGroup, all_ranks_succeed, rank_zero_decides
from ...utils.errors import CheckpointNotFoundError
from ...utils.files import StrPath, fsync_file, walk_files, write_durably
from ...utils.logging import get_logger
from ...utils.manifest import DELTA_NAME, MANIFEST_NAME
from ..api import HFExportOptions
from ..memory.per_model import PerModel
from ..training.unsharded import original_of, unsharded_view
from .dtypes import base_dtype, own_dtypes, set_config_dtype
from .name_mapping import stored_tensors
from .safetensors_layout import ADAPTER_NAME, INDEX_NAME, Layout

logger = get_logger(__name__)

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".index.json",
    # generators, as Accelerate keeps them
    ".pkl",
)
PROBE_NAME = "weights_probe.json"
"""File of a published version, with log-probabilities of its weights. See
`holdfast.engine.servers.content_check`.
"""

# Files that a run leaves in the folder of a model. transformers would look for the adapter, and add
# it to weights that have it already.
_NOT_OF_MODEL = (MANIFEST_NAME, PROBE_NAME, "trainer_state.json", ADAPTER_NAME)
_SIDECAR_FOLDERS = (CHAT_TEMPLATE_DIR, "custom_generate")

_REPLACED_BY = {
    "special_tokens_map.json": "tokenizer_config.json",
    "added_tokens.json": "tokenizer_config.json",
    "chat_template.json": CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATE_DIR: CHAT_TEMPLATE_FILE,
}
"""File or folder of a base -> the file with the same content that a tokenizer or processor writes.
transformers would take what it finds in the first one.
"""


class _Verbatim(NamedTuple):
    """A generation config that exports copy byte for byte."""

    # as transformers understands it
    config: GenerationConfig
    data: bytes  # the file


_verbatim = PerModel[_Verbatim](
    "generation_config",
    "The generation config of the model's folder, if transformers would not write it again. Set by "
    "`adopt_base`, and ends with the model.",
)


def write_sidecars(
    model: PreTrainedModel,
    folder: Path,
    options: HFExportOptions,
    layout: Layout,
) -> list[str]:
    """Write and fsync all files except the weights, as ``save_pretrained`` does, and return their
    names.
    """
    model = unsharded_view(model)
    config = copy.deepcopy(model.config)
    set_config_dtype(config, model, options.dtype)
    config.architectures = [type(model).__name__]
    separate = _stores_ties_apart(model)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "use_cache"):
            # Training turns it off, but servers want it.
            part.use_cache = True
        if separate and getattr(part, "tie_word_embeddings", False):
            # Otherwise vLLM would skip the head in the files.
            part.tie_word_embeddings = False
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)

    # The small files that come from the model, from the caller, or from the folder of the base.
    if model.can_generate() and model.generation_config is not None:
        _write_generation_config(model, folder)
    for part in (options.tokenizer, options.processor):
        if part is not None:
            part.save_pretrained(folder)
    if options.base_model_path is not None:
        _copy_base_files(Path(options.base_model_path), folder)

    # The weight files are those of all ranks, as is the folder of changes.
    others = {file.name for file in layout.files}
    names = [
        name
        for name in walk_files(folder)
        if name not in others and not name.startswith(f"{DELTA_NAME}/")
    ]
    for name in names:
        fsync_file(folder / name)
    if layout.index is not None:
        write_durably(folder / INDEX_NAME, layout.index)
        names.append(INDEX_NAME)
    return names


def _stores_ties_apart(model: PreTrainedModel) -> bool:
    """Whether weights that the model declares as tied are separate, all of them, as after PEFT has
    trained a copy of the head (``modules_to_save``).
    """
    stored, left_out = stored_tensors(model, on_meta=True)
    pairs = model.all_tied_weights_keys.items()
    return not left_out and any(key in stored and other in stored for key, other in pairs)


def adopt_base(
    model: PreTrainedModel,
    folder: StrPath,
    group: RankGroup = None,
) -> torch.dtype:
    """Give a model the generation config of its folder, as in ``from_pretrained``. Every rank of
    ``group`` calls this.

    Returns `base_dtype` on rank 0: all ranks need the same, because the layout of the files depends
    on it. OSError if this rank cannot read the generation config, and PeerError if another one
    cannot.
    """
    with all_ranks_succeed(f"reading {folder}", group):
        _adopt_generation_config(model, Path(folder))
        own_dtypes(model)
    return rank_zero_decides(lambda: base_dtype(model, folder), group)


def _adopt_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """If transformers does not read the file, or would not write it again (contradicting options),
    exports copy it byte for byte, as long as ``model.generation_config`` is not changed.
    """
    path = folder / GENERATION_CONFIG_NAME
    if not model.can_generate():
        return
    if not path.is_file():
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name=CONFIG_NAME, _from_model_config=True
        )
        return
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
        with tempfile.TemporaryDirectory(prefix="holdfast-generation-") as scratch:
            model.generation_config.save_pretrained(scratch)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # Values may be of any type.
        logger.warning(
            "%s goes into exports as it is; transformers would not write it again: %s", path, error
        )
        verbatim = _Verbatim(copy.deepcopy(model.generation_config), data)
        _verbatim.set(original_of(model), verbatim)


def _write_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the generation config. An invalid one is written with a warning, because it must not
    fail an export.
    """
    config: GenerationConfig = model.generation_config
    verbatim = _verbatim.of(original_of(model))
    if verbatim is not None and verbatim.config == config:
        (folder / GENERATION_CONFIG_NAME).write_bytes(verbatim.data)
        return
    try:
        config.save_pretrained(folder)
    except ValueError as error:
        logger.warning(
            "%s of the export is what the model has, but: %s", GENERATION_CONFIG_NAME, error
        )
        config.to_json_file(folder / GENERATION_CONFIG_NAME)


def _copy_base_files(base: Path, folder: Path) -> None:
    if not base.is_dir():
        raise CheckpointNotFoundError(
            f"base_model_path {base} is not a folder; expected a local model folder"
        )
    written = set(walk_files(folder))
    for name, source in small_files(base).items():
        first = name.partition("/")[0]
        if name not in written and _REPLACED_BY.get(first) not in written:
            target = folder / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)


def small_files(base: Path) -> dict[str, Path]:
    """The files of a model folder that are no weights, by POSIX path relative to it."""
    paths = [*base.glob("*")]
    for name in _SIDECAR_FOLDERS:
        paths += (base / name).glob("*")

    found = {}
    for path in sorted(paths):
        if not path.is_file() or path.name.startswith("."):
            continue
        if path.name in _NOT_OF_MODEL or path.name.endswith(WEIGHT_SUFFIXES):
            continue
        found[path.relative_to(base).as_posix()] = path
    return found
