"""Read checkpoints of verl's FSDP workers: files of each rank for model, optimizer, and schedule
with generators.

``model_world_size_<N>_rank_<r>.pt`` is ``model.state_dict()`` of DTensors. ``optim_...`` is
``optimizer.state_dict()`` by number, in the order of ``model.parameters()``. ``extra_state_...``
holds ``lr_scheduler`` and ``rng``. The config is in ``huggingface/``. verl counts steps from 1:
``global_step_8`` is the state after 8 steps.

The file name says which rank wrote the file, and a wrong name would put its rows in the wrong
place. So the coordinate in each DTensor's mesh is compared with the rank in the name, and each
shard's size with the size that FSDP cuts.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ...utils.plain_values import pack_json
from ...utils.rng import RngState, check_rng
from .checkpoint import Architecture, Checkpoint, ReadOptions
from .weights import read_file, require_tensor, same_values, shared_names

_MODEL = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_CUDA_STATE_BYTES = 16


def recognises(folder: Path) -> bool:
    """Whether the folder belongs to one worker, or to a step with a folder for each worker."""
    return bool(_workers(folder))


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Worker -> its checkpoint. The folder of one worker gives ``default``."""
    return {name: _read_worker(path, options) for name, path in _workers(folder).items()}


def _workers(folder: Path) -> dict[str, Path]:
    if _ranks(folder):
        return {"default": folder}
    return {name: folder / name for name in ("actor", "critic", "ref") if _ranks(folder / name)}


def _ranks(folder: Path) -> list[tuple[int, int]]:
    """World size and rank of every model file. None of a folder that does not exist."""
    paths = (
        folder.iterdir() if folder.is_dir() else ()
    )  # glob would hide a folder that cannot be read
    found = (_MODEL.fullmatch(path.name) for path in paths)
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def _read_worker(folder: Path, options: ReadOptions) -> Checkpoint:
    world_size = _world_size(folder)
    states = _files(folder, "model", world_size)
    for rank, state in enumerate(states):
        for name, value in state.items():
            require_tensor(_file(folder, "model", world_size, rank), name, value)
    names = list(states[0])
    if not names:
        raise CheckpointCorruptError(f"{_file(folder, 'model', world_size, 0)} holds no tensors")
    if any(list(state) != names for state in states):
        raise CheckpointCorruptError(
            f"{folder}: the model files of the ranks do not have the same tensors"
        )
    tied = shared_names(states[0])
    found = Checkpoint(
        f"verl, {world_size} ranks",
        {
            name: from_ranks(name, [state[name] for state in states])
            for name in names
            if name not in tied
        },
        aliases=tied,
        ranks=world_size,
        architecture=Architecture.find(options.config, folder / "huggingface"),
        step=_step(folder),
    )
    if options.with_optimizer and _file(folder, "optim", world_size, 0).exists():
        _add_optimizer(found, folder, world_size)
    if options.with_optimizer and (path := _file(folder, "extra_state", world_size, 0)).exists():
        extras = _files(folder, "extra_state", world_size)
        found.scheduler = _schedule(path, extras[0].get("lr_scheduler"))
        if all("rng" in extra for extra in extras):
            found.rng = [
                _generators(extra["rng"], rank, f"{_file(folder, 'extra_state', world_size, rank)}")
                for rank, extra in enumerate(extras)
            ]
    return found


def _world_size(folder: Path) -> int:
    ranks = _ranks(folder)
    sizes = sorted({size for size, _ in ranks})
    if len(sizes) > 1:
        raise ConfigError(
            f"{folder} holds the files of runs on {sizes} ranks; move those away that are not meant"
        )
    (size,) = sizes
    if missing := sorted(set(range(size)) - {rank for _, rank in ranks}):
        raise CheckpointCorruptError(
            f"{folder} is incomplete: the model files of ranks {missing} of {size} are missing"
        )
    return size


