"""Checkpoints of verl's FSDP workers: a file of each rank for model, optimizer, and schedule with generators.

``model_world_size_<N>_rank_<r>.pt`` is ``model.state_dict()``, with a DTensor a parameter; ``optim_...`` is
``optimizer.state_dict()`` by numbers, which go by the order of ``model.parameters()``; ``extra_state_...`` has
``lr_scheduler`` and ``rng``. The config lies in ``huggingface/``. verl counts steps from 1: ``global_step_8`` is the
state after 8 steps.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from .architecture import Architecture, find_architecture
from .checkpoint import Checkpoint, ReadOptions
from .generators import of_keys
from .parameter_order import Rule, name_states
from .torch_files import from_ranks, read_file, shared_names

_MODEL = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_RNG = {"python": "random", "numpy": "numpy", "cpu": "cpu", "cuda": "cuda"}
_ENGINES = ("actor", "critic", "ref")


def recognises(folder: Path) -> bool:
    """Whether it is of one worker, or a step with a folder for each."""
    return bool(_workers(folder))


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Each worker that the folder holds; see `checkpoint.Reader`."""
    return {name: _read_worker(path, options) for name, path in _workers(folder).items()}


def _workers(folder: Path) -> dict[str, Path]:
    if _ranks(folder):
        return {"default": folder}
    return {name: folder / name for name in _ENGINES if (folder / name).is_dir() and _ranks(folder / name)}


def _ranks(folder: Path) -> list[tuple[int, int]]:
    """World size and rank of every model file."""
    found = (_MODEL.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def _read_worker(folder: Path, options: ReadOptions) -> Checkpoint:
    world_size = _world_size(folder)
    states = _files(folder, "model", world_size)
    names = list(states[0])
    if any(list(state) != names for state in states):
        raise CheckpointCorruptError(f"{folder}: the model files of the ranks do not have the same tensors")
    tied = shared_names(states[0])
    architecture = find_architecture(options.config, folder / "huggingface")
    model = {name: from_ranks(name, [state[name] for state in states]) for name in names if name not in tied}
    found = Checkpoint(
        f"verl, {world_size} ranks",
        model,
        aliases=tied,
        ranks=world_size,
        architecture=architecture,
        step=_step(folder),
    )
    if (folder / f"optim_world_size_{world_size}_rank_0.pt").exists():
        _add_optimizer(found, folder, world_size, options, architecture)
    if (folder / f"extra_state_world_size_{world_size}_rank_0.pt").exists():
        _add_extra(found, folder, world_size)
    return found


def _world_size(folder: Path) -> int:
    ranks = _ranks(folder)
    sizes = sorted({size for size, _ in ranks})
    if len(sizes) > 1:
        raise ConfigError(f"{folder} holds the files of runs on {sizes} ranks; move those away that are not meant")
    if missing := sorted(set(range(sizes[0])) - {rank for _, rank in ranks}):
        raise CheckpointCorruptError(
            f"{folder} is incomplete: the model files of ranks {missing} of {sizes[0]} are missing"
        )
    return sizes[0]


def _files(folder: Path, kind: str, world_size: int) -> list[dict[str, Any]]:
    states = [read_file(folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt") for rank in range(world_size)]
    if not all(isinstance(state, dict) for state in states):
        raise CheckpointCorruptError(f"{folder}: the {kind} files do not hold dicts")
    return states


def _step(folder: Path) -> int | None:
    """The last step, counted from 0, by the name that verl gives to the folder of a step."""
    here = Path(os.path.abspath(folder))  # not resolved: a link may lead to a folder of another name
    matches = (re.fullmatch(r"global_step_(\d+)", part) for part in (here.name, here.parent.name))
    return next((int(match[1]) - 1 for match in matches if match), None)


def _add_optimizer(
    found: Checkpoint, folder: Path, world_size: int, options: ReadOptions, architecture: Architecture | None
) -> None:
    version = _fsdp_version(folder)
    if version == 1:
        raise CheckpointMismatchError(
            f"{folder} is of FSDP1 (fsdp_config.json), whose optimizer keeps flat shards that do not say which "
            "parameters they are of; convert --to hf, or train with strategy fsdp2 (verl: actor.strategy=fsdp2)"
        )
    states = _files(folder, "optim", world_size)
    _require_alike(folder, states)
    merged = {
        "param_groups": states[0]["param_groups"],
        "state": {
            number: {
                key: from_ranks(f"optimizer state {number}.{key}", [state["state"][number][key] for state in states])
                if isinstance(value, torch.Tensor)
                else value
                for key, value in entries.items()
            }
            for number, entries in states[0]["state"].items()
        },
    }
    shapes = {name: tensor.shape for name, tensor in found.model.items()}
    rules = [Rule("model.parameters()", [list(found.model)])]
    if architecture is not None:
        rules = [Rule("model.parameters()", [architecture.parameters]), *rules]
    if options.parameters is not None:
        rules = [Rule("the names that were given", options.parameters)]
    what = f"{folder}/optim_world_size_{world_size}_rank_*.pt"
    found.optimizer, found.groups = name_states(what, merged, shapes, rules)


def _require_alike(folder: Path, states: list[dict[str, Any]]) -> None:
    """Every rank's file is an optimizer's, with the same entries."""
    for rank, state in enumerate(states):
        if not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
            raise CheckpointCorruptError(
                f"{folder}: the optim file of rank {rank} has {sorted(map(str, state))[:4]}, "
                "expected 'state' and 'param_groups'"
            )
        for number, entries in states[0]["state"].items():
            if set(state["state"].get(number, ())) != set(entries):
                raise CheckpointCorruptError(
                    f"{folder}: the optim files of ranks 0 and {rank} differ in what they hold of parameter {number}"
                )


def _fsdp_version(folder: Path) -> int | None:
    try:
        return json.loads((folder / "fsdp_config.json").read_bytes()).get("FSDP_version")
    except (OSError, ValueError, AttributeError):
        return None


def _add_extra(found: Checkpoint, folder: Path, world_size: int) -> None:
    extras = _files(folder, "extra_state", world_size)
    found.scheduler = extras[0].get("lr_scheduler")
    if all("rng" in extra for extra in extras):
        found.rng = [of_keys(extra["rng"], _RNG, rank, f"{folder}, rank {rank}") for rank, extra in enumerate(extras)]
