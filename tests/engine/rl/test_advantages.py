"""Advantages against straight loops in float64, and the groups that break naive formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.engine.rl import NormConfig
from holdfast.engine.rl.advantages import (
    gae_advantages,
    grpo_advantages,
    normalise,
    rewards_at_last_token,
)
from holdfast.utils.errors import BatchError

RNG = np.random.default_rng(0)


def grpo_norm(group_size: int) -> NormConfig:
    return NormConfig("group", std_level="group", group_size=group_size)


def normalise_by_loop(x: np.ndarray, mask: np.ndarray, norm: NormConfig) -> np.ndarray:
    """Results for ``[B, S]``, with the deviation about the mean of the same level."""
    size, result = norm.group_size or 1, np.zeros_like(x)
    for row, column in zip(*np.nonzero(mask), strict=True):

        def members(level: str | None, row: int = row) -> list[tuple[int, int]]:
            first = row // size * size
            rows = range(first, first + size) if level == "group" else range(len(x))
            return [(i, j) for i in rows for j in range(x.shape[1]) if mask[i, j]]

        mean, std = 0.0, 1.0 - norm.eps
        if norm.mean_level:
            others = [
                x[i]
                for i in members(norm.mean_level)
                if not norm.mean_leave1out or i != (row, column)
            ]
            mean = np.mean(others) if others else 0.0
        if norm.std_level:
            values = [x[i] for i in members(norm.std_level)]
            std = np.std(values, ddof=1 if norm.std_unbiased else 0)
        result[row, column] = (x[row, column] - mean) / (std + norm.eps)
    return result


def areal_by_loop(x: np.ndarray, mask: np.ndarray, norm: NormConfig) -> np.ndarray:
    """Results for ``[B, S]`` with AReaL's deviation: about the mean that is subtracted from each
    value, or about 0.
    """
    size, result = norm.group_size or 1, np.zeros_like(x)

    def unit(level: str, row: int) -> list[tuple[int, int]]:
        rows = (
            range(row // size * size, row // size * size + size)
            if level == "group"
            else range(len(x))
        )
        return [(i, j) for i in rows for j in range(x.shape[1]) if mask[i, j]]

    def centered(at: tuple[int, int]) -> float:
        if norm.mean_level is None:
            return x[at]
        counted = [x[i] for i in unit(norm.mean_level, at[0]) if not norm.mean_leave1out or i != at]
        return x[at] - sum(counted) / len(counted)

    for row, column in zip(*np.nonzero(mask), strict=True):
        squares = [centered(i) ** 2 for i in unit(norm.std_level or "", row)]
        std = (
            (sum(squares) / (len(squares) - norm.std_unbiased)) ** 0.5 if len(squares) > 1 else 1.0
        )
        result[row, column] = centered((row, column)) / (std + norm.eps)
    return result


FAR_MEANS = [("batch", "group"), (None, "group"), (None, "batch")]
"""Levels of mean and deviation with values that may be far from their subtracted mean although they
agree.
"""


@pytest.mark.parametrize(("mean_level", "std_level"), FAR_MEANS)
@pytest.mark.parametrize(("leave1out", "unbiased"), [(False, True), (True, False)])
def test_a_deviation_under_a_mean_of_a_wider_level_is_areals(
    mean_level: str | None, std_level: str, leave1out: bool, unbiased: bool
) -> None:
    norm = NormConfig(mean_level, leave1out, std_level, unbiased, 1e-5, group_size=4)
    for rewards in ([1.0, 1, 1, 1, 0, 1, 0, 0], [1.0] * 8, [0.0] * 8, RNG.normal(size=8).tolist()):
        x = np.array(rewards)[:, None]
        expected = areal_by_loop(x, np.ones_like(x), norm)[:, 0]
        found = normalise(torch.tensor(rewards), norm).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(found).max() < 3, "nothing is divided by eps alone"
    tokens, mask = RNG.normal(size=(8, 5)), RNG.random((8, 5)) < 0.6
    got = normalise(torch.tensor(tokens), norm, torch.tensor(mask)).numpy()
    np.testing.assert_allclose(got, areal_by_loop(tokens, mask, norm), rtol=1e-5, atol=1e-6)


OWN_MEANS = [(mean, std) for mean in ("group", "batch", None) for std in ("group", "batch", None)]
OWN_MEANS = [levels for levels in OWN_MEANS if levels not in FAR_MEANS]


@pytest.mark.parametrize(("mean_level", "std_level"), OWN_MEANS)
@pytest.mark.parametrize(("leave1out", "unbiased"), [(False, True), (True, False)])
def test_normalise_equals_a_loop_at_every_other_pair_of_levels(
    mean_level: str | None, std_level: str | None, leave1out: bool, unbiased: bool
) -> None:
    norm = NormConfig(mean_level, leave1out, std_level, unbiased, 1e-5, group_size=3)
    rewards = RNG.normal(size=12)
    expected = normalise_by_loop(rewards[:, None], np.ones((12, 1)), norm)[:, 0]
    np.testing.assert_allclose(
        normalise(torch.tensor(rewards), norm).numpy(), expected, rtol=1e-5, atol=1e-6
    )
    tokens, mask = RNG.normal(size=(6, 5)), RNG.random((6, 5)) < 0.6
    got = normalise(torch.tensor(tokens), norm, torch.tensor(mask)).numpy()
    np.testing.assert_allclose(got, normalise_by_loop(tokens, mask, norm), rtol=1e-5, atol=1e-6)


def test_batch_level_sums_over_ranks() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0])
    norm = NormConfig("batch", std_level="batch")
    twice = normalise(
        rewards, norm, sum_over_ranks=lambda sums: {name: 2 * value for name, value in sums.items()}
    )
    both = normalise(torch.cat([rewards, rewards]), norm)
    torch.testing.assert_close(twice, both[:3])


def test_grpo_advantages_spread_the_group_normalised_reward_over_the_loss_tokens() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.25, 0.75])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 1]])
    advantages = grpo_advantages(rewards, mask, grpo_norm(2))
    high, low = 0.5 / (np.sqrt(0.5) + 1e-5), 0.25 / (np.sqrt(0.125) + 1e-5)
    np.testing.assert_allclose(
        advantages.numpy(), [[0, -high, -high], [0, high, 0], [0, 0, 0], [0, 0, low]], rtol=1e-6
    )
    plain = grpo_advantages(rewards, mask, None)
    assert plain.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0.75]]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e4, -7.7])
def test_a_group_of_equal_rewards_has_no_advantage(reward: float) -> None:
    advantages = grpo_advantages(torch.full((7,), reward), torch.ones(7, 2), grpo_norm(7))
    assert advantages.abs().max() < 1e-6


@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("std_level", [None, "group", "batch"])
def test_a_group_of_one_has_no_advantage(std_level: str | None, leave1out: bool) -> None:
    norm = NormConfig("group", leave1out, std_level, group_size=1)
    assert normalise(torch.tensor([3.0, -2.0]), norm).tolist() == [0, 0]


def test_a_single_value_that_loses_no_mean_of_its_own_is_not_scaled() -> None:
    norm = NormConfig("batch", std_level="group", group_size=1)
    np.testing.assert_allclose(
        normalise(torch.tensor([3.0, -1.0]), norm).numpy(), [2.0, -2.0], rtol=2e-5
    )


@pytest.mark.parametrize("mean_level", [None, "group", "batch"])
@pytest.mark.parametrize("std_level", ["group", "batch"])
def test_equal_rewards_without_an_eps_have_no_advantage(
    std_level: str, mean_level: str | None
) -> None:
    norm = NormConfig(mean_level, std_level=std_level, eps=0.0, group_size=2)
    reward = 0.0 if mean_level is None else 0.7
    assert normalise(torch.full((4,), reward), norm).tolist() == [0, 0, 0, 0]


def test_a_batch_that_is_not_whole_groups_is_refused() -> None:
    with pytest.raises(BatchError, match="5 sequences are not whole groups of 2"):
        grpo_advantages(torch.zeros(5), torch.ones(5, 1), grpo_norm(2))


def gae_by_loop(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    discount: float,
    lam: float,
    last: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of discounted deltas over the actions alone, each from its definition."""
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    for i in range(len(values)):
        actions = np.nonzero(mask[i])[0]
        v, r = [*values[i, actions], last[i]], rewards[i, actions]
        deltas = [r[k] + discount * v[k + 1] - v[k] for k in range(len(actions))]
        for k, t in enumerate(actions):
            advantages[i, t] = sum(
                (discount * lam) ** (m - k) * deltas[m] for m in range(k, len(actions))
            )
            returns[i, t] = advantages[i, t] + v[k]
    return advantages, returns


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_equals_its_definition_and_steps_over_masked_tokens(
    discount: float, lam: float, bootstrap: bool
) -> None:
    rewards, values = RNG.normal(size=(2, 6, 9))
    mask = RNG.random((6, 9)) < 0.6
    mask[0], mask[1] = False, True
    last = RNG.normal(size=6) * bootstrap
    expected = gae_by_loop(rewards, values, mask, discount, lam, last)
    polluted = torch.tensor(np.where(mask, values, np.nan))
    given = torch.tensor(last) if bootstrap else None
    advantages, returns = gae_advantages(
        torch.tensor(rewards), polluted, torch.tensor(mask), discount, lam, given
    )
    np.testing.assert_allclose(advantages.numpy(), expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns.numpy(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 1), (1, 2), (2, 3), (2, 4), (3, 700), (0, 5), (2, 0)])
