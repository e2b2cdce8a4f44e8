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

from holdfast.engine.dcp.root_names import Root
from holdfast.engine.dcp.state import ROOT
from holdfast.recover.export.architecture import Architecture
from holdfast.recover.export.engine_folder import (
    engine_folders,
    find_root,
    is_engine_folder,
    root_without_base,
    stored_adapters,
    weights_below,
)
from holdfast.recover.export.stored_tensors import DCPFolder
from holdfast.recover.info import INFO_NAME, RecoverInfo
from holdfast.utils.errors import ConfigError
from holdfast.utils.manifest import MANIFEST_NAME
from holdfast.utils.plain_values import unpack_json

from .checkpoint import Checkpoint, Entries, ReadOptions

_OPTIM = f"{ROOT}.optim."
_JSON = ("param_groups", "optim_plain", "optim_local", "scheduler")


def recognises(folder: Path) -> bool:
    """Whether the folder has torch's ``.metadata``."""
    return is_engine_folder(folder)


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
    info = RecoverInfo.read(folder)
    last = info.last_step_info

    # If one engine is asked for, the others are not read: they may be of another base.
    engines = engine_folders(folder)
    asked = [path for path in engines if path.name == options.engine]
    found = {path.name: _read_folder(path, options) for path in asked or engines}

    # Entries of the run, not of its engines.
    beside: list[str] = []
    if (folder / "data.pt").is_file():
        beside.append("data.pt")
    if any(folder.glob("state/*.pt")):
        beside.append("state/ (objects given to the handler, the driver's generators)")

    # Step and ranks are those of the generation, whatever its engines are.
    for checkpoint in found.values():
        checkpoint.format = "Holdfast generation"
        checkpoint.ranks = info.world_size
        checkpoint.step = last.global_step
        checkpoint.epoch_steps = last.steps_per_epoch
        checkpoint.ignored += beside
    return found


def _read_folder(path: Path, options: ReadOptions) -> Checkpoint:
    architecture = Architecture.find(options.config, path)
    folder = DCPFolder(path)
    if root_without_base(folder) is not None:
        return _with_base(folder, options)

    root = find_root(folder, options.root, architecture)
    weights = weights_below(folder, root, architecture)
    found = Checkpoint(
        f"DCP, root {root.name!r}",
        weights.tensors,
        aliases=weights.aliases,
        architecture=architecture,
        ranks=max(1, len(folder.layout.files)),
    )

    # The optimizer, if Holdfast or AReaL has written it. Of others nothing is known.
    if root.name == ROOT and f"{ROOT}.param_groups" in folder.layout.tensors:
        _add_own(found, folder)
        return found
    if root.optim == _OPTIM and _add_areal(found, folder):
        return found
    found.ignored += _beside(folder, root)
    return found


def _beside(folder: DCPFolder, root: Root) -> list[str]:
    """What the folder has besides the model, by the first parts of the names."""
    prefix = f"{root.name}." if root.name else ""
    found: set[str] = set()
    for name in folder.names(""):
        if root.canonical(name).startswith(f"{ROOT}.model."):
            continue
        own = name.removeprefix(prefix)
        found.add(own.partition(".")[0])
    return sorted(found)


def _optimizer_state(folder: DCPFolder) -> Entries:
    """Parameter -> entry -> value, as stored below ``dcp.optim.state``."""
    state: Entries = {}
    prefix = f"{_OPTIM}state."
    for name in folder.names(prefix):
        own = name.removeprefix(prefix)
        parameter, _, key = own.rpartition(".")
        read = folder.tensor if name in folder.layout.tensors else folder.object
        state.setdefault(parameter, {})[key] = read(name)
    return state


def _add_areal(found: Checkpoint, folder: DCPFolder) -> bool:
    """Add the optimizer under the names of torch's ``get_state_dict``, as AReaL saves it. False if
    the names differ.
    """
    groups: Entries = {}
    prefix = f"{_OPTIM}param_groups."
    for name in folder.names(prefix):
        own = name.removeprefix(prefix)
        number, _, key = own.partition(".")
        groups.setdefault(number, {})[key] = _value(folder, name)
    state = _optimizer_state(folder)

    # Groups have numbers, and parameters have names.
    if not groups or not all(number.isdigit() for number in groups):
        return False
    if any(name.isdigit() for name in state):
        return False
    listed = [groups[number] for number in sorted(groups, key=int)]
    for group in listed:
        if not isinstance(group.get("params"), list):
            return False

    what = f"{folder.path}: {_OPTIM.removesuffix('.')}"
    found.set_optimizer(what, state, listed)
    return True


def _value(folder: DCPFolder, name: str) -> Any:
    """A plain value, stored as an object or as a tensor of one element. None if there is none."""
    if name in folder.layout.objects:
        return folder.object(name)
    tensor = folder.tensor(name)
    if tensor.numel != 1:
        return None
    return tensor.rows(0, 1).item()


def _with_base(folder: DCPFolder, options: ReadOptions) -> Checkpoint:
    """Adapters, merged into the base that the folder leaves out."""
    if not options.merge:
        raise ConfigError(
            f"{folder.path} holds what was trained of a partly frozen model (LoRA adapters, say) "
            "without its base: `holdfast export` makes a model or a folder of PEFT of it. Or load "
            "it in the run, and use engine.save"
        )
    # The model becomes a whole one, which has no optimizer.
    adapters = stored_adapters(folder.path)
    assert adapters is not None
    base = Architecture.read(adapters.base_folder(options.base))
    merged = adapters.merged(base, options.files)
    return Checkpoint(
        "DCP",
        merged.tensors,
        aliases=merged.aliases,
        architecture=Architecture.find(options.config) or base,
        ranks=max(1, len(folder.layout.files)),
    )


def _add_own(found: Checkpoint, folder: DCPFolder) -> None:
    """Add the contents that Holdfast stores: optimizer, hyperparameters and schedule as JSON,
    generators.
    """
    tensors = folder.layout.tensors
    packed: dict[str, Any] = {}
    for key in _JSON:
        name = f"{ROOT}.{key}"
        if name in tensors:
            data = folder.whole_tensor(name)
            packed[key] = unpack_json(data, key)
    if "optim_local" in packed:
        raise ConfigError(
            f"{folder.path} holds an optimizer that works on each rank's shard; only Holdfast can "
            "load it"
        )

    # The state of each parameter: tensors, and plain values from the JSON.
    optimizer = _optimizer_state(folder)
    for name, entries in packed.get("optim_plain", {}).items():
        optimizer.setdefault(name, {}).update(entries)
    found.optimizer = optimizer
    found.groups = packed["param_groups"]
    found.scheduler = packed.get("scheduler")
    found.states_are_complete = True

    # The generators of each rank, in the order of the ranks.
    ranks: dict[str, dict[str, torch.Tensor]] = {}
    prefix = f"{ROOT}.rng."
    for name in sorted(tensors):
        if not name.startswith(prefix):
            continue
        own = name.removeprefix(prefix)
        rank, _, generator = own.partition(".")
        ranks.setdefault(rank, {})[generator] = folder.whole_tensor(name)
    found.rng = list(ranks.values())

    # Entries that no other format has a place for.
    if f"{ROOT}.counters" in tensors:
        found.ignored.append("counters besides the optimizer's steps")
    if folder.names(f"{ROOT}.module_state."):
        found.ignored.append("state of modules besides parameters and buffers")