def _file(folder: Path, kind: str, world_size: int, rank: int) -> Path:
    return folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def _files(folder: Path, kind: str, world_size: int) -> list[dict[str, Any]]:
    paths = [_file(folder, kind, world_size, rank) for rank in range(world_size)]
    states = [read_file(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        if not isinstance(state, dict):
            raise CheckpointCorruptError(f"{path} holds a {type(state).__name__}; expected a dict")
    return states


def _schedule(path: Path, state: Any) -> dict[str, Any] | None:
    """The state of the schedule in the file ``path``, if there is one."""
    if state is None:
        return None
    if not isinstance(state, dict):
        raise CheckpointCorruptError(
            f"{path}: lr_scheduler is {brief(state)}; expected the state_dict of a schedule"
        )
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


def _step(folder: Path) -> int | None:
    """Last step, counted from 0, from the name that verl gives to the folder of a step."""
    here = Path(
        os.path.abspath(folder)
    )  # not resolved: a link may lead to a folder of another name
    matches = (re.fullmatch(r"global_step_(\d+)", part) for part in (here.name, here.parent.name))
    return next((int(match[1]) - 1 for match in matches if match), None)


def _add_optimizer(found: Checkpoint, folder: Path, world_size: int) -> None:
    if _fsdp_version(folder) == 1:
        raise CheckpointMismatchError(
            f"{folder} is of FSDP1 (fsdp_config.json), whose optimizer keeps flat shards that do "
            "not say which parameters they are of; convert --to hf, or train with strategy fsdp2 "
            "(verl: actor.strategy=fsdp2)"
        )
    what = f"{folder}/optim_world_size_{world_size}_rank_*.pt"
    states = _files(folder, "optim", world_size)
    _require_alike(folder, states)
    groups = states[0]["param_groups"]
    names = _names(what, groups, found)
    state: dict[str, dict[str, Any]] = {}
    for number, entries in states[0]["state"].items():
        if number not in names:
            raise CheckpointMismatchError(
                f"{what} has state for parameter {number!r}, which is in none of its groups"
            )
        state[names[number]] = assembled = dict(entries)
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                parts = [each["state"][number][key] for each in states]
                assembled[key] = from_ranks(f"optimizer state {number}.{key}", parts)
    plain = [_plain(group) for group in groups]
    for number, group in enumerate(plain):
        _require_plain(what, f"param_groups[{number}]", group)
    named = [
        values | {"params": [names[number] for number in group["params"]]}
        for group, values in zip(groups, plain, strict=True)
    ]
    found.set_optimizer(what, state, named)


def _names(what: str, groups: Sequence[Mapping[str, Any]], found: Checkpoint) -> dict[Any, str]:
    """Number of a parameter -> name. verl passes ``model.parameters()`` to its optimizer as one
    group.
    """
    numbers = [number for group in groups for number in group["params"]]
    orders = [found.architecture.parameters] if found.architecture is not None else []
    order = next((each for each in (*orders, list(found.model)) if len(each) == len(numbers)), None)
    if len(groups) != 1 or order is None:
        raise ConfigError(
            f"{what} numbers its parameters, in groups of "
            f"{[len(group['params']) for group in groups]}; expected one group of the "
            f"{len(found.model)} parameters of the model. Which they are is not known: convert "
            "--to hf"
        )
    return dict(zip(numbers, order, strict=True))


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {  # a learning rate may be stored as a tensor
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _require_alike(folder: Path, states: list[dict[str, Any]]) -> None:
    """Check that each rank has the state of the same parameters, in the form of an optimizer's
    ``state_dict``.
    """
    for rank, state in enumerate(states):
        path = _file(folder, "optim", len(states), rank)
        if not isinstance(state.get("state"), dict) or not isinstance(
            state.get("param_groups"), list
        ):
            raise CheckpointCorruptError(
                f"{folder}: the optim file of rank {rank} has {sorted(map(str, state))[:4]}, "
                "expected 'state' and 'param_groups'"
            )
        for number, group in enumerate(state["param_groups"]):
            if not isinstance(group, dict):
                raise CheckpointCorruptError(
                    f"{path}: param_groups[{number}] is {brief(group)}; expected a dict"
                )
            params = group.get("params")
            if not isinstance(params, list) or not all(
                isinstance(param, int | str) for param in params
            ):
                raise CheckpointCorruptError(
                    f"{path}: params of param_groups[{number}] is {brief(params)}; expected a "
                    "list of numbers"
                )
        for number, entries in state["state"].items():
            _require_entries(path, number, entries)
        for number, entries in states[0]["state"].items():
            if set(state["state"].get(number, ())) != set(entries):
                raise CheckpointCorruptError(
                    f"{folder}: the optim files of ranks 0 and {rank} differ in what they hold of "
                    f"parameter {number}"
                )


def _require_entries(path: Path, number: Any, entries: Any) -> None:
    """Check the state of one parameter: tensors and plain values by name."""
    if not isinstance(entries, dict):
        raise CheckpointCorruptError(
            f"{path}: the state of parameter {number} is {brief(entries)}; expected a dict of its "
            "entries"
        )
    for key, value in entries.items():
        if isinstance(value, torch.Tensor) or not isinstance(key, str):
            require_tensor(f"{path}, parameter {number}", key, value)
        else:
            _require_plain(path, f"{key} of parameter {number}", value)


def _fsdp_version(folder: Path) -> int | None:
    try:
        return json.loads((folder / "fsdp_config.json").read_bytes()).get("FSDP_version")
    except (OSError, ValueError, AttributeError):
        return None


def _generators(saved: Any, rank: int, source: str) -> RngState:
    """Generators of a rank as a generation stores them, from the states that Python, numpy and
    torch return.
    """
    try:
        _, words, gauss = saved["random"]
        kind, key, position, has_gauss, cached = saved["numpy"]
        if kind != "MT19937":
            raise ValueError(f"numpy's generator is {kind}")
        state = {
            "python": torch.tensor(words, dtype=torch.int64),
            "python_gauss": torch.tensor(
                [0.0, 0.0] if gauss is None else [1.0, gauss], dtype=torch.float64
            ),
            "numpy": torch.from_numpy(np.append(np.asarray(key).astype(np.int64), int(position))),
            "numpy_gauss": torch.tensor(
                [1.0, float(cached)] if has_gauss else [0.0, 0.0], dtype=torch.float64
            ),
            "torch": saved["cpu"].clone(),
        }
        cuda = saved.get("cuda")
        rows = [cuda] if isinstance(cuda, torch.Tensor) else list(cuda or ())
        if devices := [row.clone() for row in rows if row.numel() == _CUDA_STATE_BYTES]:
            own = rank % len(devices)  # the rank's own device first
            state["cuda"] = torch.stack([*devices[own:], *devices[:own]])
        check_rng(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointCorruptError(
            f"{source} does not hold the state of random generators: {error}"
        ) from error
    return state


def from_ranks(name: str, parts: Sequence[torch.Tensor]) -> LazyTensor:
    """Assemble a tensor from the parts of all ranks: DTensors on a mesh, or the same plain tensor
    everywhere.

    ``name`` is for messages. ``parts`` are in the order of the ranks in the file names.

    Raises:
        CheckpointCorruptError: a part belongs to another rank, or does not have the size that FSDP
            cuts.
        CheckpointMismatchError: the parts are cut in a way that cannot be assembled without process
            groups.
    """
    first, sharded = parts[0], [part for part in parts if isinstance(part, DTensor)]
    if len(sharded) == len(parts):
        try:
            return _from_shards(name, sharded)
        except AttributeError as error:  # a mesh as another version of torch pickles it
            raise CheckpointMismatchError(
                f"{name} was saved by a version of torch whose DTensors torch {torch.__version__} "
                f"cannot read: {error}"
            ) from error
    if sharded:
        raise CheckpointCorruptError(f"{name} is a DTensor on some ranks only")
    whole = LazyTensor.of(first)
    if not all(same_values(whole, LazyTensor.of(part)) for part in parts[1:]):
        raise CheckpointMismatchError(
            f"{name} is a plain tensor {list(first.shape)} that differs by rank: flat shards, as "
            "FSDP1 keeps them, say nothing of which parameter they are of. Save it with FSDP2, or "
            "as a full state dict"
        )
    return whole


def _from_shards(name: str, parts: Sequence[DTensor]) -> LazyTensor:
    """Assemble a grid of blocks, one per coordinate along each sharded dim. Of replicas the first
    is used.
    """
    first = parts[0]
    shape, placements, mesh = tuple(first.shape), first.placements, first.device_mesh.mesh
    dims = [placement.dim for placement in placements if type(placement) is Shard]
    if any(type(placement) not in (Shard, Replicate) for placement in placements) or len(
        set(dims)
    ) < len(dims):
        raise CheckpointMismatchError(
            f"{name} is placed as {placements}; expected shards of different dims, and replicas. "
            "Save it as a full state dict, or in torch.distributed.checkpoint's format"
        )
    if sorted(mesh.flatten().tolist()) != list(range(len(parts))):
        raise CheckpointMismatchError(
            f"{name} is on a mesh of {mesh.numel()} ranks; {len(parts)} ranks saved theirs"
        )
    cuts = {
        p.dim: _cuts(shape[p.dim], n)
        for n, p in zip(mesh.shape, placements, strict=True)
        if isinstance(p, Shard)
    }
    blocks: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate in product(*(range(size) for size in mesh.shape)):
        rank = int(mesh[coordinate])
        part = parts[rank]
        _require_own(name, rank, part, first, coordinate)
        place = {
            p.dim: at for p, at in zip(placements, coordinate, strict=True) if isinstance(p, Shard)
        }
        ends = [
            cuts[dim][place[dim] : place[dim] + 2] if dim in cuts else (0, shape[dim])
            for dim in range(len(shape))
        ]
        local, expected = part.to_local(), [last - begin for begin, last in ends]
        if list(local.shape) != expected or local.dtype != first.dtype:
            raise CheckpointCorruptError(
                f"the shard of rank {rank} of {name} is {list(local.shape)} {local.dtype}; "
                f"expected {expected} {first.dtype}, as FSDP cuts {list(shape)}. Were files of "
                "ranks renamed?"
            )
        blocks.setdefault(tuple(begin for begin, _ in ends), local)
    return _from_blocks(shape, first.dtype, blocks)


def _cuts(length: int, count: int) -> list[int]:
    """Boundaries of ``count`` shards from ``torch.chunk``, as FSDP2 makes them. The last shards may
    be empty.
    """
    chunk = -(-length // count)
    return [min(number * chunk, length) for number in range(count + 1)]


def _require_own(
    name: str, rank: int, part: DTensor, first: DTensor, coordinate: tuple[int, ...]
) -> None:
    """Refuse a part of another tensor than on rank 0, or of another rank according to its mesh."""
    same_mesh = torch.equal(part.device_mesh.mesh, first.device_mesh.mesh)
    if (part.shape, part.placements) != (first.shape, first.placements) or not same_mesh:
        raise CheckpointCorruptError(
            f"ranks 0 and {rank} do not have parts of the same tensor {name}"
        )
    own = part.device_mesh.get_coordinate()
    if own is not None and tuple(own) != coordinate:
        raise CheckpointCorruptError(
            f"the file of rank {rank} holds {name} of rank "
            f"{int(part.device_mesh.mesh[tuple(own)])}: its name is not the one that verl gave "
            "it. Put the files of the ranks back under their names"
        )


def _from_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, blocks: dict[tuple[int, ...], torch.Tensor]
) -> LazyTensor:
    """A tensor of adjacent blocks, given by their first indices."""

    def rows(first: int, last: int) -> torch.Tensor:
        if not shape:
            return next(iter(blocks.values()))
        found = torch.empty((last - first, *shape[1:]), dtype=dtype)
        for begin, block in blocks.items():
            low, high = max(first, begin[0]), min(last, begin[0] + block.shape[0])
            if low < high:
                target = found[low - first : high - first]
                for dim in range(1, len(shape)):
                    target = target.narrow(dim, begin[dim], block.shape[dim])
                target.copy_(block[low - begin[0] : high - begin[0]])
        return found

    return LazyTensor(shape, dtype, rows)
