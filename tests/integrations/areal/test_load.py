"""AReaL's files are read as AReaL reads them. Options that Holdfast lacks are reported once, or
refused.
"""

import logging
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.engine import OptimizerConfig, ParallelStrategy, TrainEngineConfig
from holdfast.engine.rl import DPOConfig, NormConfig, PPOActorConfig, PPOCriticConfig
from holdfast.engine.rl.off_policy import RejectionSamplingConfig
from holdfast.engine.rollouts import RolloutConfig
from holdfast.engine.servers.api import GenerationHyperparameters
from holdfast.integrations.areal import load_areal
from holdfast.integrations.areal.keys import FILE, KEYS, NOTHING, SECTIONS
from holdfast.integrations.areal.load import _own_keys
from holdfast.integrations.areal.rules import RULES
from holdfast.recover import RecoverConfig
from holdfast.utils.errors import ConfigError

ENGINES = (TrainEngineConfig, PPOActorConfig, PPOCriticConfig, DPOConfig)
CLASSES: dict[str, type] = {
    cls.__name__: cls for cls in (*ENGINES, RolloutConfig, GenerationHyperparameters, RecoverConfig)
}


@dataclass
class Job:
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: TrainEngineConfig | None = None
    critic: PPOCriticConfig | None = None
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    total_train_epochs: int = 1
    tags: list[str] = field(default_factory=list)
    rollout: RolloutConfig | None = None


def write(folder: Path, **sections: Any) -> Path:
    path = folder / "areal.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_whole_file_is_read_section_by_section_with_its_interpolations(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        experiment_name="e",
        seed=7,
        total_train_epochs=3,
        tags=["x"],
        gconfig={"n_samples": 8, "max_new_tokens": 64},
        actor={
            "experiment_name": "${experiment_name}",
            "path": "Qwen/Qwen3-0.6B",
            "dtype": "bf16",
            "temperature": "${gconfig.temperature}",
            "optimizer": {"lr": "2e-6", "warmup_steps_proportion": 0.5},
            "reward_norm": {
                "mean_level": "group",
                "std_level": None,
                "group_size": "${gconfig.n_samples}",
            },
            "max_new_tokens": "${gconfig.max_new_tokens}",
        },
        ref={"path": "${actor.path}", "optimizer": None, "disable_dropout": True},
        critic={"path": "${actor.path}", "optimizer": "${actor.optimizer}", "is_critic": True},
        recover={
            "experiment_name": "${experiment_name}",
            "mode": "on",
            "freq_secs": 60,
            "fileroot": "${cluster.fileroot}",
        },
        saver={
            "experiment_name": "${experiment_name}",
            "freq_steps": 10,
            "fileroot": "${cluster.fileroot}",
        },
        cluster={"fileroot": "/shared"},
    )
    optimizer = OptimizerConfig(lr=2e-6, warmup_steps_proportion=0.5)
    model = "Qwen/Qwen3-0.6B"
    actor = PPOActorConfig(
        path=model,
        seed=7,
        disable_dropout=False,
        experiment_name="e",
        optimizer=optimizer,
        group_size=8,
        reward_norm=NormConfig("group", std_level=None, group_size=8),
        max_new_tokens=64,
        kl_ctl=0.1,
    )
    ref = TrainEngineConfig(path=model, seed=7, optimizer=None)
    critic = PPOCriticConfig(path=model, seed=7, disable_dropout=False, optimizer=optimizer)
    recover = RecoverConfig(experiment_name="e", freq_secs=60, fileroot="/shared", hf_freq_steps=10)
    assert load_areal(Job, path) == Job(actor, ref, critic, recover, 3, ["x"])
    assert load_areal(PPOActorConfig, path) == actor
    assert load_areal(TrainEngineConfig, path, section="ref") == ref
    assert load_areal(PPOCriticConfig, path) == critic
    assert load_areal(RecoverConfig, path) == recover


def test_overrides_and_keys_of_our_own_stand_beside_areals(tmp_path: Path) -> None:
    path = write(tmp_path, actor={"kl_ctl": 0.0, "entropy_coeff": 0.01, "optimizer": {"lr": 1.0}})
    config = load_areal(
        PPOActorConfig, path, ["actor.optimizer.lr=0.5", "+actor.loss_agg_mode=seq-mean-token-mean"]
    )
    assert config.optimizer is not None and config.optimizer.lr == 0.5
    assert (config.kl_ctl, config.entropy_coeff, config.loss_agg_mode) == (
        0.0,
        0.01,
        "seq-mean-token-mean",
    )


