"""The fate of each key of an AReaL file: one table for each class that a section becomes.

Read at AReaL cbff54d (August 2026). A key has one of four fates:

- ``same``: the key of that name here means the same.
- ``renamed``: another key here means the same.
- ``ignored``: the key changes neither the result nor whether the job fits into memory, or the
  caller does what it says.
- ``refused``: the key changes one of them, and Holdfast has nothing like it. A value without effect
  is accepted.

docs/areal.md shows this table, and `load_areal` reads by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTHING: Any = object()
"""The absence of a value, because None is a value of YAML."""

Keys = dict[str, Any]
"""Keys of Holdfast with their values, and with a dict for each section."""

Section = Mapping[str, Any]
"""A section as the file has it."""


@dataclass(frozen=True)
class Fate:
    """The fate of one key."""

    kind: str  # ``same``, ``renamed``, ``ignored`` or ``refused``
    why: str = ""  # a remark. For an ignored or refused key: the reason
    to: str = ""  # the key here, for a renamed key
    # Value of ``to`` when the AReaL key is true. `NOTHING` copies the value of the AReaL key.
    value: Any = NOTHING
    # Values without an effect, which are neither refused nor worth a warning.
    neutral: tuple[Any, ...] = ()
    # AReaL's default for an absent key, where it differs and the result depends on it.
    absent: Any = NOTHING
    of: str = ""  # for a refused or ignored key outside of a section: the class that it is for


Table = Mapping[str, Fate]


def _ignored(why: str, *neutral: Any) -> Fate:
    return Fate("ignored", why, neutral=neutral)


def _refused(why: str, *neutral: Any, of: str = "") -> Fate:
    return Fate("refused", why, neutral=neutral, of=of)


SAME = Fate("same")
PLACEMENT = "placement and workers are the caller's (`WorkerGroup`, torchrun)"
COLOCATION = (
    "placement is the caller's. On GPUs of the servers (`type: colocation`) your loop takes turns "
    "with them: `colocated(engine, fleet).rollout()`"
)
MEGATRON = "trained with FSDP2, in `dtype`"
PUBLISHING = "weights go to servers as `WeightUpdateMeta` says"
SPEED = "speed only"
FLOAT16 = "for float16, which is not trained in here"
STATISTICS = "statistics only"
FP8 = "there is no training in fp8 here"
TREE = "prompts are shared in flash attention here, see `enable_tree_training`"
ROUTER = "routers of experts compute in `dtype` here"
MOMENTS = "moments are float32 here, or bfloat16 with `optimizer.type: adam_bf16`"
SERVERS = "servers, workers and workflows are the caller's"
SAMPLING = "there is nothing like it here"

_ENGINE = {
    **dict.fromkeys(
        (
            "experiment_name",
            "trial_name",
            "init_from_scratch",
            "is_critic",
            "temperature",
            "gradient_checkpointing",
            "grad_reduce_dtype",
        ),
        SAME,
    ),
    "path": Fate("same", "code that comes with a model runs only with `trust_remote_code: true`"),
    "attn_impl": Fate("same", "when absent, what transformers takes, not `flash_attention_2`"),
    "dtype": Fate("same", "not float16"),
    "disable_dropout": Fate("same", absent=False),
    "logprobs_chunk_size": Fate("same", "when absent, as many rows as fit in 128 MiB, not 1024"),
    "pad_to_maximum": SAME,
    # Micro-batches.
    "mb_spec.n_mbs": Fate("same", "null is 1"),
    "mb_spec.granularity": SAME,
    "mb_spec.n_mbs_divisor": SAME,
    "mb_spec.max_tokens_per_mb": Fate(
        "same", "when absent 8192, not unlimited. The gradient is the same"
    ),
    "mb_spec.packing_algorithm": SAME,
    # The optimizer. Scales of losses are for float16 alone.
    "optimizer": Fate("same", "null: the engine does not train", absent=None),
    "optimizer.type": Fate(
        "same", "the moments of `adam_bf16` are rounded at random, not to the nearest"
    ),
    "optimizer.lr": SAME,
    "optimizer.weight_decay": SAME,
    "optimizer.beta1": SAME,
    "optimizer.beta2": SAME,
    "optimizer.eps": SAME,
    "optimizer.lr_scheduler_type": SAME,
    "optimizer.min_lr_ratio": SAME,
    "optimizer.gradient_clipping": SAME,
    "optimizer.warmup_steps": Fate(
        "same", "the first step is at 1 / (n + 1) of the rate, AReaL's at 0"
    ),
    "optimizer.warmup_steps_proportion": Fate("same", "same as for `warmup_steps`"),
    "optimizer.initial_loss_scale": _ignored(FLOAT16, 2**32),
    "optimizer.min_loss_scale": _ignored(FLOAT16, 1.0),
    "optimizer.loss_scale_window": _ignored(FLOAT16, 5),
    "optimizer.hysteresis": _ignored(FLOAT16, 2),
    "optimizer_dtype": _refused(
        "parameters are float32 here. For moments in bfloat16 there is `adam_bf16`",
        "float32",
        "fp32",
    ),
    # Sharding, offload and kernels.
    "fsdp.wrap_policy": _ignored("null: the model's own blocks, as here", None),
    "fsdp.wrap_policy.transformer_layer_cls_to_wrap": SAME,
    "fsdp.offload_params": SAME,
    "fsdp.per_layer_optim_step": Fate(
        "renamed",
        "any optimizer. Not together with `fsdp.offload_params`",
        to="optimizer.offload",
        value=True,
    ),
    "offload": _refused("`fsdp.offload_params` or `optimizer.offload` says it here", False),
    "fsdp.memory_efficient_load": _ignored("weights are always read shard by shard", False),
    "fsdp.optim_step_prefetch_layers": _ignored(SPEED, 1),
    "fsdp.shard_vision_across_sp": _refused("ranks share rows of text alone here", False),
    "use_kernels": _ignored(SPEED, False),
    "enable_tree_training": Fate(
        "same", "answers share their whole prompt alone. Rows need no `pad_to_maximum`"
    ),
    # LoRA.
    **dict.fromkeys(("use_lora", "lora_rank", "lora_alpha"), SAME),
    "target_modules": Fate("same", "empty, or with `all-linear`: every linear layer but the head"),
    "peft_type": Fate("same", "`lora` alone"),
    # The mesh, and sections of AReaL's other engines.
    "backend": Fate(
        "same",
        "`megatron:` and `archon:` are read like `fsdp:`. `p` must be 1, and `e` or `t`. "
        "The job must have d c t ranks",
    ),
    "megatron.enable_mtp": _refused("multi-token prediction is not trained here", False),
    "megatron.moe_router_bias_update_rate": _refused(
        "the bias of routers is not updated here", 0.0
    ),
    "megatron.moe_z_loss_coeff": _refused("there is no z-loss here", None),
    "megatron.moe_router_dtype": _refused(ROUTER, None),
    "megatron.fp8_config": _refused(FP8, None),
    "megatron.ddp.fp8_param_gather": _refused(FP8, False),
    "megatron.ddp.grad_reduce_in_fp32": _refused("`grad_reduce_dtype` says it here", True),
    "megatron.main_grads_dtype": _refused("gradients are float32 here", "float32", "fp32"),
    "megatron.main_params_dtype": _refused("parameters are float32 here", "float32", "fp32"),
    "megatron.exp_avg_dtype": _refused(MOMENTS, "float32", "fp32"),
    "megatron.exp_avg_sq_dtype": _refused(MOMENTS, "float32", "fp32"),
    "megatron.enable_fp32_lm_head": _refused("the head computes in `dtype` here", False),
    "megatron": _ignored(MEGATRON),
    "archon.offload_params": Fate("renamed", to="fsdp.offload_params", value=True),
    "archon.attn_type": _refused(TREE, "varlen", "sdpa"),
    "archon.fp8_config.mode": _refused(FP8, "disabled"),
    "archon.moe_router_dtype": _refused(ROUTER, None),
    "archon": _ignored(MEGATRON),
    # Publishing of weights.
    "weight_update_mode": _ignored(
        "`WeightUpdateMeta.type` says it here: `disk` or `xccl`. There is no `awex`"
    ),
    "enable_delta_weight_update": _ignored("`WeightUpdateMeta.delta` says it"),
    "weight_update_anchor_interval": _ignored("`WeightUpdateMeta.anchor_interval` says it"),
    "weight_update_delta_method": _ignored("new values are written, and bits are compared"),
    # Workers.
    **dict.fromkeys(("scheduling_spec", "_version", "admin_api_key"), _ignored(PLACEMENT)),
    "scheduling_strategy": _ignored(COLOCATION),
    **dict.fromkeys(("log_level", "request_timeout", "setup_timeout"), _ignored(PLACEMENT)),
    "workers_ready_timeout": _ignored(PLACEMENT),
}

_NORM = {
    **dict.fromkeys(("mean_level", "mean_leave1out", "std_level", "std_unbiased", "eps"), SAME),
    "group_size": Fate("same", "when absent, the actor's `group_size`"),
}
_REMOVED = _refused(
    "AReaL has removed it: `rejection_sampling: {metric: ratio, upper: ...}` says it now"
)

_ACTOR = {
    **dict.fromkeys(
        (
            "ppo_n_minibatches",
            "eps_clip",
            "eps_clip_higher",
            "c_clip",
            "reward_scaling",
            "reward_bias",
            "reward_clip",
            "discount",
            "recompute_logprob",
            "use_decoupled_loss",
            "importance_sampling_level",
            "prox_logp_method",
            "sapo_tau_pos",
            "sapo_tau_neg",
            "overlong_reward_penalty",
            "overlong_tokens",
            "overlong_penalty_factor",
        ),
        SAME,
    ),
    # Rewards and advantages.
    "max_new_tokens": Fate("same", absent=1024),
    "reward_norm": SAME,
    "adv_norm": SAME,
    **{
        f"{norm}.{key}": fate for norm in ("reward_norm", "adv_norm") for key, fate in _NORM.items()
    },
    "kl_ctl": Fate("same", "`PPOActorConfig` without a file has 0", absent=0.1),
    "kl_estimator": Fate("same", "here also the estimator of `kl_loss_coef`"),
    # The loss.
    "use_sapo_loss": Fate("renamed", to="policy_loss", value="sapo"),
    "use_cispo_loss": Fate("renamed", to="policy_loss", value="cispo"),
    "rejection_sampling": SAME,
    **dict.fromkeys(
        (f"rejection_sampling.{k}" for k in ("level", "action", "metric", "agg", "upper", "lower")),
        SAME,
    ),
    "gae_lambda": Fate("same", "a number, no path of a function"),
    # Algorithms that are not here.
    "gae_lambda_kwargs": _refused("`gae_lambda` is a number here", {}),
    "gae_timestep_unit": _refused("advantages are of tokens here, not of turns", "token"),
    "m2_threshold": _refused("there is no M2PO here", None),
    "mask_no_eos_with_zero": _refused(
        "it takes the reward of answers that were cut off, and `mask_truncated_completions` takes "
        "their tokens",
        False,
    ),
    "behave_imp_weight_cap": _REMOVED,
    "behave_imp_weight_mode": _REMOVED,
    "behav_imp_weight_cap": _REMOVED,
    "log_agent_stats": _ignored(STATISTICS, False),
    "log_agent_stats_keys": _ignored(STATISTICS, []),
    **dict.fromkeys(("beta", "loss_type"), _refused("of DPO: read `DPOConfig`")),
}

_CRITIC = {
    "ppo_n_minibatches": SAME,
    "eps_clip": SAME,
    "mask_no_eos_with_zero": _ACTOR["mask_no_eos_with_zero"],
}

_DPO = {"beta": SAME, "loss_type": SAME}

_TIMER = ("experiment_name", "trial_name", "fileroot", "freq_epochs", "freq_steps", "freq_secs")
_OPTIM = _ignored(
    "snapshots hold the optimizer: a resumed run goes on as if it had not stopped", False
)

_RECOVER = {
    **dict.fromkeys(_TIMER, SAME),
    "mode": Fate("same", "`on` and `disabled` are `auto` and `off`", absent="disabled"),
    "retries": SAME,
    "no_save_optim": _OPTIM,
    "no_load_optim": _OPTIM,
}

_SAVER = {
    **dict.fromkeys(_TIMER[:3], _ignored("exports are in the run's folder, next to the snapshots")),
    "freq_steps": Fate("renamed", to="hf_freq_steps"),
    "freq_epochs": _ignored("exports are made by number of steps: `recover.hf_freq_steps`", None),
    "freq_secs": _ignored("exports are made by number of steps: `recover.hf_freq_steps`", None),
    "mode": _ignored("exports are made in the background with `recover.async_save`"),
}

_ROLLOUT = {
    **dict.fromkeys(("max_head_offpolicyness", "max_concurrent_rollouts"), SAME),
    "request_timeout": Fate("renamed", "seconds", to="request_timeout_s"),
    "request_retries": Fate(
        "renamed", "either counts the first request too", to="request_attempts"
    ),
    "return_routed_experts": Fate(
        "same", "the actor replays them with `router_replay: {mode: R3}`"
    ),
    "deterministic_sampling": _ignored("each sample has the seed of its ticket", False),
    **dict.fromkeys(
        ("consumer_batch_size", "queue_size"), _ignored("a step takes the batch of the loader")
    ),
    **dict.fromkeys(("backend", "scheduling_spec", "agent"), _ignored(SERVERS)),
    "scheduling_strategy": _ignored(COLOCATION),
    **dict.fromkeys(
        (
            "experiment_name",
            "trial_name",
            "fileroot",
            "tokenizer_path",
            "setup_timeout",
            "workers_ready_timeout",
            "pause_grace_period",
            "_version",
            "admin_api_key",
            "model",
            "routing_strategy",
            "poll_interval",
            "api_url",
            "provider_api_key",
            "serialize_group_samples",
        ),
        _ignored(SERVERS),
    ),
    **dict.fromkeys(("use_lora", "lora_name"), _ignored(PUBLISHING)),
    **dict.fromkeys(
        ("enable_rollout_tracing", "check_trajectory_format", "dump_to_file"), _ignored(STATISTICS)
    ),
}

_GCONFIG = {
    **dict.fromkeys(
        ("n_samples", "max_new_tokens", "min_new_tokens", "temperature", "top_p"), SAME
    ),
    "top_k": Fate("same", "when absent 0, every token, as AReaL's 100,000,000"),
    "stop_token_ids": Fate(
        "same", "AReaL's workflows add the tokenizer's end and pad tokens. Here you list them"
    ),
    "greedy": _refused("`temperature: 0` says it here", False),
    "max_tokens": _refused("there is no limit for prompt and completion together here", 32768),
    **dict.fromkeys(("ignore_eos", "use_beam_search"), _refused(SAMPLING, False)),
    "stop": _refused("completions end with `stop_token_ids` here", None, []),
    "frequency_penalty": _refused(SAMPLING, 0.0),
    "reward_normalization": _refused("rewards are normalised by `reward_norm`", False),
    "drop_incomplete_group": _ignored("a group is complete, or its ticket is replaced", False),
    "seed": _ignored("each sample has the seed of its ticket", None),
    "skip_special_tokens": _ignored("workflows decode"),
    "lora_name": _ignored(PUBLISHING),
}

KEYS: Mapping[str, Table] = {
    "TrainEngineConfig": _ENGINE,
    "PPOActorConfig": _ACTOR,
    "PPOCriticConfig": _CRITIC,
    "DPOConfig": _DPO,
    "RolloutConfig": _ROLLOUT,
    "GenerationHyperparameters": _GCONFIG,
    "RecoverConfig": _RECOVER,
    "saver": _SAVER,
}
"""By the class that a section becomes, which also has the keys of its base. ``saver`` is the
section that `RecoverConfig` takes exports from. ``a.b`` is key b of section a. A key whose sections
have no rows of their own is ``same``, ``ignored`` or ``refused`` with all of them.
"""

SECTIONS: Mapping[str, str] = {
    "TrainEngineConfig": "actor",
    "PPOActorConfig": "actor",
    "PPOCriticConfig": "critic",
    "DPOConfig": "actor",
    "RolloutConfig": "rollout",
    "GenerationHyperparameters": "gconfig",
    "RecoverConfig": "recover",
}
"""The section of a file that a class is read from unless the caller names another."""

FILE: Table = {
    "seed": Fate(
        "renamed", "in each engine's section and in `rollout`, unless it has one", to="seed"
    ),
    "gconfig.n_samples": Fate(
        "renamed", "in the actor's section, unless it has one", to="group_size"
    ),
    "allocation_mode": Fate(
        "renamed", "in each engine's section, unless it has one: the part after `+`", to="backend"
    ),
    "enable_offload": Fate(
        "ignored",
        "your loop calls `engine.offload()` before rollouts and `engine.onload()` after them, or "
        "`colocated(engine, fleet).rollout()`, where the servers sleep, too",
        neutral=(False,),
        of="TrainEngineConfig",
    ),
    "defaults": _refused(
        "the files that it names are not read here. Write all keys into one file",
        ["_self_"],
        of="TrainEngineConfig",
    ),
    "gconfig.reward_normalization": _refused(
        "rewards are normalised by `reward_norm`", False, of="PPOActorConfig"
    ),
    "teacher.distill_loss_weight": Fate(
        "renamed",
        "in the actor's section, unless it has one. Without `teacher` 0. It weighs advantages, not "
        "a term of the loss",
        to="distill_loss_weight",
        absent=0.005,
    ),
    "teacher.rl_loss_weight": Fate(
        "renamed",
        "in the actor's section, unless it has one. Your loop makes the teacher of the other keys",
        to="rl_loss_weight",
    ),
}
"""Keys outside of a section that decide about one."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gconfig": {"n_samples": 1, "max_new_tokens": 16384, "temperature": 1.0},
    "rollout": {"use_lora": False},
    "cluster": {"fileroot": "/tmp/areal/"},
}
"""AReaL's values of what the sections refer to (``${gconfig.temperature}``) and the file does not
have.
"""
