"""AdamW with moments in 8 bits: levels, rounding, and the steps of AdamW."""

import pytest
import torch
from torch import nn

from holdfast.engine import OptimizerConfig
from holdfast.engine.training.adam8bit import BLOCK, SCALES, Adam8bit, dequantize, levels, quantize
from holdfast.engine.training.adam_bf16 import MOMENTS
from holdfast.engine.training.optimizer import build_optimizer

CPU = torch.device("cpu")
CONFIG = OptimizerConfig(type="adam8bit", lr=1e-2, weight_decay=0.1)


def noise_for(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, generator=generator)


def rounded(values: torch.Tensor, signed: bool, seed: int = 0) -> torch.Tensor:
    codes, scales = quantize(values, signed, noise_for(values, seed))
    dequantize(codes, scales, signed, out := torch.empty_like(values))
    return out


def test_the_levels_are_those_of_the_paper() -> None:
    """Numbers of bitsandbytes' ``create_dynamic_map``. The signed ones end at -1 and 1 here."""
    signed, unsigned = levels(True, CPU), levels(False, CPU)
    assert len(signed) == 255 and len(unsigned) == 256
    assert torch.equal(signed, -signed.flip(0)) and signed[127] == 0 and signed[-1] == 1
    assert signed[128:132].tolist() == pytest.approx([5.5e-7, 3.25e-6, 7.75e-6, 2.125e-5])
    assert signed[-3:-1].tolist() == pytest.approx([0.96484375, 0.97890625])
    assert unsigned[:4].tolist() == pytest.approx([0, 3.25e-7, 7.75e-7, 2.125e-6])
    assert unsigned[-3:].tolist() == pytest.approx([0.98945313, 0.99648438, 1.0])
    assert bool((signed.diff() > 0).all() and (unsigned.diff() > 0).all())


