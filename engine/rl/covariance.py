"""Which tokens `clip_cov` and `kl_cov` treat apart: those whose covariance with the advantage lowers the entropy most.

The covariance of a token is ``(A - mean(A)) (log p - mean(log p))``: Cui et al., "The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models", 2025, arXiv 2505.22617. Means, and the tokens that are picked,
are those of the mini-batch over all ranks. So they are found from a forward pass of their own right before the step,
and put into the batch before it is cut: cutting it in another way changes nothing. Cost: that pass, and a handful of
small collectives.
"""

from typing import TYPE_CHECKING

import torch

from ..api import Batch, TrainEngine
from .policy_losses import PolicyInputs, policy_inputs, ppo

if TYPE_CHECKING:
    from .advantages import SumOverRanks
    from .config import PPOActorConfig


def picked_tokens(
    batch: Batch, logprobs: torch.Tensor, old_logprobs: torch.Tensor, config: "PPOActorConfig", engine: TrainEngine
) -> torch.Tensor:
    """The tokens that ``config.policy_loss`` treats apart: ``[B, S]`` bool; a collective.

    `kl_cov` picks those of the largest covariance, a share ``kl_cov_ratio`` of all. `clip_cov` draws a share
    ``clip_cov_ratio`` from those between ``clip_cov_lb`` and ``clip_cov_ub`` that PPO does not clip already; the draw
    is a function of the tokens in the mini-batch, so it is the same after a resume. Shares are rounded down, but at
    least one token. Ties go to the lower rank, then to the lower row.

    Args:
        batch: this rank's share of a mini-batch, with ``loss_mask`` and ``advantages``; there is a loss token on some
            rank.
        logprobs: ``[B, S]`` under the weights that the step starts from.
        old_logprobs: ``[B, S]`` under the old policy.
        config: of the loss.
        engine: whose ranks share the mini-batch.
    """
    advantages, mask = batch["advantages"].flatten(), batch["loss_mask"].flatten()
    ends = torch.tensor([0, mask.numel()])
    inputs = policy_inputs(logprobs.flatten(), old_logprobs.flatten(), advantages, mask, ends)
    covariances, n_tokens = _covariances(inputs, engine.all_reduce_stats)
    if config.policy_loss == "kl_cov":
        candidates = inputs.mask
        chosen = _largest(covariances[candidates], max(int(config.kl_cov_ratio * n_tokens), 1), engine)
    else:
        clipped = ppo(inputs, config)[1]["clip_fraction"].bool()
        inside = (covariances > config.clip_cov_lb) & (covariances < config.clip_cov_ub)
        candidates, seed = inputs.mask & inside & ~clipped, _seed(batch, engine.all_reduce_stats)
        chosen = _drawn(int(candidates.sum()), max(int(config.clip_cov_ratio * n_tokens), 1), seed, engine)
    picked = torch.zeros_like(candidates).masked_scatter(candidates, chosen.to(candidates.device))
    return picked.view_as(logprobs)


def _covariances(inputs: PolicyInputs, sum_over_ranks: "SumOverRanks") -> tuple[torch.Tensor, int]:
    """``[T]`` float32, anything outside the mask; and the loss tokens of all ranks."""
    pair = torch.stack([inputs.advantages, inputs.logprobs]).double()  # 0 outside the mask
    own = {"A": pair[0].sum().item(), "log p": pair[1].sum().item(), "tokens": float(inputs.mask.sum())}
    sums = sum_over_ranks(own)
    means = [sums[name] / sums["tokens"] for name in ("A", "log p")]
    return ((pair[0] - means[0]) * (pair[1] - means[1])).float(), int(sums["tokens"])


def _largest(values: torch.Tensor, k: int, engine: TrainEngine) -> torch.Tensor:
    """Which of ``values`` (``[n]`` float32) are among the k largest of all ranks, which together have k or more."""
    bits = (values + 0.0).view(torch.int32).long()  # no -0
    keys = torch.where(bits >= 0, bits + (1 << 31), -1 - bits)  # in the order of the numbers, from 0 to 2^32 - 1
    threshold, n_equal = 0, k
    for shift in (24, 16, 8, 0):  # the k-th largest byte by byte, from counts of all ranks
        alike = keys[keys >> (shift + 8) == threshold >> (shift + 8)]
        own = torch.bincount((alike >> shift) & 255, minlength=256).tolist()
        counts = engine.all_reduce_stats({str(byte): float(count) for byte, count in enumerate(own)})
        byte = 255
        while counts[str(byte)] < n_equal:
            n_equal -= int(counts[str(byte)])
            byte -= 1
        threshold |= byte << shift
    equal = keys == threshold
    places = equal.cumsum(0) - 1 + _before(int(equal.sum()), engine)[0]
    return (keys > threshold) | (equal & (places < n_equal))


def _drawn(count: int, k: int, seed: int, engine: TrainEngine) -> torch.Tensor:
    """Which of this rank's ``count`` candidates are among k drawn from those of all ranks (from all, if fewer)."""
    first, total = _before(count, engine)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[first : first + count] < k


def _before(count: int, engine: TrainEngine) -> tuple[int, int]:
    """What the ``count`` of lower ranks, and of all, add up to."""
    rank, world_size = engine.data_parallel_rank, engine.data_parallel_world_size
    counts = engine.all_reduce_stats({str(other): float(count * (other == rank)) for other in range(world_size)})
    return int(sum(counts[str(other)] for other in range(rank))), int(sum(counts.values()))


def _seed(batch: Batch, sum_over_ranks: "SumOverRanks") -> int:
    """A number made of tokens and their positions; however the rows are spread over ranks."""
    tokens = (batch["input_ids"].long() + 1) * batch["attention_mask"].long()
    factors = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * 0x9E3779B1 % (1 << 31)
    own = int((tokens * factors).sum()) % (1 << 32)  # an overflow keeps these bits
    return int(sum_over_ranks({"seed": float(own)})["seed"]) % (1 << 32)
