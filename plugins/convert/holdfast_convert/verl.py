"""Read checkpoints of verl's FSDP workers: files of each rank for model, optimizer, and schedule
with generators.

``model_world_size_<N>_rank_<r>.pt`` is ``model.state_dict()`` of DTensors. ``optim_...`` is
``optimizer.state_dict()`` by number, in the order of ``model.parameters()``. ``extra_state_...``
holds ``lr_scheduler`` and ``rng``. The config is in ``huggingface/``. verl counts steps from 1:
``global_step_8`` is the state after 8 steps. `shards` assembles the tensors of the ranks.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.recover.export.architecture import Architecture
from holdfast.recover.export.stored_tensors import Tensors
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ConfigError,
)
from holdfast.utils.plain_values import pack_json
from holdfast.utils.rng import RngState, check_rng

from .checkpoint import Checkpoint, Entries, Groups, ReadOptions
from .shards import from_ranks
from .torch_files import read_file, require_tensor, shared_names

_MODEL = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_WORKERS = ("actor", "critic", "ref")
_CUDA_STATE_BYTES = 16


class _ModelFile(NamedTuple):
    """The parts of the name of a model file."""

    world_size: int
    rank: int


def recognises(folder: Path) -> bool:
    """Whether the folder belongs to one worker, or to a step with a folder for each worker."""
    return bool(_workers(folder))


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Worker -> its checkpoint. The folder of one worker gives ``default``."""
    workers = _workers(folder)
    return {name: _read_worker(path, options) for name, path in workers.items()}


def _workers(folder: Path) -> dict[str, Path]:
    if _model_files(folder):
        return {"default": folder}
    return {name: folder / name for name in _WORKERS if _model_files(folder / name)}


def _model_files(folder: Path) -> list[_ModelFile]:
    """The model files of a worker. None of a folder that does not exist."""
    if not folder.is_dir():
        return []
    found: list[_ModelFile] = []
    # Not by glob, which would hide a folder that cannot be read.
    for path in folder.iterdir():
        match = _MODEL.fullmatch(path.name)
        if match:
            found.append(_ModelFile(int(match[1]), int(match[2])))
    return sorted(found)


def _read_worker(folder: Path, options: ReadOptions) -> Checkpoint:
    world_size = _world_size(folder)

    # Every rank has its shard of the same tensors.
    states = _files(folder, "model", world_size)
    for rank, state in enumerate(states):
        path = _file(folder, "model", world_size, rank)
        for name, value in state.items():
            require_tensor(path, name, value)
    names = list(states[0])
    if not names:
        raise CheckpointCorruptError(f"{_file(folder, 'model', world_size, 0)} holds no tensors")
    if any(list(state) != names for state in states):
        raise CheckpointCorruptError(
            f"{folder}: the model files of the ranks do not have the same tensors"
        )

    tied = shared_names(states[0])
    model: Tensors = {}
    for name in names:
        if name not in tied:
            parts = [state[name] for state in states]
            model[name] = from_ranks(name, parts)
    found = Checkpoint(
        f"verl, {world_size} ranks",
        model,
        aliases=tied,
        ranks=world_size,
        architecture=Architecture.find(options.config, folder / "huggingface"),
        step=_step(folder),
    )

    # Optimizer, schedule and generators are in files beside those of the model.
    if options.with_optimizer:
        if _file(folder, "optim", world_size, 0).exists():
            _add_optimizer(found, folder, world_size)
        if _file(folder, "extra_state", world_size, 0).exists():
            _add_extras(found, folder, world_size)
    return found


def _world_size(folder: Path) -> int:
    """Number of ranks, each of which has a model file."""
    files = _model_files(folder)
    # A second run with another number of ranks leaves its files beside the first.
    sizes = sorted({file.world_size for file in files})
    if len(sizes) > 1:
        raise ConfigError(
            f"{folder} holds the files of runs on {sizes} ranks; move those away that are not meant"
        )
    (size,) = sizes
    there = {file.rank for file in files}
    missing = sorted(set(range(size)) - there)
    if missing:
        raise CheckpointCorruptError(
            f"{folder} is incomplete: the model files of ranks {missing} of {size} are missing"
        )
    return size