@pytest.mark.parametrize("signed", [True, False])
def test_levels_stay_whatever_the_scale_and_other_numbers_become_a_neighbour(signed: bool) -> None:
    known = levels(signed, CPU)
    exact = torch.cat([known, known.new_zeros(2 * BLOCK - len(known))]).view(2, BLOCK)
    exact[:, 0] = 1.0  # so that each block has its scale
    for scale in (1.0, 2.0**-100, 2.0**60):
        values = exact * scale if signed else exact.clamp(min=float(known[1])) * scale
        assert torch.equal(rounded(values, signed), values)
    values = torch.randn(50, BLOCK) * 10.0 ** torch.randint(-8, 1, (50, BLOCK))
    values = values if signed else values.abs()
    scaled = values / values.abs().amax(1, keepdim=True)
    at = torch.bucketize(scaled, known).clamp(min=1)
    for seed in range(20):
        found = rounded(values, signed, seed) / values.abs().amax(1, keepdim=True)
        gap = (known[at] - known[at - 1]) * (1 + 1e-5)
        assert bool(((found - scaled).abs() <= gap).all())
        assert signed or bool((found > 0).all())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_search_among_the_levels(signed: bool) -> None:
    known = levels(signed, CPU)
    near = [known, known.nextafter(torch.tensor(2.0)), known.nextafter(torch.tensor(-2.0))]
    every = torch.arange(0, 0x3F800001, 1009, dtype=torch.int32).view(torch.float32)  # up to 1.0
    scaled = torch.cat([*near, every, -every if signed else every]).clamp(-1 if signed else 0, 1)
    values = torch.cat([scaled, scaled.new_ones(-len(scaled) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    values = torch.cat([values, values.new_ones(len(values), 1)], 1)  # the scale of each block is 1
    noise = noise_for(values)
    below = torch.bucketize(values, known, right=True).sub(1).clamp(0, len(known) - 2)
    low, high = known[below], known[below + 1]
    expected = below + ((values - low) / (high - low) * (1 << 16) > noise)
    assert torch.equal(
        quantize(values, signed, noise)[0].long(), expected.clamp(min=0 if signed else 1)
    )


def test_numbers_are_right_in_the_mean() -> None:
    values = torch.cat([torch.tensor([1.0, -1.0]), torch.rand(BLOCK - 2) * 2 - 1]).repeat(20000, 1)
    mean = rounded(values, True).double().mean(0)
    assert torch.allclose(mean, values[0].double(), atol=4 * 0.5 * 0.015 / 20000**0.5 + 1e-6)
    assert mean[:2].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("shape", [(64, 8), (3, 300), (4, 5, 256)], ids=str)
def test_steps_are_those_of_adamw_as_near_as_8_bits_are(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    start, target = torch.randn(shape), torch.randn(shape)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [Adam8bit([params[0]], lr=0.05), torch.optim.AdamW([params[1]], lr=0.05)]
    for _ in range(30):
        for param, optimizer in zip(params, optimizers, strict=True):
            optimizer.zero_grad()
            (param - target).square().sum().backward()
            optimizer.step()
    moved = (params[1] - start).norm().item()
    assert (params[0] - params[1]).norm().item() / moved < 0.03
    state = optimizers[0].state[params[0]]
    assert {state[name].dtype for name in MOMENTS} == {torch.uint8}
    assert state["exp_avg_scale"].shape == (*shape[:-1], -(-shape[-1] // BLOCK))


def moments_of(state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments of a matrix, read block by block."""
    found = []
    for name, scale, signed in zip(MOMENTS, SCALES, (True, False), strict=True):
        values = levels(signed, CPU)[state[name].int()]
        scales = state[scale].repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
        found.append(values * scales if signed else (values * scales).square())
    return found[0], found[1]


def test_an_update_is_adamws_from_the_stored_moments_to_the_bit_whatever_the_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters of one dimension are updated as by ``adam_bf16``. One parameter is empty, one not
    contiguous.
    """
    shapes = [(5, 3), (7,), (0, 4), (), (40, 130), (6, 6), (2, 3, 256)]
    results = []
    for limit in (1, 200, 100_000):
        monkeypatch.setattr("holdfast.engine.training.adam_bf16.CPU_BUCKET", limit)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        params[5] = nn.Parameter(torch.randn(6, 6).t())
        optimizer, half = build_optimizer(params, CONFIG), build_optimizer([params[1]], CONFIG)
        for step in range(1, 5):
            expected = [param.detach().clone() for param in params]
            for number, param in enumerate(params):
                param.grad = torch.randn(param.shape) * 10.0 ** (step - 3)
                state = optimizer.state[param]
                if param.dim() < 2:
                    continue
                first, second = (
                    moments_of(state)
                    if state
                    else (torch.zeros(param.shape), torch.zeros(param.shape))
                )
                first.lerp_(param.grad, 1 - CONFIG.beta1)
                second.mul_(CONFIG.beta2).addcmul_(param.grad, param.grad, value=1 - CONFIG.beta2)
                scale = (second / (1 - CONFIG.beta2**step)).sqrt_().add_(CONFIG.eps)
                expected[number].mul_(1 - CONFIG.lr * CONFIG.weight_decay)
                expected[number].addcdiv_(first, scale, value=-CONFIG.lr / (1 - CONFIG.beta1**step))
            optimizer.step()
            assert all(
                torch.equal(p, e) for p, e in zip(params, expected, strict=True) if p.dim() > 1
            )
        assert optimizer.state[params[1]]["exp_avg"].dtype == torch.bfloat16 and not half.state
        results.append(
            [param.detach() for param in params]
            + [t for p in params for t in optimizer.state[p].values()]
        )
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def second_moment_after(steps: int, largest: float) -> torch.Tensor:
    """Second moments, root, of numbers that had one gradient of 1, next to one whose gradient is
    always larger.
    """
    param = nn.Parameter(torch.zeros(8, BLOCK))
    optimizer = Adam8bit([param], lr=0.0)
    for step in range(steps):
        param.grad = torch.full_like(param, 0.0 if step else 1.0)
        param.grad[:, 0] = largest  # keeps the scale of the block
        optimizer.step()
    return moments_of(optimizer.state[param])[1][:, 1:].sqrt()


def test_a_second_moment_falls_when_gradients_do_and_never_becomes_zero() -> None:
    """Rounded to nearest, it would stay where it is."""
    expected = (0.001 * 0.999**200) ** 0.5
    assert float(second_moment_after(201, 100.0).mean()) == pytest.approx(expected, rel=0.05)
    assert bool((second_moment_after(3, 1e12) > 0).all())


def test_the_state_survives_a_plain_state_dict() -> None:
    param, twin = (nn.Parameter(torch.ones(3, 200)) for _ in range(2))
    optimizer, other = build_optimizer([param], CONFIG), build_optimizer([twin], CONFIG)
    param.grad = torch.randn(param.shape)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    for name, saved in optimizer.state[param].items():
        loaded = other.state[twin][name]
        assert loaded.dtype == saved.dtype and torch.equal(loaded, saved)
