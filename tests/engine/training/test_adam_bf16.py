"""AdamW with moments in bfloat16: the steps of AdamW, and moments that can fall."""

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.engine import OptimizerConfig
from holdfast.engine.training.adam_bf16 import MOMENTS, AdamBF16, round_at_random
from holdfast.engine.training.optimizer import build_optimizer, materialize_state

CONFIG = OptimizerConfig(type="adam_bf16", lr=1e-2, weight_decay=0.1, gradient_clipping=1e9)


def noise_for(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, generator=generator)


def rounded_with(seed: int, values: torch.Tensor) -> torch.Tensor:
    return round_at_random(values, noise_for(values, torch.Generator().manual_seed(seed)))


def test_a_number_is_rounded_to_a_neighbour_and_is_right_in_the_mean() -> None:
    values = torch.cat([torch.randn(50), torch.tensor([0.0, 1.0, -3e-30, 1e30])]).repeat(2000, 1)
    rounded = rounded_with(0, values)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded_with(1, rounded.float()), rounded), "exact stays exact"
    exact = values[0].double()
    assert bool(((rounded.double() - exact).abs() <= exact.abs() * 2**-7).all())
    assert torch.allclose(rounded.double().mean(0), exact, rtol=4 * 2**-7 / 2000**0.5)


LARGEST = (2 - 2**-7) * 2.0**127
"""Largest number of bfloat16."""


def allowed_roundings(value: float) -> list[float]:
    """Both neighbours in bfloat16, by exact fractions. Infinity only from half a step above the
    largest number.
    """
    if math.isnan(value) or math.isinf(value):
        return [value]
    exponent = max(math.frexp(value)[1] - 1, -126) if value else -126
    step = Fraction(2) ** (exponent - 7)
    below = abs(Fraction(value)) // step * step
    magnitudes: set[Fraction | float] = {
        below,
        below if below == abs(Fraction(value)) else below + step,
    }
    if max(magnitudes) > LARGEST:
        magnitudes = {LARGEST} if abs(value) < LARGEST + 2.0**119 else {LARGEST, math.inf}
    return [math.copysign(float(m), value) for m in magnitudes]


def test_every_edge_of_float32_is_rounded_to_a_neighbour_and_nan_stays_nan() -> None:
    tops = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7FBF, 0x7FC0, 0x7FFF]
    lows = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    patterns = [sign << 31 | top << 16 | low for sign in (0, 1) for top in tops for low in lows]
    bits = torch.tensor(patterns, dtype=torch.int64).to(torch.int32)
    values = [struct.unpack("<f", struct.pack("<I", pattern))[0] for pattern in patterns]
    for seed in range(200):
        rounded = rounded_with(seed, bits.view(torch.float32)).double().tolist()
        for pattern, value, found in zip(patterns, values, rounded, strict=True):
            allowed = allowed_roundings(value)
            assert found in allowed or (math.isnan(value) and math.isnan(found)), (
                f"{pattern:#010x} became {found}"
            )


def test_steps_are_those_of_adamw_as_near_as_bfloat16_is() -> None:
    torch.manual_seed(0)
    start, target = torch.randn(64, 8), torch.randn(64, 8)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [AdamBF16([params[0]], lr=0.05), torch.optim.AdamW([params[1]], lr=0.05)]
    for _ in range(30):
        for param, optimizer in zip(params, optimizers, strict=True):
            optimizer.zero_grad()
            (param - target).square().sum().backward()
            optimizer.step()
    moved = (params[1] - start).norm().item()
    assert (params[0] - params[1]).norm().item() / moved < 0.01
    state = optimizers[0].state[params[0]]
    assert {state[name].dtype for name in MOMENTS} == {torch.bfloat16} and params[
        0
    ].dtype == torch.float32


def update_alone(
    number: int, step: int, param: torch.Tensor, grad: torch.Tensor, moments: list[torch.Tensor]
) -> None:
    """The update of one parameter, written out, with the numbers of `CONFIG`."""
    first, second = (moment.float() for moment in moments)
    first.lerp_(grad, 1 - CONFIG.beta1)
    second.mul_(CONFIG.beta2).addcmul_(grad, grad, value=1 - CONFIG.beta2)
    generator = torch.Generator().manual_seed(step * 1_000_003 + number)
    for moment, exact in zip(moments, (first, second), strict=True):
        moment.copy_(round_at_random(exact, noise_for(exact, generator)))
    scale = (second / (1 - CONFIG.beta2**step)).sqrt_().add_(CONFIG.eps)
    param.mul_(1 - CONFIG.lr * CONFIG.weight_decay).addcdiv_(
        first, scale, value=-CONFIG.lr / (1 - CONFIG.beta1**step)
    )


