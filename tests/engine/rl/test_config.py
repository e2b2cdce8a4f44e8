"""The actor's and critic's configuration through files and overrides."""

from pathlib import Path

import pytest

from holdfast.engine.rl import NormConfig, PPOActorConfig, PPOCriticConfig
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError


def test_an_actor_is_read_from_yaml_with_and_without_its_norms(tmp_path: Path) -> None:
    path = tmp_path / "actor.yaml"
    path.write_text("group_size: 4\nreward_norm: {mean_level: group, std_level: null}\noptimizer: {lr: 0.5}\n")
    config = load_config(PPOActorConfig, path, ["eps_clip_higher=0.28", "adv_norm.mean_level=batch"])
    assert config.reward_norm == NormConfig(mean_level="group", std_level=None)
    assert config.adv_norm == NormConfig() and config.eps_clip_higher == 0.28
    assert config.optimizer is not None and config.optimizer.lr == 0.5
    assert load_config(PPOActorConfig, path, ["reward_norm=null"]).reward_norm is None
    assert load_config(PPOActorConfig).reward_norm is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eps_clip=-0.1", "'eps_clip' is -0.1"),
        ("kl_estimator=k4", "'kl_estimator' is 'k4'; expected one of 'k1', 'k2', 'k3', 'low_var_kl'"),
        ("policy_loss=grpo", "'policy_loss' is 'grpo'; expected one of 'ppo', 'gspo', 'cispo', 'sapo', 'gpg', 'gmpo'"),
        ("loss_agg_mode=mean", "'loss_agg_mode' is 'mean'; expected one of 'token-mean'"),
        ("loss_agg_mode=seq-mean-token-sum-norm", "'loss_scale_factor' is None and 'loss_agg_mode' is 'seq-mean-token"),
        ("loss_scale_factor=100", "'loss_scale_factor' is 100.0 and 'loss_agg_mode' is 'token-mean'"),
        ("importance_sampling_level=row", "'importance_sampling_level'"),
        ("sapo_tau_neg=0", "'sapo_tau_neg' is 0.0; expected more than 0"),
        ("rejection_sampling.upper=2", "'use_decoupled_loss' is False, so that there are no weights to bound"),
        ("rejection_sampling.upper=1", "'rejection_sampling.upper' is 1.0; of ratios expected more than 1"),
        ("rejection_sampling.level=word", "'rejection_sampling.level' is 'word'"),
        ("overlong_reward_penalty=true", "'overlong_reward_penalty' is True, but 'max_new_tokens' is null"),
        ("kl_ctl=-1", "'kl_ctl'"),
        ("adv_estimator=best", "'adv_estimator' is 'best'; expected one of 'grpo', 'remax', 'opo', 'gpg'"),
        ("adv_estimator=opo", "'adv_estimator' is 'opo', which compares answers to one prompt, but 'group_size' is 1"),
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
        (["policy_loss=cispo", "importance_sampling_level=sequence"], "policy_loss 'cispo' has no ratio of sequences"),
        (["policy_loss=sapo", "use_decoupled_loss=true"], "policy_loss 'sapo' is not defined for it"),
        (["adv_estimator=remax", "reward_norm.std_level=null"], "a baseline of its own, but 'reward_norm' is set"),
        (["policy_loss=gpg", "c_clip=3"], "'c_clip' is 3.0, but policy_loss 'gpg' does not clip so"),
        (
            ["use_decoupled_loss=true", "rejection_sampling.metric=kl_k2", "rejection_sampling.action=clamp"],
            "its bounds are of kl_k2, not of the weight",
        ),
        (
            ["use_decoupled_loss=true", "rejection_sampling.upper=2", "rejection_sampling.lower=3"],
            "'rejection_sampling.lower' is 3.0, above 'rejection_sampling.upper', 2.0",
        ),
        (["max_new_tokens=10", "overlong_tokens=20"], "'overlong_tokens' is 20; expected a value from 1 to 10"),
    ],
)
def test_choices_that_do_not_go_together_are_refused_with_the_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(PPOActorConfig, overrides=overrides)


def test_a_critic_has_a_value_head() -> None:
    assert load_config(PPOCriticConfig).is_critic
    with pytest.raises(ConfigError, match="'is_critic' is False"):
        load_config(PPOCriticConfig, overrides=["is_critic=false"])
