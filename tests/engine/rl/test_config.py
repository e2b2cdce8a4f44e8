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
        ("kl_estimator=k1", "'kl_estimator' is 'k1'; expected one of 'k2', 'k3'"),
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


def test_a_critic_has_a_value_head() -> None:
    assert load_config(PPOCriticConfig).is_critic
    with pytest.raises(ConfigError, match="'is_critic' is False"):
        load_config(PPOCriticConfig, overrides=["is_critic=false"])
