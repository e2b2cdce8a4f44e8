"""What the PPO/GRPO actor and critic can be told, under AReaL's names wherever AReaL has one."""

from dataclasses import dataclass

from ...utils.config import require_choice, require_range
from ...utils.errors import ConfigError
from ..config import TrainEngineConfig

LEVELS = ("group", "batch", None)
KL_ESTIMATORS = ("k2", "k3")


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
    """A policy trained with PPO or, with ``reward_norm`` over groups and no values, with GRPO."""

    group_size: int = 1
    """Samples of one prompt; they stand next to each other in the batch."""
    ppo_n_minibatches: int = 4
    """Optimizer steps in one `ppo_update`."""
    eps_clip: float = 0.2
    """The ratio is clipped to at least ``1 - eps_clip``, and to at most ``1 + eps_clip_higher``."""
    eps_clip_higher: float | None = None
    """Upper clip (DAPO); null takes ``eps_clip``."""
    c_clip: float | None = None
    """Dual clip: with a negative advantage the loss is at most ``c_clip * |advantage|``; null for none."""
    reward_norm: NormConfig | None = None
    """Normalisation of rewards; for GRPO ``{mean_level: group, std_level: group}``."""
    reward_scaling: float = 1.0
    """Rewards become ``(reward + reward_bias) * reward_scaling``."""
    reward_bias: float = 0.0
    """Added before the scaling."""
    reward_clip: float = 20.0
    """Scaled rewards are clipped to plus or minus this, before they are normalised."""
    adv_norm: NormConfig | None = None
    """Normalisation of advantages over loss tokens."""
    discount: float = 1.0
    """GAE's gamma. Used only when the batch has ``values``."""
    gae_lambda: float = 1.0
    """GAE's lambda. Used only when the batch has ``values``."""
    kl_loss_coef: float = 0.0
    """Weight in the loss of the KL to the reference policy (``ref_logp`` in the batch). AReaL's ``kl_ctl`` is another
    thing, a penalty on rewards."""
    kl_estimator: str = "k3"
    """``k3`` or ``k2``; k1 would have an expected gradient of zero as a loss."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    recompute_logprob: bool = False
    """Clip against this policy as it stood before the update, not against the ``logprobs`` of the rollout."""

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
        require_range("entropy_coeff", self.entropy_coeff, low=0.0)
        norm = self.reward_norm
        if norm is not None and norm.mean_level == "group" and (norm.group_size or self.group_size) == 1:
            raise ConfigError(
                "config key 'reward_norm.mean_level' is 'group' but 'group_size' is 1: every reward would become 0; "
                "set group_size to the number of samples of a prompt"
            )


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
