"""Read weights from folders of transformers, Trainer, TRL (``checkpoint-<N>``) and Accelerate
(``save_state``).

Weights are in ``model.safetensors`` or its index, a ``.bin`` file, or DCP data in
``pytorch_model_fsdp_0/``. Other files (optimizers, schedules, generators, data positions) are
reported as not converted, and never opened. Accelerate and FSDP use the names of
``model.state_dict()``. Model folders use the names of their architecture's file format.
"""

import re
from collections.abc import Collection
from pathlib import Path

from holdfast.recover.export.architecture import Architecture
from holdfast.recover.export.engine_folder import read_weights
from holdfast.recover.export.stored_tensors import stored_safetensors
from holdfast.recover.export.weights import (
    ModelWeights,
    read_model_folder,
    strip_module,
    without_tied_copies,
)
from holdfast.utils.errors import CheckpointMismatchError, ConfigError

from .checkpoint import Checkpoint, ReadOptions
from .torch_files import read_bin

_TRAINER = "trainer_state.json"
_SHARDED = "pytorch_model_fsdp_0"
_SAFE = ("model.safetensors", "model.safetensors.index.json")
_BINS = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
_RANKED = re.compile(r"pytorch_model_fsdp.*_rank\d+\.bin")
_ACCELERATE = re.compile(r"random_states_\d+\.pkl|(optimizer|scheduler)\.bin")
_TRAINING = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict|random_states|rng_state|custom_checkpoint).*"
    r"|trainer_state\.json|training_args\.bin|(model|pytorch_model(_fsdp)?)_[1-9].*"
)
"""Files of a training state, or of a second model."""


def recognises(folder: Path) -> bool:
    """Whether the folder holds weights of a model or of an adapter."""
    names = {path.name for path in folder.iterdir()}
    # A training state without weights, too, so that the reader can say what it lacks.
    weights = {*_SAFE, *_BINS, _SHARDED, _TRAINER, "adapter_model.safetensors"}
    return bool(names & weights) or any(map(_RANKED.fullmatch, names))


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Read the weights of the folder, as ``default``."""
    names = {path.name for path in folder.iterdir()}
    found = [name for name in (*_SAFE, *_BINS) if name in names]
    _require_one_model(folder, names, found)

    # Trainer and TRL save a model folder. Accelerate saves what ``model.state_dict()`` returns.
    architecture = Architecture.find(options.config, folder)
    is_trainer = _TRAINER in names
    is_accelerate = _SHARDED in names or any(map(_ACCELERATE.match, names))
    if _SHARDED in names:
        weights = read_weights(folder / _SHARDED, options.root or "", architecture)
    elif is_accelerate and not is_trainer:
        weights = _read_state_dict(folder, found[0], options, architecture)
    else:
        weights = _read_files(folder, found[0], options, architecture)

    # For messages, with what is left out.
    kind = "Hugging Face"
    if is_trainer:
        kind = "transformers Trainer"
    elif is_accelerate:
        kind = "Accelerate"
    others = [name for name in names if _TRAINING.fullmatch(name)]
    checkpoint = Checkpoint(
        kind,
        weights.tensors,
        aliases=weights.aliases,
        architecture=architecture,
        ignored=sorted(found[1:] + others),
    )
    return {"default": checkpoint}


def _require_one_model(folder: Path, names: Collection[str], found: list[str]) -> None:
    """Refuse an adapter, two sets of weights, and none. ``found`` are the files with weights."""
    if "adapter_config.json" in names and "config.json" not in names:
        raise ConfigError(
            f"{folder} holds an adapter (LoRA), not a model: merge it into its base "
            "(PeftModel.merge_and_unload, save_pretrained) and convert that, or load it with PEFT"
        )
    if _SHARDED in names and found:
        raise ConfigError(
            f"{folder} holds weights twice, {_SHARDED} and {found[0]}: move away those that are "
            "not meant"
        )
    if _SHARDED in names or found:
        return

    # No file that can be read.
    ranked = sorted(name for name in names if _RANKED.fullmatch(name))
    if ranked:
        raise ConfigError(
            f"{folder} holds {ranked[0]}: a file of each rank, which only Accelerate on as many "
            "ranks reads; save it with use_dcp=True, or as FULL_STATE_DICT"
        )
    raise ConfigError(f"{folder} holds a training state without weights")


def _read_files(
    folder: Path,
    name: str,
    options: ReadOptions,
    architecture: Architecture | None,
) -> ModelWeights:
    """Weights of a model folder: under the names of the file format of its architecture."""
    if name in _BINS or architecture is None:
        return _read_as_named(folder, name, options, architecture)
    tensors = read_model_folder(folder, architecture, options.files)
    return without_tied_copies(strip_module(tensors), architecture.aliases)


def _read_state_dict(
    folder: Path,
    name: str,
    options: ReadOptions,
    architecture: Architecture | None,
) -> ModelWeights:
    """Weights under the names of ``model.state_dict()``, all of them and no others."""
    weights = _read_as_named(folder, name, options, architecture)
    if architecture is None:
        return weights

    # Accelerate does not say which model it has saved.
    own = architecture.model.state_dict()
    strangers = sorted(weights.tensors.keys() - own.keys())
    if strangers:
        found = f"{strangers[0]!r}, which its model does not ({len(strangers)} such)"
        raise CheckpointMismatchError(f"{folder} has {found}")
    missing = [name for name in architecture.parameters if name not in weights.tensors]
    if missing:
        raise CheckpointMismatchError(f"{folder} lacks {missing[0]!r} ({len(missing)} missing)")
    return weights


def _read_as_named(
    folder: Path,
    name: str,
    options: ReadOptions,
    architecture: Architecture | None,
) -> ModelWeights:
    """Weights under their names in the file ``name``. Tensors that share memory in it are tied."""
    shared: dict[str, str] = {}
    if name in _BINS:
        tensors, shared = read_bin(folder / name)
    else:
        tensors = stored_safetensors(folder, options.files)

    # The config knows better than the file which tensors are tied, and under which name.
    if architecture is not None:
        tensors |= {alias: tensors[first] for alias, first in shared.items()}
        return without_tied_copies(strip_module(tensors), architecture.aliases)
    aliases: dict[str, str] = {}
    for alias, first in shared.items():
        aliases[alias.removeprefix("module.")] = first.removeprefix("module.")
    return without_tied_copies(strip_module(tensors), aliases)
