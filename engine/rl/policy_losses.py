"""Policy losses by name: pure functions from per-token tensors to per-token losses.

``A`` is the advantage and ``r`` the ratio of a token's probability to its probability under the old
policy. They are 0 and 1 outside the loss mask, and ``|log r|`` is limited to 20 (`MAX_LOG_RATIO`).
`holdfast.engine.rl.losses` aggregates the losses of the tokens.

With ``importance_sampling_level: sequence`` the ratio of every token is the geometric mean over its
sequence, with the gradient of the token's own: ``log s_t = sg(mean(log r)) + log p_t - sg(log
p_t)``. With `ppo` that is GSPO (Zheng et al., "Group Sequence Policy Optimization", 2025, arXiv
2507.18071, as GSPO-token).

`clip_cov` and `kl_cov` treat the tokens whose covariance with the advantage lowers the entropy most
differently. The covariance of a token is ``(A - mean(A)) (log p - mean(log p))``: Cui et al., "The
Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025, arXiv 2505.22617.
Means and picked tokens are taken over the mini-batch of all ranks. So a separate forward pass right
before the step picks the tokens, and they enter the batch before it is cut, so the cut makes no
difference. Cost: that pass, and a few small collectives.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..api import Batch, TrainEngine
from .advantages import SumOverRanks
from .config import PPOActorConfig
from .losses import MAX_LOG_RATIO, Stats, by_sequence


@dataclass(frozen=True)
class PolicyInputs:
    """One packed micro-batch. Per-token tensors are ``[T]`` float32 and finite. Only ``logprobs``
    has a gradient.
    """

    logprobs: torch.Tensor
    log_ratio: torch.Tensor  # ``log r`` at the configured level
    advantages: torch.Tensor  # A
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    picked: torch.Tensor | None = None  # tokens of `picked_tokens`, for the covariance losses alone


def policy_inputs(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    level: str = "token",
    picked: torch.Tensor | None = None,
) -> PolicyInputs:
    """Build the input of a policy loss from ``[T]`` tensors. Values outside ``loss_mask`` are
    ignored.
    """
    mask = loss_mask.bool()
    logprobs, old, advantages = (
        torch.where(mask, x.float(), 0.0) for x in (logprobs, old_logprobs, advantages)
    )
    log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "sequence":
        log_ratio = by_sequence(log_ratio.detach(), mask, cu_seqlens) + logprobs - logprobs.detach()
    return PolicyInputs(
        logprobs, torch.where(mask, log_ratio, 0.0), advantages, mask, cu_seqlens, picked
    )


PolicyLoss = Callable[[PolicyInputs, PPOActorConfig], tuple[torch.Tensor, Stats]]
"""``[T]`` losses, and statistics of the loss (``clip_fraction``: share of tokens whose gradient was
cut off ...).
"""


def ppo(inputs: PolicyInputs, config: PPOActorConfig) -> tuple[torch.Tensor, Stats]:
    """``max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_higher))``.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, eq. 7. The separate upper clip
    is "clip-higher" of Yu et al., "DAPO", 2025. With ``c_clip`` the loss at a negative advantage is
    at most ``-A c_clip`` (Ye et al., "Mastering Complex Control in MOBA Games", 2020, eq. 5).
    """
    advantages, ratio = inputs.advantages, inputs.log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(*_clip_range(config))
    loss = torch.maximum(plain, clipped)
    dual = torch.zeros_like(inputs.mask)
    if config.c_clip is not None:
        dual = (advantages < 0) & (loss > -advantages * config.c_clip)
        loss = torch.where(dual, -advantages * config.c_clip, loss)
    return loss, {"clip_fraction": (clipped > plain).float(), "dual_clip_fraction": dual.float()}


def cispo(inputs: PolicyInputs, config: PPOActorConfig) -> tuple[torch.Tensor, Stats]:
    """``-sg(clip(r, 1 - eps_clip, 1 + eps_clip_higher)) A log p``: no token loses its gradient.

    MiniMax, "MiniMax-M1", 2025, arXiv 2506.13585, with verl's clip (TRL's upper limit is
    `eps_clip_higher` itself).
    """
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(*_clip_range(config))
    return -weight * inputs.advantages * inputs.logprobs, {
        "clip_fraction": (ratio != weight).float()
    }


def sapo(inputs: PolicyInputs, config: PPOActorConfig) -> tuple[torch.Tensor, Stats]:
    """``-A sigmoid(tau (r - 1)) 4 / tau`` with ``tau`` = ``sapo_tau_pos`` where A > 0, else
    ``sapo_tau_neg``.

    Gao et al., "Soft Adaptive Policy Optimization", 2025, arXiv 2511.20347: a soft gate where PPO
    clips.
    """
    tau = torch.where(inputs.advantages > 0, config.sapo_tau_pos, config.sapo_tau_neg)
    gate = torch.sigmoid(tau * (inputs.log_ratio.exp() - 1.0)) * 4.0 / tau
    return -gate * inputs.advantages, {}


def gpg(inputs: PolicyInputs, config: PPOActorConfig) -> tuple[torch.Tensor, Stats]:
    """``-A log p``: policy gradient without a ratio. Chu et al., "GPG", 2025, arXiv 2504.02546."""
    return -inputs.advantages * inputs.logprobs, {}


def gmpo(inputs: PolicyInputs, config: PPOActorConfig) -> tuple[torch.Tensor, Stats]:
    """``-mean(A) exp(mean(c))`` for each sequence, where ``c`` is ``log r``, clipped where that
    lowers the objective.

    ``c`` lies between ``-eps_clip`` and ``eps_clip_higher``: the limits apply to the logarithm.
    Every token has the loss of its sequence, and ``seq-mean-token-mean``, the only allowed mode,
    counts each sequence once. Zhao et al., "Geometric-Mean Policy Optimization", 2025, arXiv
    2507.20673.
    """
    low, high = _clip_range(config)
    sign, log_ratio = inputs.advantages.sign(), inputs.log_ratio
    held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(low - 1.0, high - 1.0))
    mean_ratio = by_sequence(held, inputs.mask, inputs.cu_seqlens).exp()
    mean_advantage = by_sequence(inputs.advantages, inputs.mask, inputs.cu_seqlens)
    return -mean_advantage * mean_ratio, {
        "clip_fraction": ((held != log_ratio) & (sign != 0)).float()
    }


def clip_cov(inputs: PolicyInputs, config: PPOActorConfig) -> tuple[torch.Tensor, Stats]:
    """`ppo`, but 0 without a gradient for the tokens of `picked_tokens` (Clip-Cov of Cui et al.)."""
    assert inputs.picked is not None
    losses, seen = ppo(inputs, config)
    return torch.where(inputs.picked, 0.0, losses), {**seen, "cov_fraction": inputs.picked.float()}


def kl_cov(inputs: PolicyInputs, config: PPOActorConfig) -> tuple[torch.Tensor, Stats]:
    """``-A r``, never clipped, plus ``ppo_kl_coef |log r|`` for the tokens of `picked_tokens`
    (KL-Cov of Cui et al.).
    """
    assert inputs.picked is not None
    penalty = torch.where(inputs.picked, config.ppo_kl_coef * inputs.log_ratio.abs(), 0.0)
    return penalty - inputs.advantages * inputs.log_ratio.exp(), {
        "cov_fraction": inputs.picked.float()
    }


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": ppo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "gmpo": gmpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""Functions by the name in ``policy_loss``. ``gspo`` is `ppo` at sequence level."""


