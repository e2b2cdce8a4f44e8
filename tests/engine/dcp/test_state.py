"""`DCPState` over torch's own optimizers and schedulers: all of their state is kept, or refused by
name.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState, StagedState
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
)
from holdfast.utils.plain_values import pack_json, unpack_json
from holdfast.utils.rng import capture_rng

Make = Callable[..., Any]


class Adaline(torch.optim.Optimizer):
    """An optimizer with plain values in addition to tensors, like transformers' Adafactor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "window": (2, 3)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["seen"] = [*state.get("seen", []), float(param.grad.norm())][-3:]
                state["average"] = state.get("average", torch.zeros_like(param)).lerp(
                    param.grad, 1 / state["step"]
                )
                param.sub_(state["average"] * group["lr"] / (1 + sum(state["seen"])))


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def make_state(optimizer: Make, scheduler: Make | None = None, seed: int = 0) -> DCPState:
    model = make_model(seed)
    made = optimizer(model.parameters())
    return DCPState(model, made, None if scheduler is None else scheduler(made))


def train(state: DCPState, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        state.model(x).square().sum().backward()
        assert state.optimizer is not None
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.scheduler is not None:
            state.scheduler.step()


def plain_groups(state: DCPState) -> list[dict[str, Any]]:
    assert state.optimizer is not None
    return [
        {k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups
    ]


def schedule_of(state: DCPState) -> dict[str, Any]:
    assert state.scheduler is not None
    return dict(state.scheduler.state_dict())


OPTIMIZERS: dict[str, Make] = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "plain entries": Adaline,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit_as_if_never_interrupted(
    name: str, tmp_path: Path
) -> None:
    state = make_state(OPTIMIZERS[name])
    train(state, 0, 3)
    save_dcp(tmp_path / "saved", state)
    resumed = make_state(OPTIMIZERS[name], seed=1)
    load_dcp(tmp_path / "saved", resumed)
    train(state, 3, 6)
    train(resumed, 3, 6)
    for a, b in zip(state.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


SCHEDULERS: dict[str, Make] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.MultiStepLR(o, [1, 3])],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_with_every_hyperparameter_it_sets(name: str, tmp_path: Path) -> None:
    state = make_state(torch.optim.AdamW, SCHEDULERS[name])
    train(state, 0, 3)
    save_dcp(tmp_path / "saved", state)
    resumed = make_state(lambda p: torch.optim.AdamW(p, foreach=False), SCHEDULERS[name], seed=1)
    load_dcp(tmp_path / "saved", resumed)
    assert repr(schedule_of(resumed)) == repr(schedule_of(state))
    for step in range(3, 9):
        train(state, step, step + 1)
        train(resumed, step, step + 1)
        assert plain_groups(resumed) == [
            group | {"foreach": False} for group in plain_groups(state)
        ]
    for a, b in zip(state.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_plain_values_come_back_with_their_types() -> None:
    values = {
        "counter": Counter({3: 1, 5: 2}),
        "ordered": OrderedDict([("b", 1), ("a", (1, 2.5, None, ()))]),
        "keys": {1: "a", "1": "b", (2, "x"): [True, {}], None: math.inf},
        "tag": {"__type__": "tuple", "items": [0.1 + 0.2, -0.0]},
        "text": "\ud800 é",
    }
    back = unpack_json(pack_json(values, "values"), "values")
    assert back == values
    assert repr(back) == repr(values)


@pytest.mark.parametrize("thing", [{1, 2}, torch.ones(2), b"bytes", 1j, [{"deep": object}]])
def test_entries_that_would_not_be_restored_are_refused_at_save_by_name(
    thing: Any, tmp_path: Path
) -> None:
    state = make_state(Adaline, lambda o: lr_scheduler.StepLR(o, 2))
    train(state, 0, 1)
    assert state.optimizer is not None
    vars(state.scheduler)["extra"] = thing
    with pytest.raises(ConfigError, match=r"scheduler\.extra.* cannot hold"):
        save_dcp(tmp_path / "saved", state)
    del vars(state.scheduler)["extra"]
    state.optimizer.param_groups[0]["extra"] = thing
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\.extra.* cannot hold"):
        save_dcp(tmp_path / "saved", state)
    del state.optimizer.param_groups[0]["extra"]
    state.optimizer.state[next(state.model.parameters())]["extra"] = [thing]
    with pytest.raises(ConfigError, match=r"optimizer state\.0\.weight\.extra\[0\].* cannot hold"):
        save_dcp(tmp_path / "saved", state)
    assert list(tmp_path.iterdir()) == []


def test_state_of_a_parameter_outside_the_model_is_refused_at_save(tmp_path: Path) -> None:
    model, stranger = make_model(), nn.Parameter(torch.ones(3))
    state = DCPState(model, torch.optim.AdamW([*model.parameters(), stranger]))
    with pytest.raises(ConfigError, match=r"tensor \[3\], which is no parameter of the model"):
        save_dcp(tmp_path / "saved", state)


class Counters:
    """Counters that fail with a KeyError if one is missing."""

    def __init__(self, **values: int) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = {name: state_dict[name] for name in self.values}


class Tampered(DCPState):
    """Saves given entries instead of its own."""

    def __init__(self, *args: Any, instead: dict[str, Any]) -> None:
        super().__init__(*args)
        self.instead = instead

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.instead


def rng(**changes: Any) -> dict[str, Any]:
    return {"rank_00000": {n: t for n, t in (capture_rng() | changes).items() if t is not None}}


TAMPERED: dict[str, tuple[dict[str, Any], type[CheckpointError], str]] = {
    "counters are not JSON": (
        {"counters": torch.full((9,), 65, dtype=torch.uint8)},
        CheckpointCorruptError,
        "counters is not JSON",
    ),
    "counters with an unknown tag": (
        {"counters": torch.tensor(list(b'{"__type__": "set", "items": []}'), dtype=torch.uint8)},
        CheckpointCorruptError,
        "counters is not JSON",
    ),
    "counters lack one": (
        {"counters": pack_json({"a": 1}, "")},
        CheckpointMismatchError,
        "counters .* no 'b'",
    ),
    "counters are a list": ({"counters": pack_json([1], "")}, CheckpointMismatchError, "is a list"),
    "scheduler is another": (
        {"scheduler": pack_json({"last_epoch": 1}, "")},
        CheckpointMismatchError,
        "scheduler .* has no",
    ),
    "group too many": (
        {"param_groups": pack_json([{}, {}], "")},
        CheckpointMismatchError,
        "2 parameter groups",
    ),
    "group of another": (
        {"param_groups": pack_json([{"lr": 1.0, "betas": (0.9, 0.99)}], "")},
        CheckpointMismatchError,
        "'betas'.*RMSprop",
    ),
    "plain state of another": (
        {"optim_plain": pack_json({"9.weight": {"step": 1}}, "")},
        CheckpointMismatchError,
        "9.weight",
    ),
    "generator missing": ({"rng": rng(numpy=None)}, CheckpointMismatchError, "no 'numpy'"),
    "generator too short": (
        {"rng": rng(torch=torch.zeros(3, dtype=torch.uint8))},
        CheckpointMismatchError,
        "'torch'",
    ),
    "generator of another device": (
        {"rng": rng(cuda=torch.zeros(1, 3, dtype=torch.uint8))},
        CheckpointMismatchError,
        "'cuda'",
    ),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_values_that_do_not_fit_are_refused_before_anything_changes(
    how: str, tmp_path: Path
) -> None:
    instead, kind, words = TAMPERED[how]
    make, schedule = OPTIMIZERS["RMSprop"], lambda o: lr_scheduler.StepLR(o, 2)
    source, target = make_state(make, schedule), make_state(make, schedule, seed=1)
    train(source, 0, 2)
    tampered = Tampered(
        source.model, source.optimizer, source.scheduler, Counters(a=1, b=2), instead=instead
    )
    save_dcp(
        tmp_path / "saved", StagedState(tampered.state_dict(), lambda: None)
    )  # a save would refuse the state
    target.counters = Counters(a=7, b=8)
    before = {name: tensor.clone() for name, tensor in target.live_tensors().items()}
    groups, schedule_before = plain_groups(target), schedule_of(target)
    generators = capture_rng()
    with pytest.raises(kind, match=words) as caught:
        load_dcp(tmp_path / "saved", target)
    assert str(tmp_path / "saved") in str(caught.value)
    after = target.live_tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (plain_groups(target), schedule_of(target)) == (groups, schedule_before)
    assert target.counters.state_dict() == {"a": 7, "b": 8}
    assert all(torch.equal(tensor, generators[name]) for name, tensor in capture_rng().items())


def test_an_optimizer_without_state_stays_so_when_the_folder_does_not_fit(tmp_path: Path) -> None:
    source = make_state(OPTIMIZERS["RMSprop"])
    train(source, 0, 1)
    save_dcp(tmp_path / "saved", source)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    target = DCPState(model, OPTIMIZERS["RMSprop"](model.parameters()))
    with pytest.raises(CheckpointMismatchError, match="has shape"):
        load_dcp(tmp_path / "saved", target)
    assert target.optimizer is not None
    assert not any(target.optimizer.state.values())
    with pytest.raises(CheckpointMismatchError, match=r"without.*'window'.*Adaline"):
        load_dcp(tmp_path / "saved", make_state(Adaline))
