"""From rewards to advantages: normalisation over groups or the batch, GRPO, GAE, and other
estimators by name.

Pure functions over padded tensors. Sums are in float64, because a group of equal rewards must give
advantages of exactly 0, not amplified rounding. Results are float32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...utils.errors import BatchError
from .config import NormConfig

SumOverRanks = Callable[[Mapping[str, float]], dict[str, float]]
"""Sums each named number over all ranks, like `TrainEngine.all_reduce_stats`."""


def normalise(
    values: torch.Tensor,
    norm: NormConfig,
    mask: torch.Tensor | None = None,
    sum_over_ranks: SumOverRanks = dict,
) -> torch.Tensor:
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
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    x = torch.where(mask, values.double(), 0.0)
    if "group" in (norm.mean_level, norm.std_level):
        check_groups(len(x), norm.group_size or 1)
    result = x
    if norm.mean_level is not None:
        rows, row_mask = _arrange(x, mask, norm, norm.mean_level)
        count, total = _sums(norm.mean_level, sum_over_ranks, row_mask.sum(1).double(), rows.sum(1))
        means = (total / count.clamp(min=1))[:, None].expand_as(rows)
        if norm.mean_leave1out:
            others = (total[:, None] - rows) / (count[:, None] - 1).clamp(min=1)
            means = torch.where(count[:, None] > 1, others, means)
        result = x - means.reshape(x.shape)
    if norm.std_level is not None:
        about_own_mean = norm.mean_level in ("group", norm.std_level)
        rows, row_mask = _arrange(x if about_own_mean else result, mask, norm, norm.std_level)
        count, total = _sums(norm.std_level, sum_over_ranks, row_mask.sum(1).double(), rows.sum(1))
        center = (total / count.clamp(min=1))[:, None] if about_own_mean else 0.0
        deviations = torch.where(row_mask, rows - center, 0.0)
        (squares,) = _sums(norm.std_level, sum_over_ranks, deviations.square().sum(1))
        std = (squares / (count - int(norm.std_unbiased)).clamp(min=1)).sqrt()
        if norm.std_unbiased:
            std = torch.where(count > 1, std, 1.0)
        result = result / (std[:, None].expand_as(rows).reshape(x.shape) + norm.eps)
    return torch.where(mask, result, 0.0).float()


def _arrange(
    x: torch.Tensor, mask: torch.Tensor, norm: NormConfig, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape both to ``[units, entries per unit]``. A unit is a group, or the whole batch."""
    units = len(x) // (norm.group_size or 1) if level == "group" else 1
    return x.reshape(units, -1), mask.reshape(units, -1)


def _sums(level: str, sum_over_ranks: SumOverRanks, *sums: torch.Tensor) -> list[torch.Tensor]:
    if level == "group":
        return list(sums)
    reduced = sum_over_ranks({str(i): value.item() for i, value in enumerate(sums)})
    return [torch.full_like(value, reduced[str(i)]) for i, value in enumerate(sums)]


def check_groups(batch_size: int, group_size: int) -> None:
    """Raise BatchError unless ``batch_size`` rows are whole groups of ``group_size``."""
    if batch_size % group_size:
        raise BatchError(
            f"{batch_size} sequences are not whole groups of {group_size}; put all samples of a "
            "prompt next to each other on the same rank"
        )


def grpo_advantages(
    rewards: torch.Tensor,
    loss_mask: torch.Tensor,
    norm: NormConfig | None,
    sum_over_ranks: SumOverRanks = dict,
) -> torch.Tensor:
    """Give every loss token the normalised reward of its sequence: ``[B, S]`` float32, 0 outside
    the loss mask.

    ``A[i, t] = (r[i] - mean(group)) / (std(group) + eps)``: Shao et al., "DeepSeekMath", 2024,
    section 4.1.2 (outcome supervision). Without a standard deviation it is the estimator of Liu et
    al., "Understanding R1-Zero-Like Training", 2025, and with ``mean_leave1out`` RLOO (Ahmadian et
    al., "Back to Basics", 2024). ``norm`` None takes the rewards ``[B]`` unchanged.
    """
    scores = (
        rewards.float() if norm is None else normalise(rewards, norm, sum_over_ranks=sum_over_ranks)
    )
    return torch.where(loss_mask.bool(), scores[:, None], 0.0)


def overlong_penalty(
    loss_mask: torch.Tensor, max_new_tokens: int, overlong_tokens: int, factor: float
) -> torch.Tensor:
    """Reward penalty of each sequence for its length: ``[B]`` float32, from ``-factor`` to 0.

    It is 0 up to ``max_new_tokens - overlong_tokens`` loss tokens, then falls linearly to
    ``-factor`` at
    ``max_new_tokens``: Yu et al., "DAPO", 2025, eq. 13.
    """
    beyond = loss_mask.bool().sum(1) - (max_new_tokens - overlong_tokens)
    return -factor * (beyond / overlong_tokens).clamp(0.0, 1.0)


