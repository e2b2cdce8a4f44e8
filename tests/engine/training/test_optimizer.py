"""The schedule against independent formulas, and optimizer state that is created without a step."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.engine import OptimizerConfig
from holdfast.engine.training import host_optimizer
from holdfast.engine.training.optimizer import (
    build_optimizer,
    build_scheduler,
    materialize_state,
    schedule_of,
)
from holdfast.utils.errors import ConfigError

TOTAL = 40
LR = 3e-3


def expected_rates(kind: str, warmup: int, min_ratio: float) -> np.ndarray:
    """The rate at steps 0 to 49: straight lines between corners (a warm-up is at 0 one step before
    the first), and the half-angle form of the cosine.
    """
    steps = np.arange(TOTAL + 10)
    end = 1.0 if kind == "constant" else min_ratio
    rates = np.interp(steps, [-1, warmup, TOTAL], [0.0, 1.0, end])
    if kind == "cosine":
        progress = np.clip((steps - warmup) / (TOTAL - warmup), 0, 1)
        decayed = min_ratio + (1 - min_ratio) * np.cos(np.pi * progress / 2) ** 2
        rates = np.where(steps < warmup, rates, decayed)
    return LR * rates


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("proportion", "warmup"), [(0.0, 0), (0.1, 4), (0.12, 4)])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1])
def test_the_rate_of_every_step_is_that_of_the_formula(
    kind: str, proportion: float, warmup: int, min_ratio: float
) -> None:
    config = OptimizerConfig(
        lr=LR,
        lr_scheduler_type=kind,
        warmup_steps_proportion=proportion,
        min_lr_ratio=min_ratio,
        type="sgd",
    )
    optimizer = build_optimizer([nn.Parameter(torch.zeros(1))], config)
    scheduler = build_scheduler(optimizer, config, TOTAL)
    rates = []
    for _ in range(TOTAL + 10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(
        rates, expected_rates(kind, warmup, min_ratio), rtol=1e-12, atol=1e-15
    )


def test_warmup_steps_win_over_their_proportion() -> None:
    both = OptimizerConfig(
        lr=LR, lr_scheduler_type="linear", warmup_steps=4, warmup_steps_proportion=0.5
    )
    factor = schedule_of(both, TOTAL)
    rates = [LR * factor(step) for step in range(TOTAL + 10)]
    np.testing.assert_allclose(rates, expected_rates("linear", 4, 0.0), rtol=1e-12, atol=1e-15)
    assert (
        schedule_of(OptimizerConfig(warmup_steps=0, warmup_steps_proportion=0.5), TOTAL)(0) == 1.0
    )
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps' is -1"):
        OptimizerConfig(warmup_steps=-1)


@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_an_eps_that_lets_a_number_without_a_gradient_become_nan_is_refused(eps: float) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.eps' is .*; expected a value from 1e-30"):
        OptimizerConfig(eps=eps)


def test_the_optimizers_have_the_numbers_of_the_config() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    adam = build_optimizer(
        params, OptimizerConfig(lr=0.1, weight_decay=0.2, beta1=0.3, beta2=0.4, eps=0.5)
    )
    assert type(adam) is torch.optim.AdamW
    assert {k: adam.defaults[k] for k in ("lr", "weight_decay", "betas", "eps")} == {
        "lr": 0.1,
        "weight_decay": 0.2,
        "betas": (0.3, 0.4),
        "eps": 0.5,
    }
    sgd = build_optimizer(
        params, OptimizerConfig(type="sgd", lr=0.1, weight_decay=0.2, momentum=0.3)
    )
    assert type(sgd) is torch.optim.SGD
    assert [sgd.defaults[k] for k in ("lr", "weight_decay", "momentum")] == [0.1, 0.2, 0.3]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw of the config": lambda params: build_optimizer(params, OptimizerConfig(lr=0.1)),
    "adam_bf16 of the config": lambda params: build_optimizer(
        params, OptimizerConfig(type="adam_bf16", lr=0.1)
    ),
    "adam8bit of the config": lambda params: build_optimizer(
        params, OptimizerConfig(type="adam8bit", lr=0.1)
    ),
    "muon of the config": lambda params: build_optimizer(
        params, OptimizerConfig(type="muon", lr=0.1), params[:1]
    ),
    "sgd of the config": lambda params: build_optimizer(
        params, OptimizerConfig(type="sgd", lr=0.1)
    ),
    "sgd with momentum of the config": lambda params: build_optimizer(
        params, OptimizerConfig(type="sgd", lr=0.1, momentum=0.9)
    ),
    "adam with coupled decay": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1),
    "adamw with amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "adamw one by one": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "dampened momentum": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, dampening=0.5
    ),
}
# the latter's first buffer is the gradient, whatever the state was
STATELESS = ("sgd of the config", "dampened momentum")


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), (2,))
    ]
    params[2].requires_grad_(False)
    return params


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params[:2]:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


@pytest.fixture(params=[torch.float32, torch.float64])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_made_without_a_step_is_what_a_step_starts_from(name: str) -> None:
    fresh, made = make_params(), make_params()
    reference, optimizer = OPTIMIZERS[name](fresh), OPTIMIZERS[name](made)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("step"))
    versions = [param._version for param in made]
    materialize_state(optimizer)
    assert not fired
    assert [param._version for param in made] == versions, "parameters were written to"
    assert all(param.grad is None for param in made)
    assert made[2] not in optimizer.state, "a frozen parameter needs no state"
    assert all(
        float(t.abs().sum()) == 0 for state in optimizer.state.values() for t in state.values()
    )
    assert any(optimizer.state.values()) == (name not in STATELESS)
    for seed in range(3):
        step(reference, fresh, seed)
        step(optimizer, made, seed)
        assert all(torch.equal(a, b) for a, b in zip(fresh, made, strict=True)), (
            f"step {seed} differs"
        )
        for a, b in zip(fresh[:2], made[:2], strict=True):
            assert describe(reference.state[a]) == describe(optimizer.state[b])


def describe(state: dict[str, Any]) -> dict[str, Any]:
    """Values, dtypes and devices of a parameter's state. An empty momentum buffer counts as no
    state.
    """
    return {k: (t.tolist(), t.dtype, t.device) for k, t in state.items() if t is not None}


def test_state_that_exists_is_left_alone() -> None:
    params = make_params()
    optimizer = OPTIMIZERS["adamw of the config"](params)
    step(optimizer, params, 0)
    before = {id(p): describe(state) for p, state in optimizer.state.items()}
    materialize_state(optimizer)
    assert {id(p): describe(state) for p, state in optimizer.state.items()} == before


@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "adam8bit", "muon", "sgd"])
def test_hooks_see_one_step_of_an_optimizer_on_the_host(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BLOCK_BYTES", 1)
    build_optimizer(
        make_params(), OptimizerConfig(type=kind)
    )  # torch wraps hooks around the steps of its class
    params, calls = make_params(), list[str]()
    optimizer = build_optimizer(params, OptimizerConfig(type=kind, offload=True))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    before = [param.detach().clone() for param in params]
    step(optimizer, params, 0)
    assert calls == ["before", "after"]
    assert not any(
        torch.equal(param, old) for param, old in zip(params[:2], before[:2], strict=True)
    )
