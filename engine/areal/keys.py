"""What becomes of each key of an AReaL file: one table, by the class that the section becomes.

Read at AReaL cbff54d (August 2026). A key is ``same`` (one of that name means that), ``renamed``, ``ignored`` (it says
nothing about what is computed) or ``refused`` (it would change what is computed, and there is nothing like it here)
unless it has the value that changes nothing. docs/areal.md is this table; `load_areal` reads by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class _Nothing:
    """Stands for a value that there is not; None is a value of YAML."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


@dataclass(frozen=True)
class Fate:
    """What becomes of one key.

    Attributes:
        kind: ``same``, ``renamed``, ``ignored`` or ``refused``.
        why: a remark; of what is ignored or refused, the reason.
        to: the key here, of what is renamed.
        value: what ``to`` is set to when the key is true; `NOTHING`: to the value of the key.
        neutral: value at which it says nothing: not refused, and not worth a warning.
        absent: AReaL's default where it differs from the one here and changes what is computed: taken when the key is
            absent.
    """

    kind: str
    why: str = ""
    to: str = ""
    value: Any = NOTHING
    neutral: Any = NOTHING
    absent: Any = NOTHING


def _ignored(why: str, neutral: Any = NOTHING) -> Fate:
    return Fate("ignored", why, neutral=neutral)


def _refused(why: str, neutral: Any = NOTHING) -> Fate:
    return Fate("refused", why, neutral=neutral)


SAME = Fate("same")
PLACEMENT = "placement and workers are the caller's (`WorkerGroup`, torchrun)"
MEGATRON = "trained with FSDP2, in `dtype`"
PUBLISHING = "weights go to servers as `WeightUpdateMeta` says"
MEMORY = "memory and speed only"
FLOAT16 = "for float16, which is not trained in here"
STATISTICS = "statistics only"

