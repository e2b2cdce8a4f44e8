"""From rewards to advantages: normalisation over groups or the batch, GRPO, GAE, and other
estimators by name.

Pure functions over padded tensors. Sums are in float64, because a group of equal rewards must give
advantages of exactly 0, not amplified rounding. Results are float32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...utils.errors import BatchError
from .config import NormConfig

SumOverRanks = Callable[[Mapping[str, float]], dict[str, float]]
"""Sums each named number over all ranks, like `TrainEngine.all_reduce_stats`."""


def normalise(
    values: Tensor,
    norm: NormConfig,
    mask: Tensor | None = None,
    sum_over_ranks: SumOverRanks = dict,
) -> Tensor:
    """``(x - mean) / (std + eps)`` of ``values`` ``[B]`` or ``[B, S]`` over groups of rows or over
    the whole batch.

    The standard deviation is about the mean at its own level, with two exceptions in which a group
    of equal values would be divided by ``eps`` alone:

    - ``mean_level`` null, or ``batch`` with ``std_level: group``: about the mean that is
      subtracted, as in AReaL. A deviation of 0 then means that every result is 0.
    - A single value with ``std_unbiased``: the deviation is 1, as in AReaL.

    With ``mean_leave1out`` a single value is its own mean. Masked-out entries do not count, and
    become 0. Every rank calls ``sum_over_ranks`` the same number of times if a level is ``batch``.

    Raises:
        BatchError: B is not a multiple of ``group_size`` although a level is ``group``.
    """
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    mask = mask.bool()
    x = torch.where(mask, values.double(), 0.0)
    levels = (norm.mean_level, norm.std_level)
    if "group" in levels:
        check_groups(len(x), norm.group_size or 1)

    def units_of(values: Tensor, level: str) -> _Units:
        # A group of rows has adjacent ones.
        n_units = 1
        if level == "group":
            n_units = len(values) // (norm.group_size or 1)
        rows = values.reshape(n_units, -1)
        row_mask = mask.reshape(n_units, -1)
        own_count = row_mask.sum(1).double()
        own_total = rows.sum(1)
        count, total = _sums(level, sum_over_ranks, own_count, own_total)
        return _Units(rows, row_mask, count, total)

    # x - mean
    result = x
    if norm.mean_level is not None:
        units = units_of(x, norm.mean_level)
        means = units.means.expand_as(units.rows)
        if norm.mean_leave1out:
            n_others = units.count[:, None] - 1
            totals = units.total[:, None] - units.rows
            others = totals / n_others.clamp(min=1)
            means = torch.where(n_others > 0, others, means)
        result = x - means.reshape(x.shape)

    # / (std + eps), where the deviations are from the unit's own mean, or from what was subtracted.
    if norm.std_level is not None:
        if norm.mean_level in ("group", norm.std_level):
            units = units_of(x, norm.std_level)
            deviations = units.rows - units.means
        else:
            units = units_of(result, norm.std_level)
            deviations = units.rows
        deviations = torch.where(units.mask, deviations, 0.0)
        own_squares = deviations.square().sum(1)
        (squares,) = _sums(norm.std_level, sum_over_ranks, own_squares)

        n = units.count - int(norm.std_unbiased)
        variance = squares / n.clamp(min=1)
        std = variance.sqrt()
        if norm.std_unbiased:
            # A single value has no deviation.
            std = torch.where(units.count > 1, std, 1.0)
        std = std[:, None].expand_as(units.rows)
        scale = std.reshape(x.shape) + norm.eps
        # With eps 0 equal values have scale 0, and their results are 0 already.
        result = torch.where(scale > 0, result / scale, 0.0)

    result = torch.where(mask, result, 0.0)
    return result.float()


class _Units(NamedTuple):
    """Numbers by the unit that has a mean of its own: a group of rows, or the whole batch."""

    rows: Tensor  # [units, entries of a unit on this rank]
    mask: Tensor  # the same shape
    count: Tensor  # [units], entries in the mask
    total: Tensor  # [units], their sum

    @property
    def means(self) -> Tensor:
        means = self.total / self.count.clamp(min=1)
        return means[:, None]


def _sums(
    level: str,
    sum_over_ranks: SumOverRanks,
    *sums: Tensor,
) -> list[Tensor]:
    """Sums of each unit, [units], over all ranks if the whole batch is one unit."""
    if level == "group":
        return list(sums)
    # One number each: the batch is one unit.
    own = {str(i): value.item() for i, value in enumerate(sums)}
    totals = []
    reduced = sum_over_ranks(own)
    for i, value in enumerate(sums):
        total = reduced[str(i)]
        totals.append(torch.full_like(value, total))
    return totals


def check_groups(batch_size: int, group_size: int) -> None:
    """Raise BatchError unless ``batch_size`` rows are whole groups of ``group_size``."""
    if batch_size % group_size:
        raise BatchError(
            f"{batch_size} sequences are not whole groups of {group_size}; put all samples of a "
            "prompt next to each other on the same rank"
        )


def grpo_advantages(
    rewards: Tensor,
    loss_mask: Tensor,
    norm: NormConfig | None,
    sum_over_ranks: SumOverRanks = dict,
) -> Tensor:
    """Give every loss token the normalised reward of its sequence: ``[B, S]`` float32, 0 outside
    the loss mask.

    ``A[i, t] = (r[i] - mean(group)) / (std(group) + eps)``: Shao et al., "DeepSeekMath", 2024,
    section 4.1.2 (outcome supervision). Without a standard deviation it is the estimator of Liu et
    al., "Understanding R1-Zero-Like Training", 2025, and with ``mean_leave1out`` RLOO (Ahmadian et
    al., "Back to Basics", 2024). ``norm`` None takes the rewards ``[B]`` unchanged.
    """
    scores = rewards.float()
    if norm is not None:
        scores = normalise(rewards, norm, sum_over_ranks=sum_over_ranks)
    return torch.where(loss_mask.bool(), scores[:, None], 0.0)


def overlong_penalty(
    loss_mask: Tensor,
    max_new_tokens: int,
    overlong_tokens: int,
    factor: float,
) -> Tensor:
    """Reward penalty of each sequence for its length: ``[B]`` float32, from ``-factor`` to 0.

    It is 0 up to ``max_new_tokens - overlong_tokens`` loss tokens, then falls linearly to
    ``-factor`` at
    ``max_new_tokens``: Yu et al., "DAPO", 2025, eq. 13.
    """
    n_tokens = loss_mask.bool().sum(1)
    beyond = n_tokens - (max_new_tokens - overlong_tokens)
    share = beyond / overlong_tokens
    return -factor * share.clamp(0.0, 1.0)


def rewards_at_last_token(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Put the reward ``[B]`` of each sequence on its last loss token, if it has one: ``[B, S]``
    float32.
    """
    mask = loss_mask.bool()
    # The number of loss tokens from each token on, including itself.
    n_left = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (n_left == 1)
    per_token = rewards.float()[:, None]
    return torch.where(is_last, per_token, 0.0)


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the loss tokens of each row.

    ``delta[t] = r[t] + discount * V[t'] - V[t]`` and ``A[t] = delta[t] + discount * gae_lambda *
    A[t']``, where t' is the *next loss token* (tokens in between, such as a tool's answer, are not
    actions and are skipped). After the last loss token A[t'] is 0 and V[t'] is ``last_values`` or
    0. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", 2015, eq. 16.

    Args:
        rewards: ``[B, S]``, ignored outside the loss mask.
        values: ``[B, S]``, the value before token t is chosen.
        loss_mask: ``[B, S]``.
        discount, gae_lambda: gamma and lambda.
        last_values: ``[B]``, the remaining value of a truncated answer, 0 for a complete one. None:
            0.

    Returns:
        advantages and returns (``A + V``), both ``[B, S]`` float32, 0 outside the loss mask. They
        are computed in float64 and then rounded.
    """
    mask = loss_mask.bool()
    n_columns = mask.shape[1]
    rewards = torch.where(mask, rewards, 0.0).double()
    values = torch.where(mask, values, 0.0).double()
    if last_values is None:
        last_values = values.new_zeros(len(values))

    # t' of every column: the nearest loss token to its right, or n_columns if there is none.
    columns = torch.arange(n_columns, device=mask.device)
    own_place = columns.where(mask, n_columns)
    # The smallest place from each column on.
    nearest = own_place.flip(1).cummin(1).values.flip(1)
    next_place = F.pad(nearest[:, 1:], (0, 1), value=n_columns)

    # V[t'], with the value after the last loss token in column n_columns.
    last_column = last_values.double()[:, None]
    with_last = torch.cat([values, last_column], dim=1)
    next_values = with_last.gather(1, next_place)

    # Tokens that are no actions add nothing, and hand A[t'] on as it is.
    delta = (
        rewards  # r[t]
        + discount * next_values  # V[t']
        - values  # V[t]
    )
    delta.masked_fill_(~mask, 0.0)
    decay = torch.full_like(values, discount * gae_lambda)
    decay.masked_fill_(~mask, 1.0)

    advantages = _sum_later(delta, decay)
    returns = advantages + values
    advantages = torch.where(mask, advantages, 0.0)
    returns = torch.where(mask, returns, 0.0)
    return advantages.float(), returns.float()


def _sum_later(x: Tensor, decay: Tensor) -> Tensor:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` along rows ``[B, S]``.

    Rows are cut into blocks of about sqrt(S) columns. All blocks are summed at once, each as if
    nothing followed it. Then ``decay[t]`` is the product from t to the end of its block, the factor
    of the first sum of the next block.
    """
    n_rows, n_columns = x.shape
    width = math.isqrt(n_columns) + 1
    n_blocks = -(-n_columns // width)
    blocks = (n_rows, n_blocks, width)
    padding = (0, n_blocks * width - n_columns)
    x = F.pad(x, padding).view(blocks)
    decay = F.pad(decay, padding).view(blocks)

    # Step 1: all blocks at once, from right to left.
    for t in reversed(range(width - 1)):
        following = x[..., t + 1]
        x[..., t].addcmul_(decay[..., t], following)
        decay[..., t].mul_(decay[..., t + 1])

    # Step 2: each block gets the sum of all that follows it.
    for block in reversed(range(n_blocks - 1)):
        following = x[:, block + 1, :1]
        x[:, block].addcmul_(decay[:, block], following)
    rows = x.flatten(1)
    return rows[:, :n_columns]


@dataclass(frozen=True)
class Outcomes:
    """Input of the estimators. Answers to the same prompt are adjacent. Every rank calls
    ``sum_over_ranks`` equally often.
    """

    # [B] float64
    rewards: Tensor
    # [B] loss tokens
    lengths: Tensor
    # B is a multiple of it
    group_size: int
    # [B] float64, rewards of the greedy answers, if the batch has them
    baselines: Tensor | None
    sum_over_ranks: SumOverRanks

    def by_prompt(self, values: Tensor) -> Tensor:
        """Reshape ``[B]`` to ``[prompts, group_size]``."""
        return values.reshape(-1, self.group_size)


def remax(outcomes: Outcomes) -> Tensor:
    """``r - r_greedy``. Li et al., "ReMax", 2023, arXiv 2310.10505."""
    assert outcomes.baselines is not None
    return outcomes.rewards - outcomes.baselines


def opo(outcomes: Outcomes) -> Tensor:
    """``r - sum(n r) / sum(n)`` over the answers to a prompt with lengths n. 0 for groups without a
    loss token.

    Hao et al., "On-Policy RL with Optimal Reward Baseline", 2025, arXiv 2505.23585.
    """
    rewards = outcomes.by_prompt(outcomes.rewards)
    lengths = outcomes.by_prompt(outcomes.lengths).double()
    weighted = (lengths * rewards).sum(1, True)
    n_tokens = lengths.sum(1, True).clamp(min=1)
    baseline = weighted / n_tokens
    return (rewards - baseline).flatten()


def gpg(outcomes: Outcomes) -> Tensor:
    """``alpha (r - mean(r of the prompt))``, where ``alpha`` is the number of answers / number of
    nonzero rewards.

    Both are counted over all ranks. Chu et al., "GPG", 2025, arXiv 2504.02546.
    """
    # alpha, over all ranks
    n_rewarded = outcomes.rewards.count_nonzero()
    own = {
        "answers": float(len(outcomes.rewards)),
        "rewarded": float(n_rewarded),
    }
    counts = outcomes.sum_over_ranks(own)
    alpha = counts["answers"] / max(counts["rewarded"], 1.0)
    rewards = outcomes.by_prompt(outcomes.rewards)
    centred = rewards - rewards.mean(1, True)
    return alpha * centred.flatten()


def grpo_passk(outcomes: Outcomes) -> Tensor:
    """Advantages for pass@k: ``(r_max - r_second) / (std(r) + 1e-6)`` for the best answer, 0 for
    the others.

    r are the rewards of the answers to one prompt. If several are best, the first one counts, with
    an advantage of 0.

    Tang et al., "Optimizing Language Models for Inference Time Objectives using RL", 2025, arXiv
    2503.19595.
    """
    rewards = outcomes.by_prompt(outcomes.rewards)
    best = rewards.argmax(1, True)
    # [prompts, 2]: r_max and r_second
    two_best = rewards.topk(2, dim=1).values
    margin = two_best[:, 0] - two_best[:, 1]
    std = rewards.std(1)
    scores = margin / (std + 1e-6)
    advantages = torch.zeros_like(rewards)
    advantages.scatter_(1, best, scores[:, None])
    return advantages.flatten()


ADV_ESTIMATORS: dict[str, Callable[[Outcomes], Tensor] | None] = {
    "grpo": None,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
}
"""Functions by the name in ``adv_estimator``. ``grpo`` uses ``reward_norm`` instead."""
