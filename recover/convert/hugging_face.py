"""Read weights from folders of transformers, Trainer, TRL (``checkpoint-<N>``) and Accelerate
(``save_state``).

Weights are in ``model.safetensors`` or its index, a ``.bin`` file, or DCP data in
``pytorch_model_fsdp_0/``. Other files (optimizers, schedules, generators, data positions) are
reported as not converted, and never opened. Accelerate and FSDP use the names of
``model.state_dict()``. Model folders use the names of their architecture's file format.
"""

import re
from pathlib import Path

from ...utils.errors import CheckpointMismatchError, ConfigError
from .checkpoint import Architecture, Checkpoint, ReadOptions
from .dcp import read_weights
from .stored_tensors import stored_safetensors
from .weights import read_bin, read_model_folder, strip_module, without_tied_copies

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
    weights = {*_SAFE, *_BINS, _SHARDED, _TRAINER, "adapter_model.safetensors"}
    return bool(names & weights) or any(map(_RANKED.fullmatch, names))


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Read the weights of the folder, as ``default``."""
    names = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in names and "config.json" not in names:
        raise ConfigError(
            f"{folder} holds an adapter (LoRA), not a model: merge it into its base "
            "(PeftModel.merge_and_unload, save_pretrained) and convert that, or load it with PEFT"
        )
    found = [name for name in (*_SAFE, *_BINS) if name in names]
    if _SHARDED in names and found:
        raise ConfigError(
            f"{folder} holds weights twice, {_SHARDED} and {found[0]}: move away those that are "
            "not meant"
        )
    if _SHARDED not in names and not found:
        ranked = sorted(name for name in names if _RANKED.fullmatch(name))
        raise ConfigError(
            f"{folder} holds {ranked[0]}: a file of each rank, which only Accelerate on as many "
            "ranks reads; save it with use_dcp=True, or as FULL_STATE_DICT"
            if ranked
            else f"{folder} holds a training state without weights"
        )
    architecture = Architecture.find(options.config, folder)
    accelerate = _SHARDED in names or any(map(_ACCELERATE.match, names))
    if _SHARDED in names:
        checkpoint = read_weights(folder / _SHARDED, options.root or "", architecture)
    else:
        own_names = accelerate and _TRAINER not in names
        checkpoint = _read_files(folder, found[0], options, architecture, own_names=own_names)
    checkpoint.format = (
        "transformers Trainer"
        if _TRAINER in names
        else "Accelerate"
        if accelerate
        else "Hugging Face"
    )
    checkpoint.ignored = sorted(found[1:] + [name for name in names if _TRAINING.fullmatch(name)])
    return {"default": checkpoint}


def _read_files(
    folder: Path,
    name: str,
    options: ReadOptions,
    architecture: Architecture | None,
    *,
    own_names: bool,
) -> Checkpoint:
    tied: dict[str, str] = {}
    if name in _BINS:
        tensors, tied = read_bin(folder / name)
    elif own_names or architecture is None:
        tensors = stored_safetensors(folder, options.files)
    else:
        tensors = read_model_folder(folder, architecture, options.files)
    tied = {
        alias.removeprefix("module."): first.removeprefix("module.")
        for alias, first in tied.items()
    }
    model, aliases = without_tied_copies(
        strip_module(tensors), tied if architecture is None else architecture.aliases
    )
    if own_names and architecture is not None:
        if strangers := sorted(model.keys() - architecture.model.state_dict().keys()):
            found = f"{strangers[0]!r}, which its model does not ({len(strangers)} such)"
            raise CheckpointMismatchError(f"{folder} has {found}")
        if missing := [name for name in architecture.parameters if name not in model]:
            raise CheckpointMismatchError(f"{folder} lacks {missing[0]!r} ({len(missing)} missing)")
    return Checkpoint("", model, aliases=aliases | tied, architecture=architecture)
