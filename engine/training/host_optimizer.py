"""Optimizers whose state is in host memory. A step brings it to the device block by block.

The device then holds weights, gradients, and the state of one block. The values are those of the
plain optimizer to the bit, because optimizers compute every parameter for itself. Cost: the state
crosses the bus twice in each step.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ...utils.compat.torch_private import like_sharded, step_without_hooks
from ..memory.pinned import host_copies_of
from ..memory.tensors import local_tensor, normal_tensors

State = dict[str, Any]

BLOCK_BYTES = 256 << 20
"""Size of the shards of the parameters that are updated together. At least one parameter."""


class StateOnHost(Optimizer):
    """First base of the classes of `on_host`."""

    device_class: type[Optimizer]

    @normal_tensors()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        params = []
        for group in self.param_groups:
            params += [param for param in group["params"] if param.grad is not None]
        grads = {param: param.grad for param in params}
        step_block = step_without_hooks(self.device_class)  # hooks see one step
        try:
            # The plain optimizer passes over parameters without a gradient.
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
        self,
        block: Sequence[Parameter],
        step: Callable[[Optimizer], Any],
    ) -> None:
        # Tensors in host memory are kept, so that the new values go to the same memory.
        kept: dict[Parameter, State] = {}
        for param in block:
            if self.state.get(param):
                kept[param] = dict(self.state[param])

        for param, state in kept.items():
            moved = {name: _moved(value, param.device) for name, value in state.items()}
            self.state[param].update(moved)
            del moved  # nothing else may keep the state of a block on the device
        try:
            step(self)
        finally:
            for param in block:
                state = self.state[param]
                state.update(_back(state, kept.get(param, {})))


@cache
def on_host(optimizer: type[Optimizer]) -> Any:
    """The class of ``optimizer`` with its state in host memory."""
    members = {"device_class": optimizer}
    return type(optimizer.__name__, (StateOnHost, optimizer), members)


def to_host(state: State) -> State:
    """The state of a parameter, with its tensors on a device copied to new host memory."""
    host = _back(state, {})
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    _wait_for({tensor.device for tensor in tensors})
    return host


def _blocks(params: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Cut a list into blocks, the same on every rank, because steps may have collectives."""
    block = []
    n_bytes = 0
    for param in params:
        block.append(param)
        whole_bytes = param.numel() * param.element_size()
        n_bytes += whole_bytes // _n_shards(param)
        if n_bytes >= BLOCK_BYTES:
            yield block
            block = []
            n_bytes = 0
    if block:
        yield block


def _n_shards(param: Tensor) -> int:
    if not isinstance(param, DTensor):
        return 1
    n_shards = 1
    for dim, placement in enumerate(param.placements):
        if not placement.is_replicate():
            n_shards *= param.device_mesh.size(dim)
    return n_shards


def _wait_for(devices: Collection[torch.device]) -> None:
    """Wait for copies to the host, because a snapshot may read them next."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _is_moved(value: Any) -> bool:
    # Counts of steps stay where they are.
    return isinstance(value, Tensor) and value.dim() > 0


def _moved(value: Any, device: torch.device) -> Any:
    if not _is_moved(value) or value.device == device:
        return value
    local = local_tensor(value).to(device, non_blocking=True)
    return _like(local, value)


def _like(local: Tensor, other: Tensor) -> Tensor:
    """A tensor that is sharded like ``other``, with this part."""
    if isinstance(other, DTensor):
        return like_sharded(local, other)
    return local


def _back(state: State, kept: State) -> State:
    """``state`` with its tensors on a device copied to those of ``kept`` in host memory, or to new
    ones.
    """
    # Tensors on the device
    there = {}
    for name, value in state.items():
        if _is_moved(value) and value.is_cuda:
            there[name] = value

    # Memory on the host: that of before, or new memory for all others at once.
    host = {}
    missing = {}
    for name, value in there.items():
        if name in kept and not kept[name].is_cuda:
            host[name] = kept[name]
        else:
            missing[name] = local_tensor(value)
    for name, copy in host_copies_of(missing).items():
        host[name] = _like(copy, there[name])

    # Behind the step on the same stream. `_wait_for` waits for all of them.
    for name, value in there.items():
        copy = local_tensor(host[name])
        copy.copy_(local_tensor(value), non_blocking=True)
    return state | host
