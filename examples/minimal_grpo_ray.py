"""GRPO on Ray in one file: examples/minimal_grpo.py, whose workers are started again when they die.

    python examples/minimal_grpo_ray.py python=/envs/vllm/bin/python ranks=2 gpus_per_rank=1

Ray places the server and the workers. The driver samples, and holds the data position. Each worker
holds a shard of the policy. A worker that dies takes the others with it, and the supervisor starts
all of them again from the newest snapshot. After the death of the driver, run the same command
again.
"""

import os
import re
import sys
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    OptimizerConfig,
    SaveLoadMeta,
    ServerFleet,
    WeightUpdateMeta,
)
from holdfast.engine.launch import RayServers, ServerSpec
from holdfast.engine.rl import NormConfig, PPOActor, PPOActorConfig
from holdfast.engine.rollouts import (
    GenerationHyperparameters,
    RLVRWorkflow,
    RolloutConfig,
    RolloutExecutor,
)
from holdfast.engine.servers.publish import PublishedWeights
from holdfast.engine.worker_group import WorkerResources
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from holdfast.recover.supervisor import Attempt, Supervisor

Batch = dict[str, Any]


@dataclass
class Config:
    """Options of the job, each ``name=value`` on the command line."""

    model: str = "Qwen/Qwen3-0.6B"
    """A folder or an id on the hub."""
    python: str = sys.executable
    """Python of an environment with vLLM."""
    fileroot: str = "runs/minimal_grpo_ray"
    """Folder for snapshots, published weights, logs of servers and the trained model."""
    ranks: int = 2
    cpus_per_rank: float = 1
    gpus_per_rank: float = 0
    dtype: str = "bfloat16"
    lr: float = 1e-6
    epochs: int = 20
    batch_size: int = 4
    """Prompts per step, a multiple of ``ranks``."""
    n_samples: int = 16
    """Completions per prompt."""
    max_new_tokens: int = 256
    steps_ahead: int = 1
    """Steps that sampling runs ahead of training."""
    freq_steps: int = 10
    """Steps between two snapshots."""


def make_dataset() -> list[dict[str, Any]]:
    """Return the samples: ``messages`` for the model, and whatever the reward needs."""
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}
        for a in range(5)
        for b in range(5)
    ]


def reward_fn(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Return 1 if the last number is the answer. Runs in a process of a pool, with a time limit."""
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [data["answer"]])


def spec_of(config: Config) -> FinetuneSpec:
    """Return the length of the run."""
    return FinetuneSpec(config.epochs, len(make_dataset()), config.batch_size)


class Trainer:
    """One rank of the policy. `RecoverHandler` takes snapshots of its attribute ``engine``."""

    def __init__(self, config: Config) -> None:
        actor_config = PPOActorConfig(
            path=config.model,
            dtype=config.dtype,
            optimizer=OptimizerConfig(lr=config.lr),
            group_size=config.n_samples,
            reward_norm=NormConfig(mean_level="group", std_level="group"),
        )
        self.engine = FSDPEngine(actor_config)

        # All ranks together hold the model, and write new weights.
        self.engine.create_process_group()
        self.engine.initialize(None, spec_of(config))
        self.actor = PPOActor(actor_config, self.engine)
        meta = WeightUpdateMeta("disk", f"{config.fileroot}/weights")
        self.engine.connect_engine([], meta)

    def publish(self) -> PublishedWeights:
        """Write the weights. The driver tells the servers."""
        return self.engine.update_weights()

    def train(self, batch: Batch) -> dict[str, float]:
        """Run one step on this rank's share of the batch."""
        stats = self.actor.ppo_update(self.actor.compute_advantages(batch))
        self.engine.step_lr_scheduler()
        self.engine.set_version(self.engine.get_version() + 1)
        return stats

    def export(self, path: str, tokenizer: Any) -> None:
        """Write the trained model, for `from_pretrained` and inference servers."""
        self.engine.save(SaveLoadMeta(path, "hf", with_optim=False, tokenizer=tokenizer))

    def destroy(self) -> None:
        """Leave the process group."""
        self.engine.destroy()


def split(batch: Batch, ranks: int) -> list[tuple[Batch]]:
    """Give each rank an equal part of the rows, which has whole groups."""
    rows = len(batch["rewards"]) // ranks
    shares = []
    for rank in range(ranks):
        begin = rank * rows
        share = {key: tensor[begin : begin + rows] for key, tensor in batch.items()}
        shares.append((share,))
    return shares


def run(config: Config, fleet: ServerFleet, attempt: Attempt) -> None:
    """Run the job to its end, from a fresh start or from the newest snapshot."""
    spec = spec_of(config)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    sampling = GenerationHyperparameters(
        n_samples=config.n_samples,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=[tokenizer.eos_token_id],
    )

    # One process for each rank.
    workers = attempt.worker_group(
        Trainer,
        args=(config,),
        name="trainer",
        world_size=config.ranks,
        resources=WorkerResources(config.cpus_per_rank, config.gpus_per_rank),
    )

    # The driver samples ahead and holds the data position. Snapshots have both, and the engine.
    loader = ResumableDataLoader(make_dataset(), config.batch_size, seed=1)
    ahead = RolloutConfig(config.steps_ahead, total_steps=spec.total_train_steps)
    recover = RecoverConfig(fileroot=config.fileroot, freq_steps=config.freq_steps)
    with (
        closing(RLVRWorkflow(reward_fn, sampling, tokenizer)) as workflow,
        RolloutExecutor(ahead, loader, workflow, fleet) as rollouts,
        RecoverHandler(recover, spec, notices=[attempt.draining]) as handler,
    ):
        handler.register("rollouts", rollouts)
        step = handler.first_step(handler.load(workers, dataloader=loader))
        while step.global_step < spec.total_train_steps:
            fleet.withdraw(step.global_step)  # after a crash, this version is written again
            written = workers.call_all("publish")[0]
            fleet.update(written.path, written.version, timeout_s=300)
            rollouts.set_version(step.global_step)
            batch = rollouts.next_batch(step.global_step)
            stats = workers.call_all("train", per_rank=split(batch, config.ranks))[0]
            handler.dump(workers, step, dataloader=loader)
            print(f"step {step.global_step}: reward {stats['reward']:.3f}", flush=True)
            step = step.next()
    trained = Path(config.fileroot, f"model_{spec.total_train_steps}")
    if not trained.exists():
        workers.call_all("export", str(trained), tokenizer)


if __name__ == "__main__":
    given = OmegaConf.from_cli(sys.argv[1:])
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), given))
    config.fileroot = os.path.abspath(config.fileroot)
    assert config.batch_size % config.ranks == 0, "batch_size must be a multiple of ranks"
    recover = RecoverConfig(fileroot=config.fileroot)
    ray.init()

    # The server takes a GPU, outlives the workers, and is started again when it ends.
    how = ServerSpec("vllm", config.model, config.python, dtype=config.dtype)
    with (
        RayServers(how, 1, recover.trial_root / "servers") as servers,
        closing(ServerFleet(servers)) as fleet,
    ):
        Supervisor(recover).run(partial(run, config, fleet))
