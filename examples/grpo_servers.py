"""GRPO on Ray with inference servers, sampling ahead of training. Any of its processes may die.

    # starts two vLLM servers on the CPU, and on two GPUs
    python examples/grpo_servers.py python=.venv-vllm/bin/python
    python examples/grpo_servers.py python=/envs/vllm/bin/python gpus=2,3
    # servers that run already
    python examples/grpo_servers.py servers=[http://host:8000,http://host:8001]

The driver publishes every version of the weights to the servers (`ServerFleet`) and hands out
prompts as numbered tickets (`RolloutExecutor`). The ledger of tickets is saved in the same snapshot
as engine, data cursor and generators.

- A dead server is started again, and gets no requests until it serves the current weights. The
  other servers take its requests.
- After the loss of a trainer, the `Supervisor` runs `train` again.
- After the loss of the driver, run the same command again.

In every case, each ticket is trained exactly once, in its step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from copy_task import EOS_ID, MAX_NEW_TOKENS, CopyPrompts, reward, write_model_folder
from grpo_job import (
    GRPOConfig,
    TrainWorker,
    exit_with,
    note_attempt,
    note_processes,
    open_stats,
    read_config,
    require_steps,
    run_job,
    show_progress,
    split_rows,
)

from holdfast.engine.launch import ServerFolder, ServerProcesses, ServerSpec
from holdfast.engine.rollouts import (
    RLVRWorkflow,
    RolloutConfig,
    RolloutExecutor,
    concat_trajectories,
)
from holdfast.engine.servers import ServerFleet, VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters
from holdfast.engine.worker_group import WorkerGroup
from holdfast.recover import RecoverHandler, ResumableDataLoader
from holdfast.recover.supervisor import Attempt, Supervisor
from holdfast.utils.config import require_at_least, require_choice, require_range
from holdfast.utils.errors import ConfigError, RolloutError, ServerError
from holdfast.utils.metrics import read_stats
from holdfast.utils.timing import PhaseTimes


@dataclass
class GRPOServersConfig(GRPOConfig):
    """Options of the job, in addition to `GRPOConfig`."""

    experiment_name: str = "grpo_servers"
    servers: list[str] = field(default_factory=list)
    """URLs of vLLM servers with a model of this architecture. If empty, the job starts its own
    servers, unless ``servers_folder`` names some.
    """
    servers_folder: str | None = None
    """Folder of the servers that `holdfast serve` keeps running."""
    mirrors: list[str] = field(default_factory=list)
    """URLs of the mirrors of ``servers``, in their order. If empty, the servers read the published
    folders themselves.
    """
    n_servers: int = 2
    """Number of servers to start."""
    python: str = ".venv-vllm/bin/python"
    """Python of an environment with vLLM, for starting servers."""
    gpus: str | None = None
    """Devices for the servers to start, ``2,3``. None: they compute on the CPU."""
    server_start_s: float = 1800.0
    """Longest time until the servers answer."""
    min_servers: int = 1
    """Number of servers that must serve a version before the step goes on."""
    publish: str = "disk"
    """``disk``: publish whole weights, with adapters merged. ``delta``: publish the changes in
    bfloat16, from which the servers' mirrors make the weights. ``adapter`` (with
    ``actor.use_lora``): publish only the adapters, which the servers add to the base model that
    they were started with.
    """
    colocate: bool = False
    """Trainers and servers take turns on the same GPUs. The servers must be able to sleep
    (``--enable-sleep-mode``).
    """
    publish_timeout_s: float = 300.0
    """Longest time for loading a version."""
    weights_folder: str | None = None
    """Folder for published weights, for example in memory (/dev/shm/...). None: in the run's
    folder.
    """
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Options of sampling, for example how far it runs ahead of training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, n_servers=1)
        # `holdfast serve` may keep any number of them in a folder.
        count = float("inf")
        if self.servers_folder is None:
            count = len(self.servers) or self.n_servers
        require_range("min_servers", self.min_servers, low=1, high=count)
        self.rollout = replace(self.rollout, seed=self.seed, total_steps=self.total_steps)
        if self.actor.router_replay.is_on:
            self.rollout = replace(self.rollout, return_routed_experts=True)
        require_choice("publish", self.publish, ("disk", "delta", "adapter"))

        # Changes alone are of use only to a server with a mirror.
        n_mirrors = len(self.mirrors)
        needs_mirrors = self.publish == "delta" or n_mirrors > 0
        if needs_mirrors and n_mirrors != len(self.servers):
            raise ConfigError(
                f"config key 'mirrors' has {n_mirrors} URLs; expected one for each of the "
                f"{len(self.servers)} 'servers', or none without publish=delta"
            )

        if self.publish == "adapter" and not self.actor.use_lora:
            raise ConfigError(
                "config key 'publish' is 'adapter', but 'actor.use_lora' is false: there are no "
                "adapters to publish"
            )
        if self.publish == "adapter" and (not self.actor.path or self.actor.init_from_scratch):
            raise ConfigError(
                "config key 'publish' is 'adapter', which takes a base that the servers have, "
                "too; name a model folder with weights as 'actor.path', the export of an earlier "
                "run, say"
            )

    @property
    def versions_in_flight(self) -> int:
        """Number of weight versions that may answer requests at the same time."""
        return self.rollout.max_head_offpolicyness + 1

    @property
    def published(self) -> Path:
        """Return the folder for published weights."""
        return Path(self.weights_folder or self.recover.trial_root / "weights")

    @property
    def server_spec(self) -> ServerSpec:
        """Return how to start a server."""
        return vllm_spec(
            self.actor.path,
            self.python,
            on_cpu=self.gpus is None,
            dtype=self.actor.dtype,
            sleeps=self.colocate,
            lora_rank=self.actor.lora_rank if self.publish == "adapter" else 0,
            lora_modules=self.actor.target_modules,
            lora_versions=self.versions_in_flight,
            routed_experts=self.rollout.return_routed_experts,
        )

    @property
    def gconfig(self) -> GenerationHyperparameters:
        """Return the sampling parameters."""
        return GenerationHyperparameters(
            self.n_samples,
            MAX_NEW_TOKENS,
            temperature=self.actor.temperature,
            stop_token_ids=[EOS_ID],
        )


def vllm_spec(model: str, python: str, on_cpu: bool = True, **options: Any) -> ServerSpec:
    """Return how to start vLLM for the copy task."""
    return ServerSpec(
        "vllm",
        model,
        python,
        device="cpu" if on_cpu else "cuda",
        max_model_len=64,
        max_num_seqs=64,
        environment={"OMP_NUM_THREADS": "1"} if on_cpu else {},
        **options,
    )


class CopySamples:
    """Dataset of the copy task for `RLVRWorkflow`: ``input_ids`` and the data for the reward."""

    def __init__(self, prompts: CopyPrompts) -> None:
        self._prompts = prompts
        self.fingerprint = prompts.fingerprint

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        prompt = self._prompts[index]
        return {"input_ids": prompt["prompt_ids"], "answer": prompt["answer"]}


def copy_reward(
    prompt: Any, completion: Any, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Reward of one completion."""
    return reward(completion_ids, data["answer"])