def _clip_range(config: PPOActorConfig) -> tuple[float, float]:
    upper = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    return 1.0 - config.eps_clip, 1.0 + upper


def picked_tokens(
    batch: Batch,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    config: PPOActorConfig,
    engine: TrainEngine,
) -> torch.Tensor:
    """Pick the tokens that ``config.policy_loss`` treats differently: ``[B, S]`` bool. Collective.

    - `kl_cov`: the share ``kl_cov_ratio`` of all tokens with the largest covariance.
    - `clip_cov`: a random share ``clip_cov_ratio`` of the tokens between ``clip_cov_lb`` and
      ``clip_cov_ub`` that PPO does not clip already. The draw depends only on the tokens in the
      mini-batch, so it repeats after a resume.

    Shares are rounded down, but to at least one token. Ties go to the lower rank, then to the lower
    row. ``logprobs`` and ``old_logprobs`` are ``[B, S]`` under the weights before the step and
    under the old policy.
    """
    advantages, mask = batch["advantages"].flatten(), batch["loss_mask"].flatten()
    ends = torch.tensor([0, mask.numel()])
    inputs = policy_inputs(logprobs.flatten(), old_logprobs.flatten(), advantages, mask, ends)
    covariances, n_tokens = _covariances(inputs, engine.all_reduce_stats)
    if config.policy_loss == "kl_cov":
        candidates = inputs.mask
        chosen = _largest(
            covariances[candidates], max(int(config.kl_cov_ratio * n_tokens), 1), engine
        )
    else:
        clipped = ppo(inputs, config)[1]["clip_fraction"].bool()
        inside = (covariances > config.clip_cov_lb) & (covariances < config.clip_cov_ub)
        candidates, seed = inputs.mask & inside & ~clipped, _seed(batch, engine.all_reduce_stats)
        chosen = _drawn(
            int(candidates.sum()), max(int(config.clip_cov_ratio * n_tokens), 1), seed, engine
        )
    picked = torch.zeros_like(candidates).masked_scatter(candidates, chosen.to(candidates.device))
    return picked.view_as(logprobs)


