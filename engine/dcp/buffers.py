"""Persistent buffers that a load has to replace, because a checkpoint cannot be copied into them.

A buffer may have grown since the model was built, or been made only then; an expanded one has several elements in one
place, which torch refuses to write to. Parameters are never replaced: optimizers and FSDP2 hold them.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import buffers_of, is_persistent
from ..memory.tensors import clean_name

PREFIX = "model."
"""Of the dotted names ``model.<buffer>``."""


class Slot(NamedTuple):
    """Where a module keeps a persistent buffer, or would."""

    name: str
    module: nn.Module
    key: str
    buffer: torch.Tensor | None


def persistent_buffers(model: nn.Module) -> Iterator[Slot]:
    """The slots of the buffers that ``model.state_dict()`` has, under every name, by the name in the module."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in buffers_of(module).items():
            if is_persistent(module, key):
                yield Slot(f"{prefix}.{key}" if prefix else key, module, key, buffer)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one place in memory."""
    strides = tensor.stride()
    return 0 in strides and any(size > 1 and not stride for size, stride in zip(tensor.shape, strides, strict=True))


def propose_buffers(model: nn.Module, names: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Allocate buffers in the place of those that a checkpoint cannot be copied into.

    Args:
        model: stays as it is.
        names: dotted name -> shape and dtype.

    Returns:
        dotted name -> tensor, for `adopt_buffers`. A buffer of another dtype is not replaced.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    proposed: dict[str, torch.Tensor] = {}
    for slot in persistent_buffers(model):
        name, buffer = PREFIX + clean_name(slot.name), slot.buffer
        if name not in names or isinstance(buffer, DTensor):
            continue
        shape, dtype = names[name]
        if buffer is None:
            proposed[name] = torch.empty(shape, dtype=dtype, device=device)
        elif buffer.dtype == dtype and (buffer.shape != shape or is_expanded(buffer)):
            proposed[name] = torch.empty(shape, dtype=dtype, device=buffer.device)
    return proposed


def adopt_buffers(model: nn.Module, proposed: Mapping[str, torch.Tensor]) -> None:
    """Install the buffers that `propose_buffers` allocated, under every name that the old ones have."""
    slots = [(PREFIX + clean_name(slot.name), slot) for slot in persistent_buffers(model)] if proposed else []
    new = {id(slot.buffer): proposed[name] for name, slot in slots if name in proposed and slot.buffer is not None}
    for module in model.modules() if new else ():
        for key, buffer in buffers_of(module).items():
            buffers_of(module)[key] = new.get(id(buffer), buffer)
    for name, slot in slots:
        if slot.buffer is None and name in proposed:
            buffers_of(slot.module)[slot.key] = proposed[name]
