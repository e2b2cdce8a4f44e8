"""AdamW with moments in bfloat16."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

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

State = dict[str, Tensor]

CPU_BUCKET = 1 << 18
GPU_BUCKET = 1 << 22
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
        params: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # The random numbers of a parameter depend on its number, whatever has a gradient now.
        every = [param for group in self.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(every)}

        for group in self.param_groups:
            reached = [param for param in group["params"] if param.grad is not None]
            for bucket in _buckets(reached):
                self._update(group, bucket, [numbers[param] for param in bucket])
        return loss

    def _update(
        self,
        group: dict[str, Any],
        params: list[Parameter],
        numbers: list[int],
    ) -> None:
        """Update the parameters of a bucket, where t is the step and g the gradient:

            m = beta1 m + (1 - beta1) g
            v = beta2 v + (1 - beta2) g^2
            w = (1 - lr weight_decay) w
            w = w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

        The state gets m and v rounded. The update of w uses them unrounded.
        """
        lr = group["lr"]
        beta1, beta2 = group["betas"]
        states = []
        for param in params:
            state = self.state[param]
            if not state:
                state.update(self.initial_state(param))
            states.append(state)
        foreach_add_([state["step"] for state in states], 1)
        steps = [int(state["step"]) for state in states]
        weights = [local_tensor(param) for param in params]
        grads = [local_tensor(param.grad).float() for param in params]  # type: ignore[arg-type]

        # The moments of all parameters lie side by side in float32, so that one operator serves
        # all of them where no number differs between parameters.
        sizes = [self._width(weight) for weight in weights]
        buffer = torch.empty(
            (2, sum(sizes)),
            dtype=torch.float32,
            device=weights[0].device,
        )
        m_row, v_row = buffer
        m = self._views(m_row, weights)
        v = self._views(v_row, weights)
        self._read(states, buffer, weights)

        # m = beta1 m + (1 - beta1) g
        foreach_lerp_(m, grads, 1 - beta1)
        # v = beta2 v + (1 - beta2) g^2
        v_row.mul_(beta2)
        foreach_addcmul_(v, grads, grads, 1 - beta2)

        # Stored before they are changed for the update of w.
        noise = self._noise(buffer, sizes, steps, numbers)
        self._write(states, buffer, noise, weights)

        # v becomes sqrt(v / (1 - beta2^t)) + eps.
        foreach_div_(v, [1 - beta2**step for step in steps])
        v_row.sqrt_().add_(group["eps"])
        # w = (1 - lr weight_decay) w
        foreach_mul_(weights, 1 - lr * group["weight_decay"])
        # w = w - lr / (1 - beta1^t) m / v
        rates = [-lr / (1 - beta1**step) for step in steps]
        foreach_addcdiv_(weights, m, v, rates)

    def _noise(
        self,
        buffer: Tensor,
        sizes: list[int],
        steps: list[int],
        numbers: list[int],
    ) -> Tensor:
        """Random int32 numbers below 2 ** 16 for the buffer, drawn for each parameter from its step
        and number.
        """
        noise = torch.empty_like(buffer, dtype=torch.int32)
        generator = torch.Generator(buffer.device)
        m_parts, v_parts = (row.split(sizes) for row in noise)
        for index, step in enumerate(steps):
            generator.manual_seed(step * 1_000_003 + numbers[index])
            m_parts[index].random_(0, 1 << 16, generator=generator)
            v_parts[index].random_(0, 1 << 16, generator=generator)
        return noise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, then convert the moments, which torch made float32, back to their
        dtype.
        """
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            dtype = self._dtype_for(param)
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(dtype)

    def initial_state(self, param: Tensor) -> State:
        """State before the first step of a parameter. Moments are sharded like the parameter."""
        dtype = self._dtype_for(param)
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for name in MOMENTS:
            state[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        return state

    # How moments are stored. Subclasses store them in another way.

    def _dtype_for(self, param: Tensor) -> torch.dtype:
        return torch.bfloat16

    def _width(self, weight: Tensor) -> int:
        """Number of elements for a parameter in a row of the buffer."""
        return weight.numel()

    def _views(self, row: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """The part of each parameter in a row of the buffer, in the shape of the parameter."""
        parts = row.split([weight.numel() for weight in weights])
        return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]

    def _read(
        self,
        states: Sequence[State],
        buffer: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        """Fill the buffer, ``[2, n]`` float32, with the moments."""
        for name, row in zip(MOMENTS, buffer, strict=True):
            foreach_copy_(self._views(row, weights), parts_of(states, name))

    def _write(
        self,
        states: Sequence[State],
        buffer: Tensor,
        noise: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        """Round the moments in the buffer and store them. ``noise`` is as for `round_at_random`,
        ``[2, n]``.
        """
        for name, row, random in zip(MOMENTS, buffer, noise, strict=True):
            rounded = round_at_random(row, random)
            foreach_copy_(parts_of(states, name), self._views(rounded, weights))


def parts_of(states: Sequence[State], name: str) -> list[Tensor]:
    """This rank's part of a tensor of each state."""
    return [local_tensor(state[name]) for state in states]


def _buckets(params: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Cut a list into parts on one device with at most this many local elements, or one larger
    parameter.
    """
    bucket: list[Parameter] = []
    n_elements = 0
    for param in params:
        size = local_tensor(param).numel()
        limit = GPU_BUCKET if param.is_cuda else CPU_BUCKET
        is_full = n_elements + size > limit
        if bucket and (is_full or param.device != bucket[0].device):
            yield bucket
            bucket = []
            n_elements = 0
        bucket.append(param)
        n_elements += size
    if bucket:
        yield bucket


def round_at_random(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 numbers to one of the two neighbouring bfloat16 numbers, with the nearer one
    more likely.

    ``noise`` are random int32 numbers below 2 ** 16. They are overwritten. NaN and infinities stay.
    A number whose neighbour would be infinite is rounded to nearest.
    """
    # A bfloat16 is the upper half of a float32. So the lower half, as a share of 2 ** 16, says how
    # far a number is on its way to the next bfloat16 away from 0. With 16 random bits added, it
    # carries into the upper half as often as that. Then the lower half is cut off.
    bits = noise.add_(values.view(torch.int32))
    upper_half = bits.bitwise_and_(-(1 << 16))
    rounded = upper_half.view(torch.float32)

    # The conversion at the end is exact for rounded numbers, and to nearest for others.
    both_are_finite = (values - rounded).isfinite()
    return torch.where(both_are_finite, rounded, values).to(torch.bfloat16)