def test_omitted_keys_have_areals_defaults_where_the_mathematics_depend_on_them(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, actor={"path": "m"}, recover={"fileroot": "r"})
    actor = load_areal(PPOActorConfig, path)
    assert (actor.kl_ctl, actor.disable_dropout, actor.optimizer, actor.max_new_tokens) == (
        0.1,
        False,
        None,
        1024,
    )
    assert load_areal(RecoverConfig, path).mode == "off"


def test_all_that_has_no_effect_is_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path,
        actor={
            "backend": "fsdp:d4",
            "scheduling_spec": [{"gpu": 1}],
            "weight_update_mode": "xccl",
            "megatron": {"ddp": {"overlap_grad_reduce": True}, "moe_router_bias_update_rate": 0.0},
            "fsdp": {"offload_params": False, "memory_efficient_load": True},
            "kl_ctl": 0.0,
        },
        recover={"mode": "auto", "no_save_optim": True},
        saver={"freq_epochs": 1},
        sglang={"model_path": "m"},
    )
    load_areal(Job, path)
    (text,) = warnings(caplog)
    told = ("actor.scheduling_spec", "actor.weight_update_mode", "actor.fsdp.memory_efficient_load")
    told += (
        "actor.megatron.ddp.overlap_grad_reduce",
        "recover.no_save_optim",
        "saver.freq_epochs",
        "sglang",
    )
    assert [key for key in told if key not in text] == []
    assert "offload_params" not in text and "bias_update_rate" not in text, "they have no effect"

    caplog.clear()
    load_areal(
        PPOActorConfig, write(tmp_path, actor={"path": "m", "kl_ctl": 0.0, "offload": False})
    )
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_lora": True, "peft_type": "dora"}, "'peft_type' is 'dora'; expected"),
        ({"optimizer_dtype": "bfloat16"}, "parameters are float32"),
        ({"m2_threshold": 0.04}, "'actor.m2_threshold'"),
        ({"mask_no_eos_with_zero": True}, "mask_truncated_completions"),
        ({"gae_timestep_unit": "turn"}, "'actor.gae_timestep_unit'"),
        ({"gae_lambda": "my.module.fn"}, "gae_lambda"),
        ({"gae_lambda_kwargs": {"alpha": 1}}, "gae_lambda_kwargs"),
        ({"megatron": {"enable_mtp": True}}, "'actor.megatron.enable_mtp'"),
        ({"megatron": {"moe_z_loss_coeff": 0.1}}, "z-loss"),
        ({"behave_imp_weight_cap": 5.0}, "rejection_sampling: {metric: ratio, upper"),
        ({"beta": 0.1}, "'actor.beta' .* of DPO: read `DPOConfig`"),
        ({"backend": "fsdp:d4p2t2"}, "'backend' is 'fsdp:d4p2t2', with pipeline parallelism"),
        (
            {"backend": "fsdp:d1p8"},
            "section 'actor' .*'backend' is 'fsdp:d1p8', with pipeline parallelism",
        ),
        (
            {"backend": "megatron:(attn:d4t2|ffn:d2e4)"},
            "is 4 and tensor_parallel_size 2, which are not",
        ),
        ({"offload": True}, "'actor.offload' .* expected False"),
        (
            {"archon": {"attn_type": "tree"}},
            "'actor.archon.attn_type' .* expected 'varlen' or 'sdpa'",
        ),
        (
            {"megatron": {"fp8_config": {"mode": "e4m3"}}},
            "'actor.megatron.fp8_config' .* no training in fp8",
        ),
        (
            {"megatron": {"ddp": {"fp8_param_gather": True}}},
            "'actor.megatron.ddp.fp8_param_gather'",
        ),
        ({"archon": {"fp8_config": {"mode": "blockwise"}}}, "'actor.archon.fp8_config.mode'"),
        (
            {"megatron": {"moe_router_dtype": "fp32"}},
            "'actor.megatron.moe_router_dtype' .* compute in `dtype` here",
        ),
        (
            {"megatron": {"exp_avg_dtype": "bfloat16"}},
            "'actor.megatron.exp_avg_dtype' .* adam_bf16",
        ),
        (
            {"fsdp": {"shard_vision_across_sp": True}},
            "'actor.fsdp.shard_vision_across_sp' .* share rows of text alone",
        ),
        ({"dtype": "float16"}, "'dtype' is 'float16'"),
        (
            {"epz_clip": 0.2},
            r"'actor.epz_clip' .* neither AReaL's nor Holdfast's; did you mean actor.eps_clip",
        ),
        ({"optimizer": {"lrr": 0.2}}, r"'actor.optimizer.lrr' .* did you mean actor.optimizer.lr"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr"),
        ({"path": "${nowhere.path}"}, "nowhere.path"),
    ],
    ids=str,
)
def test_keys_that_would_change_the_mathematics_are_refused_with_the_reason(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_areal(PPOActorConfig, write(tmp_path, actor=keys))


def test_rewards_normalised_by_the_rollout_are_refused_for_the_actor_alone(
    tmp_path: Path,
) -> None:
    wanted = {"reward_normalization": True}
    path = write(tmp_path, actor={"path": "m"}, recover={}, gconfig=wanted)
    with pytest.raises(ConfigError, match="reward_norm"):
        load_areal(PPOActorConfig, path)
    with pytest.raises(ConfigError, match="reward_norm"):
        load_areal(Job, path)
    load_areal(RecoverConfig, path)


@pytest.mark.parametrize(
    ("teacher", "weights"),
    [
        (None, (0.0, 1.0)),
        ({"path": "t"}, (0.005, 1.0)),
        ({"path": "t", "rl_loss_weight": 0.0, "distill_loss_weight": 2.0}, (2.0, 0.0)),
    ],
)
def test_the_weights_of_a_teacher_are_keys_of_the_actor(
    teacher: dict[str, Any] | None, weights: tuple[float, float], tmp_path: Path
) -> None:
    path = write(tmp_path, actor={"path": "m"}, teacher=teacher)
    actor = load_areal(PPOActorConfig, path)
    assert (actor.distill_loss_weight, actor.rl_loss_weight) == weights
    if teacher is not None:
        assert load_areal(PPOActorConfig, path, section="teacher").path == "t"


def test_values_without_effect_of_keys_that_are_refused_are_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_effect = {
        "offload": False,
        "fsdp": {
            "offload_params": False,
            "per_layer_optim_step": False,
            "shard_vision_across_sp": False,
        },
        "archon": {
            "offload_params": False,
            "attn_type": "varlen",
            "fp8_config": {"mode": "disabled"},
        },
        "megatron": {"fp8_config": None, "moe_router_dtype": None, "main_grads_dtype": "float32"},
    }
    load_areal(
        PPOActorConfig,
        write(tmp_path, actor=without_effect, enable_offload=False, defaults=["_self_"]),
    )
    assert warnings(caplog) == []
    for backend in (
        "fsdp:d4",
        "fsdp:d8p1t1",
        "megatron:(attn:d2p1t1|ffn:d2p1t1e1)",
        "archon:d4",
        "fsdp:d2p1t2",
        "fsdp:d2c2",
    ):
        actor = load_areal(PPOActorConfig, write(tmp_path, actor={"backend": backend}))
        assert actor.backend == backend and actor.parallel_strategy.world_size in (2, 4, 8)
    for backend in (None, ""):
        assert (
            load_areal(PPOActorConfig, write(tmp_path, actor={"backend": backend})).backend
            == "fsdp"
        )


def test_keys_outside_of_sections_that_change_what_every_engine_computes_are_refused(
    tmp_path: Path,
) -> None:
    for extra, message in [
        ({"defaults": ["../gsm8k@_global_", "_self_"]}, "'defaults' .* are not read here"),
        (
            {"allocation_mode": "sglang:d2+d2p2"},
            "'backend' is 'fsdp:d2p2', with pipeline parallelism",
        ),
        (
            {"allocation_mode": "megatron:(attn:d2t4|ffn:d1e8)"},
            "is 8 and tensor_parallel_size 4, which are not",
        ),
    ]:
        path = write(tmp_path, actor={"path": "m"}, recover={}, **extra)
        with pytest.raises(ConfigError, match=message):
            load_areal(TrainEngineConfig, path)
        load_areal(RecoverConfig, path)
    older = load_areal(
        TrainEngineConfig,
        write(tmp_path, actor={"path": "m"}, allocation_mode="sglang:d2p1t2+d2p1t1"),
    )
    assert older.parallel_strategy == ParallelStrategy(data_parallel_size=2)
    for mode, size in [("sglang:d4+eval", None), ("vllm:d2", None), ("sglang:d4|fsdp:d4", 4)]:
        loaded = load_areal(
            TrainEngineConfig, write(tmp_path, actor={"path": "m"}, allocation_mode=mode)
        )
        assert loaded.parallel_strategy == ParallelStrategy(data_parallel_size=size)


def test_keys_of_offload_are_kept_or_are_for_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for keys, on_host in [
        ({"fsdp": {"offload_params": True}, "optimizer": None}, ("weights", "optimizer")),
        ({"archon": {"offload_params": True}}, ("weights", "optimizer")),
        ({"fsdp": {"per_layer_optim_step": True}, "optimizer": {"lr": 0.1}}, ("optimizer",)),
        ({"optimizer": None, "fsdp": {"per_layer_optim_step": True}}, ()),
    ]:
        path = write(tmp_path, actor={"path": "m", **keys}, enable_offload=True)
        assert load_areal(TrainEngineConfig, path).parts_on_host == on_host
        assert "enable_offload (your loop calls `engine.offload()`" in caplog.text
        caplog.clear()
    both = {"offload_params": True, "per_layer_optim_step": True}
    with pytest.raises(ConfigError, match="are both true"):
        load_areal(
            TrainEngineConfig,
            write(tmp_path, actor={"path": "m", "fsdp": both, "optimizer": {"lr": 0.1}}),
        )


def test_colocation_is_for_the_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = {"type": "colocation", "target": "actor"}
    path = write(
        tmp_path,
        actor={"path": "m"},
        rollout={"scheduling_strategy": strategy},
        enable_offload=True,
    )
    load_areal(Job, path)
    (warning,) = warnings(caplog)
    assert (
        "rollout.scheduling_strategy (placement is the caller's. On GPUs of the servers "
        "(`type: colocation`"
    ) in warning
    assert warning.count("colocated(engine, fleet).rollout()") == 2


def test_rollouts_are_read_from_their_sections(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        seed=3,
        rollout={
            "max_head_offpolicyness": 2,
            "max_concurrent_rollouts": 64,
            "queue_size": None,
            "request_timeout": 60,
        },
        gconfig={"n_samples": 8, "greedy": False, "temperature": 0.7, "stop_token_ids": [5, 6]},
        actor={"path": "m"},
    )
    rollout = RolloutConfig(2, 64, seed=3, request_timeout_s=60.0)
    assert (
        load_areal(RolloutConfig, path)
        == load_areal(RolloutConfig, path, section="rollout")
        == rollout
    )
    assert load_areal(Job, path).rollout == rollout
    gconfig = GenerationHyperparameters(8, temperature=0.7, stop_token_ids=[5, 6])
    assert load_areal(GenerationHyperparameters, path) == gconfig
    for key, value in {
        "greedy": True,
        "max_tokens": 2048,
        "stop": ["x"],
        "ignore_eos": True,
    }.items():
        with pytest.raises(ConfigError, match=f"'gconfig.{key}'"):
            load_areal(GenerationHyperparameters, path, [f"gconfig.{key}={value}"])


def test_a_dpo_file_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        actor={"path": "m", "beta": 0.2, "loss_type": "ipo"},
        ref={"path": "m", "beta": 0.2},
    )
    config = load_areal(DPOConfig, path)
    assert (config.beta, config.loss_type, config.mb_spec.granularity) == (0.2, "ipo", 2)
    assert load_areal(TrainEngineConfig, path, section="ref").path == "m"


