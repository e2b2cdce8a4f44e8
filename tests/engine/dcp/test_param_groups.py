"""Parameter groups get back their own rates and schedules, in whichever order they are built."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import CheckpointMismatchError
from holdfast.utils.plain_values import pack_json, unpack_json
from tests.recover.runs import SPEC, step_info

pytestmark = pytest.mark.timeout(60)
Make = Callable[[torch.optim.Optimizer], Any]

DECAYED, PLAIN, HEAD = ("0.weight", "1.weight"), ("0.bias", "1.bias"), ("2.weight", "2.bias")
SETTINGS: dict[tuple[str, ...], dict[str, Any]] = {
    DECAYED: {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9)},
    PLAIN: {"lr": 0.02, "weight_decay": 0.0, "betas": (0.7, 0.99)},
    HEAD: {"lr": 0.003, "weight_decay": 0.1, "betas": (0.6, 0.95)},
}


def make_state(
    cut: list[tuple[str, ...]], schedule: Make | None = None, seed: int = 0, **first: Any
) -> DCPState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    groups = [
        {"params": [model.get_parameter(name) for name in names]} | SETTINGS.get(names, {})
        for names in cut
    ]
    optimizer = torch.optim.AdamW(groups, **first)
    return DCPState(model, optimizer, None if schedule is None else schedule(optimizer))


def train(state: DCPState, first: int, last: int) -> None:
    assert state.optimizer is not None
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        state.model(x).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if isinstance(state.scheduler, lr_scheduler.ReduceLROnPlateau):
            state.scheduler.step(1.0)
        elif state.scheduler is not None:
            state.scheduler.step()


def settings(state: DCPState) -> dict[str, Any]:
    """The training options of each parameter."""
    assert state.optimizer is not None
    names = {id(param): name for name, param in state.model.named_parameters()}
    return {
        names[id(param)]: {key: value for key, value in group.items() if key != "params"}
        for group in state.optimizer.param_groups
        for param in group["params"]
    }


ONE_CYCLE: dict[str, Any] = {"max_lr": [1.0, 0.2, 0.03], "total_steps": 20}
CYCLIC: dict[str, Any] = {
    "base_lr": [0.1, 0.02, 0.003],
    "max_lr": [1.0, 0.2, 0.03],
    "step_size_up": 3,
}
"""Options that are given by group, in the order of the groups."""


def in_order(options: dict[str, Any], cut: list[tuple[str, ...]]) -> dict[str, Any]:
    at = [list(SETTINGS).index(names) for names in cut]
    return {
        key: [value[i] for i in at] if isinstance(value, list) else value
        for key, value in options.items()
    }


def schedules(cut: list[tuple[str, ...]]) -> dict[str, Make]:
    """Schedules for groups in the order of ``cut``."""
    factors = in_order({"f": [lambda s: 1 / (s + 1), lambda s: 0.9**s, lambda s: 1.0]}, cut)["f"]
    return {
        "none": lambda o: None,
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, factors),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.5),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=7),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, **in_order(ONE_CYCLE, cut)),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(
            o, **in_order(CYCLIC, cut), cycle_momentum=False
        ),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 0.1),
                lr_scheduler.ExponentialLR(o, 0.8),
                lr_scheduler.ConstantLR(o),
            ],
            [2, 4],
        ),
        "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.8)]
        ),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(
            o, patience=1, min_lr=in_order({"m": [0.05, 0.001, 0.0001]}, cut)["m"]
        ),
    }


SAVED, OTHER = [DECAYED, PLAIN, HEAD], [HEAD, DECAYED, PLAIN]


@pytest.mark.parametrize("name", schedules(SAVED))
def test_groups_in_another_order_go_on_with_their_own_rates_and_schedules(
    name: str, tmp_path: Path
) -> None:
    state = make_state(SAVED, schedules(SAVED)[name])
    train(state, 0, 3)
    save_dcp(tmp_path / "c", state)
    resumed = make_state(OTHER, schedules(OTHER)[name], seed=1)
    load_dcp(tmp_path / "c", resumed)
    assert settings(resumed) == settings(state)
    for step in range(3, 9):
        train(state, step, step + 1)
        train(resumed, step, step + 1)
        assert settings(resumed) == settings(state), f"step {step}"
    for one, other in zip(state.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def refusal(folder: Path, target: DCPState) -> str:
    before = {name: tensor.clone() for name, tensor in target.live_tensors().items()}
    with_before = settings(target)
    with pytest.raises(CheckpointMismatchError) as refused:
        load_dcp(folder, target)
    assert settings(target) == with_before
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.live_tensors().items())
    return str(refused.value)


def test_groups_cut_in_another_way_are_refused_saying_which_parameter_is_where(
    tmp_path: Path,
) -> None:
    state = make_state(SAVED)
    train(state, 0, 1)
    save_dcp(tmp_path / "c", state)
    mixed = [("0.weight", "0.bias"), ("1.weight", "1.bias"), HEAD]
    message = refusal(tmp_path / "c", make_state(mixed, lr=1.0))
    assert (
        "0.weight and 0.bias are in groups 0 and 1 of the checkpoint's" in message
        and "both in group 0" in message
    )
    torn = [(*HEAD, *PLAIN), ("0.weight",), ("1.weight",)]
    message = refusal(tmp_path / "c", make_state(torn, lr=1.0))
    assert "both in group" in message or "in groups" in message
    assert "2 parameter groups" in refusal(
        tmp_path / "c", make_state([(*DECAYED, *PLAIN), HEAD], lr=1.0)
    ).replace("3 parameter groups, the optimizer 2", "2 parameter groups")


class OwnSchedule:
    """Keeps a list that may or may not have one value a group."""

    def __init__(self, values: list[float]) -> None:
        self.state: dict[str, Any] = {"phases": values, "inner": {"deep": values}}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)

    def step(self) -> None: ...


def test_a_list_that_may_be_one_of_groups_is_never_guessed_at(tmp_path: Path) -> None:
    for values, at in (([1.0, 2.0, 3.0], "phases"), ([1.0, 2.0], None)):
        state = make_state(SAVED, lambda o, values=values: OwnSchedule(values))
        train(state, 0, 1)
        save_dcp(tmp_path / str(at), state)
        target = make_state(OTHER, lambda o: OwnSchedule([0.0]), seed=1)
        if at is None:
            load_dcp(tmp_path / str(at), target)
            assert target.scheduler is not None and state.scheduler is not None
            assert target.scheduler.state_dict() == state.scheduler.state_dict()
        else:
            message = refusal(tmp_path / str(at), target)
            assert f"scheduler.{at} is a list of 3" in message and "[2, 0, 1]" in message
        same = make_state(SAVED, lambda o: OwnSchedule([0.0]), seed=1)
        load_dcp(tmp_path / str(at), same)


class Unnamed(DCPState):
    """Saves groups in the format of older releases."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        groups = unpack_json(state["param_groups"], "")
        unnamed = [
            {key: value for key, value in group.items() if key != "params"} for group in groups
        ]
        return state | {"param_groups": pack_json(unnamed, "")}


