"""The policy of PPO and GRPO: log-probabilities, advantages, update."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import BatchError, ConfigError
from ..api import Batch, LossFn, TrainEngine
from ..training.batch import ROUTES, require_shape_per_token, validate_batch
from ..training.logprobs import token_logprobs
from .advantages import (
    ADV_ESTIMATORS,
    Outcomes,
    check_groups,
    gae_advantages,
    grpo_advantages,
    normalise,
    overlong_penalty,
    rewards_at_last_token,
)
from .config import OF_PICKED_TOKENS, OVER_GROUPS, NormConfig, PPOActorConfig
from .kl import AdaptiveKLController, FixedKLController, kl_estimate, kl_stats
from .losses import aggregate, count_losses, with_loss_weights
from .off_policy import approximation_errors, behave_weights, interpolate_prox_logp, prox_alpha
from .policy_losses import POLICY_LOSSES, picked_tokens, policy_inputs
from .teacher import EngineTeacher, KnownTeacher, Teacher, distill_advantages
from .update import (
    INPUTS,
    TokenStats,
    all_ranks_accept,
    count_ranks,
    loss_mask_of,
    mean_over_ranks,
    require_on_all_or_none,
    require_per_token,
    train_minibatches,
)

_TOKEN_STATS = (
    "ratio",
    "clip_fraction",
    "dual_clip_fraction",
    "cov_fraction",
    "kl",
    "kl_k1",
    "kl_ref",
    "kl_ref_k1",
    "kl_teacher",
    "kl_teacher_k1",
    "entropy",
    "advantage",
    "behave_kl",
    "behave_kl_k1",
    "behave_weight",
    "rejected",
    "kl_reward",
    "loglinear_error",
    "linear_error",
    "rollout_error",
)


class PPOActor:
    """PPO/GRPO updates of the model in ``engine``, which may be any `TrainEngine`.

    Every method is a collective: all ranks call it, each with its own share of the batch::

        actor = PPOActor(config, engine)
        batch = actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        engine.step_lr_scheduler()

    Args:
        config: the algorithm.
        engine: the policy, with the same configuration.
        teacher: scores the tokens of batches without ``teacher_logp``, for ``distill_loss_weight``.
            The engine saves its identity, and refuses a generation of another one.

    Attributes:
        kl_ctl: coefficient of the KL in rewards. With ``kl_target`` the engine saves and restores
            it.

    Raises:
        ConfigError: there is a teacher, but ``distill_loss_weight`` is 0, or the teacher's ranks
            share data that the student's do not.
    """

    def __init__(
        self, config: PPOActorConfig, engine: TrainEngine, teacher: Teacher | None = None
    ) -> None:
        self.config = config
        self.engine = engine
        self.teacher = teacher
        if teacher is not None:
            if not config.distill_loss_weight:
                raise ConfigError(
                    "there is a teacher, but config key 'distill_loss_weight' is 0, so that it "
                    "would teach nothing; set that, or leave the teacher out"
                )
            if isinstance(teacher, EngineTeacher):
                teacher.check_student(engine)
            known = KnownTeacher(teacher.identity(), config.allow_other_teacher)
            engine.register_state("teacher", known)

        # Only an adapted coefficient is part of the saved state.
        self.kl_ctl: FixedKLController = FixedKLController(config.kl_ctl)
        if config.kl_target is not None:
            self.kl_ctl = AdaptiveKLController(config.kl_ctl, config.kl_target, config.kl_horizon)
            engine.register_state("kl_ctl", self.kl_ctl)

    def compute_logp(self, batch: Batch) -> Tensor:
        """Log-probability of every token under the current weights: ``[B, S]`` float32.

        Aligned with the token (0 at the first token and at padding), at the temperature of the
        configuration.
        """

        def logprobs(output: Any, micro_batch: Batch) -> Tensor:
            return self._logprobs(output, micro_batch)[0]

        self.engine.eval()
        return self.engine.forward_batch(batch, logprobs)

    def compute_ref_logp(self, batch: Batch) -> Tensor:
        """`compute_logp` of the base under the adapters: ``ref_logp`` for a LoRA policy, without a
        second model. It routes its tokens itself.

        Raises:
            ConfigError: the engine has no adapters. Use another engine with the reference weights.
            BatchError: see `validate_batch`.
        """
        with all_ranks_accept(self.engine):
            validate_batch(batch)
        own = {key: entry for key, entry in batch.items() if key != ROUTES}
        with self.engine.adapters_off():
            return self.compute_logp(own)

    def compute_advantages(self, batch: Batch) -> Batch:
        """Return the batch with ``advantages`` ``[B, S]`` and the effective ``loss_mask``. The
        argument does not change.

        - Rewards get the overlong penalty, then bias, scale, clip and normalisation.
        - With ``values`` in the batch the advantages are GAE's, and ``returns`` are added. Without,
          every loss token gets the reward of its sequence (GRPO).
        - With ``kl_ctl`` each token gets its own penalty (``kl_rewards``, ``[B, S]``), which counts
          for the tokens up to it.
        - With ``mask_truncated_completions`` truncated answers have no loss token.
        - With ``distill_loss_weight`` each token gets the teacher's advantage, too (see
          `distill_advantages`), and ``teacher_logp`` is added.
        - ``adv_norm`` comes last.

        Raises:
            BatchError: ``rewards`` are not finite or not ``[B]``, the batch is not whole groups of
                ``group_size``, an entry that a config key requires is missing, only some ranks have
                ``values``, or another rank refused its share.
        """
        with all_ranks_accept(self.engine):
            self._validate_rewards(batch)
        require_on_all_or_none(self.engine, batch, "values")
        config = self.config
        result = {**batch}
        loss_mask = loss_mask_of(batch)
        rewards = self._shaped_rewards(batch, loss_mask)

        # The penalty for the distance from the reference policy, for each token.
        kl_rewards: Tensor | None = None
        if config.kl_ctl:
            penalties = -self.kl_ctl.value * self._kl_of_rewards(batch)
            kl_rewards = torch.where(loss_mask, penalties, 0.0)
            result["kl_rewards"] = kl_rewards

        if "values" in batch:
            advantages, result["returns"] = self._gae(batch, rewards, kl_rewards, loss_mask)
        else:
            advantages = self._answer_advantages(batch, rewards, loss_mask)
            if kl_rewards is not None:
                # Each penalty counts for the tokens up to its own.
                of_kl, _ = gae_advantages(
                    kl_rewards,
                    torch.zeros_like(kl_rewards),
                    loss_mask,
                    config.discount,
                    config.gae_lambda,
                )
                advantages = advantages + of_kl

        # Truncated answers count in means of rewards, but not in those of advantages.
        if config.mask_truncated_completions:
            loss_mask = loss_mask & ~batch["truncated"].bool()[:, None]
            advantages = torch.where(loss_mask, advantages, 0.0)
        result["loss_mask"] = loss_mask

        if config.distill_loss_weight:
            of_teacher = self._teacher_advantages(result)
            advantages = (
                config.rl_loss_weight * advantages  # from rewards
                + config.distill_loss_weight * of_teacher
            )

        adv_norm = self._norm(config.adv_norm)
        if adv_norm is not None:
            advantages = normalise(advantages, adv_norm, loss_mask, self.engine.all_reduce_stats)
        result["advantages"] = advantages
        return result

    def _teacher_advantages(self, batch: Batch) -> Tensor:
        """The teacher's advantage of each token, before its weight. Adds ``teacher_logp`` to the
        batch.
        """
        if self.teacher is not None:
            # All ranks ask the teacher if one has to. The others keep what they have.
            n_without = count_ranks(self.engine, "teacher_logp" not in batch)
            if n_without:
                teacher_logp = self.teacher.compute_logp(batch, self.config.temperature)
                batch.setdefault("teacher_logp", teacher_logp)
        loss_mask = batch["loss_mask"].bool()
        sampled = self._sampled(batch)
        with all_ranks_accept(self.engine):
            hint = "distill_loss_weight is not 0, so give the actor a teacher, or the batch this"
            for key in ("teacher_logp", sampled):
                require_per_token(batch, key, loss_mask, hint)
        return distill_advantages(batch["teacher_logp"], batch[sampled], loss_mask)

    def _shaped_rewards(self, batch: Batch, loss_mask: Tensor) -> Tensor:
        """``[B]`` rewards with the overlong penalty, then bias, scale and clip."""
        config = self.config
        rewards = batch["rewards"].float()
        if config.overlong_reward_penalty:
            assert config.max_new_tokens
            assert config.overlong_tokens
            assert config.overlong_penalty_factor is not None
            rewards = rewards + overlong_penalty(
                loss_mask,
                config.max_new_tokens,
                config.overlong_tokens,
                config.overlong_penalty_factor,
            )
        return self._scale(rewards)

    def _gae(
        self,
        batch: Batch,
        rewards: Tensor,
        kl_rewards: Tensor | None,
        loss_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of a batch with ``values``."""
        config = self.config
        reward_norm = self._norm(config.reward_norm)
        if reward_norm is not None:
            sum_over_ranks = self.engine.all_reduce_stats
            rewards = normalise(rewards, reward_norm, sum_over_ranks=sum_over_ranks)
        # The reward of the answer comes with its last token.
        token_rewards = rewards_at_last_token(rewards, loss_mask)
        if kl_rewards is not None:
            token_rewards = token_rewards + kl_rewards

        # A complete answer has no value after its last token.
        last_values = None
        if config.bootstrap_truncated:
            truncated = batch["truncated"].bool()
            last_values = torch.where(truncated, batch["last_values"].float(), 0.0)
        return gae_advantages(
            token_rewards,
            batch["values"],
            loss_mask,
            config.discount,
            config.gae_lambda,
            last_values,
        )

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """Take ``ppo_n_minibatches`` optimizer steps on a batch from `compute_advantages`.

        The ratio is relative to ``logprobs`` (from the rollout), or with ``recompute_logprob`` or
        ``use_decoupled_loss`` to ``prox_logp``, which is computed here unless the batch has it. The
        caller advances the learning-rate schedule.

        Returns:
            the statistics of `train_minibatches`, and over all ranks, if they apply:
                - ``kl_ctl``: the coefficient used in rewards (``kl_target`` adapts it afterwards).
                - ``reward``: mean of the raw rewards over sequences, NaN if no rank has any.
                - Means over loss tokens: ``advantage``, ``ratio``, ``entropy`` (nats), ``kl`` (old
                  policy to this one), ``kl_ref`` (to the reference policy), ``kl_teacher`` (to the
                  teacher), ``behave_kl`` (sampling policy to the trainer's before the update, only
                  for the first mini-batch if no forward pass computes it), and statistics of the
                  loss (``clip_fraction`` ...). KLs are k3 estimates, ``kl_k1`` etc. are k1
                  estimates.

        Raises:
            BatchError: ``advantages``, the old log-probabilities or (with ``kl_loss_coef``)
                ``ref_logp`` are missing or not finite, only some ranks have ``kl_rewards``, no rank
                has a loss token, or another rank refused its share.
        """
        with all_ranks_accept(self.engine):
            validate_batch(batch)
            self._validate_update(batch)
        require_on_all_or_none(self.engine, batch, "kl_rewards")
        share = self._share_of(batch)
        stats = TokenStats()
        if "kl_rewards" in batch:
            stats.add({"kl_reward": batch["kl_rewards"]}, share["loss_mask"])

        self.engine.train()
        result = train_minibatches(
            self.engine,
            share,
            self.config.ppo_n_minibatches,
            self._loss_fn(stats),
            count_losses,
            self._preparation(),
            shares_prompts=self.config.enable_tree_training,
        )

        # Each line is a collective.
        reward = mean_over_ranks(self.engine, batch.get("rewards"))
        of_kl_ctl = self._update_kl_ctl(batch)
        of_tokens = stats.reduce(self.engine, _TOKEN_STATS)
        return {"reward": reward, **of_kl_ctl, **of_tokens, **result}

    def _share_of(self, batch: Batch) -> Batch:
        # The entries that the model and the loss read.
        needed = (*INPUTS, "advantages", "ref_logp", "teacher_logp")
        share = {key: batch[key] for key in needed if key in batch}
        share["loss_mask"] = loss_mask_of(batch)
        if "logprobs" in batch:
            share["behave_logp"] = batch["logprobs"]

        # The proximal policy: its place between sampler and trainer, or its log-probabilities.
        method = self.config.prox_logp_method
        if method == "reuse_train_logp":
            share["prox_alpha"] = torch.ones_like(batch["logprobs"], dtype=torch.float32)
        elif method != "recompute":
            share["prox_alpha"] = prox_alpha(batch["versions"], self.engine.get_version())
        if self._recomputes and "prox_logp" in batch:
            share["prox_logp"] = batch["prox_logp"]
        if self._recomputes and method in ("recompute", "metrics"):
            # All ranks compute them if one has to. The others keep what they have.
            n_without = count_ranks(self.engine, "prox_logp" not in batch)
            if n_without:
                prox_logp = self.compute_logp(batch)
                share.setdefault("prox_logp", prox_logp)
        return with_loss_weights(share, self.config.agg_mode, self.config.loss_scale_factor)

    def _loss_fn(self, stats: TokenStats) -> LossFn:
        config = self.config
        policy_loss = POLICY_LOSSES[config.policy_loss]

        def loss_fn(output: Any, micro_batch: Batch) -> Tensor:
            mask = micro_batch["loss_mask"]
            logprobs, entropy = self._logprobs(output, micro_batch)
            old_logprobs = _old_logprobs(micro_batch, logprobs)
            inputs = policy_inputs(
                logprobs,
                old_logprobs,
                micro_batch["advantages"],
                mask,
                micro_batch["cu_seqlens"],
                config.ratio_level,
                micro_batch.get("picked"),
            )
            # Statistics of the loss come with it, and those of the policy below.
            losses, seen = policy_loss(inputs, config)

            # Decoupled: each token is weighed by p_prox / p_behave.
            if config.use_decoupled_loss:
                weights, of_weights = behave_weights(
                    old_logprobs,
                    micro_batch["behave_logp"],
                    mask,
                    inputs.cu_seqlens,
                    config.rejection_sampling,
                )
                losses = losses * weights
                seen |= of_weights
            seen["ratio"] = inputs.log_ratio.exp()
            seen["entropy"] = entropy
            seen["advantage"] = micro_batch["advantages"]
            seen |= kl_stats("kl", old_logprobs, logprobs, mask)

            # KL to the reference policy, and the entropy bonus.
            if "ref_logp" in micro_batch:
                ref_logp = torch.where(inputs.mask, micro_batch["ref_logp"], 0.0)
                seen |= kl_stats("kl_ref", logprobs, ref_logp, mask)
                if config.kl_loss_coef:
                    kl = kl_estimate(inputs.logprobs, ref_logp, config.kl_estimator or "k3")
                    losses = losses + config.kl_loss_coef * kl
            if "teacher_logp" in micro_batch:
                seen |= kl_stats("kl_teacher", logprobs, micro_batch["teacher_logp"], mask)
            if config.entropy_coeff:
                losses = losses - config.entropy_coeff * entropy

            stats.add(seen, mask)
            _add_mismatch(stats, micro_batch, logprobs, old_logprobs)
            return aggregate(losses, micro_batch)

        return loss_fn

    def _preparation(self) -> Callable[[Batch], Batch]:
        steps = count()

        def prepare(minibatch: Batch) -> Batch:
            minibatch = {**minibatch}
            # The policy is the one before the update only in the first step.
            if next(steps) == 0:
                minibatch["before_update"] = minibatch["loss_mask"]
            if self.config.policy_loss in OF_PICKED_TOKENS:
                logprobs = self.compute_logp(minibatch)
                old_logprobs = _old_logprobs(minibatch, logprobs)
                minibatch["picked"] = picked_tokens(
                    minibatch,
                    logprobs,
                    old_logprobs,
                    self.config,
                    self.engine,
                )
            return minibatch

        return prepare

    def _logprobs(self, output: Any, micro_batch: Batch) -> tuple[Tensor, Tensor]:
        input_ids = micro_batch["input_ids"]
        cu_seqlens = micro_batch["cu_seqlens"]
        return token_logprobs(output, input_ids, cu_seqlens, self.config.temperature)

    @property
    def _recomputes(self) -> bool:
        return self.config.recompute_logprob or self.config.use_decoupled_loss

    def _scale(self, rewards: Tensor) -> Tensor:
        config = self.config
        scaled = (rewards.float() + config.reward_bias) * config.reward_scaling
        return scaled.clamp(-config.reward_clip, config.reward_clip)

    def _answer_advantages(
        self,
        batch: Batch,
        rewards: Tensor,
        loss_mask: Tensor,
    ) -> Tensor:
        sum_over_ranks = self.engine.all_reduce_stats
        estimator = ADV_ESTIMATORS[self.config.adv_estimator]
        if estimator is None:
            norm = self._norm(self.config.reward_norm)
            return grpo_advantages(rewards, loss_mask, norm, sum_over_ranks)

        # Greedy answers are scaled as the sampled ones are.
        baselines = None
        if "reward_baselines" in batch:
            baselines = self._scale(batch["reward_baselines"]).double()
        outcomes = Outcomes(
            rewards=rewards.double(),
            lengths=loss_mask.sum(1),
            group_size=self.config.group_size,
            baselines=baselines,
            sum_over_ranks=sum_over_ranks,
        )
        scores = estimator(outcomes).float()
        return torch.where(loss_mask, scores[:, None], 0.0)

    def _kl_of_rewards(self, batch: Batch) -> Tensor:
        logprobs = batch[self._sampled(batch)]
        estimator = self.config.kl_estimator or "k1"
        return kl_estimate(logprobs, batch["ref_logp"], estimator)

    def _update_kl_ctl(self, batch: Batch) -> dict[str, float]:
        """Adapt the coefficient to the KL of the batch: the mean over sequences of their mean KL,
        as in verl.
        """
        if "kl_rewards" not in batch:
            return {}
        used = self.kl_ctl.value
        if self.config.kl_target is None:
            return {"kl_ctl": used}

        mask = loss_mask_of(batch)
        kl = torch.where(mask, self._kl_of_rewards(batch), 0.0)
        n_tokens = mask.sum(1)
        # Mean KL of each sequence. All sequences count alike.
        means = kl.sum(1, dtype=torch.float64) / n_tokens.clamp(min=1)
        own = {
            "kl": means.sum().item(),
            "sequences": float((n_tokens > 0).sum()),
        }
        sums = self.engine.all_reduce_stats(own)
        n_sequences = sums["sequences"]
        self.kl_ctl.update(sums["kl"] / n_sequences, int(n_sequences))
        return {"kl_ctl": used}

    def _sampled(self, batch: Batch) -> str:
        """Key of the log-probabilities of the policy that the rewards belong to."""
        if self.config.recompute_logprob and "prox_logp" in batch:
            return "prox_logp"
        return "logprobs"

    def _norm(self, norm: NormConfig | None) -> NormConfig | None:
        if norm is None:
            return None
        return replace(norm, group_size=norm.group_size or self.config.group_size)

    def _validate_rewards(self, batch: Batch) -> None:
        validate_batch(batch)
        if "rewards" not in batch or batch["rewards"].dim() != 1:
            raise BatchError(f"the batch has no 'rewards' of shape [batch]; it has {sorted(batch)}")
        rewards = batch["rewards"]
        is_finite = torch.isfinite(rewards.float())
        if not bool(is_finite.all()):
            rows = (~is_finite).nonzero().flatten().tolist()
            raise BatchError(f"batch['rewards'] is NaN or infinite in row(s) {rows[:8]}")

        # Groups must be whole at the level that a norm or an estimator uses.
        for norm in (self.config.reward_norm, self.config.adv_norm):
            if norm is not None and "group" in (norm.mean_level, norm.std_level):
                check_groups(len(rewards), norm.group_size or self.config.group_size)
        self._validate_estimator(batch)
        if "values" in batch:
            require_per_token(batch, "values", loss_mask_of(batch), "")
        if self.config.kl_ctl:
            hint = "kl_ctl is not 0, so rewards need it"
            for key in (self._sampled(batch), "ref_logp"):
                require_per_token(batch, key, loss_mask_of(batch), hint)
        self._validate_truncated(batch)

    def _validate_truncated(self, batch: Batch) -> None:
        bootstraps = self.config.bootstrap_truncated
        key = "bootstrap_truncated" if bootstraps else "mask_truncated_completions"
        if getattr(self.config, key):
            truncated = batch.get("truncated")
            if truncated is None or truncated.shape != batch["rewards"].shape:
                raise BatchError(
                    f"the batch has no 'truncated' of shape [batch], which {key} needs: whether "
                    "each answer was cut off"
                )
        if bootstraps and "values" not in batch:
            raise BatchError(
                "bootstrap_truncated is for GAE, but the batch has no 'values'; leave the key out"
            )
        if bootstraps and not _is_finite(batch, "last_values", batch["truncated"]):
            raise BatchError(
                "the batch has no finite 'last_values' of shape [batch], which "
                "bootstrap_truncated needs; the critic's with_values gives them"
            )

    def _validate_estimator(self, batch: Batch) -> None:
        name = self.config.adv_estimator
        if name != "grpo" and "values" in batch:
            raise BatchError(
                f"the batch has 'values', which are for GAE, but adv_estimator is {name!r}; leave "
                "one out"
            )
        if name in OVER_GROUPS:
            check_groups(len(batch["rewards"]), self.config.group_size)
        if name == "remax" and not _is_finite(batch, "reward_baselines"):
            raise BatchError(
                "the batch has no finite 'reward_baselines' of shape [batch], which adv_estimator "
                "'remax' needs: the reward of the greedy answer to each prompt"
            )

    def _validate_update(self, batch: Batch) -> None:
        config = self.config
        mask = loss_mask_of(batch)
        hint = "give the batch that compute_advantages returns"
        require_per_token(batch, "advantages", mask, hint)

        # Log-probabilities of the sampling policy, and of the proximal one.
        if not config.recompute_logprob or config.use_decoupled_loss:
            hint = "the rollout must give them, or set recompute_logprob"
            require_per_token(batch, "logprobs", mask, hint)
        if self._recomputes and "prox_logp" in batch:
            require_per_token(batch, "prox_logp", mask, "")
        if config.prox_logp_method in ("loglinear", "metrics"):
            hint = "prox_logp_method needs the version that sampled each token, as rollouts give it"
            require_per_token(batch, "versions", mask, hint)

        # Log-probabilities of the reference policy.
        if config.kl_loss_coef or config.kl_target is not None or "ref_logp" in batch:
            hint = (
                "with kl_loss_coef or kl_target, the reference policy's compute_logp must give it"
            )
            require_per_token(batch, "ref_logp", mask, hint)

        # Statistics read these, where the batch has them.
        require_shape_per_token(batch, ("logprobs", "teacher_logp", "kl_rewards"))