def _file(folder: Path, kind: str, world_size: int, rank: int) -> Path:
    return folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def _files(folder: Path, kind: str, world_size: int) -> list[dict[str, Any]]:
    """The contents of the files of all ranks, by rank."""
    paths = [_file(folder, kind, world_size, rank) for rank in range(world_size)]
    states = [read_file(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        if not isinstance(state, dict):
            raise CheckpointCorruptError(f"{path} holds a {type(state).__name__}; expected a dict")
    return states


def _step(folder: Path) -> int | None:
    """Last step, counted from 0, from the name that verl gives to the folder of a step."""
    # Not resolved: a link may lead to a folder of another name.
    here = Path(os.path.abspath(folder))
    for name in (here.name, here.parent.name):
        match = re.fullmatch(r"global_step_(\d+)", name)
        if match:
            return int(match[1]) - 1
    return None


def _add_extras(found: Checkpoint, folder: Path, world_size: int) -> None:
    """Add the schedule, and the generators of every rank."""
    extras = _files(folder, "extra_state", world_size)
    path = _file(folder, "extra_state", world_size, 0)
    found.scheduler = _schedule(path, extras[0].get("lr_scheduler"))
    if not all("rng" in extra for extra in extras):
        return
    for rank, extra in enumerate(extras):
        path = _file(folder, "extra_state", world_size, rank)
        found.rng.append(_generators(extra["rng"], rank, f"{path}"))


def _schedule(path: Path, state: Any) -> dict[str, Any] | None:
    """The state of the schedule in the file ``path``, if there is one."""
    if state is None:
        return None
    if not isinstance(state, dict):
        raise CheckpointCorruptError(
            f"{path}: lr_scheduler is {brief(state)}; expected the state_dict of a schedule"
        )
    # A resume goes on from this number.
    step = state.get("last_epoch", 0)
    if not isinstance(step, int):
        raise CheckpointCorruptError(
            f"{path}: last_epoch of lr_scheduler is {brief(step)}; expected a whole number"
        )
    _require_plain(path, "lr_scheduler", state)
    return state


def _require_plain(path: str | Path, name: str, value: Any) -> None:
    try:
        pack_json(value, name)
    except ConfigError as error:
        raise CheckpointCorruptError(f"{path}: {error}") from error


def _generators(saved: Any, rank: int, source: str) -> RngState:
    """Generators of a rank as a generation stores them, from the states that Python, numpy and
    torch return.
    """
    try:
        # The form is that of each library's own state.
        _, words, gauss = saved["random"]
        kind, key, position, has_gauss, cached = saved["numpy"]
        if kind != "MT19937":
            raise ValueError(f"numpy's generator is {kind}")
        key = np.asarray(key).astype(np.int64)
        state = {
            "python": torch.tensor(words, dtype=torch.int64),
            "python_gauss": _gauss(gauss),
            "numpy": torch.from_numpy(np.append(key, int(position))),
            "numpy_gauss": _gauss(float(cached) if has_gauss else None),
            "torch": saved["cpu"].clone(),
        }
        devices = _cuda_states(saved.get("cuda"))
        if devices:
            # The rank's own device first.
            own = rank % len(devices)
            ordered = devices[own:] + devices[:own]
            state["cuda"] = torch.stack(ordered)
        check_rng(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointCorruptError(
            f"{source} does not hold the state of random generators: {error}"
        ) from error
    return state


def _gauss(value: float | None) -> Tensor:
    """Whether a generator keeps a normal variate for its next call, and the variate."""
    pair = [0.0, 0.0] if value is None else [1.0, value]
    return torch.tensor(pair, dtype=torch.float64)


def _cuda_states(saved: Any) -> list[Tensor]:
    """The states of the devices of a node. verl saves one tensor, or a list."""
    rows = [saved] if isinstance(saved, Tensor) else list(saved or ())
    return [row.clone() for row in rows if row.numel() == _CUDA_STATE_BYTES]


def _add_optimizer(found: Checkpoint, folder: Path, world_size: int) -> None:
    if _fsdp_version(folder) == 1:
        raise CheckpointMismatchError(
            f"{folder} is of FSDP1 (fsdp_config.json), whose optimizer keeps flat shards that do "
            "not say which parameters they are of; convert --to hf, or train with strategy fsdp2 "
            "(verl: actor.strategy=fsdp2)"
        )
    # All files are checked before any of them is trusted.
    what = f"{folder}/optim_world_size_{world_size}_rank_*.pt"
    states = _files(folder, "optim", world_size)
    _require_alike(folder, states)
    groups = states[0]["param_groups"]
    names = _names(what, groups, found)

    # The state of each parameter, assembled from the ranks.
    state: Entries = {}
    for number, entries in states[0]["state"].items():
        if number not in names:
            raise CheckpointMismatchError(
                f"{what} has state for parameter {number!r}, which is in none of its groups"
            )
        assembled = dict(entries)
        for key, value in entries.items():
            if isinstance(value, Tensor):
                parts = [each["state"][number][key] for each in states]
                assembled[key] = from_ranks(f"optimizer state {number}.{key}", parts)
        state[names[number]] = assembled

    # The groups, with names instead of numbers.
    named: Groups = []
    for number, group in enumerate(groups):
        plain = _plain(group)
        _require_plain(what, f"param_groups[{number}]", plain)
        plain["params"] = [names[each] for each in group["params"]]
        named.append(plain)
    found.set_optimizer(what, state, named)


def _fsdp_version(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "fsdp_config.json").read_bytes())
        return config.get("FSDP_version")
    except (OSError, ValueError, AttributeError):
        return None


def _names(what: str, groups: Sequence[Mapping[str, Any]], found: Checkpoint) -> dict[Any, str]:
    """Number of a parameter -> name. verl passes ``model.parameters()`` to its optimizer as one
    group.
    """
    numbers = [number for group in groups for number in group["params"]]

    # The first of these orders that has as many parameters.
    orders = [list(found.model)]
    if found.architecture is not None:
        orders.insert(0, found.architecture.parameters)
    fitting = [order for order in orders if len(order) == len(numbers)]

    if len(groups) != 1 or not fitting:
        raise ConfigError(
            f"{what} numbers its parameters, in groups of "
            f"{[len(group['params']) for group in groups]}; expected one group of the "
            f"{len(found.model)} parameters of the model. Which they are is not known: convert "
            "--to hf"
        )
    return dict(zip(numbers, fitting[0], strict=True))


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        # A learning rate may be stored as a tensor.
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        found[key] = value
    return found


def _require_alike(folder: Path, states: list[dict[str, Any]]) -> None:
    """Check that each rank has the state of the same parameters, in the form of an optimizer's
    ``state_dict``.
    """
    for rank, state in enumerate(states):
        path = _file(folder, "optim", len(states), rank)
        entries_of = state.get("state")
        groups = state.get("param_groups")
        if not isinstance(entries_of, dict) or not isinstance(groups, list):
            raise CheckpointCorruptError(
                f"{folder}: the optim file of rank {rank} has {sorted(map(str, state))[:4]}, "
                "expected 'state' and 'param_groups'"
            )
        for number, group in enumerate(groups):
            _require_group(path, number, group)
        for number, entries in entries_of.items():
            _require_entries(path, number, entries)

        for number, entries in states[0]["state"].items():
            if set(entries_of.get(number, ())) != set(entries):
                raise CheckpointCorruptError(
                    f"{folder}: the optim files of ranks 0 and {rank} differ in what they hold of "
                    f"parameter {number}"
                )


def _require_group(path: Path, number: int, group: Any) -> None:
    """Check the form of a parameter group: a dict with numbers as ``params``."""
    if not isinstance(group, dict):
        raise CheckpointCorruptError(
            f"{path}: param_groups[{number}] is {brief(group)}; expected a dict"
        )
    params = group.get("params")
    is_list = isinstance(params, list)
    if not is_list or not all(isinstance(param, int | str) for param in params):
        raise CheckpointCorruptError(
            f"{path}: params of param_groups[{number}] is {brief(params)}; expected a "
            "list of numbers"
        )


def _require_entries(path: Path, number: Any, entries: Any) -> None:
    """Check the state of one parameter: tensors and plain values by name."""
    if not isinstance(entries, dict):
        raise CheckpointCorruptError(
            f"{path}: the state of parameter {number} is {brief(entries)}; expected a dict of its "
            "entries"
        )
    # Names are checked with the tensors.
    for key, value in entries.items():
        if isinstance(value, Tensor) or not isinstance(key, str):
            require_tensor(f"{path}, parameter {number}", key, value)
        else:
            _require_plain(path, f"{key} of parameter {number}", value)
