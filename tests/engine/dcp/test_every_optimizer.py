"""The promise of every save: what it accepts loads into a fresh model, and training goes on bit for
bit.

Every optimizer and schedule of torch is tried, and every optimizer of PEFT. A save refuses what
cannot come back.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from peft import optimizers as peft_optimizers
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from holdfast.engine.dcp.configured import Configured
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.optimizer_state import hyperparameters as restored_hyperparameters
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.errors import CheckpointMismatchError, ConfigError

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Matrices only, because Muon takes no others. With ``sparse`` gradients only the first one is
    trained.
    """

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5, sparse=sparse)
        self.out = nn.Linear(5, 3, bias=False).requires_grad_(not sparse)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens).tanh())


def train(state: DCPState, first: int, last: int) -> None:
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


def build(
    make: Make, schedule: Any = None, net: Callable[[], Any] = Net, seed: int = 0
) -> DCPState:
    torch.manual_seed(seed)
    model = net()
    optimizer = make(model)
    return DCPState(model, optimizer, None if schedule is None else schedule(optimizer))


def check_that_it_goes_on(
    folder: Path | None, make: Make, schedule: Any = None, net: Callable[[], Any] = Net
) -> None:
    """Save after three steps, load into a fresh state, and compare three more steps of both.

    Without a folder the values are handed over in memory.
    """
    state, resumed = (build(make, schedule, net, seed) for seed in (0, 1))
    train(state, 0, 3)
    if folder is None:
        resumed.load_state_dict(state.state_dict())
    else:
        save_dcp(folder, state)
        load_dcp(folder, resumed)
    train(state, 3, 6)
    train(resumed, 3, 6)
    assert hyperparameters(resumed) == hyperparameters(state)
    if schedule is not None:
        assert repr(resumed.scheduler.state_dict()) == repr(state.scheduler.state_dict())  # type: ignore[union-attr]
    assert_same_tensors(resumed, state)


def assert_same_tensors(one: DCPState, other: DCPState) -> None:
    tensors, others = one.live_tensors(), other.live_tensors()
    assert tensors.keys() == others.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])] == []


def hyperparameters(state: DCPState) -> list[dict[str, Any]]:
    assert state.optimizer is not None
    return [
        {key: value for key, value in g.items() if key != "params"}
        for g in state.optimizer.param_groups
    ]


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in OPTIMIZERS},
    "Adam amsgrad": {"amsgrad": True},
    "Adam fused": {"fused": True},
    "Adam foreach": {"foreach": True},
    "AdamW maximize": {"maximize": True, "weight_decay": 0.1},
    "NAdam decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RMSprop centered": {"momentum": 0.5, "centered": True},
    "SGD momentum": {"lr": 0.01, "momentum": 0.9},
    "SGD dampening": {"lr": 0.01, "momentum": 0.9, "dampening": 0.1},
    "SGD nesterov": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
}

REFUSED_OPTIMIZERS: dict[str, tuple[Make, str]] = {
    "LBFGS": (
        lambda m: torch.optim.LBFGS(m.parameters()),
        r"optimizer state\.embed\.weight\.\w+\[0\] is a torch.Tensor",
    ),
    "a tensor as rate": (
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
        r"param_groups\[0\]\.lr is a torch.Tensor",
    ),
}


UNTOLD = {"d", "initial_accumulator_value"}
"""``d`` of Adafactor is the name of progress in other optimizers, and the other one counts once."""


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REFUSED_OPTIMIZERS])
def test_every_hyperparameter_that_a_load_replaces_is_told(name: str) -> None:
    optimizer = OPTIMIZERS[name](Net().parameters())  # type: ignore[call-arg]
    configured = Configured(optimizer, None, False)
    group = optimizer.param_groups[0]
    replaced = restored_hyperparameters(group).keys() - UNTOLD
    told = set()
    for key in replaced:
        if group[key] is None:
            continue
        told |= {"beta1", "beta2"} if key == "betas" else {key}
        group[key] = ("another", "another")
    assert {setting.name for setting in configured.settle().kept} == told


def variant(name: str) -> tuple[Make, Callable[[], Any]]:
    """An optimizer of `VARIANTS`, and the net that it trains."""
    kind: Any = OPTIMIZERS[name.split()[0]]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(
            [param for param in model.parameters() if param.requires_grad], **VARIANTS[name]
        )

    return make, partial(Net, kind is torch.optim.SparseAdam)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in REFUSED_OPTIMIZERS])
def test_every_optimizer_of_torch_goes_on_bit_for_bit(
    name: str, in_memory: bool, tmp_path: Path
) -> None:
    make, net = variant(name)
    check_that_it_goes_on(None if in_memory else tmp_path / "c", make, net=net)


