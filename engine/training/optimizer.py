"""Optimizers, learning-rate schedule, and optimizer state before the first step."""

import inspect
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..config import OptimizerConfig
from ..memory.tensors import normal_tensors
from .adam8bit import Adam8bit
from .adam_bf16 import AdamBF16
from .host_optimizer import StateOnHost, on_host, to_host
from .muon import Muon, hidden_matrices

_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "auto": {},  # torch's choice: foreach on CUDA, a loop elsewhere
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

_KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,
    "adam_bf16": AdamBF16,
    "adam8bit": Adam8bit,
    "muon": Muon,
    "sgd": torch.optim.SGD,
}


def optimizer_for(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters of a model that FSDP2 has sharded. Raises as
    `hidden_matrices`.
    """
    trained = (param for param in model.parameters() if param.requires_grad)
    return build_optimizer(trained, config, hidden_matrices(model) if config.type == "muon" else ())


def build_optimizer(
    params: Iterable[nn.Parameter], config: OptimizerConfig, matrices: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimizer of ``config.type`` over all ``params``. ``matrices`` are those that `Muon`
    orthogonalizes.
    """
    params, choice = list(params), config.implementation
    kind: Any = _KINDS[config.type]
    if (
        choice == "auto"
        and issubclass(kind, torch.optim.AdamW)
        and all(param.is_cuda for param in params)
    ):
        choice = "fused"
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    options |= {} if issubclass(kind, AdamBF16) else _IMPLEMENTATIONS[choice]
    if config.type == "sgd":
        options["momentum"] = config.momentum or 0.0
    else:
        options |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.type == "muon":
        options["matrices"] = matrices
        options |= {} if config.momentum is None else {"momentum": config.momentum}
    return (on_host(kind) if config.offload else kind)(params, **options)


def lr_factor(
    step: int, *, shape: str, warmup_steps: int, total_steps: int = 0, min_lr_ratio: float = 0.0
) -> float:
    """Share of the peak rate at ``step``: linear warm-up, then constant, linear or cosine decay.

    A warm-up of n steps runs at 1 / (n + 1) to n / (n + 1), because a step at rate 0 would train
    nothing. The cosine is from Loshchilov & Hutter, "SGDR", 2017, without restarts. From
    ``total_steps`` on it stays at ``min_lr_ratio``.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if shape == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    decay = 1.0 - progress if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * decay


def schedule_of(config: OptimizerConfig, total_steps: int) -> partial[float]:
    """`lr_factor` with the arguments of a config. Two runs with equal arguments have the same
    rates.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = int(config.warmup_steps_proportion * total_steps)
    if config.lr_scheduler_type == "constant":
        return partial(lr_factor, shape="constant", warmup_steps=warmup)
    return partial(
        lr_factor,
        shape=config.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=config.min_lr_ratio,
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int
) -> LambdaLR:
    """The schedule of `lr_factor`. Build it before any load, or it starts from the wrong base rate."""
    return LambdaLR(optimizer, schedule_of(config, total_steps))


@normal_tensors()
def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter the state from which its first step would start, without
    taking a step.

    torch optimizers create their state in the first ``step``, but a checkpoint of a fresh engine
    and a load into one need it earlier. This knows the optimizers of `build_optimizer`, and Adam.
    For others, and for subclasses that step in another way, it does nothing: their state exists
    after the first step, and a load creates it from the checkpoint.
    """
    made_by = optimizer.made_by if isinstance(optimizer, UnsteppedOptimizer) else optimizer
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and not optimizer.state.get(param):
                state = _initial_state(made_by, group, param)
                optimizer.state[param].update(
                    to_host(state) if isinstance(made_by, StateOnHost) else state
                )


class UnsteppedOptimizer(torch.optim.Optimizer):
    """An optimizer as it was before its first step, over other tensors, for `materialize_state`. It
    cannot step.

    ``twins`` has the other tensor for each parameter, by id.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, twins: Mapping[int, nn.Parameter]) -> None:
        # Not the constructor of torch, which would check and complete the groups.
        self.made_by = optimizer
        self.param_groups = [
            {**group, "params": [twins.get(id(param), param) for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        self.state = defaultdict(dict)


def _steps_as(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Whether ``optimizer`` is a ``kind`` that does not step in its own way, and so has the state
    of that class.
    """
    own = optimizer.device_class if isinstance(optimizer, StateOnHost) else type(optimizer)
    makers = ("step", "_init_group")
    return issubclass(own, kind) and all(
        inspect.unwrap(getattr(own, maker)) is inspect.unwrap(getattr(kind, maker))
        for maker in makers
    )


def _initial_state(
    optimizer: torch.optim.Optimizer, group: dict, param: nn.Parameter
) -> dict[str, torch.Tensor]:
    match optimizer:
        case AdamBF16():
            return optimizer.initial_state(param)
        case Muon() if group["orthogonal"]:
            return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}
        case torch.optim.Adam() if _steps_as(optimizer, torch.optim.Adam):  # AdamW too
            names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
            on_device = group["capturable"] or group["fused"]
            is_double = (
                torch.get_default_dtype() == torch.float64 and not group["fused"]
            )  # as torch does
            dtype = torch.float64 if is_double else torch.float32
            step = torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
            zeros = {
                n: torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False)
                for n in names
            }
            return {"step": step, **zeros}
        case torch.optim.SGD() if (
            group["momentum"] != 0
            and group["dampening"] == 0
            and _steps_as(optimizer, torch.optim.SGD)
        ):
            # The first step copies the gradient, which equals momentum * 0 + gradient.
            return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}
        case _:
            return {}
