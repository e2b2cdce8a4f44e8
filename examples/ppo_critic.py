"""PPO with a critic: `examples/grpo.py` with a second engine, saved in the same generation.

    python examples/ppo_critic.py [--config examples/ppo_critic.yaml] [key=value ...]

Each prompt gets one answer. The critic estimates the value before each token, where GRPO compares
several answers. GAE turns the values into advantages for the actor and returns for the critic.
`RecoverHandler` finds both engines under ``engines`` and commits them together, so that actor and
critic always come back at the same step.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from copy_task import write_model_folder
from grpo import copy_digits, run_parts
from grpo_job import GRPOConfig, TrainWorker, exit_with, read_config, run_job

from holdfast.engine import FSDPEngine
from holdfast.engine.api import Batch
from holdfast.engine.rl import PPOCritic, PPOCriticConfig
from holdfast.utils.errors import ConfigError


@dataclass
class PPOConfig(GRPOConfig):
    """Options of the job, in addition to `GRPOConfig`."""

    experiment_name: str = "ppo_critic"
    critic: PPOCriticConfig = field(default_factory=PPOCriticConfig)
    """The value function. With an empty ``path``, it starts from the actor's model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend is not None:
            self.critic = replace(self.critic, backend=self.backend)
        if self.critic.optimizer is None:
            raise ConfigError(
                "config key 'critic.optimizer' is null; a critic that is trained needs one"
            )


class PPOWorker(TrainWorker):
    """One rank of policy and critic. `RecoverHandler` snapshots its attribute ``engines``."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        if not config.critic.path:
            config.critic.path = config.actor.path
            config.critic.init_from_scratch = config.actor.init_from_scratch

        critic = FSDPEngine(config.critic)
        critic.create_process_group()
        critic.initialize(None, config.ft_spec)
        self.critic = PPOCritic(config.critic, critic)
        self.engines = {"actor": self.engine, "critic": critic}

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Run one PPO step on this rank's share of the batch. Statistics of the critic begin with
        ``critic/``.
        """
        # The advantages are from the critic before its update.
        values = self.critic.compute_values(batch)
        batch = {**batch, "values": values}
        batch = self.actor.compute_advantages(batch)

        stats = self.actor.ppo_update(batch)
        seen = self.critic.ppo_update(batch)
        for name, number in seen.items():
            stats[f"critic/{name}"] = number

        # The critic is never published. Its version tells traces which step it trains.
        self.end_step()
        self.critic.engine.step_lr_scheduler()
        self.engines["critic"].set_version(self.engine.get_version())
        return stats

    def destroy(self) -> None:
        """Leave the process groups."""
        # In the opposite order of their creation.
        for engine in reversed(self.engines.values()):
            engine.destroy()


def main(argv: list[str]) -> int:
    """Run the job."""
    config = read_config(PPOConfig, "ppo_critic.yaml", __doc__, argv)
    parts = copy_digits(config, PPOWorker)
    supervise = partial(run_parts, parts)
    return run_job(config, write_model_folder, supervise)


if __name__ == "__main__":
    exit_with(main)