@pytest.mark.parametrize(
    ("name", "steps", "is_refused"),
    [
        ("AdamW", 0, False),
        ("SGD", 0, False),
        ("SGD dampening", 0, True),
        ("RMSprop", 0, True),
        ("RMSprop", 1, False),
    ],
)
def test_torchs_own_load_restores_the_state_or_is_refused(
    name: str, steps: int, is_refused: bool, tmp_path: Path
) -> None:
    make, _ = variant(name)
    state, resumed = (build(make, seed=seed) for seed in (0, 1))
    train(state, 0, 3)
    save_dcp(tmp_path / "c", state)
    train(resumed, 0, steps)
    if is_refused:
        with pytest.raises(CheckpointMismatchError, match="use load_dcp"):
            dcp.load({"dcp": resumed}, checkpoint_id=tmp_path / "c")
        return
    dcp.load({"dcp": resumed}, checkpoint_id=tmp_path / "c")
    assert_same_tensors(resumed, state)


def test_state_that_the_optimizer_does_not_have_is_refused_before_anything_changes() -> None:
    state, other = (build(variant(name)[0], seed=1) for name in ("Adam amsgrad", "Adam"))
    train(state, 0, 3)
    train(other, 0, 1)
    before = {name: tensor.clone() for name, tensor in other.live_tensors().items()}
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight\.max_exp_avg_sq.*the Adam"):
        other.load_state_dict(state.state_dict())
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.live_tensors().items())


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_an_optimizer_that_cannot_come_back_is_refused_by_the_save(
    name: str, tmp_path: Path
) -> None:
    make, words = REFUSED_OPTIMIZERS[name]
    state = build(make)
    train(state, 0, 1)
    with pytest.raises(ConfigError, match=words):
        save_dcp(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []


class Averaging(torch.optim.AdamW):
    """AdamW with one more tensor for each parameter, which appears in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", param.clone())
                average.lerp_(param, 0.5)
                param.lerp_(average, 0.1)


class HalfMoments(torch.optim.Adam):
    """Adam with one moment, in bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.bfloat16)
                state["exp_avg"].lerp_(param.grad.bfloat16(), 0.1)
                param.sub_(state["exp_avg"], alpha=group["lr"])


@pytest.mark.parametrize("kind", [Averaging, HalfMoments])
def test_a_subclass_with_other_state_than_its_class_goes_on_bit_for_bit(
    kind: Any, tmp_path: Path
) -> None:
    check_that_it_goes_on(tmp_path / "c", lambda model: kind(model.parameters()))


class Rate:
    """A factor with state of its own. torch keeps the attributes of such objects."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LambdaLR object": lambda o: lr_scheduler.LambdaLR(o, Rate()),
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
    "CyclicLR exp_range": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9
    ),
    "CyclicLR scale_fn": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, step_size_up=2, scale_fn=lambda x: 1 / x
    ),
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


def test_no_schedule_of_torch_is_forgotten_here() -> None:
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler)
    }
    assert kinds - {"LRScheduler", "_LRScheduler"} <= SCHEDULES.keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    check_that_it_goes_on(
        tmp_path / "c",
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        SCHEDULES[name],
    )


def adapted() -> Any:
    """The net with an adapter. The base is the same for every seed, as it is from files."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = Net()
    return get_peft_model(
        net, LoraConfig(r=2, lora_alpha=4, target_modules=["out"], init_lora_weights=False)
    )


PEFT_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LoRA+": lambda m: create_loraplus_optimizer(
        m, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=4.0
    ),
    "LoRA+ over SGD": lambda m: create_loraplus_optimizer(
        m, torch.optim.SGD, lr=0.01, loraplus_lr_ratio=4.0
    ),
}
if hasattr(peft_optimizers, "create_riemannian_optimizer"):  # not in older versions
    PEFT_OPTIMIZERS["Riemannian"] = lambda m: peft_optimizers.create_riemannian_optimizer(
        m, torch.optim.AdamW, lr=0.01
    )


@pytest.mark.parametrize("name", PEFT_OPTIMIZERS)
def test_optimizers_of_peft_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    check_that_it_goes_on(tmp_path / "c", PEFT_OPTIMIZERS[name], SCHEDULES["CyclicLR"], adapted)


def test_an_optimizer_that_keeps_state_under_names_is_refused_by_the_save(tmp_path: Path) -> None:
    def lorafa(model: Any) -> torch.optim.Optimizer:
        return create_lorafa_optimizer(model, r=2, lora_alpha=4, lr=0.01)

    state = build(lorafa, net=adapted)
    train(state, 0, 1)
    with pytest.raises(
        ConfigError,
        match=r"state for 'base_model\.model\.out\.lora', which is no parameter of the model",
    ):
        save_dcp(tmp_path / "c", state)
