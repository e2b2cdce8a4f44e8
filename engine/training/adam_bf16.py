"""AdamW whose moments are stored in bfloat16: half the memory of the optimizer's state, and of its checkpoints.

The arithmetic is in float32; a new moment is rounded to bfloat16 *at random*, up or down with the probability that
makes it right in the mean. Rounded to the nearest, a second moment that ``beta2 = 0.999`` takes 0.1 % from would stay
where it is, for neighbouring numbers of bfloat16 are 0.4 to 0.8 % apart: it could grow but never fall. The random bits
follow from the step and the place of the parameter, so nothing of them needs to be saved, and a resumed run repeats.
Parameters stay in float32 and need no compensation for lost bits (Kahan), as they do where they are bfloat16 too.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..memory.tensors import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamBF16(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) over float32 parameters, sharded or not, with moments in bfloat16.

    Args:
        params: trained.
        lr: step size.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbered = enumerate((group, param) for group in self.param_groups for param in group["params"])
        for number, (group, param) in numbered:
            if param.grad is not None:
                self._update(number, group, param)
        return loss

    def _update(self, number: int, group: dict[str, Any], param: nn.Parameter) -> None:
        state = self.state[param]
        if not state:
            state.update(initial_state(param))
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        weights, grad = local_tensor(param), local_tensor(param.grad).float()  # type: ignore[arg-type]
        first, second = (local_tensor(state[name]) for name in MOMENTS)
        mean = first.float().lerp_(grad, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        generator = torch.Generator(weights.device).manual_seed(step * 1_000_003 + number)
        first.copy_(round_at_random(mean, generator))
        second.copy_(round_at_random(square, generator))
        scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which makes the moments float32, as the parameters are; here they are bfloat16 again."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].to(torch.bfloat16) for name in MOMENTS if name in state})


def initial_state(param: nn.Parameter) -> dict[str, torch.Tensor]:
    """What the first step of a parameter starts from; moments are sharded as it is."""
    zeros = {name: torch.zeros_like(param, dtype=torch.bfloat16, requires_grad=False) for name in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **zeros}


def round_at_random(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round a float32 tensor to bfloat16, away from 0 with a probability in proportion to how near that neighbour is.

    NaN and infinities stay. A number whose neighbour would be infinite is rounded to the nearest.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, generator=generator, device=values.device)
    rounded = ((values.contiguous().view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite() & rounded.isfinite(), rounded, values).to(torch.bfloat16)