def test_a_class_that_no_section_becomes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, lr=0.5, actor={"path": "m"})
    for section in (None, "actor"):
        with pytest.raises(
            ConfigError,
            match=r"OptimizerConfig is no section of AReaL's files; expected TrainEngine",
        ):
            load_areal(OptimizerConfig, path, section=section)


def test_the_estimator_of_kl_in_rewards_is_kept(tmp_path: Path) -> None:
    config = load_areal(
        PPOActorConfig, write(tmp_path, actor={"kl_ctl": 0.1, "kl_estimator": "k2"})
    )
    assert (config.kl_ctl, config.kl_estimator) == (0.1, "k2")


def test_the_loss_of_a_switch_is_policy_loss(tmp_path: Path) -> None:
    for switch, name in [("use_sapo_loss", "sapo"), ("use_cispo_loss", "cispo")]:
        assert (
            load_areal(
                PPOActorConfig, write(tmp_path, actor={switch: True, "kl_ctl": 0.0})
            ).policy_loss
            == name
        )
        assert (
            load_areal(PPOActorConfig, write(tmp_path, actor={switch: False})).policy_loss == "ppo"
        )


def test_keys_that_mean_something_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bounds = {"metric": "ratio", "upper": 2.0}
    plain = load_areal(PPOActorConfig, write(tmp_path, actor={"use_decoupled_loss": True}))
    assert (plain.use_decoupled_loss, plain.recompute_logprob) == (False, True), (
        "AReaL's weights are 1 then"
    )
    bounded = load_areal(
        PPOActorConfig,
        write(tmp_path, actor={"use_decoupled_loss": True, "rejection_sampling": bounds}),
    )
    assert bounded.use_decoupled_loss and bounded.rejection_sampling == RejectionSamplingConfig(
        upper=2.0
    )
    dropped = load_areal(PPOActorConfig, write(tmp_path, actor={"rejection_sampling": bounds}))
    assert dropped.rejection_sampling is None
    with pytest.raises(
        ConfigError, match="'prox_logp_method' is 'loglinear' without 'rejection_sampling'"
    ):
        load_areal(
            PPOActorConfig,
            write(tmp_path, actor={"use_decoupled_loss": True, "prox_logp_method": "loglinear"}),
        )
    caplog.clear()
    mixed = {"mean_level": "group", "std_level": "batch"}
    load_areal(
        PPOActorConfig, write(tmp_path, actor={"reward_norm": mixed}, gconfig={"n_samples": 4})
    )
    load_areal(RecoverConfig, write(tmp_path, recover={"mode": "disabled"}))
    first, second = warnings(caplog)
    assert (
        "standard deviation of reward_norm is not AReaL's" in first
        and "neither snapshots nor exports" in second
    )