def _is_finite(
    batch: Batch,
    key: str,
    rows: Tensor | None = None,
) -> bool:
    """Whether the batch has ``[B]`` numbers under ``key``, finite in ``rows`` (None: all)."""
    if key not in batch or batch[key].shape != batch["rewards"].shape:
        return False
    values = batch[key].float()
    if rows is not None:
        values = values[rows.bool()]
    return bool(torch.isfinite(values).all())


def _old_logprobs(batch: Batch, logprobs: Tensor) -> Tensor:
    if "prox_logp" in batch:
        return batch["prox_logp"]
    behave_logp = batch["behave_logp"]
    if "prox_alpha" not in batch:
        return behave_logp
    return interpolate_prox_logp(behave_logp, logprobs, batch["prox_alpha"], batch["loss_mask"])


def _add_mismatch(
    stats: TokenStats,
    micro_batch: Batch,
    logprobs: Tensor,
    old_logprobs: Tensor,
) -> None:
    """Distance from the sampling policy to the trainer's before the update. Without a forward pass
    for the latter, it covers only the first mini-batch.
    """
    has_prox = "prox_logp" in micro_batch
    is_known = has_prox or "before_update" in micro_batch
    if "behave_logp" not in micro_batch or not is_known:
        return
    # Other entries may be NaN, such as those of tokens that no rollout sampled.
    behave_logp = micro_batch["behave_logp"]
    before_update = old_logprobs if has_prox else logprobs
    mask = micro_batch["loss_mask"].bool() & torch.isfinite(behave_logp)
    seen = kl_stats("behave_kl", behave_logp, before_update, mask)
    if has_prox and "prox_alpha" in micro_batch:
        alpha = micro_batch["prox_alpha"]
        seen |= approximation_errors(old_logprobs, behave_logp, logprobs, alpha, mask)
    stats.add(seen, mask)
