"""AdamW with moments in bfloat16."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...utils.compat.torch_private import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
)
from ..memory.tensors import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[str, torch.Tensor]

CPU_BUCKET, GPU_BUCKET = 1 << 18, 1 << 22
"""Most elements of the parameters that `AdamBF16` updates together: they fit a CPU's cache, or keep
a GPU busy. An update takes about 30 bytes of memory for each.
"""


class AdamBF16(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) over float32 parameters, sharded or not, with moments
    stored in bfloat16.

    This halves the memory of the optimizer state and of its checkpoints. The arithmetic is in
    float32, and new moments are rounded to bfloat16 at random, so that the mean is right. With
    rounding to nearest, a second moment that ``beta2 = 0.999`` reduces by 0.1 % would never fall,
    because neighbouring bfloat16 numbers are 0.4 to 0.8 % apart. The random bits depend only on the
    step and the parameter's index, so a resumed run repeats them.

    Parameters are updated in buckets, with a fixed number of operators for each bucket. Only the
    random numbers take two operators per parameter.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = {
            param: number
            for number, param in enumerate(p for g in self.param_groups for p in g["params"])
        }
        for group in self.param_groups:
            for params in _buckets([param for param in group["params"] if param.grad is not None]):
                self._update(group, params, [numbers[param] for param in params])
        return loss

    def _update(
        self, group: dict[str, Any], params: list[nn.Parameter], numbers: list[int]
    ) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(self.initial_state(param))
        states, (beta1, beta2), lr = (
            [self.state[param] for param in params],
            group["betas"],
            group["lr"],
        )
        foreach_add_([state["step"] for state in states], 1)
        steps = [int(state["step"]) for state in states]
        weights = [local_tensor(param) for param in params]
        grads = [local_tensor(param.grad).float() for param in params]  # type: ignore[arg-type]

        sizes = [self._width(weight) for weight in weights]
        buffer = torch.empty((2, sum(sizes)), dtype=torch.float32, device=weights[0].device)
        means, squares = (self._views(row, weights) for row in buffer)
        self._read(states, buffer, weights)
        foreach_lerp_(means, grads, 1 - beta1)
        buffer[1].mul_(beta2)
        foreach_addcmul_(squares, grads, grads, 1 - beta2)

        noise, generator = (
            torch.empty_like(buffer, dtype=torch.int32),
            torch.Generator(buffer.device),
        )
        for step, number, *parts in zip(
            steps, numbers, *(row.split(sizes) for row in noise), strict=True
        ):
            generator.manual_seed(step * 1_000_003 + number)
            for part in parts:
                part.random_(0, 1 << 16, generator=generator)
        self._write(states, buffer, noise, weights)

        foreach_div_(squares, [1 - beta2**step for step in steps])
        buffer[1].sqrt_().add_(group["eps"])
        foreach_mul_(weights, 1 - lr * group["weight_decay"])
        foreach_addcdiv_(weights, means, squares, [-lr / (1 - beta1**step) for step in steps])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, then convert the moments, which torch made float32, back to their
        dtype.
        """
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            state.update(
                {name: state[name].to(self._dtype_for(param)) for name in MOMENTS if name in state}
            )

    def initial_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """State before the first step of a parameter. The moments are sharded like the parameter."""
        dtype = self._dtype_for(param)
        zeros = {
            name: torch.zeros_like(param, dtype=dtype, requires_grad=False) for name in MOMENTS
        }
        return {"step": torch.zeros((), dtype=torch.float32), **zeros}

    # How moments are stored. Subclasses store them in another way.

    def _dtype_for(self, param: torch.Tensor) -> torch.dtype:
        return torch.bfloat16

    def _width(self, weight: torch.Tensor) -> int:
        """Number of elements for a parameter in a row of the buffer."""
        return weight.numel()

    def _views(self, row: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The part of each parameter in a row of the buffer, in the shape of the parameter."""
        parts = row.split([weight.numel() for weight in weights])
        return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]

    def _read(
        self, states: Sequence[State], buffer: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> None:
        """Fill the buffer, ``[2, n]`` float32, with the moments."""
        for name, row in zip(MOMENTS, buffer, strict=True):
            foreach_copy_(
                self._views(row, weights), [local_tensor(state[name]) for state in states]
            )

    def _write(
        self,
        states: Sequence[State],
        buffer: torch.Tensor,
        noise: torch.Tensor,
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Round the moments in the buffer and store them. ``noise`` is as for `round_at_random`,
        ``[2, n]``.
        """
        for name, row, random in zip(MOMENTS, buffer, noise, strict=True):
            rounded = self._views(round_at_random(row, random), weights)
            foreach_copy_([local_tensor(state[name]) for state in states], rounded)


def _buckets(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut a list into parts on one device with at most this many local elements, or one larger
    parameter.
    """
    bucket, n_elements = list[nn.Parameter](), 0
    for param in params:
        size, limit = local_tensor(param).numel(), GPU_BUCKET if param.is_cuda else CPU_BUCKET
        if bucket and (n_elements + size > limit or param.device != bucket[0].device):
            yield bucket
            bucket, n_elements = [], 0
        bucket.append(param)
        n_elements += size
    if bucket:
        yield bucket


def round_at_random(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers to one of the two neighbouring bfloat16 numbers, with the nearer one
    more likely.

    ``noise`` are random int32 numbers below 2 ** 16. They are overwritten. NaN and infinities stay.
    A number whose neighbour would be infinite is rounded to nearest.
    """
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    both_are_finite = (values - rounded).isfinite()
    return torch.where(both_are_finite, rounded, values).to(torch.bfloat16)
