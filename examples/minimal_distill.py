"""On-policy distillation in one file: `minimal_grpo.py` with a teacher that scores every token.

    torchrun --nproc_per_node=2 examples/minimal_distill.py python=/envs/vllm/bin/python gpu=2

The student samples, and learns from the teacher's log-probabilities of its own tokens. Rewards are
only printed, unless ``rl_loss_weight`` is more than 0. A teacher that is a URL is a vLLM server.
Kill it at any moment and start it again with the same command: it continues after its newest
snapshot. It refuses to go on with another teacher. docs/algorithms.md has the formula.
`make distill` runs this file without a GPU, with tiny models and a stand-in for the server.
"""

import re
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.distributed import get_rank
from transformers import AutoTokenizer

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    OptimizerConfig,
    SaveLoadMeta,
    ServerFleet,
    VLLMServer,
    WeightUpdateMeta,
)
from holdfast.engine.launch import ServerProcesses, ServerSpec
from holdfast.engine.rl import (
    EngineTeacher,
    NormConfig,
    PPOActor,
    PPOActorConfig,
    ServerTeacher,
)
from holdfast.engine.rollouts import (
    GenerationHyperparameters,
    RLVRWorkflow,
    RolloutConfig,
    RolloutExecutor,
    SharedRollouts,
)
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader


@dataclass
class Config:
    """Options of the job, each ``name=value`` on the command line."""

    model: str = "Qwen/Qwen3-0.6B"
    """A folder or an id on the hub."""
    teacher: str = "Qwen/Qwen3-4B"
    """A folder, an id on the hub, or the URL of a server. Its vocabulary is that of the model."""
    distill_loss_weight: float = 1.0
    """Weight of the teacher."""
    rl_loss_weight: float = 0.0
    """Weight of the rewards."""
    python: str = sys.executable
    """Python of an environment with vLLM."""
    gpu: str | None = None
    """Device of the server. None: the first one, which rank 0 has, too."""
    fileroot: str = "runs/minimal_distill"
    """Folder for snapshots, published weights, logs of servers and the trained model."""
    dtype: str = "bfloat16"
    lr: float = 1e-6
    epochs: int = 20
    batch_size: int = 5
    """Prompts per step."""
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


def main(config: Config) -> None:
    """Train on this rank."""
    dataset = make_dataset()
    spec = FinetuneSpec(config.epochs, len(dataset), config.batch_size)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    recover = RecoverConfig(fileroot=config.fileroot, freq_steps=config.freq_steps)

    # The policy: a model in shards on all ranks, and the loss of GRPO.
    actor_config = PPOActorConfig(
        path=config.model,
        dtype=config.dtype,
        optimizer=OptimizerConfig(lr=config.lr),
        ppo_n_minibatches=1,
        group_size=config.n_samples,
        reward_norm=NormConfig(mean_level="group", std_level="group"),
        distill_loss_weight=config.distill_loss_weight,
        rl_loss_weight=config.rl_loss_weight,
        adv_norm=NormConfig(mean_level="batch", std_level=None),
    )
    engine = FSDPEngine(actor_config)
    engine.create_process_group()

    # Rank 0 starts the server, and starts it again when it ends.
    how = ServerSpec("vllm", config.model, config.python, dtype=config.dtype)
    servers = ServerProcesses(how, 1, recover.trial_root / "servers", config.gpu)
    if get_rank() == 0:
        servers.start()
    engine.initialize(None, spec)

    # The teacher: a server, or a second model in shards that does not train.
    if config.teacher.startswith("http"):
        teacher = ServerTeacher([VLLMServer(config.teacher)], engine)
    else:
        teacher_engine = FSDPEngine(
            PPOActorConfig(path=config.teacher, dtype=config.dtype, optimizer=None)
        )
        teacher_engine.create_process_group()
        teacher_engine.initialize(None, spec)
        teacher = EngineTeacher(teacher_engine)
    actor = PPOActor(actor_config, engine, teacher)

    # Sampling: rank 0 sends each prompt to the server, which serves the weights of every step.
    fleet = ServerFleet(servers)
    engine.connect_engine(fleet, WeightUpdateMeta("disk", f"{config.fileroot}/weights"))
    sampling = GenerationHyperparameters(
        n_samples=config.n_samples,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    loader = ResumableDataLoader(dataset, config.batch_size, seed=1)
    ahead = RolloutConfig(config.steps_ahead, total_steps=spec.total_train_steps)
    rollouts = SharedRollouts(
        lambda: RolloutExecutor(ahead, loader, RLVRWorkflow(reward_fn, sampling, tokenizer), fleet),
        engine,
    )

    # Recovery: engine, data position, samples and generators are saved together.
    handler = RecoverHandler(recover, spec, group=engine.control_group)
    with closing(servers), closing(fleet), closing(rollouts), handler:
        handler.register("rollouts", rollouts)
        step = handler.first_step(handler.load(engine, dataloader=loader))
        while step.global_step < spec.total_train_steps:
            engine.update_weights()
            rollouts.set_version(step.global_step)
            batch = rollouts.next_batch(step.global_step)
            stats = actor.ppo_update(actor.compute_advantages(batch))
            engine.step_lr_scheduler()
            engine.set_version(step.global_step + 1)
            handler.dump(engine, step, dataloader=loader)
            if get_rank() == 0:
                kl = stats["kl_teacher_k1"]
                print(
                    f"step {step.global_step}: reward {stats['reward']:.3f}, kl {kl:.3f}",
                    flush=True,
                )
            step = step.next()

    # The trained model, for `from_pretrained` and inference servers. A longer run has another one.
    trained = Path(config.fileroot, f"model_{spec.total_train_steps}")
    if not trained.exists():
        engine.save(SaveLoadMeta(str(trained), "hf", with_optim=False, tokenizer=tokenizer))
    engine.destroy()


if __name__ == "__main__":
    given = OmegaConf.from_cli(sys.argv[1:])
    main(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), given)))  # type: ignore
