"""Read torch.distributed.checkpoint folders with any root, and generations, which hold one such
folder per engine.

Optimizer state is read only from folders of Holdfast and AReaL, both with parameter names below
``dcp.optim``. Hyperparameters are JSON in tensors (Holdfast), or ``torch.save`` objects that are
read with an allow-list (AReaL). From all other folders only the weights are read, and the other
contents are reported.
"""

from pathlib import Path
from typing import Any

import torch

from ...engine.dcp.base_model import BASE, BASE_SAMPLE, base_fingerprint
from ...engine.dcp.format import FolderLayout, read_layout
from ...engine.dcp.reader import read_object
from ...engine.dcp.root_names import Root, choose_root, describe_roots, find_roots
from ...engine.dcp.state import ROOT
from ...utils.config import require_choice
from ...utils.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigError
from ...utils.manifest import MANIFEST_NAME
from ...utils.plain_values import unpack_json
from ..info import INFO_NAME, RecoverInfo
from .adapters import LeftOut, StoredAdapters
from .checkpoint import Architecture, Checkpoint, ReadOptions
from .stored_tensors import read_whole, stored_tensor
from .weights import strip_module, without_tied_copies

_OPTIM = f"{ROOT}.optim."


def recognises(folder: Path) -> bool:
    """Whether the folder has torch's ``.metadata``."""
    return (folder / ".metadata").is_file()


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Read the model below one root, as ``default``, with its optimizer if Holdfast or AReaL wrote
    it.
    """
    return {"default": _read_folder(folder, options)}


def is_generation(folder: Path) -> bool:
    """Whether a `RecoverHandler` or a conversion made the folder."""
    return (folder / INFO_NAME).is_file() and (folder / MANIFEST_NAME).is_file()


def read_generation(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Read all engines of a generation, or the engine in ``options``, with step and generators. See
    `read`.
    """
    info, engines = RecoverInfo.read(folder), _engines(folder)
    asked = [
        path for path in engines if path.name == options.engine
    ]  # the others may be of another base
    found = {path.name: _read_folder(path, options) for path in asked or engines}
    beside = [name for name in ("data.pt",) if (folder / name).is_file()]
    if any(folder.glob("state/*.pt")):
        beside.append("state/ (objects given to the handler, the driver's generators)")
    last = info.last_step_info
    for checkpoint in found.values():
        checkpoint.format, checkpoint.ranks = "Holdfast generation", info.world_size
        checkpoint.step, checkpoint.epoch_steps = last.global_step, last.steps_per_epoch
        checkpoint.ignored += beside
    return found


def engine_folder(folder: Path, engine: str | None) -> Path:
    """Folder of one engine of a generation. A folder that holds tensors itself is returned
    unchanged.

    Raises:
        ConfigError: ``engine`` is unknown, or None while the generation has several engines.
    """
    if recognises(folder):
        return folder
    found = {path.name: path for path in _engines(folder)}
    if engine is None and len(found) > 1:
        raise ConfigError(f"the source holds {sorted(found)}; say which one: engine=, --engine")
    require_choice("engine", engine, (None, *found))
    if not found:
        raise CheckpointNotFoundError(f"{folder} holds no engine")
    return found[engine] if engine is not None else next(iter(found.values()))


def _engines(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and recognises(path)]


def _read_folder(folder: Path, options: ReadOptions) -> Checkpoint:
    architecture = Architecture.find(options.config, folder)
    layout = read_layout(folder)
    if (left_out := _left_out(folder, layout)) is not None:
        return _with_base(folder, layout, *left_out, options)
    root = _root(folder, layout, options.root, architecture)
    found = _model_of(folder, layout, root, architecture)
    found.format = f"DCP, root {root.name!r}"
    if f"{ROOT}.param_groups" in layout.tensors and root.name == ROOT:
        _add_own(found, folder, layout)
    elif root.optim != _OPTIM or not _add_areal(found, folder, layout):
        found.ignored += _beside(layout, root)
    return found


def read_weights(folder: Path, root: str, architecture: Architecture | None) -> Checkpoint:
    """Read the model below ``root``, without an optimizer."""
    layout = read_layout(folder)
    return _model_of(folder, layout, _root(folder, layout, root, architecture), architecture)


def _beside(layout: FolderLayout, root: Root) -> list[str]:
    prefix = f"{root.name}." if root.name else ""
    others = (
        name for name in layout.names() if not root.canonical(name).startswith(f"{ROOT}.model.")
    )
    return sorted({name.removeprefix(prefix).partition(".")[0] for name in others})


def _optimizer_state(folder: Path, layout: FolderLayout) -> dict[str, dict[str, Any]]:
    """Parameter -> entry -> value, as stored below ``dcp.optim.state``."""
    state: dict[str, dict[str, Any]] = {}
    prefix = f"{_OPTIM}state."
    for name in (
        *layout.tensors,
        *layout.objects,
    ):  # as stored: `names` is a set, whose order differs by process
        if name.startswith(prefix):
            of, _, key = name.removeprefix(prefix).rpartition(".")
            stored = (
                stored_tensor(folder, layout, name)
                if name in layout.tensors
                else read_object(folder, layout, name)
            )
            state.setdefault(of, {})[key] = stored
    return state


