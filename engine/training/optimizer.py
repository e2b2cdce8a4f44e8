"""Optimizers, learning-rate schedule, and optimizer state before the first step."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..config import OptimizerConfig
from ..memory.tensors import local_tensor, normal_tensors


def build_optimizer(params: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) with moments in float32 or bfloat16, or SGD, over all ``params``."""
    if config.type == "sgd":
        return torch.optim.SGD(params, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    betas = (config.beta1, config.beta2)
    adam = AdamBF16 if config.type == "adam_bf16" else torch.optim.AdamW
    return adam(params, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Share of the peak rate at ``step``: linear warm-up, then constant, linear or cosine decay.

    A warm-up of n steps runs at 1 / (n + 1) to n / (n + 1), because a step at rate 0 would train nothing. The cosine is
    from Loshchilov & Hutter, "SGDR", 2017, without restarts. From ``total_steps`` on it stays at ``min_lr_ratio``.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = int(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    """The schedule of `lr_factor`. Build it before any load, or it starts from the wrong base rate."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps))


@normal_tensors()
def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter the state from which its first step would start, without taking a step.

    torch optimizers create their state in the first ``step``, but a checkpoint of a fresh engine and a load into one
    need it earlier. This knows Adam, AdamW, `AdamBF16` and SGD. For other optimizers it does nothing: their state
    exists after the first step, and a load creates it from the checkpoint.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and not optimizer.state.get(param):
                optimizer.state[param].update(_initial_state(optimizer, group, param))


def _initial_state(optimizer: torch.optim.Optimizer, group: dict, param: nn.Parameter) -> dict[str, torch.Tensor]:
    match optimizer:
        case AdamBF16():
            return initial_state(param)
        case torch.optim.Adam() | torch.optim.AdamW():
            names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
            on_device = group["capturable"] or group["fused"]
            is_double = torch.get_default_dtype() == torch.float64 and not group["fused"]  # as torch does
            dtype = torch.float64 if is_double else torch.float32
            step = torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
            zeros = {
                n: torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False) for n in names
            }
            return {"step": step, **zeros}
        case torch.optim.SGD() if group["momentum"] != 0 and group["dampening"] == 0:
            # The first step copies the gradient, which equals momentum * 0 + gradient.
            return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}
        case _:
            return {}


MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamBF16(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) over float32 parameters, sharded or not, with moments stored in bfloat16.

    This halves the memory of the optimizer state and of its checkpoints. The arithmetic is in float32, and new moments
    are rounded to bfloat16 at random, so that the mean is right. With rounding to nearest, a second moment that ``beta2
    = 0.999`` reduces by 0.1 % would never fall, because neighbouring bfloat16 numbers are 0.4 to 0.8 % apart. The
    random bits depend only on the step and the parameter's index, so a resumed run repeats them.
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
        """Update every parameter that has a gradient."""
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
        """Load as torch does, then convert the moments, which torch made float32, back to bfloat16."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].to(torch.bfloat16) for name in MOMENTS if name in state})


def initial_state(param: nn.Parameter) -> dict[str, torch.Tensor]:
    """State before the first step of a parameter. The moments are sharded like the parameter."""
    zeros = {name: torch.zeros_like(param, dtype=torch.bfloat16, requires_grad=False) for name in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **zeros}


def round_at_random(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round a float32 tensor to one of the two neighbouring bfloat16 numbers, with the nearer one more likely.

    NaN and infinities stay. A number whose neighbour would be infinite is rounded to nearest.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, generator=generator, device=values.device)
    rounded = ((values.contiguous().view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite() & rounded.isfinite(), rounded, values).to(torch.bfloat16)
