"""Optimizers, learning-rate schedule, and optimizer state before the first step."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ...utils.compat.torch_private import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
)
from ..config import OptimizerConfig
from ..memory.tensors import local_tensor, normal_tensors
from .host_optimizer import StateOnHost, on_host, to_host

_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "auto": {},  # torch's choice: foreach on CUDA, a loop elsewhere
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def build_optimizer(params: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) with moments in float32 or bfloat16, or SGD, over all ``params``."""
    params, choice = list(params), config.implementation
    if choice == "auto" and config.type == "adam" and all(param.is_cuda for param in params):
        choice = "fused"
    kind: Any = {"sgd": torch.optim.SGD, "adam_bf16": AdamBF16, "adam": torch.optim.AdamW}[config.type]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    options |= {} if config.type == "adam_bf16" else _IMPLEMENTATIONS[choice]
    if config.type == "sgd":
        options["momentum"] = config.momentum
    else:
        options |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return (on_host(kind) if config.offload else kind)(params, **options)


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
                state = _initial_state(optimizer, group, param)
                optimizer.state[param].update(to_host(state) if isinstance(optimizer, StateOnHost) else state)


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

_CPU_BUCKET, _GPU_BUCKET = 1 << 18, 1 << 22
"""Most elements of the parameters that `AdamBF16` updates together: they fit a CPU's cache, or keep a GPU busy. An
update takes about 30 bytes of memory for each."""


class AdamBF16(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) over float32 parameters, sharded or not, with moments stored in bfloat16.

    This halves the memory of the optimizer state and of its checkpoints. The arithmetic is in float32, and new moments
    are rounded to bfloat16 at random, so that the mean is right. With rounding to nearest, a second moment that ``beta2
    = 0.999`` reduces by 0.1 % would never fall, because neighbouring bfloat16 numbers are 0.4 to 0.8 % apart. The
    random bits depend only on the step and the parameter's index, so a resumed run repeats them.

    Parameters are updated in buckets, with a fixed number of operators for each bucket. Only the random numbers take
    two operators per parameter.
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
        numbers = {param: number for number, param in enumerate(p for g in self.param_groups for p in g["params"])}
        for group in self.param_groups:
            for params in _buckets([param for param in group["params"] if param.grad is not None]):
                self._update(group, params, [numbers[param] for param in params])
        return loss

    def _update(self, group: dict[str, Any], params: list[nn.Parameter], numbers: list[int]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(initial_state(param))
        states, (beta1, beta2), lr = [self.state[param] for param in params], group["betas"], group["lr"]
        foreach_add_([state["step"] for state in states], 1)
        steps = [int(state["step"]) for state in states]
        weights = [local_tensor(param) for param in params]
        grads = [local_tensor(param.grad).float() for param in params]  # type: ignore[arg-type]
        moments = [local_tensor(state[name]) for name in MOMENTS for state in states]

        sizes = [tensor.numel() for tensor in weights]
        buffer = torch.empty((2, sum(sizes)), dtype=torch.float32, device=weights[0].device)
        views = [part.view_as(like) for row in buffer for part, like in zip(row.split(sizes), weights, strict=True)]
        means, squares = views[: len(params)], views[len(params) :]
        foreach_copy_(views, moments)
        foreach_lerp_(means, grads, 1 - beta1)
        buffer[1].mul_(beta2)
        foreach_addcmul_(squares, grads, grads, 1 - beta2)

        noise, generator = torch.empty_like(buffer, dtype=torch.int32), torch.Generator(buffer.device)
        for step, number, *parts in zip(steps, numbers, *(row.split(sizes) for row in noise), strict=True):
            generator.manual_seed(step * 1_000_003 + number)
            for part in parts:
                part.random_(0, 1 << 16, generator=generator)
        rounded = [part for pair in zip(buffer, noise, strict=True) for part in round_at_random(*pair).split(sizes)]
        foreach_copy_(moments, [part.view_as(like) for part, like in zip(rounded, moments, strict=True)])

        foreach_div_(squares, [1 - beta2**step for step in steps])
        buffer[1].sqrt_().add_(group["eps"])
        foreach_mul_(weights, 1 - lr * group["weight_decay"])
        foreach_addcdiv_(weights, means, squares, [-lr / (1 - beta1**step) for step in steps])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, then convert the moments, which torch made float32, back to bfloat16."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].to(torch.bfloat16) for name in MOMENTS if name in state})


def initial_state(param: nn.Parameter) -> dict[str, torch.Tensor]:
    """State before the first step of a parameter. The moments are sharded like the parameter."""
    zeros = {name: torch.zeros_like(param, dtype=torch.bfloat16, requires_grad=False) for name in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **zeros}


def _buckets(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut a list into parts on one device with at most this many local elements, or one larger parameter."""
    bucket, n_elements = list[nn.Parameter](), 0
    for param in params:
        size, limit = local_tensor(param).numel(), _GPU_BUCKET if param.is_cuda else _CPU_BUCKET
        if bucket and (n_elements + size > limit or param.device != bucket[0].device):
            yield bucket
            bucket, n_elements = [], 0
        bucket.append(param)
        n_elements += size
    if bucket:
        yield bucket


def round_at_random(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers to one of the two neighbouring bfloat16 numbers, with the nearer one more likely.

    ``noise`` are random int32 numbers below 2 ** 16. They are overwritten. NaN and infinities stay. A number whose
    neighbour would be infinite is rounded to nearest.
    """
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    both_are_finite = (values - rounded).isfinite()
    return torch.where(both_are_finite, rounded, values).to(torch.bfloat16)