def test_keys_of_an_algorithm_do_not_stop_a_reference_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path, ref={"path": "m", "reward_norm": {"mean_level": "group"}, "eps_clip": 0.2}
    )
    assert load_areal(TrainEngineConfig, path, section="ref").path == "m"
    assert (
        "ref.eps_clip, ref.reward_norm (of an algorithm, which TrainEngineConfig has not)"
        in warnings(caplog)[0]
    )


def test_a_section_that_is_missing_or_no_section_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, actor={"path": "m"}, critic=3)
    with pytest.raises(ConfigError, match="has no section 'ref'; it has actor, critic"):
        load_areal(TrainEngineConfig, path, section="ref")
    with pytest.raises(ConfigError, match="critic is 3; expected a section"):
        load_areal(PPOCriticConfig, path)
    with pytest.raises(ConfigError, match="section is 'actor', but Job takes several"):
        load_areal(Job, path, section="actor")
    with pytest.raises(ConfigError, match=r"missing\.yaml does not exist"):
        load_areal(Job, tmp_path / "missing.yaml")


def test_the_table_names_keys_that_there_are() -> None:
    for name, table in KEYS.items():
        own = set(_own_keys(CLASSES[name] if name != "saver" else RecoverConfig))
        for key, fate in table.items():
            assert fate.kind in ("same", "renamed", "ignored", "refused")
            assert fate.kind != "same" or key in own, f"{name} has no key {key}"
            assert fate.kind != "renamed" or fate.to in own, f"{name} has no key {fate.to}"
            assert fate.kind in ("same", "renamed") or fate.why, f"{key}: no reason"
            assert fate.absent is NOTHING or fate.kind == "same"
    assert (
        set(SECTIONS) == set(CLASSES)
        and set(RULES) <= set(CLASSES)
        and all(fate.why for fate in FILE.values())
    )


def test_a_default_of_areals_is_in_the_table_only_where_it_differs() -> None:
    for name, table in KEYS.items():
        for key, fate in table.items():
            if fate.absent is not NOTHING and "." not in key:
                own = {f.name: f for f in fields(CLASSES[name])}[key]
                assert not is_dataclass(own.type) and own.default != fate.absent, (
                    f"{key}: absent says nothing"
                )
