"""Optimizer and learning-rate schedule, and optimizer state that exists before the first step.

Torch optimizers make their state in the first ``step``. A checkpoint of a fresh engine, and a load into one, need it
earlier; the ways torch offers take a step for that, which moves parameters and counts. `materialize_state` writes down
the state the first step would start from instead.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..config import OptimizerConfig
from ..memory.tensors import normal_tensors
from .adam_bf16 import AdamBF16, initial_state


def build_optimizer(params: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, 2019), with moments in float32 or bfloat16, or SGD over all ``params``."""
    if config.type == "sgd":
        return torch.optim.SGD(params, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    betas = (config.beta1, config.beta2)
    adam = AdamBF16 if config.type == "adam_bf16" else torch.optim.AdamW
    return adam(params, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Share of the peak rate at ``step``: linear warm-up, then constant, linear or cosine decay.

    The warm-up has no step at rate 0, which would train nothing: its n steps run at 1 / (n + 1) to n / (n + 1).
    The cosine is that of Loshchilov & Hutter, "SGDR", 2017, without restarts. From ``total_steps`` on it stays at
    ``min_lr_ratio``.
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
    """The schedule of `lr_factor`; build it before any load, or it starts from the wrong base rate."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps))


@normal_tensors()
def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter the state its first step would start from, without taking a step.

    Knows Adam, AdamW, `AdamBF16` and SGD. For another optimizer nothing is made: its state exists after its first step,
    and a load makes it from the checkpoint.
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
            # The first step copies the gradient, which is what momentum * 0 + gradient gives.
            return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}
        case _:
            return {}
