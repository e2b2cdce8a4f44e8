"""What the PPO/GRPO actor and critic can be told, under AReaL's names wherever AReaL has one."""

from dataclasses import dataclass

from ...utils.config import require_choice, require_range
from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from .aggregation import LOSS_AGG_MODES
from .estimators import ADV_ESTIMATORS, OVER_GROUPS
from .off_policy import RejectionSamplingConfig
from .policy_losses import POLICY_LOSSES, WITH_SEQUENCE_RATIOS

LEVELS = ("group", "batch", None)
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")


@dataclass
class NormConfig:
    """How rewards or advantages are normalised: ``(x - mean) / (std + eps)``."""

    mean_level: str | None = "batch"
    """Over what the mean is taken: ``group``, ``batch`` (all ranks), or null for no centring."""
    mean_leave1out: bool = False
    """Leave the value itself out of its mean (RLOO)."""
    std_level: str | None = "batch"
    """Over what the standard deviation is taken: ``group``, ``batch``, or null for no scaling."""
    std_unbiased: bool = True
    """Divide by n - 1 instead of n."""
    eps: float = 1e-5
    """Added to the standard deviation."""
    group_size: int | None = None
    """Rows in a group, contiguous in the batch; null takes the actor's ``group_size``."""

    def __post_init__(self) -> None:
        require_choice("mean_level", self.mean_level, LEVELS)
        require_choice("std_level", self.std_level, LEVELS)
        require_range("eps", self.eps, low=0.0)
        require_range("group_size", self.group_size, low=1)


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """A policy trained with PPO or, with ``reward_norm`` over groups and no values, with GRPO.

    docs/algorithms.md has the names that AReaL, verl and TRL have for its keys.
    """

    group_size: int = 1
    """Samples of one prompt; they stand next to each other in the batch."""
    ppo_n_minibatches: int = 4
    """Optimizer steps in one `ppo_update`."""
    policy_loss: str = "ppo"
    """``ppo``, ``gspo``, ``cispo``, ``sapo``, ``gpg`` or ``gmpo``: see `holdfast.engine.rl.policy_losses`."""
    importance_sampling_level: str = "token"
    """``token``, or ``sequence``: the ratio of a token is the geometric mean of its sequence's (with ``ppo``: GSPO)."""
    loss_agg_mode: str = "token-mean"
    """How losses of tokens become one: ``token-mean``, ``seq-mean-token-mean``, ``seq-mean-token-sum`` or
    ``seq-mean-token-sum-norm``, always over all ranks and micro-batches."""
    loss_scale_factor: float | None = None
    """The constant that ``seq-mean-token-sum-norm`` divides by (Dr. GRPO); usually the length of the longest answer."""
    eps_clip: float = 0.2
    """The ratio is clipped to at least ``1 - eps_clip``, and to at most ``1 + eps_clip_higher``."""
    eps_clip_higher: float | None = None
    """Upper clip (DAPO); null takes ``eps_clip``."""
    c_clip: float | None = None
    """Dual clip: with a negative advantage the loss is at most ``c_clip * |advantage|``; null for none."""
    sapo_tau_pos: float = 1.0
    """``sapo``: sharpness of the gate at positive advantages."""
    sapo_tau_neg: float = 1.05
    """``sapo``: and at the others."""
    reward_norm: NormConfig | None = None
    """Normalisation of rewards; for GRPO ``{mean_level: group, std_level: group}``."""
    reward_scaling: float = 1.0
    """Rewards become ``(reward + reward_bias) * reward_scaling``."""
    reward_bias: float = 0.0
    """Added before the scaling."""
    reward_clip: float = 20.0
    """Scaled rewards are clipped to plus or minus this, before they are normalised."""
    adv_estimator: str = "grpo"
    """Advantage of an answer: ``grpo`` (``reward_norm``), or in its place ``remax`` (less ``reward_baselines`` of the
    batch), ``opo``, ``gpg`` or ``grpo_passk``: see `holdfast.engine.rl.estimators`."""
    adv_norm: NormConfig | None = None
    """Normalisation of advantages over loss tokens."""
    discount: float = 1.0
    """GAE's gamma. Used only when the batch has ``values``."""
    gae_lambda: float = 1.0
    """GAE's lambda. Used only when the batch has ``values``."""
    kl_ctl: float = 0.0
    """Penalty on the reward of every token: so many times its k1 estimate of the KL to the reference policy
    (``ref_logp`` in the batch)."""
    kl_loss_coef: float = 0.0
    """Weight in the loss of the KL to the reference policy (``ref_logp`` in the batch)."""
    kl_estimator: str = "k3"
    """Of the KL in the loss: ``k1`` (with the gradient of k2), ``k2``, ``k3``, or ``low_var_kl``, k3 up to 10."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    recompute_logprob: bool = False
    """Clip against this policy as it stood before the update, not against the ``logprobs`` of the rollout."""
    use_decoupled_loss: bool = False
    """Do so, and weigh each token by its probability under that policy over that under the one that sampled it."""
    rejection_sampling: RejectionSamplingConfig | None = None
    """Bounds of these weights; null for none."""
    overlong_reward_penalty: bool = False
    """DAPO's soft punishment: an answer of more than ``max_new_tokens - overlong_tokens`` tokens loses up to
    ``overlong_penalty_factor`` of its reward, in proportion to how far it is beyond."""
    overlong_tokens: int | None = None
    """Length of the stretch in which the penalty grows."""
    overlong_penalty_factor: float | None = None
    """The largest penalty."""
    max_new_tokens: int | None = None
    """Tokens after which the rollout cuts an answer off."""
    mask_truncated_completions: bool = False
    """Answers that were cut off (``truncated`` in the batch) have no loss token; they count in their group's mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_critic:
            raise ConfigError("config key 'is_critic' is True; an actor has a language-model head, expected False")
        require_range("group_size", self.group_size, low=1)
        require_range("ppo_n_minibatches", self.ppo_n_minibatches, low=1)
        require_range("eps_clip", self.eps_clip, low=0.0, high=1.0)
        require_range("eps_clip_higher", self.eps_clip_higher, low=0.0)
        require_range("c_clip", self.c_clip, low=1.0)
        require_range("reward_clip", self.reward_clip, low=0.0)
        require_range("discount", self.discount, low=0.0, high=1.0)
        require_range("gae_lambda", self.gae_lambda, low=0.0, high=1.0)
        require_range("kl_loss_coef", self.kl_loss_coef, low=0.0)
        require_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        self._check_loss()
        self._check_overlong()
        require_range("entropy_coeff", self.entropy_coeff, low=0.0)
        self._check_advantages()

    def _check_advantages(self) -> None:
        require_choice("adv_estimator", self.adv_estimator, tuple(ADV_ESTIMATORS))
        norm = self.reward_norm
        if self.adv_estimator != "grpo" and norm is not None:
            raise ConfigError(
                f"config key 'adv_estimator' is {self.adv_estimator!r}, which has a baseline of its own, but "
                "'reward_norm' is set; set one of them to its default"
            )
        if self.adv_estimator in OVER_GROUPS and self.group_size == 1:
            raise ConfigError(
                f"config key 'adv_estimator' is {self.adv_estimator!r}, which compares answers to one prompt, but "
                "'group_size' is 1"
            )
        if norm is not None and norm.mean_level == "group" and (norm.group_size or self.group_size) == 1:
            raise ConfigError(
                "config key 'reward_norm.mean_level' is 'group' but 'group_size' is 1: every reward would become 0; "
                "set group_size to the number of samples of a prompt"
            )

    @property
    def ratio_level(self) -> str:
        """``token`` or ``sequence``: of what the loss takes ratios."""
        return "sequence" if self.policy_loss == "gspo" else self.importance_sampling_level

    def _check_loss(self) -> None:
        require_choice("policy_loss", self.policy_loss, tuple(POLICY_LOSSES))
        require_choice("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        require_choice("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)
        require_range("kl_ctl", self.kl_ctl, low=0.0)
        for key in ("loss_scale_factor", "sapo_tau_pos", "sapo_tau_neg"):
            if (value := getattr(self, key)) is not None and not value > 0:
                raise ConfigError(f"config key {key!r} is {value}; expected more than 0")
        if self.importance_sampling_level == "sequence" and self.policy_loss not in WITH_SEQUENCE_RATIOS:
            raise ConfigError(
                f"config key 'importance_sampling_level' is 'sequence', but policy_loss {self.policy_loss!r} has no "
                f"ratio of sequences; expected policy_loss to be one of {', '.join(map(repr, WITH_SEQUENCE_RATIOS))}"
            )
        if (self.loss_agg_mode == "seq-mean-token-sum-norm") != (self.loss_scale_factor is not None):
            raise ConfigError(
                f"config key 'loss_scale_factor' is {self.loss_scale_factor} and 'loss_agg_mode' is "
                f"{self.loss_agg_mode!r}; the factor belongs to 'seq-mean-token-sum-norm', which does not go without it"
            )
        if self.c_clip is not None and self.policy_loss not in ("ppo", "gspo"):
            raise ConfigError(
                f"config key 'c_clip' is {self.c_clip}, but policy_loss {self.policy_loss!r} does not clip so"
            )
        if self.use_decoupled_loss and self.policy_loss == "sapo":
            raise ConfigError(
                "config key 'use_decoupled_loss' is True, but policy_loss 'sapo' is not defined for it; take another"
            )
        if self.rejection_sampling is not None and not self.use_decoupled_loss:
            raise ConfigError(
                "config key 'rejection_sampling' is set, but 'use_decoupled_loss' is False, so that there are no "
                "weights to bound; set that, or leave this out"
            )

    def _check_overlong(self) -> None:
        require_range("max_new_tokens", self.max_new_tokens, low=1)
        require_range("overlong_tokens", self.overlong_tokens, low=1, high=self.max_new_tokens or float("inf"))
        require_range("overlong_penalty_factor", self.overlong_penalty_factor, low=0.0)
        needed = ("max_new_tokens", "overlong_tokens", "overlong_penalty_factor")
        if self.overlong_reward_penalty and (missing := [key for key in needed if getattr(self, key) is None]):
            raise ConfigError(f"config key 'overlong_reward_penalty' is True, but {missing[0]!r} is null; set it")


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """A value function trained beside a PPO actor."""

    is_critic: bool = True
    """Always True."""
    ppo_n_minibatches: int = 4
    """Optimizer steps in one `ppo_update`."""
    eps_clip: float = 0.5
    """New values count at most this far from the old ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_critic:
            raise ConfigError("config key 'is_critic' is False; a critic has a value head, expected True")
        require_range("ppo_n_minibatches", self.ppo_n_minibatches, low=1)
        require_range("eps_clip", self.eps_clip, low=0.0)