_ENGINE = {
    **dict.fromkeys(("experiment_name", "trial_name", "init_from_scratch", "is_critic", "temperature"), SAME),
    **dict.fromkeys(("gradient_checkpointing", "grad_reduce_dtype"), SAME),
    "path": Fate("same", "code that comes with a model runs only with `trust_remote_code: true`"),
    "attn_impl": Fate("same", "when absent, what transformers takes, not `flash_attention_2`"),
    "dtype": Fate("same", "not float16"),
    "disable_dropout": Fate("same", absent=False),
    "logprobs_chunk_size": Fate("same", "when absent, as many rows as fit in 128 MiB, not 1024"),
    "pad_to_maximum": SAME,
    "mb_spec.n_mbs": Fate("same", "null is 1"),
    "mb_spec.granularity": SAME,
    "mb_spec.n_mbs_divisor": SAME,
    "mb_spec.max_tokens_per_mb": Fate("same", "when absent 8192, not without a limit; the gradient is the same"),
    "mb_spec.packing_algorithm": SAME,
    "optimizer": Fate("same", "null: the engine does not train", absent=None),
    "optimizer.type": Fate("same", "the moments of `adam_bf16` are rounded at random, not to the nearest"),
    **dict.fromkeys((f"optimizer.{key}" for key in ("lr", "weight_decay", "beta1", "beta2", "eps")), SAME),
    **dict.fromkeys((f"optimizer.{key}" for key in ("lr_scheduler_type", "min_lr_ratio", "gradient_clipping")), SAME),
    "optimizer.warmup_steps": Fate("same", "the first step is at 1 / (n + 1) of the rate, AReaL's at 0"),
    "optimizer.warmup_steps_proportion": Fate("same", "likewise"),
    "optimizer.initial_loss_scale": _ignored(FLOAT16, 2**32),
    "optimizer.min_loss_scale": _ignored(FLOAT16, 1.0),
    "optimizer.loss_scale_window": _ignored(FLOAT16, 5),
    "optimizer.hysteresis": _ignored(FLOAT16, 2),
    "optimizer_dtype": _refused("parameters are float32; for moments in bfloat16 there is `adam_bf16`", "float32"),
    "fsdp.wrap_policy": _ignored("null: the model's own blocks, as here", neutral=None),
    "fsdp.wrap_policy.transformer_layer_cls_to_wrap": SAME,
    "fsdp.offload_params": _ignored(MEMORY, neutral=False),
    "fsdp.memory_efficient_load": _ignored("weights are always read shard by shard", neutral=False),
    "fsdp.per_layer_optim_step": _ignored(MEMORY, neutral=False),
    "fsdp.optim_step_prefetch_layers": _ignored(MEMORY, neutral=1),
    "fsdp.shard_vision_across_sp": _ignored(MEMORY, neutral=False),
    "use_kernels": _ignored(MEMORY, neutral=False),
    "offload": _ignored(MEMORY, neutral=False),
    "enable_tree_training": _ignored(MEMORY, neutral=False),
    **dict.fromkeys(("use_lora", "lora_rank", "lora_alpha"), SAME),
    "target_modules": Fate("same", "empty, or with `all-linear`: every linear layer but the head"),
    "peft_type": Fate("same", "`lora` alone"),
    "backend": _ignored("FSDP2 over all ranks, whatever it says"),
    "megatron.enable_mtp": _refused("multi-token prediction is not trained here", neutral=False),
    "megatron.moe_router_bias_update_rate": _refused("the bias of routers is not updated here", neutral=0.0),
    "megatron.moe_z_loss_coeff": _refused("there is no z-loss here", neutral=None),
    "megatron": _ignored(MEGATRON),
    "archon": _ignored(MEGATRON),
    **dict.fromkeys(("weight_update_mode", "enable_delta_weight_update"), _ignored(PUBLISHING)),
    **dict.fromkeys(("weight_update_delta_method", "weight_update_anchor_interval"), _ignored(PUBLISHING)),
    **dict.fromkeys(("scheduling_spec", "scheduling_strategy", "_version", "admin_api_key"), _ignored(PLACEMENT)),
    **dict.fromkeys(("log_level", "request_timeout", "setup_timeout"), _ignored(PLACEMENT)),
    "workers_ready_timeout": _ignored(PLACEMENT),
    "beta": _refused("of the DPO loss: give it to that loss, and leave it out here"),
    "loss_type": _refused("of the DPO loss: give it to that loss, and leave it out here"),
}

_NORM = {
    **dict.fromkeys(("mean_level", "mean_leave1out", "std_level", "std_unbiased", "eps"), SAME),
    "group_size": Fate("same", "when absent, the actor's `group_size`"),
}
_REMOVED = _refused("AReaL has removed it: `rejection_sampling: {metric: ratio, upper: ...}` says it now")

_ACTOR = {
    **dict.fromkeys(("ppo_n_minibatches", "eps_clip", "eps_clip_higher", "c_clip", "reward_scaling"), SAME),
    **dict.fromkeys(("reward_bias", "reward_clip", "discount", "recompute_logprob", "use_decoupled_loss"), SAME),
    **dict.fromkeys(("importance_sampling_level", "prox_logp_method", "sapo_tau_pos", "sapo_tau_neg"), SAME),
    **dict.fromkeys(("overlong_reward_penalty", "overlong_tokens", "overlong_penalty_factor"), SAME),
    "max_new_tokens": Fate("same", absent=1024),
    "reward_norm": SAME,
    "adv_norm": SAME,
    **{f"{norm}.{key}": fate for norm in ("reward_norm", "adv_norm") for key, fate in _NORM.items()},
    "kl_ctl": Fate("same", "here it is 0 when absent", absent=0.1),
    "kl_estimator": _ignored(
        "of the KL in rewards, which is k1 here; the key of that name is of the loss", neutral="k1"
    ),
    "use_sapo_loss": Fate("renamed", to="policy_loss", value="sapo"),
    "use_cispo_loss": Fate("renamed", to="policy_loss", value="cispo"),
    "rejection_sampling": SAME,
    **dict.fromkeys((f"rejection_sampling.{k}" for k in ("level", "action", "metric", "agg", "upper", "lower")), SAME),
    "gae_lambda": Fate("same", "a number, no path of a function"),
    "gae_lambda_kwargs": _refused("`gae_lambda` is a number here", neutral={}),
    "gae_timestep_unit": _refused("advantages are of tokens here, not of turns", neutral="token"),
    "m2_threshold": _refused("there is no M2PO here", neutral=None),
    "mask_no_eos_with_zero": _refused(
        "it takes the reward of answers that were cut off; `mask_truncated_completions` takes their tokens",
        neutral=False,
    ),
    "behave_imp_weight_cap": _REMOVED,
    "behave_imp_weight_mode": _REMOVED,
    "behav_imp_weight_cap": _REMOVED,
    "log_agent_stats": _ignored(STATISTICS, neutral=False),
    "log_agent_stats_keys": _ignored(STATISTICS, neutral=[]),
}