def rewards_at_last_token(rewards: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Put the reward ``[B]`` of each sequence on its last loss token, if it has one: ``[B, S]``
    float32.
    """
    mask = loss_mask.bool()
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last, rewards.float()[:, None], 0.0)


def gae_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    last_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    mask, n_columns = loss_mask.bool(), loss_mask.shape[1]
    rewards, values = (torch.where(mask, x, 0.0).double() for x in (rewards, values))
    last = values.new_zeros(len(values)) if last_values is None else last_values.double()
    places = torch.arange(n_columns, device=mask.device).where(mask, n_columns)
    next_place = F.pad(places.flip(1).cummin(1).values.flip(1)[:, 1:], (0, 1), value=n_columns)
    next_value = torch.cat([values, last[:, None]], dim=1).gather(1, next_place)
    delta = (rewards + discount * next_value - values).masked_fill_(~mask, 0.0)
    decay = torch.full_like(values, discount * gae_lambda).masked_fill_(~mask, 1.0)
    advantages = _sum_later(delta, decay)
    returns = torch.where(mask, advantages + values, 0.0)
    return torch.where(mask, advantages, 0.0).float(), returns.float()


def _sum_later(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` along rows ``[B, S]``.

    Rows are cut into blocks of about sqrt(S) columns. All blocks are summed at once, each as if
    nothing followed it. Then ``decay[t]`` is the product from t to the end of its block, the factor
    of the first sum of the next block.
    """
    n_columns = x.shape[1]
    width = math.isqrt(n_columns) + 1
    n_blocks = -(-n_columns // width)
    x, decay = (
        F.pad(each, (0, n_blocks * width - n_columns)).view(len(x), n_blocks, width)
        for each in (x, decay)
    )
    for t in reversed(range(width - 1)):
        x[..., t].addcmul_(decay[..., t], x[..., t + 1])
        decay[..., t].mul_(decay[..., t + 1])
    for block in reversed(range(n_blocks - 1)):
        x[:, block].addcmul_(decay[:, block], x[:, block + 1, :1])
    return x.reshape(len(x), n_blocks * width)[:, :n_columns]


@dataclass(frozen=True)
class Outcomes:
    """Input of the estimators. Answers to the same prompt are adjacent. Every rank calls
    ``sum_over_ranks`` equally often.
    """

    rewards: torch.Tensor  # ``[B]`` float64
    lengths: torch.Tensor  # ``[B]`` loss tokens
    group_size: int  # B is a multiple of it
    baselines: (
        torch.Tensor | None
    )  # ``[B]`` float64, rewards of the greedy answers, if the batch has them
    sum_over_ranks: SumOverRanks

    def by_prompt(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape ``[B]`` to ``[prompts, group_size]``."""
        return values.reshape(-1, self.group_size)


def remax(outcomes: Outcomes) -> torch.Tensor:
    """``r - r_greedy``. Li et al., "ReMax", 2023, arXiv 2310.10505."""
    assert outcomes.baselines is not None
    return outcomes.rewards - outcomes.baselines


def opo(outcomes: Outcomes) -> torch.Tensor:
    """``r - sum(n r) / sum(n)`` over the answers to a prompt with lengths n. 0 for groups without a
    loss token.

    Hao et al., "On-Policy RL with Optimal Reward Baseline", 2025, arXiv 2505.23585.
    """
    rewards, lengths = (
        outcomes.by_prompt(outcomes.rewards),
        outcomes.by_prompt(outcomes.lengths.double()),
    )
    baseline = (lengths * rewards).sum(1, True) / lengths.sum(1, True).clamp(min=1)
    return (rewards - baseline).flatten()


def gpg(outcomes: Outcomes) -> torch.Tensor:
    """``alpha (r - mean(r of the prompt))``, where ``alpha`` is the number of answers / number of
    nonzero rewards.

    Both are counted over all ranks. Chu et al., "GPG", 2025, arXiv 2504.02546.
    """
    own = {
        "answers": float(len(outcomes.rewards)),
        "rewarded": float(outcomes.rewards.count_nonzero()),
    }
    counts = outcomes.sum_over_ranks(own)
    rewards = outcomes.by_prompt(outcomes.rewards)
    return (counts["answers"] / max(counts["rewarded"], 1.0)) * (
        rewards - rewards.mean(1, True)
    ).flatten()


def grpo_passk(outcomes: Outcomes) -> torch.Tensor:
    """Advantages for pass@k: ``(r_max - r_second) / (std(r) + 1e-6)`` for the best answer, 0 for
    the others.

    r are the rewards of the answers to one prompt. If several are best, the first one counts, with
    an advantage of 0.

    Tang et al., "Optimizing Language Models for Inference Time Objectives using RL", 2025, arXiv
    2503.19595.
    """
    rewards = outcomes.by_prompt(outcomes.rewards)
    best = rewards.topk(2, dim=1).values
    scores = (best[:, 0] - best[:, 1]) / (rewards.std(1) + 1e-6)
    return torch.zeros_like(rewards).scatter(1, rewards.argmax(1, True), scores[:, None]).flatten()


ADV_ESTIMATORS: dict[str, Callable[[Outcomes], torch.Tensor] | None] = {
    "grpo": None,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
}
"""Functions by the name in ``adv_estimator``. ``grpo`` uses ``reward_norm`` instead."""
