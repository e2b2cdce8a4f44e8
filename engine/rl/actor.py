"""The policy of PPO and GRPO on top of any `TrainEngine`: log-probabilities, advantages, update.

One iteration of a job is ``batch = actor.compute_advantages(batch)``, ``stats = actor.ppo_update(batch)``,
``engine.step_lr_scheduler()``. Every method is a collective: all ranks call it, each with its own share of the batch.
"""

from dataclasses import replace

import torch

from ...utils.errors import BatchError
from ..api import Batch, LossFn, TrainEngine
from ..training.microbatch import validate_batch
from .advantages import check_groups, gae_advantages, grpo_advantages, normalise, rewards_at_last_token
from .config import NormConfig, PPOActorConfig
from .logprobs import token_logprobs
from .losses import kl_estimate, masked_mean, ppo_actor_loss
from .update import (
    TokenStats,
    all_ranks_accept,
    loss_mask_of,
    mean_over_ranks,
    require_per_token,
    train_minibatches,
)

_TOKEN_STATS = ("ratio", "clip_fraction", "dual_clip_fraction", "kl", "kl_ref", "entropy", "advantage")


class PPOActor:
    """PPO/GRPO updates of the model in ``engine``."""

    def __init__(self, config: PPOActorConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_logp(self, batch: Batch) -> torch.Tensor:
        """Log-probability of every token under the present weights: ``[B, S]`` float32.

        Aligned with the token (0 at the first token and at padding), at the temperature of the configuration.
        """

        def post(logits: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
            return self._logprobs(logits, micro_batch)[0]

        self.engine.eval()
        return self.engine.forward_batch(batch, post)

    def compute_advantages(self, batch: Batch) -> Batch:
        """The batch with ``advantages`` ``[B, S]`` and the effective ``loss_mask``; the argument is left as it is.

        Rewards are biased, scaled, clipped and normalised. With ``values`` in the batch the advantages are GAE's, and
        ``returns`` are added; without, every loss token has the reward of its sequence (GRPO). ``adv_norm`` comes last.

        Raises:
            BatchError: no ``rewards`` of ``[B]``, one that is not finite, a batch that is not whole groups of
                ``group_size``, or the batch of another rank was refused.
        """
        with all_ranks_accept(self.engine):
            self._validate_rewards(batch)
        loss_mask = loss_mask_of(batch)
        rewards, reward_norm = self._shape_rewards(batch["rewards"]), self._norm(self.config.reward_norm)
        sum_over_ranks = self.engine.all_reduce_stats
        result = {**batch, "loss_mask": loss_mask}
        if "values" in batch:
            if reward_norm is not None:
                rewards = normalise(rewards, reward_norm, sum_over_ranks=sum_over_ranks)
            advantages, result["returns"] = gae_advantages(
                rewards_at_last_token(rewards, loss_mask),
                batch["values"],
                loss_mask,
                self.config.discount,
                self.config.gae_lambda,
            )
        else:
            advantages = grpo_advantages(rewards, loss_mask, reward_norm, sum_over_ranks)
        if (adv_norm := self._norm(self.config.adv_norm)) is not None:
            advantages = normalise(advantages, adv_norm, loss_mask, sum_over_ranks)
        return {**result, "advantages": advantages}

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """``ppo_n_minibatches`` optimizer steps on a batch from `compute_advantages`.

        The ratio is taken to ``logprobs`` (the rollout's) or, with ``recompute_logprob``, to ``prox_logp``, computed
        here unless the batch has it. The learning-rate schedule is left to the caller.

        Returns:
            what `train_minibatches` gives; ``reward``, the mean of the raw rewards over sequences (NaN when no rank has
            any); and means over loss tokens of ``advantage``, ``ratio``, ``clip_fraction``, ``dual_clip_fraction``,
            ``kl`` (k3, from the old policy to this one), ``kl_ref`` and ``entropy`` (nats). All over all ranks.

        Raises:
            BatchError: ``advantages``, the old log-probabilities or (with ``kl_loss_coef``) ``ref_logp`` are missing or
                not finite, or there is no loss token on any rank, or the batch of another rank was refused.
        """
        with all_ranks_accept(self.engine):
            validate_batch(batch)
            self._validate_update(batch)
        needed = ("input_ids", "attention_mask", "advantages", "ref_logp")
        share = {key: batch[key] for key in needed if key in batch}
        share["loss_mask"] = loss_mask_of(batch)
        share["old_logprobs"] = self._old_logprobs(batch)
        stats = TokenStats()
        self.engine.train()
        result = train_minibatches(self.engine, share, self.config.ppo_n_minibatches, self._loss_fn(stats))
        reward = mean_over_ranks(self.engine, batch.get("rewards"))
        return {"reward": reward, **stats.reduce(self.engine, _TOKEN_STATS), **result}

    def _loss_fn(self, stats: TokenStats) -> LossFn:
        config = self.config

        def loss_fn(logits: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
            mask = micro_batch["loss_mask"]
            logprobs, entropy = self._logprobs(logits, micro_batch)
            old_logprobs, advantages = micro_batch["old_logprobs"], micro_batch["advantages"]
            loss, seen = ppo_actor_loss(
                logprobs, old_logprobs, advantages, mask, config.eps_clip, config.eps_clip_higher, config.c_clip
            )
            seen = {**seen, "entropy": entropy.detach(), "advantage": advantages}
            if "ref_logp" in micro_batch:
                ref_logp = torch.where(mask.bool(), micro_batch["ref_logp"], logprobs.detach())  # else may be NaN
                kl_ref = kl_estimate(logprobs, ref_logp, config.kl_estimator)
                seen["kl_ref"] = kl_ref.detach()
                if config.kl_loss_coef:
                    loss = loss + config.kl_loss_coef * masked_mean(kl_ref, mask)
            if config.entropy_coeff:
                loss = loss - config.entropy_coeff * masked_mean(entropy, mask)
            stats.add(seen, mask)
            return loss

        return loss_fn

    def _logprobs(self, logits: torch.Tensor, micro_batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        input_ids, cu_seqlens = micro_batch["input_ids"], micro_batch["cu_seqlens"]
        return token_logprobs(logits, input_ids, cu_seqlens, self.config.temperature)

    def _old_logprobs(self, batch: Batch) -> torch.Tensor:
        if not self.config.recompute_logprob:
            return batch["logprobs"]
        return batch["prox_logp"] if "prox_logp" in batch else self.compute_logp(batch)

    def _shape_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        limit = self.config.reward_clip
        return ((rewards.float() + self.config.reward_bias) * self.config.reward_scaling).clamp(-limit, limit)

    def _norm(self, norm: NormConfig | None) -> NormConfig | None:
        return norm and replace(norm, group_size=norm.group_size or self.config.group_size)

    def _validate_rewards(self, batch: Batch) -> None:
        validate_batch(batch)
        if "rewards" not in batch or batch["rewards"].dim() != 1:
            raise BatchError(f"the batch has no 'rewards' of shape [batch]; it has {sorted(batch)}")
        if not bool(torch.isfinite(batch["rewards"].float()).all()):
            rows = (~torch.isfinite(batch["rewards"].float())).nonzero().flatten().tolist()
            raise BatchError(f"batch['rewards'] is NaN or infinite in row(s) {rows[:8]}")
        for norm in (self._norm(self.config.reward_norm), self._norm(self.config.adv_norm)):
            if norm is not None and "group" in (norm.mean_level, norm.std_level):
                check_groups(len(batch["rewards"]), norm.group_size or 1)
        if "values" in batch:
            require_per_token(batch, "values", loss_mask_of(batch), "")

    def _validate_update(self, batch: Batch) -> None:
        mask = loss_mask_of(batch)
        require_per_token(batch, "advantages", mask, "call compute_advantages first")
        if not self.config.recompute_logprob:
            require_per_token(batch, "logprobs", mask, "the rollout must give them, or set recompute_logprob")
        elif "prox_logp" in batch:
            require_per_token(batch, "prox_logp", mask, "")
        if self.config.kl_loss_coef or "ref_logp" in batch:
            hint = "kl_loss_coef is not 0, so the reference policy's compute_logp must give it"
            require_per_token(batch, "ref_logp", mask, hint)