_CRITIC = {
    "ppo_n_minibatches": SAME,
    "eps_clip": SAME,
    "mask_no_eos_with_zero": _ACTOR["mask_no_eos_with_zero"],
}

_TIMER = ("experiment_name", "trial_name", "fileroot", "freq_epochs", "freq_steps", "freq_secs")
_OPTIM = _ignored("snapshots hold the optimizer: a resumed run goes on as if it had not stopped", neutral=False)

_RECOVER = {
    **dict.fromkeys(_TIMER, SAME),
    "mode": Fate("same", "`on` and `disabled` are `auto` and `off`", absent="disabled"),
    "retries": SAME,
    "no_save_optim": _OPTIM,
    "no_load_optim": _OPTIM,
}

_SAVER = {
    **dict.fromkeys(_TIMER[:3], _ignored("exports are beside the snapshots of `recover`")),
    "freq_steps": Fate("renamed", to="hf_freq_steps"),
    "freq_epochs": _ignored("exports are made every so many steps: `recover.hf_freq_steps`", neutral=None),
    "freq_secs": _ignored("exports are made every so many steps: `recover.hf_freq_steps`", neutral=None),
    "mode": _ignored("exports are made in the background with `recover.async_save`"),
}

KEYS: Mapping[str, Mapping[str, Fate]] = {
    "TrainEngineConfig": _ENGINE,
    "PPOActorConfig": _ACTOR,
    "PPOCriticConfig": _CRITIC,
    "RecoverConfig": _RECOVER,
    "saver": _SAVER,
}
"""By the class that a section becomes, which also has the keys of its base; ``saver`` is the section that
`RecoverConfig` takes exports from. ``a.b`` is key b of section a; a key that has sections without rows of their own is
``same``, ``ignored`` or ``refused`` with all of them."""

SECTIONS: Mapping[str, str] = {
    "TrainEngineConfig": "actor",
    "PPOActorConfig": "actor",
    "PPOCriticConfig": "critic",
    "RecoverConfig": "recover",
}
"""The section of a file that a class is read from unless the caller names another."""

FILE: Mapping[str, Fate] = {
    "seed": Fate("renamed", "of each engine's section, unless it has one", to="seed"),
    "gconfig.n_samples": Fate("renamed", "of the actor's section, unless it has one", to="group_size"),
    "gconfig.reward_normalization": _refused("rewards are normalised by `reward_norm`", neutral=False),
    "teacher": _refused("there is no loss of distillation here", neutral=None),
}
"""Keys outside of a section that decide about one."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gconfig": {"n_samples": 1, "max_new_tokens": 16384, "temperature": 1.0},
    "rollout": {"use_lora": False},
    "cluster": {"fileroot": "/tmp/areal/"},
}
"""AReaL's values of what the sections refer to (``${gconfig.temperature}``) and the file does not have."""
