"""Allocate memory for a sharded model, and draw its weights from a seed.

A seeded draw goes block by block over a second model without memory (the skeleton): one block at a
time exists on the CPU, and its values depend only on the seed and the block's name, never on the
number of ranks.

On meta, non-persistent buffers (rotary frequencies) have no values. The model's own
``_init_weights`` computes them, once over zeros and once over ones. A buffer that it does not write
differs between the two, which is an error instead of a silent wrong answer.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from ...utils.compat.torch_private import buffers_of, is_persistent
from ...utils.compat.transformers_private import initialize_module, parameters_left_alone
from ...utils.errors import ConfigError
from .unsharded import unsharded_class

Initialize = Callable[[nn.Module], None]


def compute_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that the model's code can compute: name -> value, on the CPU.

    ``model`` is on meta, not yet sharded, and does not change.
    """
    first = _initialized_buffers(model, 0)
    second = _initialized_buffers(model, 1)
    # Values that do not depend on the garbage were computed.
    return {name: value for name, value in first.items() if torch.equal(value, second[name])}


def give_memory(
    model: PreTrainedModel,
    computed: Mapping[str, Tensor],
    device: torch.device,
    params_on: torch.device | None = None,
) -> list[str]:
    """Allocate this rank's shard (uninitialised) on ``params_on``, or on ``device`` with the
    buffers, which get the values of `compute_buffers`.

    ``model`` is on meta and sharded. Returns the names of persistent buffers that only a checkpoint
    can fill. They are NaN or 0.

    Raises:
        ConfigError: nothing computes a non-persistent buffer.
    """
    model.to_empty(device=params_on or device)
    model.tie_weights()  # _apply may have untied weights

    # Buffers stay on the device when parameters do not.
    if params_on not in (None, device):
        for module in model.modules():
            members = buffers_of(module)
            for key, held in list(members.items()):
                if held is not None:
                    members[key] = held.to(device)

    unfilled = []
    for full, buffer in model.named_buffers():
        name, _, key = full.rpartition(".")
        module = model.get_submodule(name)
        if full in computed:
            buffer.copy_(computed[full])
        elif not is_persistent(module, key):
            raise ConfigError(
                f"{unsharded_class(module).__name__} at {name!r} does not compute its buffer "
                f"{key!r} in _init_weights, so the model cannot be built on the meta device; "
                "upgrade transformers or report the architecture"
            )
        else:
            unknown = float("nan") if buffer.is_floating_point() else 0
            buffer.fill_(unknown)
            unfilled.append(full)
    return unfilled


@torch.no_grad()
def _initialized_buffers(model: PreTrainedModel, garbage: int) -> dict[str, Tensor]:
    """All buffers, on the CPU, after the modules have initialised themselves over ``garbage``.
    Parameters stay on meta, and so do the buffers in the end.

    Modules may compute buffers of their children (Falcon-H1), so parents are initialised last.
    """
    own: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
    for module in model.modules():
        members = buffers_of(module)
        own.append((members, dict(members)))
        for key, buffer in members.items():
            if buffer is not None:
                members[key] = torch.full_like(buffer, garbage, device="cpu")
    try:
        # Drawing millions of weights on meta would take longer than all buffers.
        with torch.random.fork_rng(devices=[]), parameters_left_alone(model):
            for module, initialize in reversed(_initializers(model)):
                initialize(module)
        return dict(model.named_buffers(remove_duplicate=False))
    finally:
        for members, before in own:
            members.clear()
            members.update(before)


def _initializers(model: PreTrainedModel) -> list[tuple[nn.Module, Initialize]]:
    """Every module, parents before children, with the ``_init_weights`` of the innermost model
    around it.

    transformers does the same: a vision tower initialises its own modules.
    """
    found: list[tuple[nn.Module, Initialize]] = []

    def walk(module: nn.Module, initialize: Initialize) -> None:
        if isinstance(module, PreTrainedModel):
            initialize = partial(initialize_module, module)
        found.append((module, initialize))
        for child in module.children():
            walk(child, initialize)

    walk(model, partial(initialize_module, model))
    return found


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel,
    skeleton: PreTrainedModel,
    seed: int,
    blocks: tuple[type[nn.Module], ...],
) -> list[str]:
    """Draw every parameter as transformers would, one block at a time, with the same values at
    every world size.

    Each block is drawn from ``seed`` and the block's name, over the unsharded ``skeleton``. Modules
    of the classes ``blocks`` are drawn whole, because some models scale a block's inner weights.
    Each rank keeps its own rows. Returns the names of parameters that only a checkpoint can fill.
    They are NaN.
    """
    initializers = dict(_initializers(skeleton))
    undrawn = []
    for name, unit in _draw_units(skeleton, blocks):
        # NaN marks what no initializer writes.
        unit.to_empty(device="cpu")
        for drawn in unit.parameters():
            drawn.fill_(float("nan"))

        # Children before parents, as transformers does.
        seed_of_unit = xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) >> 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of_unit)
            for module in reversed(list(unit.modules())):
                initialize = initializers[module]
                initialize(module)

        # Parts of this rank go to the model, before the whole block is freed.
        for key, drawn in unit.named_parameters(prefix=name):
            if drawn.isnan().any():
                undrawn.append(key)
            keep_own_shard(model.get_parameter(key), drawn)
        unit.to_empty(device="meta")  # frees the memory
    return undrawn


def _draw_units(
    skeleton: nn.Module, blocks: tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module]]:
    """The outermost blocks, and the outermost other modules that own parameters. Together they have
    every parameter.
    """
    units: list[tuple[str, nn.Module]] = []
    prefixes: list[str] = []
    for name, module in skeleton.named_modules():
        if f"{name}.".startswith(tuple(prefixes)):
            continue
        own_parameters = list(module.parameters(recurse=False))
        if own_parameters or isinstance(module, blocks):
            units.append((name, module))
            # The root, whose name is empty, has all others inside.
            prefixes.append(f"{name}." if name else "")
    return units


@torch.no_grad()
def keep_own_shard(param: Tensor, full: Tensor) -> None:
    """Copy this rank's part of ``full`` (the whole tensor, equal on all ranks) into ``param``. No
    communication.
    """
    if isinstance(param, DTensor):
        distributed = distribute_tensor(
            full.to(param.device),
            param.device_mesh,
            param.placements,
            src_data_rank=None,  # without communication
        )
        full = distributed.to_local()
        param = param.to_local()
    param.copy_(full)
