"""Optimizer state under the names of its parameters, as a checkpoint stores it.

Most optimizers keep DTensors for sharded parameters. Some work on the local shards, and keep plain tensors of them:
these are stored as the shards they are, and come back as plain tensors. A plain tensor of another shape may differ by
rank, and is refused when it is saved; but a number (a step count) is taken to be the same on all ranks.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import made_sharded
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..memory.tensors import local_tensor
from ..training.optimizer import materialize_state

logger = get_logger(__name__)

PREFIX = "optim.state."
"""Of the dotted names ``optim.state.<parameter>.<entry>``."""

Parameters = Mapping[str, nn.Parameter]

_CLASSES = (torch.Tensor, nn.Parameter)
"""Classes of tensors that are their memory and nothing else; others may wrap tensors, or mean something by the bits."""


def tensor_entries(optimizer: torch.optim.Optimizer, params: Parameters) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter name -> those entries of its state that are tensors; plain ones of the local shard become DTensors."""
    found = {
        name: {key: _as_shard(param, value) for key, value in state.items() if isinstance(value, torch.Tensor)}
        for name, param, state in _states(optimizer, params)
    }
    return {name: entries for name, entries in found.items() if entries}


def plain_entries(optimizer: torch.optim.Optimizer, params: Parameters) -> dict[str, dict[str, Any]]:
    """Parameter name -> those entries of its state that are not tensors."""
    found = {
        name: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for name, _, state in _states(optimizer, params)
    }
    return {name: entries for name, entries in found.items() if entries}


def local_entries(optimizer: torch.optim.Optimizer, params: Parameters) -> dict[str, list[str]]:
    """Parameter name -> names of those entries of its state that are plain tensors of this rank's shard."""
    found = {
        name: [key for key, value in state.items() if _is_plain(value) and _is_shard(param, value)]
        for name, param, state in _states(optimizer, params)
        if isinstance(param, DTensor)
    }
    return {name: entries for name, entries in found.items() if entries}


def check_entries(optimizer: torch.optim.Optimizer, params: Parameters) -> None:
    """See that the state can be stored so that every rank gets back what it has.

    Raises:
        ConfigError: it has state of something that is no parameter of the model, a tensor of a class of its own, or one
            that ranks could hold differently.
    """
    own = {id(param) for param in params.values()}
    if strangers := [key for key in optimizer.state if id(key) not in own]:
        what = f"a tensor {list(key.shape)}" if isinstance(key := strangers[0], torch.Tensor) else repr(key)
        raise ConfigError(
            f"the optimizer has state for {what}, which is no parameter of the model ({len(strangers)} such) and "
            "would be lost; make it one, or give it an optimizer of its own"
        )
    for name, param, state in _states(optimizer, params):
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (kind := type(local_tensor(value))) not in _CLASSES:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name} as a {kind.__module__}.{kind.__qualname__}, "
                    "whose values a checkpoint cannot hold; expected a torch.Tensor or a DTensor of one. Use an "
                    "optimizer with plain state (torch's own, bitsandbytes' 8-bit ones)"
                )
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            continue
        for key, value in state.items():
            if _is_plain(value) and value.ndim and not _is_shard(param, value):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name} as a plain tensor {list(value.shape)}, which "
                    f"may differ by rank; expected a DTensor, a number, or a tensor {list(param.to_local().shape)} as "
                    f"this rank's shard of the parameter {list(param.shape)}"
                )


def propose_state(
    optimizer: torch.optim.Optimizer, params: Parameters, names: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Zeroed state for what `materialize_state` does not know, from what a checkpoint holds.

    Args:
        optimizer: stays as it is.
        params: of the model, by name.
        names: dotted name -> shape and dtype. An entry of the parameter's shape is sharded like the parameter, any
            other is a plain tensor. A number takes the dtype of the checkpoint: torch's go by the default dtype.

    Returns:
        dotted name -> tensor, for `adopt_state`.
    """
    materialize_state(optimizer)
    groups = optimizer.param_groups
    on_device = {id(p) for g in groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    proposed: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in names.items():
        fqn, _, entry = name.removeprefix(PREFIX).rpartition(".")
        param = params.get(fqn)
        if param is None or not param.requires_grad:
            continue
        state = optimizer.state.get(param)
        if not state:
            like = shape == param.shape
            device = param.device if len(shape) or id(param) in on_device else "cpu"  # step counts, as torch does
            zeros = torch.zeros_like(param, dtype=dtype) if like else torch.zeros(shape, dtype=dtype, device=device)
            proposed[name] = zeros.detach()
        elif shape == () and _has_other_float_dtype(number := state.get(entry), dtype):
            proposed[name] = number.to(dtype)
    return proposed


def adopt_state(
    optimizer: torch.optim.Optimizer,
    params: Parameters,
    proposed: Mapping[str, torch.Tensor],
    local: Mapping[str, Collection[str]],
) -> None:
    """Install what `propose_state` allocated; ``local`` is what `local_entries` said of the saved optimizer."""
    of_rank_0 = []
    for name, tensor in proposed.items():
        fqn, _, entry = name.removeprefix(PREFIX).rpartition(".")
        optimizer.state[params[fqn]][entry] = local_tensor(tensor) if entry in local.get(fqn, ()) else tensor
        if isinstance(params[fqn], DTensor) and tensor.ndim and not isinstance(tensor, DTensor):
            of_rank_0.append(f"{name} {list(tensor.shape)}")
    if of_rank_0:
        logger.warning(
            "%s (%d such) is not stored as a shard of its parameter: every rank gets what rank 0 had",
            of_rank_0[0], len(of_rank_0),
        )  # fmt: skip


def _states(
    optimizer: torch.optim.Optimizer, params: Parameters
) -> Iterator[tuple[str, nn.Parameter, Mapping[str, Any]]]:
    for name, param in params.items():
        if state := optimizer.state.get(param):
            yield name, param, state


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _has_other_float_dtype(value: Any, dtype: torch.dtype) -> bool:
    """Whether ``value`` is a number as a plain tensor, and of another dtype."""
    is_float = _is_plain(value) and not value.ndim and value.is_floating_point()
    return is_float and dtype.is_floating_point and value.dtype != dtype


def _is_shard(param: DTensor, value: torch.Tensor) -> bool:
    return value.ndim > 0 and value.shape == param.to_local().shape


def _as_shard(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """``value`` as a DTensor that is sharded like ``param``, if it is a plain tensor of this rank's shard."""
    if not isinstance(param, DTensor) or isinstance(value, DTensor) or not _is_shard(param, value):
        return value
    return made_sharded(value, param.device_mesh, param.placements, param.shape, param.stride())