class Servers(NamedTuple):
    """The inference servers of a job and their fleet. The job either starts the servers or gets
    them by configuration.

    The servers outlive the attempts of the supervisor. Only the driver talks to them.
    """

    fleet: ServerFleet
    # Returns the process ids of servers that the job has started.
    pids: Callable[[], dict[str, int]]


@contextmanager
def open_servers(config: GRPOServersConfig) -> Iterator[Servers]:
    """Start the servers, unless they run already. The first publication waits for those that the
    job starts.
    """
    with ExitStack() as stack:
        pids = dict[str, int]
        if config.servers:
            pairs = zip_longest(config.servers, config.mirrors)
            servers = [VLLMServer(url, mirror=mirror) for url, mirror in pairs]
            wait_for_servers(servers, config.server_start_s)
        elif config.servers_folder is not None:
            servers = ServerFolder(config.servers_folder)
        else:
            folder = config.recover.trial_root / "servers"
            mirrored = config.published if config.publish == "delta" else None
            servers = stack.enter_context(
                ServerProcesses(
                    config.server_spec, config.n_servers, folder, config.gpus, published=mirrored
                )
            )
            pids = servers.pids
            print(f"starting {config.n_servers} inference servers; logs: {folder}", flush=True)
            if config.colocate:  # they need their memory before the trainers take it
                servers.wait_until_up(config.server_start_s)
        fleet = ServerFleet(servers, config.min_servers, server_wait_s=config.server_start_s)
        stack.callback(fleet.close)
        yield Servers(fleet, pids)


def wait_for_servers(servers: Sequence[VLLMServer], timeout_s: float) -> None:
    """Wait until all servers answer. Raises ServerError if one does not within ``timeout_s``."""
    end = time.monotonic() + timeout_s
    for server in servers:
        while True:
            try:
                server.status()
                break
            except ServerError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.5)


