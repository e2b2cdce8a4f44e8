"""Optimizers, learning-rate schedule, and optimizer state before the first step."""

import inspect
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn, zeros_like
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..config import OptimizerConfig
from ..memory.tensors import normal_tensors
from .adam8bit import Adam8bit
from .adam_bf16 import AdamBF16, State
from .host_optimizer import StateOnHost, on_host, to_host
from .muon import Muon, hidden_matrices

_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "auto": {},  # torch's choice: foreach on CUDA, a loop elsewhere
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

_KINDS: dict[str, type[Optimizer]] = {
    "adam": AdamW,
    "adam_bf16": AdamBF16,
    "adam8bit": Adam8bit,
    "muon": Muon,
    "sgd": SGD,
}


def optimizer_for(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer over the trained parameters of a model that FSDP2 has sharded. Raises as
    `hidden_matrices`.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices: Collection[Parameter] = ()
    if config.type == "muon":
        matrices = hidden_matrices(model)
    return build_optimizer(trained, config, matrices)


def build_optimizer(
    params: Iterable[Parameter],
    config: OptimizerConfig,
    matrices: Collection[Parameter] = (),
) -> Optimizer:
    """The optimizer of ``config.type`` over all ``params``. ``matrices`` are those that `Muon`
    orthogonalizes.
    """
    params = list(params)
    kind: Any = _KINDS[config.type]
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
    }

    # `AdamBF16` has one implementation.
    if not issubclass(kind, AdamBF16):
        choice = config.implementation
        is_adamw = issubclass(kind, AdamW)
        if choice == "auto" and is_adamw and all(param.is_cuda for param in params):
            choice = "fused"
        options.update(_IMPLEMENTATIONS[choice])

    # Options that only some types have.
    if config.type == "sgd":
        options["momentum"] = config.momentum or 0.0
    else:
        options["betas"] = (config.beta1, config.beta2)
        options["eps"] = config.eps
    if config.type == "muon":
        options["matrices"] = matrices
        if config.momentum is not None:
            options["momentum"] = config.momentum

    if config.offload:
        kind = on_host(kind)
    return kind(params, **options)


def lr_factor(
    step: int,
    *,
    shape: str,
    warmup_steps: int,
    total_steps: int = 0,
    min_lr_ratio: float = 0.0,
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
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    if shape == "linear":
        decay = 1.0 - progress
    else:
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
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
    optimizer: Optimizer,
    config: OptimizerConfig,
    total_steps: int,
) -> LambdaLR:
    """The schedule of `lr_factor`. Build it before any load, or its base rate is wrong."""
    return LambdaLR(optimizer, schedule_of(config, total_steps))


@normal_tensors()
def materialize_state(optimizer: Optimizer) -> None:
    """Give every trainable parameter the state from which its first step would start, without
    taking a step.

    torch optimizers create their state in the first ``step``, but a checkpoint of a fresh engine
    and a load into one need it earlier. This knows the optimizers of `build_optimizer`, and Adam.
    For others, and for subclasses that step in another way, it does nothing: their state exists
    after the first step, and a load creates it from the checkpoint.
    """
    # Twins of parameters get the state that the optimizer itself would make.
    made_by = optimizer
    if isinstance(optimizer, UnsteppedOptimizer):
        made_by = optimizer.made_by
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not param.requires_grad or optimizer.state.get(param):
                continue
            state = _initial_state(made_by, group, param)
            if isinstance(made_by, StateOnHost):
                state = to_host(state)
            optimizer.state[param].update(state)


def keeps_state(optimizer: Optimizer) -> bool:
    """Whether steps leave state behind. Only plain SGD is known to need none."""
    if not _steps_as(optimizer, SGD):
        return True
    return any(group["momentum"] != 0 for group in optimizer.param_groups)


class UnsteppedOptimizer(Optimizer):
    """An optimizer as it was before its first step, over other tensors, for `materialize_state`. It
    cannot step.

    ``twins`` has the other tensor for each parameter, by id.
    """

    def __init__(self, optimizer: Optimizer, twins: Mapping[int, Parameter]) -> None:
        # Not the constructor of torch, which would check and complete the groups.
        self.made_by = optimizer
        self.param_groups = []
        for group in optimizer.param_groups:
            params = [twins.get(id(param), param) for param in group["params"]]
            self.param_groups.append({**group, "params": params})
        self.state = defaultdict(dict)


def _steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether ``optimizer`` is a ``kind`` that does not step in its own way, and so has the state
    of that class.
    """
    own = type(optimizer)
    if isinstance(optimizer, StateOnHost):
        own = optimizer.device_class
    if not issubclass(own, kind):
        return False
    for name in ("step", "_init_group"):
        method = inspect.unwrap(getattr(own, name))
        if method is not inspect.unwrap(getattr(kind, name)):
            return False
    return True


def _initial_state(optimizer: Optimizer, group: dict, param: Parameter) -> State:
    match optimizer:
        case AdamBF16():
            return optimizer.initial_state(param)
        case Muon() if group["orthogonal"]:
            return {"momentum_buffer": zeros_like(param, requires_grad=False)}
        case Adam() if _steps_as(optimizer, Adam):  # AdamW too
            return _initial_state_of_adam(group, param)
        case SGD() if _steps_as(optimizer, SGD):
            # The first step copies the gradient, which equals momentum * 0 + gradient without
            # dampening.
            if group["momentum"] != 0 and group["dampening"] == 0:
                return {"momentum_buffer": zeros_like(param, requires_grad=False)}
    return {}


def _initial_state_of_adam(group: dict, param: Parameter) -> State:
    # The count of steps is on the device and in double precision where torch has it so.
    device: Any = "cpu"
    if group["capturable"] or group["fused"]:
        device = param.device
    dtype = torch.float32
    if torch.get_default_dtype() == torch.float64 and not group["fused"]:
        dtype = torch.float64
    state = {"step": torch.zeros((), dtype=dtype, device=device)}

    names = ["exp_avg", "exp_avg_sq"]
    if group["amsgrad"]:
        names.append("max_exp_avg_sq")
    for name in names:
        state[name] = zeros_like(param, requires_grad=False)
    return state