def test_parameters_are_updated_together_as_each_would_be_alone_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the buckets: one ends before 7, which then counts another number of steps. One
    parameter is empty.
    """
    shapes = [(5, 3), (7,), (0, 4), (), (40, 2), (6, 6), (3,)]
    for limit in (1, 20, 1000):
        monkeypatch.setattr("holdfast.engine.training.adam_bf16.CPU_BUCKET", limit)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        params[5] = nn.Parameter(torch.randn(6, 6).t())  # not contiguous
        optimizer = build_optimizer(params, CONFIG)
        expected = [param.detach().clone() for param in params]
        moments = [
            [torch.zeros_like(param, dtype=torch.bfloat16) for _ in MOMENTS] for param in expected
        ]
        counts = [0] * len(params)
        for step in range(4):
            for number, param in enumerate(params):
                param.grad = (
                    None
                    if number == 1 and step == 2
                    else torch.randn(param.shape) * 10.0 ** (step - 2)
                )
                if param.grad is not None:
                    counts[number] += 1
                    update_alone(
                        number, counts[number], expected[number], param.grad, moments[number]
                    )
            optimizer.step()
        for number, param in enumerate(params):
            state = optimizer.state[param]
            assert torch.equal(param, expected[number]) and int(state["step"]) == counts[number]
            for name, moment in zip(MOMENTS, moments[number], strict=True):
                assert torch.equal(state[name], moment), (limit, number, name)


class Kernels(TorchDispatchMode):
    """Counts operators that compute something on tensors with more than one number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        computed = [
            tensor for tensor in tree_leaves((result, args)) if isinstance(tensor, torch.Tensor)
        ]
        if (
            not func.is_view
            and "empty" not in str(func)
            and any(tensor.numel() > 1 for tensor in computed)
        ):
            self.names.append(str(func))
        return result


def test_more_parameters_take_no_more_operators_but_for_their_random_numbers() -> None:
    counts = {}
    for n_params in (10, 100):
        params = [nn.Parameter(torch.randn(8, 4)) for _ in range(n_params)]
        optimizer = build_optimizer(params, CONFIG)
        materialize_state(optimizer)
        for param in params:
            param.grad = torch.randn_like(param)
        with Kernels() as kernels:
            optimizer.step()
        drawn = [name for name in kernels.names if "random" in name]
        assert len(drawn) == 2 * n_params
        counts[n_params] = len(kernels.names) - len(drawn)
    assert counts[10] == counts[100] <= 30, counts


def test_a_second_moment_falls_when_gradients_do() -> None:
    """Rounded to nearest, 0.999 times a bfloat16 number is the number itself."""
    assert torch.equal(
        torch.full((1,), 1.0).bfloat16().mul_(0.999), torch.full((1,), 1.0).bfloat16()
    )
    param = nn.Parameter(torch.zeros(1024))
    optimizer = AdamBF16([param], lr=0.0)
    for step in range(201):
        param.grad = torch.full_like(param, 1.0 if step == 0 else 0.0)
        optimizer.step()
    assert float(optimizer.state[param]["exp_avg_sq"].float().mean()) == pytest.approx(
        0.001 * 0.999**200, rel=0.01
    )


def test_the_state_before_the_first_step_is_its_start_and_survives_a_plain_state_dict() -> None:
    (param, twin) = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer, other = build_optimizer([param], CONFIG), build_optimizer([twin], CONFIG)
    assert isinstance(optimizer, AdamBF16)
    materialize_state(optimizer)
    for p, o in ((param, optimizer), (twin, other)):
        p.grad = torch.full_like(p, 0.3)
        o.step()
    assert torch.equal(param, twin)
    third = build_optimizer([twin], CONFIG)
    third.load_state_dict(optimizer.state_dict())
    for name in (*MOMENTS, "step"):
        loaded, saved = third.state[twin][name], optimizer.state[param][name]
        assert loaded.dtype == saved.dtype and torch.equal(loaded, saved)
