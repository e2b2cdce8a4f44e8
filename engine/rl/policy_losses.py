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
from torch import Tensor

from ..api import Batch, TrainEngine
from .config import PPOActorConfig
from .losses import MAX_LOG_RATIO, Stats, by_sequence, masked


@dataclass(frozen=True)
class PolicyInputs:
    """One packed micro-batch. Per-token tensors are ``[T]`` float32 and finite. Only ``logprobs``
    has a gradient.
    """

    logprobs: Tensor
    # log r at the configured level
    log_ratio: Tensor
    # A
    advantages: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    # tokens of `picked_tokens`, for the covariance losses alone
    picked: Tensor | None = None


def policy_inputs(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    level: str = "token",
    picked: Tensor | None = None,
) -> PolicyInputs:
    """Build the input of a policy loss from ``[T]`` tensors. Values outside ``loss_mask`` are
    ignored.
    """
    # Numbers outside the mask may be NaN. As zeros they have ratio 1 and advantage 0.
    mask = loss_mask.bool()
    logprobs = masked(logprobs, mask)
    old_logprobs = masked(old_logprobs, mask)
    advantages = masked(advantages, mask)

    log_ratio = logprobs - old_logprobs
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "sequence":
        # log s_t = sg(mean(log r)) + log p_t - sg(log p_t)
        mean = by_sequence(log_ratio.detach(), mask, cu_seqlens)
        log_ratio = mean + logprobs - logprobs.detach()
    log_ratio = masked(log_ratio, mask)
    return PolicyInputs(logprobs, log_ratio, advantages, mask, cu_seqlens, picked)


LossesAndStats = tuple[Tensor, Stats]
"""``[T]`` losses, and statistics of the loss (``clip_fraction``: share of tokens whose gradient was
cut off ...).
"""
PolicyLoss = Callable[[PolicyInputs, PPOActorConfig], LossesAndStats]


def ppo(inputs: PolicyInputs, config: PPOActorConfig) -> LossesAndStats:
    """``max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_higher))``.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, eq. 7. The separate upper clip
    is "clip-higher" of Yu et al., "DAPO", 2025. With ``c_clip`` the loss at a negative advantage is
    at most ``-A c_clip`` (Ye et al., "Mastering Complex Control in MOBA Games", 2020, eq. 5).
    """
    advantages = inputs.advantages
    ratio = inputs.log_ratio.exp()
    low, high = _clip_range(config)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(low, high)
    loss = torch.maximum(plain, clipped)

    # Dual clip: at most -A c_clip, where A < 0.
    is_dual = torch.zeros_like(inputs.mask)
    if config.c_clip is not None:
        most = -advantages * config.c_clip
        is_dual = (advantages < 0) & (loss > most)
        loss = torch.where(is_dual, most, loss)
    return loss, {
        "clip_fraction": (clipped > plain).float(),
        "dual_clip_fraction": is_dual.float(),
    }


def cispo(inputs: PolicyInputs, config: PPOActorConfig) -> LossesAndStats:
    """``-sg(clip(r, 1 - eps_clip, 1 + eps_clip_higher)) A log p``: no token loses its gradient.

    MiniMax, "MiniMax-M1", 2025, arXiv 2506.13585, with verl's clip (TRL's upper limit is
    `eps_clip_higher` itself).
    """
    low, high = _clip_range(config)
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(low, high)
    loss = -weight * inputs.advantages * inputs.logprobs
    is_clipped = ratio != weight
    return loss, {"clip_fraction": is_clipped.float()}


def sapo(inputs: PolicyInputs, config: PPOActorConfig) -> LossesAndStats:
    """``-A sigmoid(tau (r - 1)) 4 / tau`` with ``tau`` = ``sapo_tau_pos`` where A > 0, else
    ``sapo_tau_neg``.

    Gao et al., "Soft Adaptive Policy Optimization", 2025, arXiv 2511.20347: a soft gate where PPO
    clips.
    """
    ratio = inputs.log_ratio.exp()
    tau = torch.where(
        inputs.advantages > 0,
        config.sapo_tau_pos,
        config.sapo_tau_neg,
    )
    gate = torch.sigmoid(tau * (ratio - 1.0))
    gate = gate * 4.0 / tau
    return -gate * inputs.advantages, {}


def gpg(inputs: PolicyInputs, config: PPOActorConfig) -> LossesAndStats:
    """``-A log p``: policy gradient without a ratio. Chu et al., "GPG", 2025, arXiv 2504.02546."""
    return -inputs.advantages * inputs.logprobs, {}