@pytest.mark.parametrize("n_groups", [1, 3])
def test_groups_without_names_go_by_position_with_a_warning_when_several(
    n_groups: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = SAVED if n_groups == 3 else [(*DECAYED, *PLAIN, *HEAD)]
    state = make_state(cut)
    train(state, 0, 1)
    assert state.optimizer is not None
    save_dcp(tmp_path / "c", Unnamed(state.model, state.optimizer))
    resumed = make_state(cut, seed=1)
    with caplog.at_level(logging.WARNING):
        load_dcp(tmp_path / "c", resumed)
    assert settings(resumed) == settings(state)
    assert caplog.text.count("matched by position") == (n_groups == 3)


def test_a_frozen_parameter_in_only_one_runs_optimizer_is_no_difference(
    tmp_path: Path,
) -> None:
    def frozen(cut: list[tuple[str, ...]]) -> DCPState:
        state = make_state(cut, seed=1, lr=0.5)
        for name in HEAD:
            state.model.get_parameter(name).requires_grad_(False)
        return state

    save_dcp(tmp_path / "c", frozen([DECAYED, (*PLAIN, *HEAD)]))
    load_dcp(tmp_path / "c", frozen([DECAYED, PLAIN]))
    load_dcp(tmp_path / "c", frozen([PLAIN, DECAYED]))


def test_the_handler_resumes_a_run_whose_groups_are_built_in_another_order(tmp_path: Path) -> None:
    config = RecoverConfig("e", "t", fileroot=str(tmp_path), freq_steps=1)
    rates: list[dict[str, float]] = []
    for at, cut in enumerate((SAVED, OTHER, SAVED)):
        state = make_state(cut, schedules(cut)["LambdaLR"], seed=at)
        with RecoverHandler(config, SPEC) as handler:
            assert (handler.load(state) is None) == (at == 0)
            train(state, at, at + 1)
            handler.dump(state, step_info(at))
        rates.append({name: setting["initial_lr"] for name, setting in settings(state).items()})
    assert rates[0] == rates[1] == rates[2]