def train(
    config: GRPOServersConfig,
    servers: Servers,
    attempt: Attempt,
    handler_class: type[RecoverHandler] = RecoverHandler,
) -> None:
    """Run the job to its end, from a fresh start or the newest generation."""
    if config.colocate:
        servers.fleet.sleep()
    trainer = attempt.worker_group(
        TrainWorker,
        args=(config,),
        name="trainer",
        world_size=config.n_trainers,
        resources=config.trainer_resources,
        strategy=config.strategy,
        hang_timeout_s=config.hang_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
    )
    # A server may read adapters again while it uses them.
    n_kept = max(2, config.versions_in_flight)
    trainer.call_all("connect", [], str(config.published), config.publish, n_kept)

    # One loader, because the driver hands out all prompts.
    samples = CopySamples(CopyPrompts(config.n_prompts, config.seed))
    loader = ResumableDataLoader(samples, config.batch_size, seed=config.seed)
    with (
        closing(RLVRWorkflow(copy_reward, config.gconfig)) as workflow,
        RolloutExecutor(config.rollout, loader, workflow, servers.fleet) as rollouts,
        handler_class(config.recover, config.ft_spec, notices=[attempt.draining]) as handler,
        closing(open_stats(config)) as stats_logger,
    ):
        note_processes(config, trainer=trainer.pids(), server=[*servers.pids().values()])
        handler.register("rollouts", rollouts)
        info = handler.load(trainer, dataloader=loader)
        step = handler.first_step(info)
        require_steps(config, step)
        stats_logger.resume_after(info.last_step_info.global_step if info else None)
        note_attempt(config, attempt, step, trainer.world_size)
        with show_progress(config, step) as advance:
            while step.global_step < config.total_steps:
                started = time.monotonic()
                stats = train_step(config, servers.fleet, rollouts, trainer, step.global_step)
                seconds = time.monotonic() - started

                # Log before the snapshot: a kill between the two logs the step twice.
                times = {"seconds": seconds, "time": time.time()}
                stats_logger.log(step.global_step, {**stats, **times, **handler.goodput()})
                last = step.global_step == config.total_steps - 1
                handler.dump(trainer, step, dataloader=loader, force=last, metrics=stats)
                advance(step, f"reward {stats['reward']:.3f}", seconds)
                step = step.next()
    if not config.final_export.exists():
        trainer.call_all("export", str(config.final_export))


def train_step(
    config: GRPOServersConfig,
    fleet: ServerFleet,
    rollouts: RolloutExecutor,
    trainer: WorkerGroup,
    step: int,
) -> dict[str, float]:
    """Publish the weights after ``step`` steps, let sampling run ahead, and train on the tickets of
    this step.
    """
    turn = ("waking", "sleeping") if config.colocate else ()
    times = PhaseTimes(*turn, "publishing", "sampling", "training")

    # The servers need memory for the new weights.
    if config.colocate:
        with times.phase("waking"):
            trainer.call_all("offload")
            fleet.wake_up(("weights",))
            rollouts.resume()
    with times.phase("publishing"):
        fleet.withdraw(step)  # after a crash, the run writes this version a second time
        published = trainer.call_all("publish")[0]
        fleet.update(published.path, published.version, config.publish_timeout_s)
    with times.phase("sampling"):  # the part of sampling that training waits for
        rollouts.set_version(step)
        accepted = rollouts.next_trajectories(step)
    if config.colocate:
        with times.phase("sleeping"):
            rollouts.pause()
            fleet.sleep()
            trainer.call_all("onload")
    with times.phase("training"):
        batch = concat_trajectories([trajectory for _, trajectory in accepted])
        shares = split_rows(batch, config, trainer.world_size, config.n_samples)
        stats = trainer.call_all("train_step", per_rank=shares)[0]

    first, _ = accepted[0]
    last, _ = accepted[-1]
    return {
        **stats,
        "tickets/first": first.number,
        "tickets/last": last.number,
        "tickets/trained": len(accepted),
        **rollouts.stats(),
        **published.stats(),
        **fleet.stats(),
        **times.take(),
    }


def account(config: GRPOServersConfig) -> str:
    """Describe what happened to the tickets, over all starts of the run.

    Raises:
        RolloutError: a ticket was trained twice, or not at all.
    """
    steps = read_stats(config.stats_folder / "stats.jsonl")
    numbers = [s["step"] for s in steps]
    trained: list[int] = []
    for s in steps:
        trained += range(int(s["tickets/first"]), int(s["tickets/last"]) + 1)

    # Steps and tickets count from 0, without gaps.
    every_step = numbers == list(range(config.total_steps))
    every_ticket = trained == list(range(len(trained)))
    if not (every_step and every_ticket):
        raise RolloutError(
            f"{config.stats_folder}/stats.jsonl does not account for every ticket once"
        )
    # Staleness of the whole run, as the bound promises.
    oldest = max(s["rollouts/staleness_max"] for s in steps)
    return (
        f"tickets 0 to {trained[-1]} were trained, each once and in its step; no token is more "
        f"than {oldest:.0f} step(s) older than the weights that it trained"
    )


def main(argv: list[str]) -> int:
    """Run the job."""
    config = read_config(GRPOServersConfig, "grpo_servers.yaml", __doc__, argv)

    def supervise(config: GRPOServersConfig, supervisor: Supervisor) -> None:
        with open_servers(config) as servers:
            supervisor.run(partial(train, config, servers))
        print(account(config))

    # On a CPU, vLLM needs attention heads of at least 32.
    return run_job(config, partial(write_model_folder, hidden=128, for_vllm=True), supervise)


if __name__ == "__main__":
    exit_with(main)