def _covariances(inputs: PolicyInputs, sum_over_ranks: SumOverRanks) -> tuple[torch.Tensor, int]:
    """``[T]`` float32, meaningless outside the mask, and the number of loss tokens of all ranks."""
    a, log_p = inputs.advantages.double(), inputs.logprobs.double()  # 0 outside the mask
    sums = sum_over_ranks(
        {"A": a.sum().item(), "log p": log_p.sum().item(), "tokens": float(inputs.mask.sum())}
    )
    covariances = (a - sums["A"] / sums["tokens"]) * (log_p - sums["log p"] / sums["tokens"])
    return covariances.float(), int(sums["tokens"])


def _largest(values: torch.Tensor, k: int, engine: TrainEngine) -> torch.Tensor:
    """Which of ``values`` (``[n]`` float32) are among the k largest of all ranks, which together
    have at least k.
    """
    bits = (values + 0.0).view(torch.int32).long()  # no -0
    keys = torch.where(
        bits >= 0, bits + (1 << 31), -1 - bits
    )  # in the order of the numbers, from 0 to 2^32 - 1
    threshold, n_equal = 0, k
    for shift in (24, 16, 8, 0):  # the k-th largest byte by byte, from counts of all ranks
        alike = keys[keys >> (shift + 8) == threshold >> (shift + 8)]
        own = torch.bincount((alike >> shift) & 255, minlength=256).tolist()
        counts = engine.all_reduce_stats(
            {str(byte): float(count) for byte, count in enumerate(own)}
        )
        byte = 255
        while counts[str(byte)] < n_equal:
            n_equal -= int(counts[str(byte)])
            byte -= 1
        threshold |= byte << shift
    equal = keys == threshold
    places = equal.cumsum(0) - 1 + _before(int(equal.sum()), engine)[0]
    return (keys > threshold) | (equal & (places < n_equal))


def _drawn(count: int, k: int, seed: int, engine: TrainEngine) -> torch.Tensor:
    """Which of this rank's ``count`` candidates are among k drawn from all ranks (from all, if
    there are fewer).
    """
    first, total = _before(count, engine)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[first : first + count] < k


def _before(count: int, engine: TrainEngine) -> tuple[int, int]:
    """Sum of ``count`` over the lower ranks, and over all ranks."""
    rank, world_size = engine.data_parallel_rank, engine.data_parallel_world_size
    counts = engine.all_reduce_stats(
        {str(other): float(count * (other == rank)) for other in range(world_size)}
    )
    return int(sum(counts[str(other)] for other in range(rank))), int(sum(counts.values()))


def _seed(batch: Batch, sum_over_ranks: SumOverRanks) -> int:
    tokens = (batch["input_ids"].long() + 1) * batch["attention_mask"].long()
    factors = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * 0x9E3779B1 % (1 << 31)
    own = int((tokens * factors).sum()) % (1 << 32)  # an overflow keeps these bits
    return int(sum_over_ranks({"seed": float(own)})["seed"]) % (1 << 32)
