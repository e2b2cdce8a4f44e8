"""Checkpoints of transformers' Trainer and its subclasses (TRL): ``checkpoint-<N>``.

A Hugging Face folder with ``optimizer.pt`` (by numbers: first the parameters with weight decay, then those without),
``scheduler.pt``, ``rng_state*.pth`` and ``trainer_state.json``; under FSDP with Accelerate's sharded folders for
weights and optimizer. ``training_args.bin``, a pickle, is never opened. The folder's number counts steps from 1. A
Hugging Face folder without ``trainer_state.json`` is a model without a training state.
"""

import json
import re
from pathlib import Path
from typing import Any

from ...utils.errors import CheckpointCorruptError, ConfigError
from . import accelerate
from .architecture import Architecture, find_architecture
from .checkpoint import Checkpoint, ReadOptions
from .generators import of_keys
from .parameter_order import Rule
from .torch_files import read_file
from .weights import read_bin, read_model_folder, store_once

_STATE = "trainer_state.json"
_RNG = {"python": "python", "numpy": "numpy", "cpu": "cpu", "cuda": "cuda"}


def recognises(folder: Path) -> bool:
    """Whether a Trainer wrote it, or it is a model's folder."""
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_model.safetensors")
    names = {path.name for path in folder.iterdir()}
    return _STATE in names or ("config.json" in names and bool(names.intersection(weights)))


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Model, optimizer, schedule and generators; see `checkpoint.Reader`."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds an adapter (LoRA), not a model: merge it into its base (PeftModel.merge_and_unload, "
            "save_pretrained) and convert that, or load it with PEFT"
        )
    architecture = find_architecture(options.config, folder)
    if architecture is None:
        raise ConfigError(f"{folder} has no config.json; name a folder that has: config=, --config")
    trained = (folder / _STATE).is_file()
    if accelerate.is_sharded(folder):
        found = accelerate.read_sharded(folder, options, architecture)
    else:
        found = _read_weights(folder, options, architecture)
    found.format = "transformers Trainer" if trained else "Hugging Face"
    if trained:
        _add_training(found, folder, options, architecture)
    return {"default": found}


def _read_weights(folder: Path, options: ReadOptions, architecture: Architecture) -> Checkpoint:
    if (folder / "pytorch_model.bin").is_file():
        tensors = read_bin(folder / "pytorch_model.bin")[0]
    else:
        tensors = read_model_folder(folder, architecture, options.files)
    model, aliases = store_once(tensors, architecture.aliases)
    return Checkpoint("", model, aliases=aliases, architecture=architecture)


def _add_training(found: Checkpoint, folder: Path, options: ReadOptions, architecture: Architecture) -> None:
    found.step, found.epoch_steps = _place(folder / _STATE)
    if (folder / "optimizer.pt").is_file():
        rules = [Rule("Trainer's groups with and without weight decay", architecture.trainer_groups())]
        accelerate.add_numbered(found, folder / "optimizer.pt", options, rules)
    elif (folder / "optimizer.bin").is_file():  # FSDP's full state, by names
        accelerate.add_numbered(found, folder / "optimizer.bin", options, [])
    if (folder / "scheduler.pt").is_file():
        found.scheduler = read_file(folder / "scheduler.pt")
    several = sorted(folder.glob("rng_state_*.pth"), key=lambda path: int(re.sub(r"\D", "", path.name)))
    paths = several or [path for path in (folder / "rng_state.pth",) if path.is_file()]
    found.rng = [of_keys(read_file(path), _RNG, rank, str(path)) for rank, path in enumerate(paths)]
    found.ranks = max(1, len(paths))
    found.ignored += [path.name for path in (folder / "scaler.pt",) if path.is_file()]


def _place(path: Path) -> tuple[int | None, int | None]:
    """The last step, counted from 0, and the steps of an epoch, where both can be told."""
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        steps, epochs = int(state["global_step"]), float(state.get("epoch") or 0)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    per_epoch = round(steps / epochs) if epochs > 0 else 0
    # Trainer stores batches / length unrounded. Where accumulation does not divide the length, an epoch has one shorter
    # step more, which cannot be told from here: then nothing is said.
    exact = per_epoch > 0 and abs(steps / per_epoch - epochs) < 1e-9 * epochs
    return (steps - 1 if steps > 0 else None), (per_epoch if exact else None)
