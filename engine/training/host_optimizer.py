"""Optimizers whose state is in host memory. A step brings it to the device block by block.

The device then holds weights, gradients, and the state of one block. The values are those of the
plain optimizer to the bit, because optimizers compute every parameter for itself. Cost: the state
crosses the bus twice in each step.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import like_sharded, step_without_hooks
from ..memory.pinned import host_copies_of
from ..memory.tensors import local_tensor, normal_tensors

BLOCK_BYTES = 256 << 20
"""Size of the shards of the parameters that are updated together. At least one parameter."""


class StateOnHost(torch.optim.Optimizer):
    """First base of the classes of `on_host`."""

    device_class: type[torch.optim.Optimizer]

    @normal_tensors()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [
            param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        grads = {param: param.grad for param in params}
        step_block = step_without_hooks(self.device_class)  # hooks see one step
        try:
            for block in _blocks(params):
                for param in params:
                    param.grad = None
                for param in block:
                    param.grad = grads[param]
                self._update_block(block, step_block)
        finally:
            for param in params:
                param.grad = grads[param]
        _wait_for({param.device for param in params})
        return loss

    def _update_block(
        self, block: Sequence[nn.Parameter], step: Callable[[torch.optim.Optimizer], Any]
    ) -> None:
        kept = {param: dict(self.state[param]) for param in block if self.state.get(param)}
        for param, state in kept.items():
            self.state[param].update(
                {name: _moved(value, param.device) for name, value in state.items()}
            )
        try:
            step(self)
        finally:
            for param in block:
                self.state[param].update(_back(self.state[param], kept.get(param, {})))


@cache
def on_host(optimizer: type[torch.optim.Optimizer]) -> Any:
    """The class of ``optimizer`` with its state in host memory."""
    return type(optimizer.__name__, (StateOnHost, optimizer), {"device_class": optimizer})


def to_host(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter, with its tensors on a device copied to new host memory."""
    host = _back(state, {})
    _wait_for({value.device for value in state.values() if isinstance(value, torch.Tensor)})
    return host


def _blocks(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut a list into blocks, the same on every rank, because steps may have collectives."""
    block, n_bytes = [], 0
    for param in params:
        block.append(param)
        n_bytes += param.numel() * param.element_size() // _n_shards(param)
        if n_bytes >= BLOCK_BYTES:
            yield block
            block, n_bytes = [], 0
    if block:
        yield block


def _n_shards(param: torch.Tensor) -> int:
    if not isinstance(param, DTensor):
        return 1
    cuts = zip(param.device_mesh.shape, param.placements, strict=True)
    return prod(size for size, cut in cuts if not cut.is_replicate())


def _wait_for(devices: Collection[torch.device]) -> None:
    """Wait for copies to the host, because a snapshot may read them next."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _is_moved(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.dim() > 0
    )  # counts of steps stay where they are


def _moved(value: Any, device: torch.device) -> Any:
    if not _is_moved(value) or value.device == device:
        return value
    local = local_tensor(value).to(device, non_blocking=True)
    return like_sharded(local, value) if isinstance(value, DTensor) else local


def _back(state: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """``state`` with its tensors on a device copied to those of ``kept`` in host memory, or to new
    ones.
    """
    there = {name: value for name, value in state.items() if _is_moved(value) and value.is_cuda}
    host = {name: kept[name] for name in there if name in kept and not kept[name].is_cuda}
    new = host_copies_of(
        {name: local_tensor(value) for name, value in there.items() if name not in host}
    )
    for name, copy in new.items():
        host[name] = (
            like_sharded(copy, value) if isinstance(value := there[name], DTensor) else copy
        )
    for name, value in there.items():
        local_tensor(host[name]).copy_(local_tensor(value), non_blocking=True)
    return state | host
