"""Configuration of the PPO/GRPO actor and critic, with AReaL's names where AReaL has them."""

from dataclasses import dataclass

from ...utils.config import (
    require_at_least,
    require_choice,
    require_numbers,
    require_range,
)
from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from .losses import LOSS_AGG_MODES
from .off_policy import PROX_LOGP_METHODS, RejectionSamplingConfig, rejection_from_rollout_keys

ADV_ESTIMATORS = ("grpo", "remax", "opo", "gpg", "grpo_passk")
"""Names in ``adv_estimator``. Their functions are in `holdfast.engine.rl.advantages`."""
OVER_GROUPS = ("opo", "gpg", "grpo_passk")
"""Estimators that compare answers to one prompt."""
POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "gpg", "gmpo", "clip_cov", "kl_cov")
"""Names in ``policy_loss``. Their functions are in `holdfast.engine.rl.policy_losses`."""
WITH_SEQUENCE_RATIOS = ("ppo", "gspo", "sapo")
"""Losses that support ``importance_sampling_level: sequence``."""
OF_PICKED_TOKENS = ("clip_cov", "kl_cov")
"""Losses that need `PolicyInputs.picked`."""
LEVELS = ("group", "batch", None)
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")


@dataclass
class NormConfig:
    """Normalisation of rewards or advantages: ``(x - mean) / (std + eps)``."""

    mean_level: str | None = "batch"
    """Level of the mean: ``group``, ``batch`` (all ranks), or null for no centring."""
    mean_leave1out: bool = False
    """Leave the value itself out of its mean (RLOO)."""
    std_level: str | None = "batch"
    """Level of the standard deviation: ``group``, ``batch``, or null for no scaling."""
    std_unbiased: bool = True
    """Divide by n - 1 instead of n."""
    eps: float = 1e-5
    """Added to the standard deviation."""
    group_size: int | None = None
    """Rows in a group, adjacent in the batch. Null takes the actor's ``group_size``."""

    def __post_init__(self) -> None:
        require_numbers(self)
        require_choice("mean_level", self.mean_level, LEVELS)
        require_choice("std_level", self.std_level, LEVELS)
        require_at_least(self, eps=0.0, group_size=1)


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """A policy trained with PPO or, with ``reward_norm`` over groups and no values, with GRPO.

    docs/algorithms.md lists the names of its keys in AReaL, verl and TRL.
    """

    group_size: int = 1
    """Samples per prompt, adjacent in the batch."""
    ppo_n_minibatches: int = 4
    """Optimizer steps in one `ppo_update`."""
    policy_loss: str = "ppo"
    """``ppo``, ``gspo``, ``cispo``, ``sapo``, ``gpg``, ``gmpo``, ``clip_cov`` or ``kl_cov``: see
    `holdfast.engine.rl.policy_losses`."""
    importance_sampling_level: str = "token"
    """``token``, or ``sequence``: the ratio of a token is the geometric mean over its sequence
    (with ``ppo``: GSPO).
    """
    loss_agg_mode: str | None = None
    """Aggregation of token losses: ``token-mean``, ``seq-mean-token-mean``, ``seq-mean-token-sum``
    or ``seq-mean-token-sum-norm``, always over all ranks and micro-batches. Null:
    ``seq-mean-token-mean`` with ``gmpo``, which has one loss per sequence, else ``token-mean``.
    """
    loss_scale_factor: float | None = None
    """Constant divisor for ``seq-mean-token-sum-norm`` (Dr. GRPO), usually the length of the
    longest answer.
    """
    eps_clip: float = 0.2
    """The ratio is clipped to at least ``1 - eps_clip``, and to at most ``1 + eps_clip_higher``."""
    eps_clip_higher: float | None = None
    """Upper clip (DAPO). Null takes ``eps_clip``."""
    c_clip: float | None = None
    """Dual clip: with a negative advantage the loss is at most ``c_clip * |advantage|``. Null for
    none.
    """
    sapo_tau_pos: float = 1.0
    """``sapo``: sharpness of the gate at positive advantages."""
    sapo_tau_neg: float = 1.05
    """``sapo``: sharpness at other advantages."""
    clip_cov_ratio: float = 0.0002
    """``clip_cov``: share of the loss tokens of a mini-batch that lose their gradient, at least one
    token ...
    """
    clip_cov_lb: float = 1.0
    """... drawn from those with a covariance above this ..."""
    clip_cov_ub: float = 5.0
    """... and below this."""
    kl_cov_ratio: float = 0.0002
    """``kl_cov``: share of the loss tokens of a mini-batch, with the largest covariance, that get a
    penalty ...
    """
    ppo_kl_coef: float = 0.1
    """... with this coefficient."""
    reward_norm: NormConfig | None = None
    """Normalisation of rewards. For GRPO ``{mean_level: group, std_level: group}``."""
    reward_scaling: float = 1.0
    """Rewards become ``(reward + reward_bias) * reward_scaling``."""
    reward_bias: float = 0.0
    """Added before the scaling."""
    reward_clip: float = 20.0
    """Scaled rewards are clipped to plus or minus this, before they are normalised."""
    adv_estimator: str = "grpo"
    """Advantage of an answer: ``grpo`` (``reward_norm``), or instead ``remax`` (minus
    ``reward_baselines`` of the batch), ``opo``, ``gpg`` or ``grpo_passk``: see
    `holdfast.engine.rl.advantages`.
    """
    adv_norm: NormConfig | None = None
    """Normalisation of advantages over loss tokens."""
    discount: float = 1.0
    """GAE's gamma. Used when the batch has ``values``, and for the penalties of ``kl_ctl``."""
    gae_lambda: float = 1.0
    """GAE's lambda. Used like ``discount``."""
    bootstrap_truncated: bool = False
    """GAE of truncated answers (``truncated`` in the batch) continues with the value after their
    last token (``last_values``) instead of 0.
    """
    kl_ctl: float = 0.0
    """Penalty on the reward of every token: this coefficient times the estimated KL to the
    reference policy (``ref_logp`` in the batch).
    """
    kl_target: float | None = None
    """Target KL to the reference policy, in nats per token. ``kl_ctl`` is adapted to it after every
    update, and the engine saves the adapted coefficient. Null: a fixed ``kl_ctl``.
    """
    kl_horizon: int = 10000
    """Sequences in which a KL that stays 20 % or more off the target changes the coefficient by
    about a fifth.
    """
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss (``ref_logp`` in the batch)."""
    kl_estimator: str | None = None
    """Estimator of the KL to the reference policy for ``kl_ctl`` and ``kl_loss_coef``: ``k1`` (in
    the loss with the gradient of k2), ``k2``, ``k3``, or ``low_var_kl``, which is k3 up to 10.
    Null: k1 in rewards, k3 in the loss.
    """
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    distill_loss_weight: float = 0.0
    """Weight of the teacher in on-policy distillation: the advantage of each token gets this times
    ``log p_teacher - log p_student``. See `holdfast.engine.rl.teacher`.
    """
    rl_loss_weight: float = 1.0
    """Weight of the advantages from rewards beside those from a teacher. 0: distillation alone."""
    allow_other_teacher: bool = False
    """Whether a run may go on with another teacher than before."""
    recompute_logprob: bool = False
    """Clip against the policy before the update, not against the ``logprobs`` of the rollout."""
    use_decoupled_loss: bool = False
    """As ``recompute_logprob``, and weigh each token by its probability under that policy, divided
    by its probability under the sampling policy.
    """
    rejection_sampling: RejectionSamplingConfig | None = None
    """Bounds for these weights. Null for none."""
    prox_logp_method: str = "recompute"
    """Source of the proximal log-probabilities for ``use_decoupled_loss`` (see
    `holdfast.engine.rl.off_policy`):
    ``recompute``: a forward pass before the update.
    ``loglinear``: interpolation by the ``versions`` of the batch, without that pass.
    ``metrics``: as ``recompute``, with the error of interpolation in the statistics.
    ``reuse_train_logp``: log-probabilities of the single training step itself.
    """
    rollout_is: str | None = None
    """verl's name: ``token`` or ``sequence`` sets ``use_decoupled_loss``, with weights limited to
    the threshold.
    """
    rollout_is_threshold: float = 2.0
    """verl's name: limit of the weights."""
    rollout_rs: str | None = None
    """verl's name: ``token_k1`` ... ``seq_max_k3`` sets ``use_decoupled_loss``, and rejects beyond
    the threshold.
    """
    rollout_rs_threshold: str | None = None
    """verl's name: a number, or ``lower_upper``."""
    overlong_reward_penalty: bool = False
    """DAPO's soft punishment: an answer of more than ``max_new_tokens - overlong_tokens`` tokens
    loses up to ``overlong_penalty_factor`` of reward, in proportion to its excess length.
    """
    overlong_tokens: int | None = None
    """Number of tokens over which the penalty grows."""
    overlong_penalty_factor: float | None = None
    """The largest penalty."""
    max_new_tokens: int | None = None
    """Tokens after which the rollout truncates an answer."""
    mask_truncated_completions: bool = False
    """Truncated answers (``truncated`` in the batch) have no loss token. They still count in their
    group's mean.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_critic:
            raise ConfigError(
                "config key 'is_critic' is True; an actor has a language-model head, expected False"
            )
        # Single keys first, then what does not go together.
        for key in ("group_size", "ppo_n_minibatches", "kl_horizon", "max_new_tokens"):
            require_range(key, getattr(self, key), low=1)
        for key in ("eps_clip", "discount", "gae_lambda", "clip_cov_ratio", "kl_cov_ratio"):
            require_range(key, getattr(self, key), low=0.0, high=1.0)
        for key in (
            "eps_clip_higher",
            "reward_clip",
            "kl_ctl",
            "kl_loss_coef",
            "entropy_coeff",
            "ppo_kl_coef",
            "distill_loss_weight",
            "rl_loss_weight",
            "overlong_penalty_factor",
        ):
            require_range(key, getattr(self, key), low=0.0)
        require_at_least(self, c_clip=1.0)
        require_range(
            "overlong_tokens", self.overlong_tokens, low=1, high=self.max_new_tokens or float("inf")
        )
        require_choice("kl_estimator", self.kl_estimator, (None, *KL_ESTIMATORS))
        require_choice("adv_estimator", self.adv_estimator, ADV_ESTIMATORS)
        require_choice("policy_loss", self.policy_loss, POLICY_LOSSES)
        require_choice(
            "importance_sampling_level", self.importance_sampling_level, ("token", "sequence")
        )
        require_choice("loss_agg_mode", self.loss_agg_mode, (None, *LOSS_AGG_MODES))
        require_choice("prox_logp_method", self.prox_logp_method, PROX_LOGP_METHODS)

        # verl's keys first: the checks see what they set.
        self._read_rollout_keys()
        self._check_loss()
        self._check_off_policy()
        self._check_advantages()

    def _check_advantages(self) -> None:
        if self.rl_loss_weight != 1.0 and not self.distill_loss_weight:
            raise ConfigError(
                f"config key 'rl_loss_weight' is {self.rl_loss_weight}, but "
                "'distill_loss_weight' is 0, so that there is no teacher to weigh rewards "
                "against; set that, or leave this out"
            )
        if self.overlong_reward_penalty:
            for key in ("max_new_tokens", "overlong_tokens", "overlong_penalty_factor"):
                if getattr(self, key) is None:
                    raise ConfigError(
                        f"config key 'overlong_reward_penalty' is True, but {key!r} is null; set it"
                    )
        # 0 stays 0.
        if self.kl_target is not None and not (self.kl_target > 0 and self.kl_ctl > 0):
            raise ConfigError(
                f"config keys 'kl_target' and 'kl_ctl' are {self.kl_target} and {self.kl_ctl}; an "
                "adaptive coefficient is multiplied, expected both to be more than 0"
            )

        # Estimators have a baseline of their own.
        norm = self.reward_norm
        if self.adv_estimator != "grpo" and norm is not None:
            raise ConfigError(
                f"config key 'adv_estimator' is {self.adv_estimator!r}, which has a baseline of "
                "its own, but 'reward_norm' is set; set one of them to its default"
            )
        if self.adv_estimator in OVER_GROUPS and self.group_size == 1:
            raise ConfigError(
                f"config key 'adv_estimator' is {self.adv_estimator!r}, which compares answers to "
                "one prompt, but 'group_size' is 1"
            )
        # Truncated answers have a value after their end, or no loss token.
        if self.bootstrap_truncated and self.mask_truncated_completions:
            raise ConfigError(
                "config keys 'bootstrap_truncated' and 'mask_truncated_completions' are both "
                "True, but answers without a loss token need no advantage; leave one out"
            )
        # A group of one has itself as its mean.
        if norm is not None and norm.mean_level == "group":
            group_size = norm.group_size or self.group_size
            if group_size == 1:
                raise ConfigError(
                    "config key 'reward_norm.mean_level' is 'group' but 'group_size' is 1: every "
                    "reward would become 0; set group_size to the number of samples of a prompt"
                )

    @property
    def ratio_level(self) -> str:
        """Level of the ratios in the loss: ``token`` or ``sequence``."""
        return "sequence" if self.policy_loss == "gspo" else self.importance_sampling_level

    @property
    def agg_mode(self) -> str:
        """``loss_agg_mode``, or the default for null."""
        if self.loss_agg_mode is not None:
            return self.loss_agg_mode
        return "seq-mean-token-mean" if self.policy_loss == "gmpo" else "token-mean"

    def _check_loss(self) -> None:
        _check_scale_factor(self.agg_mode, self.loss_scale_factor)
        if self.policy_loss == "gmpo" and self.agg_mode != "seq-mean-token-mean":
            raise ConfigError(
                f"config key 'loss_agg_mode' is {self.loss_agg_mode!r}, but policy_loss 'gmpo' "
                "has one loss for each sequence, whatever its length; leave 'loss_agg_mode' out"
            )

        # Settings of single losses.
        for key in ("sapo_tau_pos", "sapo_tau_neg"):
            value = getattr(self, key)
            if not value > 0:
                raise ConfigError(f"config key {key!r} is {value}; expected more than 0")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ConfigError(
                f"config key 'clip_cov_lb' is {self.clip_cov_lb}, not below 'clip_cov_ub', "
                f"{self.clip_cov_ub}: no token lies between them"
            )

        # Settings that not every loss supports.
        of_sequences = self.importance_sampling_level == "sequence"
        if of_sequences and self.policy_loss not in WITH_SEQUENCE_RATIOS:
            raise ConfigError(
                "config key 'importance_sampling_level' is 'sequence', but policy_loss "
                f"{self.policy_loss!r} has no ratio of sequences; expected policy_loss to be one "
                f"of {', '.join(map(repr, WITH_SEQUENCE_RATIOS))}"
            )
        if self.c_clip is not None and self.policy_loss not in ("ppo", "gspo"):
            raise ConfigError(
                f"config key 'c_clip' is {self.c_clip}, but policy_loss {self.policy_loss!r} does "
                "not clip so"
            )
        if self.use_decoupled_loss and self.policy_loss == "sapo":
            raise ConfigError(
                "config key 'use_decoupled_loss' is True, but policy_loss 'sapo' is not defined "
                "for it; take another"
            )

    def _check_off_policy(self) -> None:
        # Keys of the decoupled loss alone.
        if self.prox_logp_method != "recompute" and not self.use_decoupled_loss:
            raise ConfigError(
                f"config key 'prox_logp_method' is {self.prox_logp_method!r}, but "
                "'use_decoupled_loss' is False, so that there is no proximal policy; set that, or "
                "leave this out"
            )
        if self.prox_logp_method == "reuse_train_logp" and self.ppo_n_minibatches != 1:
            raise ConfigError(
                "config key 'prox_logp_method' is 'reuse_train_logp', which takes the policy of "
                "the training step for the one before the update, but 'ppo_n_minibatches' is "
                f"{self.ppo_n_minibatches}; set it to 1"
            )
        _check_minibatches(self)
        if self.rejection_sampling is not None and not self.use_decoupled_loss:
            raise ConfigError(
                "config key 'rejection_sampling' is set, but 'use_decoupled_loss' is False, so "
                "that there are no weights to bound; set that, or leave this out"
            )

    def _read_rollout_keys(self) -> None:
        """Convert verl's keys to ``use_decoupled_loss`` and ``rejection_sampling``, and reset them
        to null.
        """
        found = rejection_from_rollout_keys(
            self.rollout_is,
            self.rollout_is_threshold,
            self.rollout_rs,
            self.rollout_rs_threshold,
        )
        if found is None:
            return
        if self.rejection_sampling is not None:
            raise ConfigError(
                "config keys 'rollout_is' and 'rollout_rs' (verl's) say what 'rejection_sampling' "
                "(AReaL's) does, which is set too; leave one of them out"
            )
        self.use_decoupled_loss = True
        self.rejection_sampling = found

        # A copy of this config would convert them again.
        self.rollout_is = None
        self.rollout_rs = None
        self.rollout_rs_threshold = None


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """A value function trained together with a PPO actor."""

    is_critic: bool = True
    """Always True."""
    ppo_n_minibatches: int = 4
    """Optimizer steps in one `ppo_update`."""
    eps_clip: float = 0.5
    """New values count at most this far from the old ones."""
    loss_agg_mode: str = "token-mean"
    """Aggregation of token losses, see `PPOActorConfig.loss_agg_mode`."""
    loss_scale_factor: float | None = None
    """Constant divisor for ``seq-mean-token-sum-norm``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_critic:
            raise ConfigError(
                "config key 'is_critic' is False; a critic has a value head, expected True"
            )
        require_choice("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)
        _check_scale_factor(self.loss_agg_mode, self.loss_scale_factor)
        require_at_least(self, ppo_n_minibatches=1, eps_clip=0.0)
        _check_minibatches(self)


def _check_minibatches(config: "PPOActorConfig | PPOCriticConfig") -> None:
    granularity = config.mb_spec.granularity
    if config.ppo_n_minibatches > 1 and granularity > 1:
        raise ConfigError(
            f"config keys 'ppo_n_minibatches' and 'mb_spec.granularity' are "
            f"{config.ppo_n_minibatches} and {granularity}, but mini-batches are cut between any "
            "two rows; set one of them to 1"
        )


def _check_scale_factor(mode: str, factor: float | None) -> None:
    if factor is not None and not factor > 0:
        raise ConfigError(f"config key 'loss_scale_factor' is {factor}; expected more than 0")
    if (mode == "seq-mean-token-sum-norm") != (factor is not None):
        raise ConfigError(
            f"config key 'loss_scale_factor' is {factor} and 'loss_agg_mode' is {mode!r}; the "
            "factor belongs to 'seq-mean-token-sum-norm', which does not go without it"
        )