def test_gae_of_rows_of_every_length_is_rounded_once(shape: tuple[int, int]) -> None:
    """Within one unit in the last place of float32, also where 700 terms are summed without a
    decay.
    """
    values = RNG.normal(size=shape).astype(np.float32)
    rewards, last = (
        RNG.normal(size=shape).astype(np.float32),
        RNG.normal(size=shape[0]).astype(np.float32),
    )
    mask = RNG.random(shape) < 0.7
    for discount, lam in ((1.0, 1.0), (0.99, 0.95)):
        rewards64, values64, last64 = (
            array.astype(np.float64) for array in (rewards, values, last)
        )
        exact = gae_by_loop(rewards64, values64, mask, discount, lam, last64)
        r, v, m, end = (torch.tensor(array) for array in (rewards, values, mask, last))
        found = gae_advantages(r, v, m, discount, lam, end)
        for tensor, expected in zip(found, exact, strict=True):
            assert tensor.shape == shape and tensor.dtype == torch.float32
            np.testing.assert_allclose(tensor.numpy(), expected, rtol=2**-23, atol=1e-12)


def test_gae_takes_far_fewer_operators_than_a_row_has_tokens() -> None:
    counts = {}
    for n_tokens in (100, 10_000):
        rewards, values = torch.randn(2, 2, n_tokens)
        with Operators() as operators:
            gae_advantages(rewards, values, torch.ones(2, n_tokens), 0.99, 0.95)
        counts[n_tokens] = operators.count
    assert counts[10_000] < 12 * counts[100] and counts[10_000] < 2000, counts


class Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_gae_without_discount_returns_the_reward_at_every_action() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]])
    at_last = rewards_at_last_token(torch.tensor([2.0, 5.0]), mask)
    assert at_last.tolist() == [[0, 0, 0, 0, 2, 0], [0] * 6]
    _, returns = gae_advantages(at_last, torch.randn(2, 6), mask)
    torch.testing.assert_close(
        returns, 2.0 * mask * torch.tensor([[1.0], [0.0]]), rtol=0, atol=1e-6
    )
