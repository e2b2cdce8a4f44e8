"""Folders of torch.distributed.checkpoint under any root: torchtitan's, AReaL's, plain scripts', Holdfast's own.

Optimizer states go by the names of parameters (``get_optimizer_state_dict``, flattened or not) or by numbers
(``optimizer.state_dict()``). What is not a tensor is an archive of ``torch.save``, read with an allow-list; Holdfast
has JSON in tensors instead.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...engine.dcp.archive_reader import read_archives, read_object
from ...engine.dcp.base_model import BASE, BASE_SAMPLE, base_fingerprint
from ...engine.dcp.direct_reader import Destination, TensorReader
from ...engine.dcp.layout import FolderLayout
from ...engine.dcp.metadata import read_layout
from ...engine.dcp.roots import Root, choose_root, describe_roots, find_roots
from ...engine.dcp.state import ROOT
from ...engine.lazy_tensor import LazyTensor
from ...engine.tensors import Box
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.safe_json import unpack_json
from .adapters import LeftOut, StoredAdapters
from .architecture import Architecture, find_architecture
from .checkpoint import Checkpoint, ReadOptions
from .parameter_order import Rule, name_states, plain_group
from .weights import store_once, strip_module

_SCHEDULES = ("scheduler", "lr_scheduler", "lr_schedulers")
_STEPS = ("train_state.step", "global_step", "step")


def recognises(folder: Path) -> bool:
    """Whether it has torch's ``.metadata``."""
    return (folder / ".metadata").is_file()


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Model, optimizer and schedule below one root; see `checkpoint.Reader`."""
    return {"default": read_folder(folder, options)}


def read_folder(folder: Path, options: ReadOptions) -> Checkpoint:
    """`read`, of one engine.

    Raises:
        ConfigError: it holds trained parameters without their base.
    """
    architecture = find_architecture(options.config, folder)
    layout = read_layout(folder)
    if (left_out := _left_out(folder, layout)) is not None:
        return _with_base(folder, layout, *left_out, options)
    root = _root(folder, layout, options.root, architecture)
    found = _model_of(folder, layout, root, architecture)
    found.format = f"DCP, root {root.name!r}"
    prefix = f"{root.name}." if root.name else ""
    if root.optim is not None:
        read_optimizer(found, folder, root.optim, options, layout)
    if root.name == ROOT:
        _add_own(found, folder, layout)
    found.scheduler = found.scheduler or _schedule(folder, layout, prefix)
    steps = (_value(folder, layout, f"{prefix}{name}") for name in _STEPS)
    found.step = next((int(step) - 1 for step in steps if isinstance(step, int | float) and step >= 1), None)
    taken = (root.model, root.optim or root.model, *(f"{prefix}{name}" for name in (*_SCHEDULES, *_STEPS)))
    if root.name != ROOT and root.model != prefix:
        left = {name for name in layout.names() if not name.startswith(taken)}
        found.ignored += sorted({".".join(name.split(".")[:2]) for name in left})[:8]
    return found


def read_weights(folder: Path, root: str, architecture: Architecture | None) -> Checkpoint:
    """The model alone, below ``root``."""
    layout = read_layout(folder)
    return _model_of(folder, layout, _root(folder, layout, root, architecture), architecture)


def read_optimizer(
    found: Checkpoint, folder: Path, prefix: str, options: ReadOptions, layout: FolderLayout | None = None
) -> None:
    """Add the optimizer state that stands under ``prefix``.

    Raises:
        ConfigError: it goes by numbers, and which parameters they are of is not known.
        CheckpointMismatchError: it is of another model.
    """
    layout = layout or read_layout(folder)
    state: dict[Any, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name in (*layout.tensors, *layout.objects):  # as stored: `names` is a set, whose order differs by process
        kind, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or kind not in ("state", "param_groups"):
            continue
        of, _, key = rest.rpartition(".")
        value = _lazy(folder, layout, name) if kind == "state" and name in layout.tensors else None
        into = state if kind == "state" else groups
        into.setdefault(of, {})[key] = _value(folder, layout, name) if value is None else value
    if all(str(number).isdigit() for number in state) and state:
        state = {int(number): entries for number, entries in state.items()}
    listed = _groups(groups, list(state))
    shapes = {name: tensor.shape for name, tensor in found.model.items()}
    rules = [Rule("model.parameters()", [list(found.model)])]
    if found.architecture is not None:
        rules = [Rule("model.parameters()", [found.architecture.parameters])]
    if options.parameters is not None:
        rules = [Rule("the names that were given", options.parameters)]
    what = f"{folder}: {prefix.removesuffix('.')}"
    found.optimizer, named = name_states(what, {"state": state, "param_groups": listed}, shapes, rules)
    found.groups = named if groups else None


def _groups(groups: Mapping[str, Mapping[str, Any]], names: list[Any]) -> list[dict[str, Any]]:
    """Groups as a list; flattened ones (hyperparameters of each parameter) put together where they are equal."""
    if not groups:
        return [{"params": names}]
    if all(number.isdigit() for number in groups):
        return [dict(groups[number]) for number in sorted(groups, key=int)]
    listed: list[dict[str, Any]] = []
    for name, values in groups.items():
        own = plain_group(values)
        same = next((group for group in listed if {k: v for k, v in group.items() if k != "params"} == own), None)
        if same is None:
            listed.append(own | {"params": [name]})
        else:
            same["params"].append(name)
    return listed


def _root(folder: Path, layout: FolderLayout, name: str | None, architecture: Architecture | None) -> Root:
    names = layout.names()
    if name is None:
        roots = find_roots(names)
        if len(roots) != 1:
            raise ConfigError(f"{folder}: {describe_roots(names)}")
        name = roots[0].name
        if architecture is None:
            return roots[0]
    known = [root for root in find_roots(names) if root.name == name]
    if architecture is None and known:
        return known[0]
    try:
        return choose_root(names, name, () if architecture is None else architecture.parameters)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{folder}: {error}") from error


def _with_base(folder: Path, layout: FolderLayout, root: Root, left_out: LeftOut, options: ReadOptions) -> Checkpoint:
    if not options.merge:
        raise ConfigError(
            f"{folder} holds what was trained of a partly frozen model (LoRA adapters, say) without its base: "
            "`holdfast export` makes a model or a folder of PEFT of it. Or load it in the run, and use engine.save"
        )
    found = _model_of(folder, layout, root, None)
    adapters = StoredAdapters(folder, found.model, left_out)
    architecture = Architecture.read(adapters.base_folder(options.base))
    found.model, found.aliases = adapters.merged(architecture, options.files)
    found.architecture = find_architecture(options.config) or architecture
    return found


def stored_adapters(folder: Path) -> StoredAdapters | None:
    """The adapters of a folder that holds them without their base; None where it holds all weights.

    Raises:
        ConfigError: see `StoredAdapters`.
    """
    layout = read_layout(folder)
    if (found := _left_out(folder, layout)) is None:
        return None
    root, left_out = found
    return StoredAdapters(folder, _model_of(folder, layout, root, None).model, left_out)


def _left_out(folder: Path, layout: FolderLayout) -> tuple[Root, LeftOut] | None:
    """What stands in the place of frozen parameters, and the root of those that are there; None where all are."""
    for name in (name for name in layout.tensors if name.rpartition(".")[2] == BASE):
        prefix = name.removesuffix(BASE)
        if shares := [other for other in layout.tensors if other.startswith(f"{prefix}{BASE_SAMPLE}.")]:
            tensors = ((one, layout.tensors[one].shape[0]) for one in (name, *shares))
            description, *values = (_lazy(folder, layout, one).rows(0, length) for one, length in tensors)
            root = Root(prefix.removesuffix("."), f"{prefix}model.", None)
            return root, LeftOut(unpack_json(description, BASE), base_fingerprint(values))
    return None


def _model_of(folder: Path, layout: FolderLayout, root: Root, architecture: Architecture | None) -> Checkpoint:
    canonical = f"{ROOT}.model."
    names = {name: root.canonical(name) for name in layout.tensors}
    tensors = {
        own.removeprefix(canonical): _lazy(folder, layout, name)
        for name, own in names.items()
        if own.startswith(canonical)
    }
    model, aliases = store_once(strip_module(tensors), {} if architecture is None else architecture.aliases)
    return Checkpoint("DCP", model, aliases=aliases, architecture=architecture, ranks=max(1, len(layout.files)))


def _lazy(folder: Path, layout: FolderLayout, name: str) -> LazyTensor:
    stored = layout.tensors[name]
    shape = tuple(stored.shape)

    def read(first: int, last: int) -> torch.Tensor:
        sizes = (last - first, *shape[1:]) if shape else ()
        values = torch.empty(sizes, dtype=stored.dtype)
        where = {name: Destination(Box((first, *[0] * (len(shape) - 1)) if shape else (), sizes), values)}
        reader = TensorReader(folder, layout, where)
        if reader.names:
            reader.read()
        else:
            read_archives(folder, layout, where)
        return values

    if TensorReader(folder, layout, {name: Destination(Box((0,) * len(shape), shape), _nothing(stored))}).names:
        return LazyTensor(shape, stored.dtype, read)
    return LazyTensor.read_at_once(shape, stored.dtype, lambda: read(0, shape[0] if shape else 1))


def _nothing(stored: Any) -> torch.Tensor:
    """A tensor of the stored shape without memory, to plan with."""
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _value(folder: Path, layout: FolderLayout, name: str) -> Any:
    """A plain value, stored as an object or as a tensor of one element; None where there is none."""
    if name in layout.objects:
        return read_object(folder, layout, name)
    if name in layout.tensors and layout.tensors[name].shape.numel() == 1:
        return _lazy(folder, layout, name).rows(0, 1).item()
    return None


def _schedule(folder: Path, layout: FolderLayout, prefix: str) -> dict[str, Any] | None:
    for schedule in _SCHEDULES:
        below = [name for name in (*layout.tensors, *layout.objects) if name.startswith(f"{prefix}{schedule}.")]
        keys = {name.removeprefix(f"{prefix}{schedule}."): name for name in below}
        if "last_epoch" in keys and not any("." in key for key in keys):
            return {key: _value(folder, layout, name) for key, name in keys.items()}
    return None


def _add_own(found: Checkpoint, folder: Path, layout: FolderLayout) -> None:
    """What Holdfast stores as JSON, and generators."""
    packed = {
        key: unpack_json(_lazy(folder, layout, f"{ROOT}.{key}").rows(0, layout.tensors[f"{ROOT}.{key}"].shape[0]), key)
        for key in ("param_groups", "optim_plain", "optim_local", "scheduler")
        if f"{ROOT}.{key}" in layout.tensors
    }
    if "optim_local" in packed:
        raise ConfigError(f"{folder} holds an optimizer that works on each rank's shard; only Holdfast can load it")
    found.groups = packed.get("param_groups", found.groups)
    for name, entries in packed.get("optim_plain", {}).items():
        found.optimizer = {**found.optimizer, name: {**found.optimizer.get(name, {}), **entries}}
    found.scheduler = packed.get("scheduler")
    ranks: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(layout.tensors):
        if name.startswith(f"{ROOT}.rng."):
            rank, _, generator = name.removeprefix(f"{ROOT}.rng.").partition(".")
            tensor = _lazy(folder, layout, name)
            ranks.setdefault(rank, {})[generator] = torch.cat([values for _, values in tensor.blocks()])
    found.rng = list(ranks.values())
    if f"{ROOT}.counters" in layout.tensors:
        found.ignored.append("counters besides the optimizer's steps")
    if any(name.startswith(f"{ROOT}.module_state.") for name in layout.tensors):
        found.ignored.append("state of modules besides parameters and buffers")
