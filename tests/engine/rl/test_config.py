"""The actor's and critic's configuration through files and overrides."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.rl import (
    NormConfig,
    PPOActorConfig,
    PPOCriticConfig,
    advantages,
    config,
    policy_losses,
)
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError


def test_an_actor_is_read_from_yaml_with_and_without_its_norms(tmp_path: Path) -> None:
    path = tmp_path / "actor.yaml"
    path.write_text(
        "group_size: 4\nreward_norm: {mean_level: group, std_level: null}\noptimizer: {lr: 0.5}\n"
    )
    config = load_config(
        PPOActorConfig, path, ["eps_clip_higher=0.28", "adv_norm.mean_level=batch"]
    )
    assert config.reward_norm == NormConfig(mean_level="group", std_level=None)
    assert config.adv_norm == NormConfig() and config.eps_clip_higher == 0.28
    assert config.optimizer is not None and config.optimizer.lr == 0.5
    assert load_config(PPOActorConfig, path, ["reward_norm=null"]).reward_norm is None
    assert load_config(PPOActorConfig).reward_norm is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eps_clip=-0.1", "'eps_clip' is -0.1"),
        (
            "kl_estimator=k4",
            "'kl_estimator' is 'k4'; expected one of None, 'k1', 'k2', 'k3', 'low_var_kl'",
        ),
        (
            "policy_loss=grpo",
            (
                "'policy_loss' is 'grpo'; expected one of 'ppo', 'gspo', 'cispo', 'sapo', 'gpg', "
                "'gmpo'"
            ),
        ),
        ("policy_loss=none", "'sapo', 'gpg', 'gmpo', 'clip_cov', 'kl_cov'"),
        (
            "clip_cov_lb=6",
            "'clip_cov_lb' is 6.0, not below 'clip_cov_ub', 5.0: no token lies between them",
        ),
        ("kl_cov_ratio=2", "'kl_cov_ratio' is 2.0"),
        ("loss_agg_mode=mean", "'loss_agg_mode' is 'mean'; expected one of None, 'token-mean'"),
        (
            "loss_agg_mode=seq-mean-token-sum-norm",
            "'loss_scale_factor' is None and 'loss_agg_mode' is 'seq-mean-token",
        ),
        (
            "loss_scale_factor=100",
            "'loss_scale_factor' is 100.0 and 'loss_agg_mode' is 'token-mean'",
        ),
        ("loss_scale_factor=0", "'loss_scale_factor' is 0.0; expected more than 0"),
        ("importance_sampling_level=row", "'importance_sampling_level'"),
        ("sapo_tau_neg=0", "'sapo_tau_neg' is 0.0; expected more than 0"),
        (
            "rejection_sampling.upper=2",
            "'use_decoupled_loss' is False, so that there are no weights to bound",
        ),
        (
            "rejection_sampling.upper=1",
            "'rejection_sampling.upper' is 1.0; of ratios expected more than 1",
        ),
        ("rejection_sampling.level=word", "'rejection_sampling.level' is 'word'"),
        (
            "prox_logp_method=linear",
            "'prox_logp_method' is 'linear'; expected one of 'recompute', 'loglinear', 'metr",
        ),
        (
            "prox_logp_method=loglinear",
            "'use_decoupled_loss' is False, so that there is no proximal policy",
        ),
        ("rollout_is=row", "'rollout_is' is 'row'; expected one of None, 'token', 'sequence'"),
        ("rollout_rs=seq_max_k1", "'rollout_rs' is 'seq_max_k1'; expected one of token_k1"),
        ("rollout_rs=seq_mean_k1", "'rollout_rs_threshold' is None; expected a number above 0"),
        ("rollout_rs_threshold=2", "'rollout_rs_threshold' is '2', but 'rollout_rs' is null"),
        (
            "overlong_reward_penalty=true",
            "'overlong_reward_penalty' is True, but 'max_new_tokens' is null",
        ),
        ("kl_ctl=-1", "'kl_ctl'"),
        (
            "kl_target=0.1",
            "'kl_target' and 'kl_ctl' are 0.1 and 0.0; an adaptive coefficient is multiplied",
        ),
        ("kl_horizon=0", "'kl_horizon' is 0"),
        (
            "adv_estimator=best",
            "'adv_estimator' is 'best'; expected one of 'grpo', 'remax', 'opo', 'gpg'",
        ),
        (
            "adv_estimator=opo",
            "'adv_estimator' is 'opo', which compares answers to one prompt, but 'group_size' is 1",
        ),
        ("c_clip=0.5", "'c_clip'"),
        ("ppo_n_minibatches=0", "'ppo_n_minibatches'"),
        ("gae_lambda=1.5", "'gae_lambda'"),
        ("reward_norm.mean_level=world", "'mean_level' is 'world'"),
        ("reward_norm.mean_level=group", "'group_size' is 1: every reward would become 0"),
        ("is_critic=true", "'is_critic'"),
        ("dtype=int8", "'dtype'"),
        ("entropy_coef=0.1", "entropy_coef"),
    ],
)
def test_a_bad_actor_value_is_an_error_that_names_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(PPOActorConfig, overrides=[override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["policy_loss=cispo", "importance_sampling_level=sequence"],
            "policy_loss 'cispo' has no ratio of sequences",
        ),
        (
            ["policy_loss=kl_cov", "importance_sampling_level=sequence"],
            "'kl_cov' has no ratio of sequences",
        ),
        (
            ["policy_loss=clip_cov", "c_clip=3"],
            "'c_clip' is 3.0, but policy_loss 'clip_cov' does not clip so",
        ),
        (
            ["policy_loss=sapo", "use_decoupled_loss=true"],
            "policy_loss 'sapo' is not defined for it",
        ),
        (
            ["adv_estimator=remax", "reward_norm.std_level=null"],
            "a baseline of its own, but 'reward_norm' is set",
        ),
        (
            ["policy_loss=gmpo", "loss_agg_mode=token-mean"],
            "'token-mean', but policy_loss 'gmpo' has one loss for each",
        ),
        (
            ["policy_loss=gpg", "c_clip=3"],
            "'c_clip' is 3.0, but policy_loss 'gpg' does not clip so",
        ),
        (
            [
                "use_decoupled_loss=true",
                "rejection_sampling.metric=kl_k2",
                "rejection_sampling.action=clamp",
            ],
            "its bounds are of kl_k2, not of the weight",
        ),
        (
            ["use_decoupled_loss=true", "rejection_sampling.upper=2", "rejection_sampling.lower=3"],
            "'rejection_sampling.lower' is 3.0, above 'rejection_sampling.upper', 2.0",
        ),
        (
            ["rollout_is=token", "rejection_sampling.upper=2"],
            (
                "'rollout_is' and 'rollout_rs' .* say what 'rejection_sampling' .* leave one of "
                "them out"
            ),
        ),
        (
            ["rollout_rs=token_k2", "rollout_rs_threshold=0.5_2.0"],
            "'rollout_rs_threshold' is '0.5_2.0'; expected a",
        ),
        (
            ["rollout_rs=token_k1", "rollout_rs_threshold=0.5_2"],
            "'rollout_rs_threshold' is '0.52'; .*YAML reads 0.5_2",
        ),
        (
            [
                "use_decoupled_loss=true",
                "rejection_sampling.action=clamp",
                "rejection_sampling.weight=one",
            ],
            "'rejection_sampling.weight' is 'one': there is nothing to clamp",
        ),
        (
            ["bootstrap_truncated=true", "mask_truncated_completions=true"],
            "are both True, but answers without a loss",
        ),
        (
            ["mb_spec.granularity=2"],
            "'ppo_n_minibatches' and 'mb_spec.granularity' are 4 and 2, .*; set one of them to 1",
        ),
        (
            ["max_new_tokens=10", "overlong_tokens=20"],
            "'overlong_tokens' is 20; expected a value from 1 to 10",
        ),
    ],
)
def test_choices_that_do_not_go_together_are_refused_with_the_reason(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(PPOActorConfig, overrides=overrides)


def test_keys_of_verl_are_another_spelling_of_rejection_sampling() -> None:
    config = load_config(
        PPOActorConfig, overrides=["rollout_is=sequence", "rollout_is_threshold=3"]
    )
    assert config.use_decoupled_loss and config.rejection_sampling is not None
    assert (config.rejection_sampling.weighs, config.rejection_sampling.weight_upper) == (
        "sequence_product",
        3.0,
    )
    config = load_config(
        PPOActorConfig, overrides=["rollout_rs=seq_mean_k1", "rollout_rs_threshold=1.25"]
    )
    found = config.rejection_sampling
    assert found is not None and (found.level, found.agg, found.metric, found.weighs) == (
        "sequence",
        "mean",
        "ratio",
        "one",
    )
    assert (found.lower, found.upper) == (0.8, 1.25)
    assert replace(config, group_size=2).rejection_sampling == found


def test_null_takes_the_mean_that_goes_with_the_loss() -> None:
    assert PPOActorConfig().agg_mode == "token-mean"
    assert PPOActorConfig(policy_loss="gmpo").agg_mode == "seq-mean-token-mean"
    assert PPOActorConfig(loss_agg_mode="seq-mean-token-sum").agg_mode == "seq-mean-token-sum"


def test_the_mean_of_a_critic_is_checked_as_the_one_of_an_actor() -> None:
    with pytest.raises(
        ConfigError, match="'loss_agg_mode' is 'mean'; expected one of 'token-mean'"
    ):
        PPOCriticConfig(loss_agg_mode="mean")
    with pytest.raises(ConfigError, match="the factor belongs to 'seq-mean-token-sum-norm'"):
        PPOCriticConfig(loss_scale_factor=3.0)


def test_a_critic_has_a_value_head() -> None:
    assert load_config(PPOCriticConfig).is_critic
    with pytest.raises(ConfigError, match="'is_critic' is False"):
        load_config(PPOCriticConfig, overrides=["is_critic=false"])


def test_the_policy_of_the_training_step_stands_for_the_one_before_it_with_one_minibatch_only() -> (
    None
):
    decoupled: dict[str, Any] = {"use_decoupled_loss": True, "prox_logp_method": "reuse_train_logp"}
    PPOActorConfig(**decoupled, ppo_n_minibatches=1)
    with pytest.raises(
        ConfigError, match="one before the update, but 'ppo_n_minibatches' is 4; set it to 1"
    ):
        PPOActorConfig(**decoupled)


def test_every_named_loss_and_estimator_has_a_function() -> None:
    assert tuple(policy_losses.POLICY_LOSSES) == config.POLICY_LOSSES
    assert tuple(advantages.ADV_ESTIMATORS) == config.ADV_ESTIMATORS
    assert {*config.WITH_SEQUENCE_RATIOS, *config.OF_PICKED_TOKENS} <= {*config.POLICY_LOSSES}
    assert {*config.OVER_GROUPS} <= {*config.ADV_ESTIMATORS}