def _add_areal(found: Checkpoint, folder: Path, layout: FolderLayout) -> bool:
    """Add the optimizer under the names of torch's ``get_state_dict``, as AReaL saves it. False if
    the names differ.
    """
    prefix, groups = f"{_OPTIM}param_groups.", dict[str, dict[str, Any]]()
    for name in (*layout.tensors, *layout.objects):
        if name.startswith(prefix):
            number, _, key = name.removeprefix(prefix).partition(".")
            groups.setdefault(number, {})[key] = _value(folder, layout, name)
    state = _optimizer_state(folder, layout)
    if (
        not groups
        or not all(number.isdigit() for number in groups)
        or any(name.isdigit() for name in state)
    ):
        return False
    listed = [groups[number] for number in sorted(groups, key=int)]
    if not all(isinstance(group.get("params"), list) for group in listed):
        return False
    found.set_optimizer(f"{folder}: {_OPTIM.removesuffix('.')}", state, listed)
    return True


def _root(
    folder: Path, layout: FolderLayout, name: str | None, architecture: Architecture | None
) -> Root:
    names = layout.names()
    roots = find_roots(names)
    if name is None:
        if len(roots) != 1:
            raise ConfigError(f"{folder}: {describe_roots(names)}")
        name = roots[0].name
    if architecture is None and (known := [root for root in roots if root.name == name]):
        return known[0]
    try:
        return choose_root(names, name, () if architecture is None else architecture.parameters)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{folder}: {error}") from error


def _with_base(
    folder: Path, layout: FolderLayout, root: Root, left_out: LeftOut, options: ReadOptions
) -> Checkpoint:
    if not options.merge:
        raise ConfigError(
            f"{folder} holds what was trained of a partly frozen model (LoRA adapters, say) "
            "without its base: `holdfast export` makes a model or a folder of PEFT of it. Or load "
            "it in the run, and use engine.save"
        )
    found = _model_of(folder, layout, root, None)
    adapters = StoredAdapters(folder, found.model, left_out)
    architecture = Architecture.read(adapters.base_folder(options.base))
    found.model, found.aliases = adapters.merged(architecture, options.files)
    found.architecture = Architecture.find(options.config) or architecture
    return found


def stored_adapters(folder: Path) -> StoredAdapters | None:
    """Adapters of a folder that holds them without their base. None if the folder holds all
    weights.
    """
    layout = read_layout(folder)
    if (found := _left_out(folder, layout)) is None:
        return None
    root, left_out = found
    return StoredAdapters(folder, _model_of(folder, layout, root, None).model, left_out)


def _left_out(folder: Path, layout: FolderLayout) -> tuple[Root, LeftOut] | None:
    """Root of the trained parameters, and the description of the frozen ones. None if the folder
    holds all of them.
    """
    for name in (name for name in layout.tensors if name.rpartition(".")[2] == BASE):
        prefix = name.removesuffix(BASE)
        if shares := [
            other for other in layout.tensors if other.startswith(f"{prefix}{BASE_SAMPLE}.")
        ]:
            description, *values = (
                read_whole(stored_tensor(folder, layout, each)) for each in (name, *shares)
            )
            root = Root(prefix.removesuffix("."), f"{prefix}model.", None)
            return root, LeftOut(unpack_json(description, BASE), base_fingerprint(values))
    return None


def _model_of(
    folder: Path, layout: FolderLayout, root: Root, architecture: Architecture | None
) -> Checkpoint:
    canonical, tensors = f"{ROOT}.model.", {}
    for name in layout.tensors:
        if (own := root.canonical(name)).startswith(canonical):
            tensors[own.removeprefix(canonical)] = stored_tensor(folder, layout, name)
    model, aliases = without_tied_copies(
        strip_module(tensors), {} if architecture is None else architecture.aliases
    )
    return Checkpoint(
        "DCP", model, aliases=aliases, architecture=architecture, ranks=max(1, len(layout.files))
    )


def _value(folder: Path, layout: FolderLayout, name: str) -> Any:
    """A plain value, stored as an object or as a tensor of one element. None if there is none."""
    if name in layout.objects:
        return read_object(folder, layout, name)
    if name in layout.tensors and layout.tensors[name].shape.numel() == 1:
        return stored_tensor(folder, layout, name).rows(0, 1).item()
    return None


def _add_own(found: Checkpoint, folder: Path, layout: FolderLayout) -> None:
    """Add the contents that Holdfast stores: optimizer, hyperparameters and schedule as JSON,
    generators.
    """
    packed = {
        key: unpack_json(read_whole(stored_tensor(folder, layout, f"{ROOT}.{key}")), key)
        for key in ("param_groups", "optim_plain", "optim_local", "scheduler")
        if f"{ROOT}.{key}" in layout.tensors
    }
    if "optim_local" in packed:
        raise ConfigError(
            f"{folder} holds an optimizer that works on each rank's shard; only Holdfast can load "
            "it"
        )
    found.groups, optimizer = packed["param_groups"], _optimizer_state(folder, layout)
    for name, entries in packed.get("optim_plain", {}).items():
        optimizer.setdefault(name, {}).update(entries)
    found.optimizer, found.states_are_complete = optimizer, True
    found.scheduler = packed.get("scheduler")
    ranks: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(name for name in layout.tensors if name.startswith(f"{ROOT}.rng.")):
        rank, _, generator = name.removeprefix(f"{ROOT}.rng.").partition(".")
        ranks.setdefault(rank, {})[generator] = read_whole(stored_tensor(folder, layout, name))
    found.rng = list(ranks.values())
    if f"{ROOT}.counters" in layout.tensors:
        found.ignored.append("counters besides the optimizer's steps")
    if any(name.startswith(f"{ROOT}.module_state.") for name in layout.tensors):
        found.ignored.append("state of modules besides parameters and buffers")
