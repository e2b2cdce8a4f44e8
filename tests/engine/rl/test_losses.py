"""Losses against straight loops in float64, and independence from masked-out tokens."""

import math

import numpy as np
import pytest
import torch

from holdfast.engine.rl import PPOActorConfig
from holdfast.engine.rl.critic import ppo_critic_loss
from holdfast.engine.rl.kl import kl_estimate
from holdfast.engine.rl.losses import Stats, aggregate, masked_mean, sft_loss, with_loss_weights
from holdfast.engine.rl.policy_losses import POLICY_LOSSES, policy_inputs

RNG = np.random.default_rng(0)
N = 40
LOGPROBS, OLD = -RNG.random(N) * 3, -RNG.random(N) * 3
ADVANTAGES = RNG.normal(size=N)
MASK = RNG.random(N) < 0.7


def f32(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def actor_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    name: str = "ppo",
    **settings: float | None,
) -> tuple[torch.Tensor, Stats]:
    """The mean over the loss tokens of one packed sequence."""
    ends = torch.tensor([0, len(logprobs)])
    inputs = policy_inputs(
        logprobs, old, advantages, mask, ends, picked=torch.arange(len(logprobs)) == 0
    )
    losses, stats = POLICY_LOSSES[name](inputs, PPOActorConfig(policy_loss=name, **settings))  # type: ignore[arg-type]
    return masked_mean(losses, mask), stats


def actor_by_loop(low: float, high: float, c_clip: float | None) -> dict[str, float]:
    sums = dict.fromkeys(("loss", "clip_fraction", "dual_clip_fraction"), 0.0)
    for logp, old, adv, counts in zip(LOGPROBS, OLD, ADVANTAGES, MASK, strict=True):
        if not counts:
            continue
        ratio = math.exp(logp) / math.exp(old)
        unclipped, clipped = ratio * adv, min(max(ratio, 1 - low), 1 + high) * adv
        objective = min(unclipped, clipped)
        if c_clip is not None and adv < 0 and c_clip * adv > objective:
            objective = c_clip * adv
            sums["dual_clip_fraction"] += 1
        sums["loss"] -= objective
        sums["clip_fraction"] += clipped < unclipped
    return {name: total / MASK.sum() for name, total in sums.items()}


