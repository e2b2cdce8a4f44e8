"""The policy of PPO and GRPO on top of any `TrainEngine`: log-probabilities, advantages, update.

One iteration of a job is ``batch = actor.compute_advantages(batch)``, ``stats = actor.ppo_update(batch)``,
``engine.step_lr_scheduler()``. Every method is a collective: all ranks call it, each with its own share of the batch.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from ...utils.errors import BatchError
from ..api import Batch, LossFn, TrainEngine
from ..training.microbatch import validate_batch
from .advantages import (
    check_groups,
    gae_advantages,
    grpo_advantages,
    normalise,
    overlong_penalty,
    rewards_at_last_token,
)
from .aggregation import aggregate, count_losses, with_loss_weights
from .config import NormConfig, PPOActorConfig
from .estimators import ADV_ESTIMATORS, OVER_GROUPS, Outcomes
from .logprobs import token_logprobs
from .losses import kl_estimate, kl_stats
from .off_policy import behave_weights
from .policy_losses import POLICY_LOSSES, policy_inputs
from .update import (
    TokenStats,
    all_ranks_accept,
    loss_mask_of,
    mean_over_ranks,
    require_per_token,
    train_minibatches,
)

_TOKEN_STATS = (
    *("ratio", "clip_fraction", "dual_clip_fraction", "kl", "kl_k1", "kl_ref", "kl_ref_k1", "entropy", "advantage"),
    *("behave_kl", "behave_kl_k1", "behave_weight", "rejected", "kl_reward"),
)


class PPOActor:
    """PPO/GRPO updates of the model in ``engine``."""

    def __init__(self, config: PPOActorConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_logp(self, batch: Batch) -> torch.Tensor:
        """Log-probability of every token under the present weights: ``[B, S]`` float32.

        Aligned with the token (0 at the first token and at padding), at the temperature of the configuration.
        """

        def post(output: Any, micro_batch: Batch) -> torch.Tensor:
            return self._logprobs(output, micro_batch)[0]

        self.engine.eval()
        return self.engine.forward_batch(batch, post)

    def compute_advantages(self, batch: Batch) -> Batch:
        """The batch with ``advantages`` ``[B, S]`` and the effective ``loss_mask``; the argument is left as it is.

        Rewards get the overlong penalty, are biased, scaled, clipped and normalised. With ``values`` in the batch the
        advantages are GAE's, and ``returns`` are added; without, every loss token has the reward of its sequence
        (GRPO). With ``kl_ctl`` each token has a penalty of its own besides (``kl_rewards``, ``[B, S]``), which counts
        for the tokens up to it. ``adv_norm`` comes last. With ``mask_truncated_completions`` no token of an answer that
        was cut off is left in the loss mask.

        Raises:
            BatchError: no ``rewards`` of ``[B]``, one that is not finite, a batch that is not whole groups of
                ``group_size``, what a key asks for is missing, or the batch of another rank was refused.
        """
        with all_ranks_accept(self.engine):
            self._validate_rewards(batch)
        loss_mask = loss_mask_of(batch)
        rewards = self._shape_rewards(batch["rewards"], loss_mask)
        sum_over_ranks = self.engine.all_reduce_stats
        result = {**batch}
        kl_rewards = self._kl_rewards(batch, loss_mask)
        if kl_rewards is not None:
            result["kl_rewards"] = kl_rewards
        if "values" in batch:
            if (reward_norm := self._norm(self.config.reward_norm)) is not None:
                rewards = normalise(rewards, reward_norm, sum_over_ranks=sum_over_ranks)
            token_rewards = rewards_at_last_token(rewards, loss_mask)
            if kl_rewards is not None:
                token_rewards = token_rewards + kl_rewards
            advantages, result["returns"] = self._gae(token_rewards, batch["values"], loss_mask)
        else:
            advantages = self._answer_advantages(batch, rewards, loss_mask)
            if kl_rewards is not None:
                advantages = advantages + self._gae(kl_rewards, torch.zeros_like(kl_rewards), loss_mask)[0]
        if self.config.mask_truncated_completions:
            loss_mask = loss_mask & ~batch["truncated"].bool()[:, None]
            advantages = torch.where(loss_mask, advantages, 0.0)
        result["loss_mask"] = loss_mask
        if (adv_norm := self._norm(self.config.adv_norm)) is not None:
            advantages = normalise(advantages, adv_norm, loss_mask, sum_over_ranks)
        return {**result, "advantages": advantages}

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """``ppo_n_minibatches`` optimizer steps on a batch from `compute_advantages`.

        The ratio is taken to ``logprobs`` (the rollout's) or, with ``recompute_logprob`` or ``use_decoupled_loss``, to
        ``prox_logp``, computed here unless the batch has it. The learning-rate schedule is left to the caller.

        Returns:
            what `train_minibatches` gives; ``reward``, the mean of the raw rewards over sequences (NaN when no rank has
            any); and means over loss tokens of ``advantage``, ``ratio``, ``kl`` (from the old policy to this one),
            ``kl_ref`` (to the reference policy), ``entropy`` (nats), ``behave_kl`` (from the policy that sampled to the
            proximal one) and what the loss adds (``clip_fraction`` ...). KLs are k3 estimates; ``kl_k1`` and so on are
            the k1 estimates of the same. All over all ranks; what does not apply is left out.

        Raises:
            BatchError: ``advantages``, the old log-probabilities or (with ``kl_loss_coef``) ``ref_logp`` are missing or
                not finite, or there is no loss token on any rank, or the batch of another rank was refused.
        """
        with all_ranks_accept(self.engine):
            validate_batch(batch)
            self._validate_update(batch)
        needed = ("input_ids", "attention_mask", "advantages", "ref_logp")
        share = {key: batch[key] for key in needed if key in batch}
        share["loss_mask"] = mask = loss_mask_of(batch)
        share["old_logprobs"] = old_logprobs = self._old_logprobs(batch)
        stats = TokenStats()
        if self.config.use_decoupled_loss:
            rejection = self.config.rejection_sampling
            share["behave_weights"], seen = behave_weights(old_logprobs, batch["logprobs"], mask, rejection)
            stats.add(seen, mask)
        elif self.config.recompute_logprob and "logprobs" in batch:
            known = mask & torch.isfinite(batch["logprobs"])  # of this loss nothing depends on them
            stats.add(kl_stats("behave_kl", batch["logprobs"], old_logprobs, known), known)
        if "kl_rewards" in batch:
            stats.add({"kl_reward": batch["kl_rewards"]}, mask)
        share = with_loss_weights(share, self.config.loss_agg_mode, self.config.loss_scale_factor)
        self.engine.train()
        n_minibatches, loss_fn = self.config.ppo_n_minibatches, self._loss_fn(stats)
        result = train_minibatches(self.engine, share, n_minibatches, loss_fn, count_losses)
        reward = mean_over_ranks(self.engine, batch.get("rewards"))
        return {"reward": reward, **stats.reduce(self.engine, _TOKEN_STATS), **result}

    def _loss_fn(self, stats: TokenStats) -> LossFn:
        config = self.config
        policy_loss = POLICY_LOSSES[config.policy_loss]

        def loss_fn(output: Any, micro_batch: Batch) -> torch.Tensor:
            mask, advantages = micro_batch["loss_mask"], micro_batch["advantages"]
            logprobs, entropy = self._logprobs(output, micro_batch)
            old_logprobs, cu_seqlens = micro_batch["old_logprobs"], micro_batch["cu_seqlens"]
            inputs = policy_inputs(logprobs, old_logprobs, advantages, mask, cu_seqlens, config.ratio_level)
            losses, seen = policy_loss(inputs, config)
            if "behave_weights" in micro_batch:
                losses = losses * micro_batch["behave_weights"]
            seen = {**seen, "ratio": inputs.log_ratio.exp(), "entropy": entropy, "advantage": advantages}
            seen |= kl_stats("kl", old_logprobs, logprobs, mask)
            if "ref_logp" in micro_batch:
                ref_logp = torch.where(inputs.mask, micro_batch["ref_logp"], 0.0)
                seen |= kl_stats("kl_ref", logprobs, ref_logp, mask)
                if config.kl_loss_coef:
                    losses = losses + config.kl_loss_coef * kl_estimate(inputs.logprobs, ref_logp, config.kl_estimator)
            if config.entropy_coeff:
                losses = losses - config.entropy_coeff * entropy
            stats.add(seen, mask)
            return aggregate(losses, micro_batch)

        return loss_fn

    def _logprobs(self, output: Any, micro_batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        input_ids, cu_seqlens = micro_batch["input_ids"], micro_batch["cu_seqlens"]
        return token_logprobs(output, input_ids, cu_seqlens, self.config.temperature)

    def _old_logprobs(self, batch: Batch) -> torch.Tensor:
        if not self._recomputes:
            return batch["logprobs"]
        return batch["prox_logp"] if "prox_logp" in batch else self.compute_logp(batch)

    @property
    def _recomputes(self) -> bool:
        return self.config.recompute_logprob or self.config.use_decoupled_loss

    def _shape_rewards(self, rewards: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        config, rewards = self.config, rewards.float()
        if config.overlong_reward_penalty:
            assert config.max_new_tokens and config.overlong_tokens and config.overlong_penalty_factor is not None
            sizes = (config.max_new_tokens, config.overlong_tokens, config.overlong_penalty_factor)
            rewards = rewards + overlong_penalty(loss_mask, *sizes)
        return self._scale(rewards)

    def _scale(self, rewards: torch.Tensor) -> torch.Tensor:
        limit = self.config.reward_clip
        return ((rewards.float() + self.config.reward_bias) * self.config.reward_scaling).clamp(-limit, limit)

    def _answer_advantages(self, batch: Batch, rewards: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        estimator, sum_over_ranks = ADV_ESTIMATORS[self.config.adv_estimator], self.engine.all_reduce_stats
        if estimator is None:
            return grpo_advantages(rewards, loss_mask, self._norm(self.config.reward_norm), sum_over_ranks)
        baselines = self._scale(batch["reward_baselines"]).double() if "reward_baselines" in batch else None
        lengths = loss_mask.sum(1)
        scores = estimator(Outcomes(rewards.double(), lengths, self.config.group_size, baselines, sum_over_ranks))
        return torch.where(loss_mask, scores.float()[:, None], 0.0)

    def _kl_rewards(self, batch: Batch, loss_mask: torch.Tensor) -> torch.Tensor | None:
        if not self.config.kl_ctl:
            return None
        kl = kl_estimate(batch[self._sampled(batch)], batch["ref_logp"], "k1")
        return torch.where(loss_mask, -self.config.kl_ctl * kl, 0.0)

    def _sampled(self, batch: Batch) -> str:
        """Which log-probabilities of the batch are those of the policy that rewards are for."""
        return "prox_logp" if self.config.recompute_logprob and "prox_logp" in batch else "logprobs"

    def _gae(
        self, rewards: torch.Tensor, values: torch.Tensor, loss_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gae_advantages(rewards, values, loss_mask, self.config.discount, self.config.gae_lambda)

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
        self._validate_estimator(batch)
        if "values" in batch:
            require_per_token(batch, "values", loss_mask_of(batch), "")
        if self.config.kl_ctl:
            for key in (self._sampled(batch), "ref_logp"):
                require_per_token(batch, key, loss_mask_of(batch), "kl_ctl is not 0, so rewards need it")
        truncated = batch.get("truncated", torch.tensor(False))
        if self.config.mask_truncated_completions and truncated.shape != batch["rewards"].shape:
            raise BatchError(
                "the batch has no 'truncated' of shape [batch], which mask_truncated_completions needs: whether each "
                "answer was cut off"
            )

    def _validate_estimator(self, batch: Batch) -> None:
        name, rewards = self.config.adv_estimator, batch["rewards"]
        if name != "grpo" and "values" in batch:
            raise BatchError(f"the batch has 'values', which are for GAE, but adv_estimator is {name!r}; leave one out")
        if name in OVER_GROUPS:
            check_groups(len(rewards), self.config.group_size)
        baselines = batch.get("reward_baselines", torch.tensor(math.nan))
        if name == "remax" and (baselines.shape != rewards.shape or not bool(torch.isfinite(baselines.float()).all())):
            raise BatchError(
                "the batch has no finite 'reward_baselines' of shape [batch], which adv_estimator 'remax' needs: the "
                "reward of the greedy answer to each prompt"
            )

    def _validate_update(self, batch: Batch) -> None:
        mask = loss_mask_of(batch)
        require_per_token(batch, "advantages", mask, "call compute_advantages first")
        if not self.config.recompute_logprob or self.config.use_decoupled_loss:
            require_per_token(batch, "logprobs", mask, "the rollout must give them, or set recompute_logprob")
        if self._recomputes and "prox_logp" in batch:
            require_per_token(batch, "prox_logp", mask, "")
        if self.config.kl_loss_coef or "ref_logp" in batch:
            hint = "kl_loss_coef is not 0, so the reference policy's compute_logp must give it"
            require_per_token(batch, "ref_logp", mask, hint)
