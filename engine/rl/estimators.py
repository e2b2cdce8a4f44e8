"""Advantages of whole answers that no normalisation of rewards gives, by name: pure functions from rewards ``[B]``.

They take the place of ``reward_norm``. GRPO, Dr. GRPO, RLOO and REINFORCE++ are normalisations:
`holdfast.engine.rl.advantages.normalise`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .advantages import SumOverRanks


@dataclass(frozen=True)
class Outcomes:
    """What advantages are estimated from; the answers to one prompt stand next to each other.

    Attributes:
        rewards: ``[B]`` float64.
        lengths: ``[B]`` loss tokens of each answer.
        group_size: answers to a prompt; B is a multiple of it.
        baselines: ``[B]`` float64, reward of the greedy answer to the same prompt; None when the batch has none.
        sum_over_ranks: sums named numbers over all ranks; called equally often on each.
    """

    rewards: torch.Tensor
    lengths: torch.Tensor
    group_size: int
    baselines: torch.Tensor | None
    sum_over_ranks: "SumOverRanks"

    def by_prompt(self, values: torch.Tensor) -> torch.Tensor:
        """``[B]`` as ``[prompts, group_size]``."""
        return values.reshape(-1, self.group_size)


def remax(outcomes: Outcomes) -> torch.Tensor:
    """``r - r_greedy``. Li et al., "ReMax", 2023, arXiv 2310.10505."""
    assert outcomes.baselines is not None
    return outcomes.rewards - outcomes.baselines


def opo(outcomes: Outcomes) -> torch.Tensor:
    """``r - sum(n r) / sum(n)`` over the answers to a prompt, n being their lengths; 0 for groups without a loss token.

    Hao et al., "On-Policy RL with Optimal Reward Baseline", 2025, arXiv 2505.23585.
    """
    rewards, lengths = outcomes.by_prompt(outcomes.rewards), outcomes.by_prompt(outcomes.lengths.double())
    baseline = (lengths * rewards).sum(1, True) / lengths.sum(1, True).clamp(min=1)
    return (rewards - baseline).flatten()


def gpg(outcomes: Outcomes) -> torch.Tensor:
    """``alpha (r - mean(r of the prompt))``, ``alpha`` being the number of answers over that of rewards that are not 0.

    Both are counted over all ranks. Chu et al., "GPG", 2025, arXiv 2504.02546.
    """
    own = {"answers": float(len(outcomes.rewards)), "rewarded": float(outcomes.rewards.count_nonzero())}
    counts = outcomes.sum_over_ranks(own)
    rewards = outcomes.by_prompt(outcomes.rewards)
    return (counts["answers"] / max(counts["rewarded"], 1.0)) * (rewards - rewards.mean(1, True)).flatten()


def grpo_passk(outcomes: Outcomes) -> torch.Tensor:
    """``(r_max - r_second) / (std(r of the prompt) + 1e-6)`` for the best answer to a prompt (its first), else 0.

    Tang et al., "Optimizing Language Models for Inference Time Objectives using RL", 2025, arXiv 2503.19595.
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
"""By the name in ``adv_estimator``; ``grpo`` is ``reward_norm``."""
OVER_GROUPS = ("opo", "gpg", "grpo_passk")
"""Those that compare answers to one prompt."""