@pytest.mark.parametrize(
    ("low", "high", "c_clip"), [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 1.5)]
)
def test_ppo_actor_loss_and_stats_equal_a_loop(
    low: float, high: float | None, c_clip: float | None
) -> None:
    limits = {"eps_clip": low, "eps_clip_higher": high, "c_clip": c_clip}
    loss, stats = actor_loss(f32(LOGPROBS), f32(OLD), f32(ADVANTAGES), torch.tensor(MASK), **limits)
    expected = actor_by_loop(low, low if high is None else high, c_clip)
    got = {
        "loss": loss,
        **{name: masked_mean(values, torch.tensor(MASK)) for name, values in stats.items()},
    }
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(
            float(got[name]), expected[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    if c_clip:
        assert expected["dual_clip_fraction"] > 0
    assert not any(values.requires_grad for values in stats.values())


def test_ppo_actor_gradient_is_advantage_times_ratio_and_zero_where_clipped() -> None:
    logp = torch.tensor([0.0, 0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    loss, _ = actor_loss(
        logp, torch.zeros(5), advantages, torch.ones(5), eps_clip=0.2, eps_clip_higher=0.3
    )
    loss.backward()
    expected = [-1.0, 0.0, math.exp(0.5), -math.exp(-0.5), 0.0]
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad.numpy(), np.array(expected) / 5, rtol=1e-6)


def gmpo_of_the_paper(
    logp: list[list[float]],
    old: list[list[float]],
    advantages: list[float],
    low: float,
    high: float,
) -> float:
    """The negated objective with the clip in ``(e^-low, e^high)``: products of ratios, one mean
    over the answers.
    """
    total = 0.0
    for answer, before, advantage in zip(logp, old, advantages, strict=True):
        sign, product = math.copysign(1.0, advantage), 1.0
        for p, q in zip(answer, before, strict=True):
            ratio = math.exp(p) / math.exp(q)
            held = min(max(ratio, math.exp(-low)), math.exp(high))
            product *= min(ratio**sign, held**sign) ** sign
        total -= product ** (1 / len(answer)) * advantage
    return total / len(logp)


def test_gmpo_has_the_loss_of_the_paper_without_a_key_for_its_mean() -> None:
    lengths, advantages = [1, 9, 4], [1.5, -0.5, 0.7]
    logp, old = ([(-RNG.random(n) * 3).tolist() for n in lengths] for _ in range(2))
    config = PPOActorConfig(policy_loss="gmpo", eps_clip=0.4, eps_clip_higher=0.6)
    mask = torch.arange(9)[None, :] < torch.tensor(lengths)[:, None]
    weighed = with_loss_weights({"loss_mask": mask}, config.agg_mode, config.loss_scale_factor)
    new, before = (torch.tensor([p for row in rows for p in row]) for rows in (logp, old))
    a = torch.tensor(advantages).repeat_interleave(torch.tensor(lengths))
    inputs = policy_inputs(new, before, a, torch.ones(14), torch.tensor([0, 1, 10, 14]))
    losses, _ = POLICY_LOSSES["gmpo"](inputs, config)
    loss = aggregate(losses, {key: value[mask] for key, value in weighed.items()})
    assert float(loss) == pytest.approx(
        gmpo_of_the_paper(logp, old, advantages, 0.4, 0.6), rel=1e-5
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("own", [-1.0, -math.inf])
def test_masked_out_nan_reaches_neither_loss_nor_gradient(name: str, own: float) -> None:
    mask = torch.tensor([1, 0, 1])
    nan = torch.tensor([0.0, math.nan, 0.0])
    own_logp = torch.tensor([-1.0, own, -2.0], requires_grad=True)
    actor, _ = actor_loss(own_logp, nan - 1, nan + 1, mask, name)
    actor.backward()
    assert (
        own_logp.grad is not None
        and bool(torch.isfinite(own_logp.grad).all())
        and own_logp.grad[1] == 0
    )
    logp = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    actor, stats = actor_loss(logp, nan - 1, nan + 1, mask, name)
    critic = masked_mean(ppo_critic_loss(logp, nan, nan, mask)[0], mask)
    kl = masked_mean(kl_estimate(logp, nan - 1), mask)
    (actor + critic + kl + sft_loss(logp, mask)).backward()
    assert logp.grad is not None and bool(torch.isfinite(logp.grad).all()) and logp.grad[1] == 0
    assert all(bool(torch.isfinite(values[mask.bool()]).all()) for values in stats.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_ratio_beyond_float_range_keeps_loss_and_gradient_finite(name: str) -> None:
    logp = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = actor_loss(
        logp, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), torch.ones(2), name
    )
    loss.backward()
    assert (
        math.isfinite(float(loss.detach()))
        and logp.grad is not None
        and bool(torch.isfinite(logp.grad).all())
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_all_masked_loss_is_zero_and_has_a_graph(name: str) -> None:
    x = torch.randn(3, requires_grad=True)
    zeros = torch.zeros(3)
    actor, _ = actor_loss(x, zeros, zeros + 1, zeros, name)
    critic = ppo_critic_loss(x, zeros, zeros, zeros)[0]
    total = actor + masked_mean(critic, zeros) + sft_loss(x, zeros)
    total.backward()
    assert float(total.detach()) == 0 and x.grad is not None and not bool(x.grad.any())


def test_k1_in_a_loss_has_the_gradient_of_k2_and_low_var_kl_ends_at_10() -> None:
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    ref = torch.tensor([-1.5, -0.2])
    kl_estimate(logp, ref, "k1").sum().backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, (logp - ref).detach())
    far = kl_estimate(torch.tensor([-9.0, -1.0]), torch.tensor([-1.0, -1.5]), "low_var_kl")
    torch.testing.assert_close(far, torch.tensor([10.0, math.exp(-0.5) - 1 + 0.5]))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimate_equals_its_formula_and_its_mean_approaches_the_true_kl(kind: str) -> None:
    expected = {
        "k1": LOGPROBS - OLD,
        "k2": (LOGPROBS - OLD) ** 2 / 2,
        "k3": np.exp(OLD) / np.exp(LOGPROBS) - 1 - (OLD - LOGPROBS),
    }[kind]
    np.testing.assert_allclose(
        kl_estimate(f32(LOGPROBS), f32(OLD), kind).numpy(), expected, rtol=2e-5, atol=1e-6
    )
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.3, 0.25])
    per_token = kl_estimate(f32(np.log(policy)), f32(np.log(reference)), kind).double().numpy()
    np.testing.assert_allclose(
        (policy * per_token).sum(), (policy * np.log(policy / reference)).sum(), rtol=0.06
    )


@pytest.mark.parametrize("eps", [0.2, 100.0])
def test_ppo_critic_loss_equals_a_loop(eps: float) -> None:
    values, old, returns = RNG.normal(size=(3, N))
    total = clipped = 0.0
    for v, v_old, target, counts in zip(values, old, returns, MASK, strict=True):
        if counts:
            near = min(max(v, v_old - eps), v_old + eps)
            total += max((v - target) ** 2, (near - target) ** 2) / 2
            clipped += (near - target) ** 2 > (v - target) ** 2
    losses, stats = ppo_critic_loss(f32(values), f32(old), f32(returns), torch.tensor(MASK), eps)
    np.testing.assert_allclose(
        float(masked_mean(losses, torch.tensor(MASK))), total / MASK.sum(), rtol=1e-5
    )
    fraction = masked_mean(stats["value_clip_fraction"], torch.tensor(MASK))
    np.testing.assert_allclose(float(fraction), clipped / MASK.sum(), rtol=1e-6)