def gmpo(inputs: PolicyInputs, config: PPOActorConfig) -> LossesAndStats:
    """``-mean(A) exp(mean(c))`` for each sequence, where ``c`` is ``log r``, clipped where that
    lowers the objective.

    ``c`` lies between ``-eps_clip`` and ``eps_clip_higher``: the limits apply to the logarithm.
    Every token has the loss of its sequence, and ``seq-mean-token-mean``, the only allowed mode,
    counts each sequence once. Zhao et al., "Geometric-Mean Policy Optimization", 2025, arXiv
    2507.20673.
    """
    log_ratio = inputs.log_ratio
    low, high = _clip_range(config)
    clipped = log_ratio.clamp(low - 1.0, high - 1.0)

    # c: of log r and its clipped value the one with the lower objective, given the sign of A.
    sign = inputs.advantages.sign()
    c = torch.minimum(sign * log_ratio, sign * clipped)
    c = sign * c

    mean_c = by_sequence(c, inputs.mask, inputs.cu_seqlens)
    mean_advantage = by_sequence(inputs.advantages, inputs.mask, inputs.cu_seqlens)
    loss = -mean_advantage * mean_c.exp()
    is_clipped = (c != log_ratio) & (sign != 0)
    return loss, {"clip_fraction": is_clipped.float()}


def clip_cov(inputs: PolicyInputs, config: PPOActorConfig) -> LossesAndStats:
    """`ppo`, but 0 without a gradient for the tokens of `picked_tokens`: Clip-Cov of Cui et al."""
    assert inputs.picked is not None
    losses, stats = ppo(inputs, config)
    stats["cov_fraction"] = inputs.picked.float()
    return torch.where(inputs.picked, 0.0, losses), stats


def kl_cov(inputs: PolicyInputs, config: PPOActorConfig) -> LossesAndStats:
    """``-A r``, never clipped, plus ``ppo_kl_coef |log r|`` for the tokens of `picked_tokens`
    (KL-Cov of Cui et al.).
    """
    assert inputs.picked is not None
    ratio = inputs.log_ratio.exp()
    penalty = config.ppo_kl_coef * inputs.log_ratio.abs()
    penalty = torch.where(inputs.picked, penalty, 0.0)
    loss = penalty - inputs.advantages * ratio
    return loss, {"cov_fraction": inputs.picked.float()}


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
    above = config.eps_clip_higher
    if above is None:
        above = config.eps_clip
    return 1.0 - config.eps_clip, 1.0 + above


def picked_tokens(
    batch: Batch,
    logprobs: Tensor,
    old_logprobs: Tensor,
    config: PPOActorConfig,
    engine: TrainEngine,
) -> Tensor:
    """Pick the tokens that ``config.policy_loss`` treats differently: ``[B, S]`` bool. Collective.

    - `kl_cov`: the share ``kl_cov_ratio`` of all tokens with the largest covariance.
    - `clip_cov`: a random share ``clip_cov_ratio`` of the tokens between ``clip_cov_lb`` and
      ``clip_cov_ub`` that PPO does not clip already. The draw depends only on the tokens in the
      mini-batch, so it repeats after a resume.

    Shares are rounded down, but to at least one token. Ties go to the lower rank, then to the lower
    row. ``logprobs`` and ``old_logprobs`` are ``[B, S]`` under the weights before the step and
    under the old policy.
    """
    # All rows count as one sequence: no ratio of sequences is used here.
    mask = batch["loss_mask"].flatten()
    inputs = policy_inputs(
        logprobs.flatten(),
        old_logprobs.flatten(),
        batch["advantages"].flatten(),
        mask,
        torch.tensor([0, mask.numel()]),
    )
    covariances, n_tokens = _covariances(inputs, engine)

    # k of the candidates of all ranks are chosen.
    if config.policy_loss == "kl_cov":
        k = int(config.kl_cov_ratio * n_tokens)
        candidates = inputs.mask
        chosen = _largest(covariances[candidates], max(k, 1), engine)
    else:
        k = int(config.clip_cov_ratio * n_tokens)
        _, stats = ppo(inputs, config)
        is_clipped = stats["clip_fraction"].bool()
        is_above = covariances > config.clip_cov_lb
        is_below = covariances < config.clip_cov_ub
        candidates = inputs.mask & (is_above & is_below) & ~is_clipped
        seed = _seed(batch, engine)
        n_candidates = int(candidates.sum())
        chosen = _drawn(n_candidates, max(k, 1), seed, engine)

    # ``chosen`` has one entry for each candidate, in order.
    chosen = chosen.to(candidates.device)
    picked = torch.zeros_like(candidates)
    picked.masked_scatter_(candidates, chosen)
    return picked.view_as(logprobs)


