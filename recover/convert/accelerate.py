"""Folders of Accelerate's ``save_state``: FSDP's sharded ones (torch.distributed.checkpoint), and full ones.

Sharded: ``pytorch_model_fsdp_0/`` has the model under ``model``, ``optimizer_0/`` the optimizer under ``optimizer``, by
names. Full: ``model.safetensors`` or a ``.bin``, and ``optimizer.bin``; by numbers, unless FSDP wrote it. Beside both:
``scheduler.bin``, and ``random_states_<rank>.pkl``, which is a file of ``torch.save``. Nothing tells the config.
"""

import re
from pathlib import Path
from typing import Any

import torch

from ...engine.lazy_tensor import LazyTensor
from ...utils.errors import ConfigError
from .architecture import Architecture, find_architecture
from .checkpoint import Checkpoint, ReadOptions
from .dcp import read_optimizer, read_weights
from .generators import of_keys
from .parameter_order import Rule, name_states
from .torch_files import read_file
from .weights import read_bin, read_safetensors, store_once, strip_module

SHARDED_MODEL, SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_RNG = {
    "python": "random_state",
    "numpy": "numpy_random_seed",
    "cpu": "torch_manual_seed",
    "cuda": "torch_cuda_manual_seed",
}
_BINS = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
_BESIDE = re.compile(r"(sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl")


def recognises(folder: Path) -> bool:
    """Whether ``save_state`` wrote it."""
    names = {path.name for path in folder.iterdir()}
    beside = {"optimizer.bin", "scheduler.bin"} & names or any(name.startswith("random_states_") for name in names)
    full = {"model.safetensors", "model.safetensors.index.json", *_BINS} & names
    return is_sharded(folder) or bool(beside and full) or bool(_ranked(folder))


def is_sharded(folder: Path) -> bool:
    """Whether its model is sharded, as FSDP saves it in this format."""
    return (folder / SHARDED_MODEL / ".metadata").is_file()


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """The first model and its optimizer; see `checkpoint.Reader`."""
    if ranked := _ranked(folder):
        raise ConfigError(
            f"{folder} holds {ranked[0]}: a file of each rank, which only Accelerate on as many ranks reads; save "
            "it with use_dcp=True, or as FULL_STATE_DICT"
        )
    architecture = find_architecture(options.config, folder)
    read_model = read_sharded if is_sharded(folder) else _read_full
    found = read_model(folder, options, architecture)
    if (folder / "scheduler.bin").exists():
        found.scheduler = read_file(folder / "scheduler.bin")
    paths = sorted(folder.glob("random_states_*.pkl"), key=lambda path: int(re.sub(r"\D", "", path.name)))
    found.rng = [of_keys(read_file(path), _RNG, rank, str(path)) for rank, path in enumerate(paths)]
    found.ranks = max(1, len(paths))
    several = [path.name for path in folder.glob("*_1*") if path.name.startswith(("model", "optimizer", "pytorch"))]
    found.ignored += sorted(path.name for path in folder.iterdir() if _BESIDE.fullmatch(path.name)) + sorted(several)
    return {"default": found}


def _ranked(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("pytorch_model_fsdp*_rank*.bin"))


def read_sharded(folder: Path, options: ReadOptions, architecture: Architecture | None) -> Checkpoint:
    """Model and optimizer in the format of torch.distributed.checkpoint."""
    found = read_weights(folder / SHARDED_MODEL, options.root or "", architecture)
    found.format = "Accelerate, sharded"
    if (folder / SHARDED_OPTIMIZER / ".metadata").is_file():
        read_optimizer(found, folder / SHARDED_OPTIMIZER, "optimizer.", options)
    return found


def _read_full(folder: Path, options: ReadOptions, architecture: Architecture | None) -> Checkpoint:
    bins = [folder / name for name in _BINS if (folder / name).is_file()]
    tensors, tied = read_bin(bins[0]) if bins else (read_safetensors(folder, options.files), {})
    tensors = strip_module(tensors)
    tied = {name.removeprefix("module."): first.removeprefix("module.") for name, first in tied.items()}
    model, aliases = store_once(tensors, tied if architecture is None else architecture.aliases)
    found = Checkpoint("Accelerate", model, aliases=aliases | tied, architecture=architecture)
    if (folder / "optimizer.bin").is_file():
        rules = [Rule("model.parameters()", [list(model)])] if bins else []  # safetensors files sort their names
        add_numbered(found, folder / "optimizer.bin", options, rules)
    return found


def add_numbered(found: Checkpoint, path: Path, options: ReadOptions, rules: list[Rule]) -> None:
    """The optimizer in a file of ``torch.save``; ``rules`` by which the source may have numbered its parameters."""
    if found.architecture is not None:
        rules = [*rules, Rule("model.parameters()", [found.architecture.parameters])]
    if options.parameters is not None:
        rules = [Rule("the names that were given", options.parameters)]
    state = read_file(path)
    shapes = {name: tensor.shape for name, tensor in found.model.items()}
    try:
        found.optimizer, found.groups = name_states(str(path), _lazy(state), shapes, rules)
    except ConfigError as error:
        if found.architecture is not None:
            raise
        raise ConfigError(f"{error}. Or name a folder with the config.json of the model: config=, --config") from error


def _lazy(state: Any) -> Any:
    """A state_dict with its tensors as `LazyTensor`; those of hyperparameters stay."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return {}
    entries = {
        number: {key: LazyTensor.of(value) if isinstance(value, torch.Tensor) else value for key, value in each.items()}
        for number, each in state["state"].items()
    }
    return {**state, "state": entries}
