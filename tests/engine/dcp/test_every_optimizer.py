"""The promise of every save: what it accepts loads into a fresh model, and training goes on bit for bit.

Every optimizer and schedule of torch is tried, and those of PEFT. What cannot be kept is refused by the save.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.errors import ConfigError

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two matrices, so that Muon takes it, which adapters go to as well."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5, sparse=sparse)
        self.out = nn.Linear(5, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens).tanh())


def train(state: DCPState, first: int, last: int, sparse: bool = False) -> None:
    optimizer = state.optimizer
    assert optimizer is not None
    for step in range(first, last):
        tokens = torch.randint(6, (4, 2), generator=torch.Generator().manual_seed(step))

        def loss_of(tokens: torch.Tensor = tokens) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (state.model(tokens) - 1).square().mean()
            loss.backward()
            return loss

        loss = loss_of()
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss_of)
        else:
            optimizer.step()
        if isinstance(state.scheduler, lr_scheduler.ReduceLROnPlateau):
            state.scheduler.step(loss.detach().item())
        elif state.scheduler is not None:
            state.scheduler.step()


def goes_on(make: Callable[[int], DCPState], folder: Path) -> None:
    """Save after three steps, load into a fresh state, and compare three more steps of both."""
    state = make(0)
    train(state, 0, 3)
    save_dcp(folder, state)
    resumed = make(1)
    load_dcp(folder, resumed)
    train(state, 3, 6)
    train(resumed, 3, 6)
    assert state.optimizer is not None and resumed.optimizer is not None
    for mine, other in zip(state.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    for name, tensor in state.live_tensors().items():
        assert torch.equal(tensor, resumed.live_tensors()[name]), name


def on_net(make: Make, schedule: Any = None, sparse: bool = False) -> Callable[[int], DCPState]:
    def build(seed: int) -> DCPState:
        torch.manual_seed(seed)
        model = Net(sparse)
        optimizer = make(model)
        return DCPState(model, optimizer, None if schedule is None else schedule(optimizer))

    return build


KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}

OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(KINDS, {}),
    "Adam amsgrad": {"amsgrad": True},
    "Adam fused": {"fused": True},
    "Adam foreach": {"foreach": True},
    "AdamW differentiable": {"maximize": True, "weight_decay": 0.1},
    "NAdam decoupled": {"decoupled_weight_decay": True},
    "RMSprop centered": {"momentum": 0.5, "centered": True},
    "SGD momentum": {"momentum": 0.9},
    "SGD dampening": {"momentum": 0.9, "dampening": 0.1},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True},
    "Adam tensor rate": {"lr": torch.tensor(0.01), "foreach": False},
}


class Remembering(torch.optim.AdamW):
    """AdamW with one more tensor per parameter, which appears in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", param.clone())
                average.lerp_(param, 0.5)
                param.lerp_(average, 0.1)


class HalfMoments(torch.optim.Adam):
    """Adam that makes its moments itself, in bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.bfloat16)
                state["exp_avg"].lerp_(param.grad.bfloat16(), 0.1)
                param.sub_(state["exp_avg"], alpha=group["lr"])


@pytest.mark.parametrize("name", OPTIONS)
def test_an_optimizer(name: str, tmp_path: Path) -> None:
    kind = KINDS[name.split()[0]]
    goes_on(on_net(lambda model: kind(model.parameters(), **OPTIONS[name]), sparse=kind is torch.optim.SparseAdam), tmp_path / "c")

@pytest.mark.parametrize("kind", [Remembering, HalfMoments])
def test_sub(kind, tmp_path: Path) -> None:
    goes_on(on_net(lambda model: kind(model.parameters())), tmp_path / "c")

SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CyclicLR exp_range": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    "CyclicLR scale_fn": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, scale_fn=lambda x: 1 / x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "SWALR": lambda o: SWALR(o, 0.05),
    "SWALR linear": lambda o: SWALR(o, 0.05, anneal_strategy="linear"),
}
class Factor:
    def __init__(self): self.n = 0
    def __call__(self, step): return 1/(1+step)
class FactorT(Factor):
    def __init__(self): self.n = torch.ones(2)
class FactorLate(Factor):
    def __init__(self): pass
    def __call__(self, step):
        if step>1: self.late = step
        return 1/(1+step)
SCHEDULES["LambdaLR object"] = lambda o: lr_scheduler.LambdaLR(o, Factor())
SCHEDULES["LambdaLR object tensor"] = lambda o: lr_scheduler.LambdaLR(o, FactorT())
SCHEDULES["LambdaLR object late"] = lambda o: lr_scheduler.LambdaLR(o, FactorLate())
SCHEDULES["Reduce in chain"] = lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o, 0.1),lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    )],[2])

@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule(name: str, tmp_path: Path) -> None:
    goes_on(on_net(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), SCHEDULES[name]), tmp_path / "c")


def adapted() -> Any:
    return get_peft_model(Net(False), LoraConfig(r=2, lora_alpha=4, target_modules=["out"], init_lora_weights=False))


def peft(model_of: Callable[[], Any], make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[int], DCPState]:
    def build(seed: int) -> DCPState:
        torch.manual_seed(7)
        model = model_of()
        return DCPState(model, make(model), trainable_only=True)
    return build

PEFT = {
 "plus": lambda m: create_loraplus_optimizer(m, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=4),
 "plus sgd": lambda m: create_loraplus_optimizer(m, torch.optim.SGD, lr=0.01, loraplus_lr_ratio=4),
 "fa": lambda m: create_lorafa_optimizer(m, r=2, lora_alpha=4, lr=0.01),
 "riem": lambda m: __import__("peft.optimizers").optimizers.create_riemannian_optimizer(m, torch.optim.AdamW, lr=0.01),
}
@pytest.mark.parametrize("name", PEFT)
def test_peft(name: str, tmp_path: Path) -> None:
    goes_on(peft(adapted, PEFT[name]), tmp_path / "c")