def _covariances(inputs: PolicyInputs, engine: TrainEngine) -> tuple[Tensor, int]:
    """``[T]`` float32, meaningless outside the mask, and the number of loss tokens of all ranks."""
    # Both are 0 outside the mask.
    advantages = inputs.advantages.double()
    logprobs = inputs.logprobs.double()
    sums = engine.all_reduce_stats(
        {
            "A": advantages.sum().item(),
            "log p": logprobs.sum().item(),
            "tokens": float(inputs.mask.sum()),
        }
    )
    n_tokens = sums["tokens"]
    mean_advantage = sums["A"] / n_tokens
    mean_logprob = sums["log p"] / n_tokens
    covariances = (advantages - mean_advantage) * (logprobs - mean_logprob)
    return covariances.float(), int(n_tokens)


def _largest(
    values: Tensor,
    k: int,
    engine: TrainEngine,
) -> Tensor:
    """Which of ``values`` (``[n]`` float32) are among the k largest of all ranks, which together
    have at least k.
    """
    # The bits of a float32 as a number from 0 to 2^32 - 1, in the order of the floats. Adding 0.0
    # turns -0 into 0. Bits of negative floats, as integers, run the other way.
    bits = (values + 0.0).view(torch.int32).long()
    if_positive = bits + (1 << 31)
    if_negative = -1 - bits
    keys = torch.where(bits >= 0, if_positive, if_negative)

    # Find the key of the k-th largest value of all ranks, byte by byte from the highest. In the
    # end ``n_equal`` of the values with that very key are among the k largest.
    threshold = 0
    n_equal = k
    for shift in (24, 16, 8, 0):
        # Of the keys that agree with the threshold in the higher bytes, those of each byte.
        higher = shift + 8
        alike = keys[keys >> higher == threshold >> higher]
        own_bytes = (alike >> shift) & 255
        own_counts = torch.bincount(own_bytes, minlength=256).tolist()
        own = {str(byte): float(count) for byte, count in enumerate(own_counts)}
        counts = engine.all_reduce_stats(own)

        byte = 255
        while counts[str(byte)] < n_equal:
            n_equal -= int(counts[str(byte)])
            byte -= 1
        threshold |= byte << shift

    # Lower ranks come first among equal values, then lower rows.
    is_equal = keys == threshold
    n_before, _ = _before(int(is_equal.sum()), engine)
    places = is_equal.cumsum(0) - 1 + n_before
    is_larger = keys > threshold
    return is_larger | (is_equal & (places < n_equal))


def _drawn(
    count: int,
    k: int,
    seed: int,
    engine: TrainEngine,
) -> Tensor:
    """Which of this rank's ``count`` candidates are among k drawn from all ranks (from all, if
    there are fewer).
    """
    first, total = _before(count, engine)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=generator)
    own = order[first : first + count]
    return own < k


def _before(count: int, engine: TrainEngine) -> tuple[int, int]:
    """Sum of ``count`` over the lower ranks, and over all ranks."""
    rank = engine.data_parallel_rank
    ranks = range(engine.data_parallel_world_size)
    own = {str(other): 0.0 for other in ranks}
    own[str(rank)] = float(count)
    counts = engine.all_reduce_stats(own)
    before = sum(counts[str(other)] for other in ranks[:rank])
    total = sum(counts.values())
    return int(before), int(total)


def _seed(batch: Batch, engine: TrainEngine) -> int:
    # A sum over tokens with a factor for each position. An overflow keeps the lower 32 bits.
    tokens = batch["input_ids"].long() + 1
    tokens = tokens * batch["attention_mask"].long()
    n_columns = tokens.shape[1]
    positions = torch.arange(1, n_columns + 1, device=tokens.device)
    factors = positions * 0x9E3779B1 % (1 << 31)
    own = int((tokens * factors).sum()) % (1 << 32)
    stats = engine.all_reduce_stats({"seed": float(own)})
    return int(stats["seed"]) % (1 << 32)
