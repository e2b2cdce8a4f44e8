"""Shared parts of the GRPO examples: job configuration, trainers, start of the job."""

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import ray
from copy_task import require_copy_tokenizer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    InferenceServer,
    SaveLoadMeta,
    StepInfo,
    WeightUpdateMeta,
)
from holdfast.engine.api import Batch
from holdfast.engine.model_folder import find_model_folder
from holdfast.engine.rl import PPOActor, PPOActorConfig
from holdfast.engine.servers.publish import PublishedWeights
from holdfast.engine.worker_group import STRATEGIES, WorkerResources
from holdfast.recover import RecoverConfig
from holdfast.recover.supervisor import Attempt, Supervisor
from holdfast.utils.config import load_config, require_at_least, require_choice, require_range
from holdfast.utils.errors import ConfigError, HoldfastError, JobRefusedError, Preempted
from holdfast.utils.files import replace_atomically
from holdfast.utils.logging import configure_logging
from holdfast.utils.metrics import StatsLogger
from holdfast.utils.rng import seed_rng
from holdfast.utils.trackers import require_trackers


@dataclass
class GRPOConfig:
    """Options of the job. All files of a run are below
    ``<fileroot>/<experiment_name>/<trial_name>``.
    """

    experiment_name: str = "grpo_copy"
    """Name for a group of trials."""
    trial_name: str = "trial0"
    """Name of this run. Starting the same name again continues the run."""
    fileroot: str = "runs"
    """Parent folder of all runs."""
    seed: int = 1
    """Seed of the prompts, their order, and sampling."""
    total_steps: int = 150
    """Length of the run."""
    n_prompts: int = 1600
    """Size of the dataset."""
    batch_size: int = 16
    """Prompts per step."""
    n_samples: int = 16
    """Completions per prompt."""
    n_trainers: int = 2
    """Ranks that share the policy."""
    min_trainers: int | None = None
    """Smallest number of trainers to go on with if the cluster lacks resources for all (see
    ``recover.shrink_after_s``).
    None: all.
    """
    cpus_per_trainer: float = 1.0
    """CPUs and threads per trainer."""
    gpus_per_trainer: float = 0.0
    """GPUs per trainer: 1, or 0 to train on the CPU."""
    resources_per_trainer: dict[str, float] = field(default_factory=dict)
    """Other resources per trainer, with the names given to ``ray start --resources``."""
    strategy: str = "PACK"
    """Ray's placement of trainers on nodes: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    cpus_per_rollout: float = 1.0
    """CPUs and threads of the rollout worker."""
    gpus_per_rollout: float = 0.0
    """GPUs of the rollout worker: 1, a fraction to share one with others, or 0 to sample on the
    CPU.
    """
    resources_per_rollout: dict[str, float] = field(default_factory=dict)
    """Other resources of the rollout worker."""
    ray_address: str = "local"
    """``local`` starts Ray on this machine, ``auto`` joins the cluster of this machine,
    ``host:port`` names the head of a cluster.
    """
    hang_timeout_s: float = 60.0
    """Seconds after which a worker that does not answer pings counts as lost."""
    stall_timeout_s: float = 1800.0
    """Seconds after which workers that answer pings, but make no progress, count as lost."""
    backend: str | None = None
    """Mesh of the trainers, for example ``fsdp:d1c2``. None: as ``actor.backend`` says."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Trackers in addition to ``stats.jsonl``, by their names in docs/examples.md."""
    log_level: str = "WARNING"
    """Log level of the driver and all workers."""
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    """The policy. With an empty ``path``, the tiny model of the copy task is trained from scratch.
    """
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Snapshots. Their folder is set by this job."""

    def __post_init__(self) -> None:
        require_choice("log_level", self.log_level, ("DEBUG", "INFO", "WARNING", "ERROR"))
        require_trackers(self.trackers)
        require_at_least(
            self,
            total_steps=1,
            n_trainers=1,
            cpus_per_trainer=0.0,
            cpus_per_rollout=0.0,
            gpus_per_trainer=0.0,
            gpus_per_rollout=0.0,
            hang_timeout_s=0.1,
            stall_timeout_s=0.1,
            n_prompts=self.batch_size,
        )
        require_range("min_trainers", self.min_trainers, low=1, high=self.n_trainers)
        require_choice("strategy", self.strategy, STRATEGIES)
        # The driver must be on a node, to check the processes there.
        if self.ray_address.startswith("ray:"):
            raise ConfigError(
                f"config key 'ray_address' is {self.ray_address!r}; Ray Client is not supported: "
                "start the job on a node of the cluster, with ray_address=auto (`ray job submit` "
                "does so from afar)"
            )
        # Ray hides the GPUs from workers that did not ask for any.
        if self.actor.device == "cuda" and not self.gpus_per_trainer:
            raise ConfigError(
                "config key 'actor.device' is 'cuda', but 'gpus_per_trainer' is 0, which hides "
                "every GPU; set that to 1"
            )
        if self.actor.optimizer is None:
            raise ConfigError(
                "config key 'actor.optimizer' is null; a policy that is trained needs one"
            )

        # The run has one name, which the section ``recover`` takes over.
        names = {
            "experiment_name": self.experiment_name,
            "trial_name": self.trial_name,
            "fileroot": self.fileroot,
        }
        defaults = RecoverConfig()
        for key, own in names.items():
            given = getattr(self.recover, key)
            if given not in (getattr(defaults, key), own):
                raise ConfigError(
                    f"config key 'recover.{key}' is {given!r}, but {key!r} is {own!r}; set only "
                    "the latter"
                )
        self.recover = replace(self.recover, **names)

        # The mesh must fit the trainers, also the smallest number of them, and the batch the mesh.
        if self.backend is not None:
            self.actor = replace(self.actor, backend=self.backend)
        mesh = self.actor.parallel_strategy
        mesh.for_world(self.min_trainers or self.n_trainers)
        n_data_ranks = mesh.for_world(self.n_trainers).sizes["d"]
        if self.batch_size < 1 or self.batch_size % n_data_ranks:
            raise ConfigError(
                f"config key 'batch_size' is {self.batch_size}; expected a multiple of "
                f"{n_data_ranks}, the number of trainers with different data (n_trainers is "
                f"{self.n_trainers})"
            )

    @property
    def ft_spec(self) -> FinetuneSpec:
        """The number of epochs that ``total_steps`` take."""
        steps_per_epoch = self.n_prompts // self.batch_size
        # rounded up
        epochs = -(-self.total_steps // steps_per_epoch)
        return FinetuneSpec(
            epochs, self.n_prompts, self.batch_size, max_train_steps=self.total_steps
        )

    @property
    def lr_spec(self) -> FinetuneSpec:
        """The steps over which the learning rate changes: all steps."""
        return self.ft_spec

    @property
    def stats_folder(self) -> Path:
        """Folder of ``stats.jsonl``, ``attempts.jsonl``, ``processes.json`` and trackers' files."""
        return self.recover.trial_root / "stats"

    @property
    def trainer_resources(self) -> WorkerResources:
        """Resources of a trainer."""
        return WorkerResources(
            self.cpus_per_trainer, self.gpus_per_trainer, self.resources_per_trainer
        )

    @property
    def final_export(self) -> Path:
        """Folder of the trained model."""
        return self.recover.trial_root / "hf" / f"global_step_{self.total_steps - 1}"


class TrainWorker:
    """One rank of the policy. `RecoverHandler` takes snapshots of its attribute ``engine``."""

    def __init__(self, config: GRPOConfig) -> None:
        configure_logging(config.log_level)
        self.config = config.actor
        self.engine = FSDPEngine(config.actor)
        self.engine.create_process_group()
        seed_rng(config.seed, self.engine.data_parallel_rank)
        self.engine.initialize(None, config.lr_spec)
        self.actor = PPOActor(config.actor, self.engine)

    def connect(
        self,
        servers: list[InferenceServer],
        path: str,
        kind: Literal["disk", "delta", "adapter"] = "disk",
        keep: int = 2,
    ) -> None:
        """Set the workers that sample, and the folder through which weights reach them."""
        if kind == "delta":
            meta = WeightUpdateMeta("disk", path, keep=keep, delta=True, dtype="bfloat16")
        else:
            meta = WeightUpdateMeta(kind, path, keep=keep)
        self.engine.connect_engine(servers, meta)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Run one GRPO step on this rank's share of the batch. The weights get a new version.

        With adapters (``actor.use_lora``), the reference policy for ``kl_loss_coef`` is the base
        model without them.
        """
        if self.config.use_lora and self.config.kl_loss_coef:
            batch["ref_logp"] = self.actor.compute_ref_logp(batch)
        stats = self.actor.ppo_update(self.actor.compute_advantages(batch))
        self.end_step()
        return stats

    def end_step(self) -> None:
        """Advance the schedule, and give the weights a new version."""
        self.engine.step_lr_scheduler()
        self.engine.set_version(self.engine.get_version() + 1)

    def publish(self) -> PublishedWeights:
        """Write the weights for the servers of `connect`, and wait until they serve them."""
        return self.engine.update_weights()

    def offload(self) -> None:
        """Leave the GPUs to the servers."""
        self.engine.offload()

    def onload(self) -> None:
        """Come back to the GPUs."""
        self.engine.onload()

    def export(self, path: str) -> None:
        """Export the policy as a Hugging Face folder."""
        base = str(self.engine.model_folder)
        meta = SaveLoadMeta(path, "hf", with_optim=False, base_model_path=base)
        self.engine.save(meta)

    def destroy(self) -> None:
        """Leave the process group."""
        self.engine.destroy()


def open_stats(config: GRPOConfig) -> StatsLogger:
    """Open the statistics of the run."""
    return StatsLogger(
        config.stats_folder,
        config.trackers,
        project=config.experiment_name,
        name=config.trial_name,
    )


def note_processes(config: GRPOConfig, **pids: list[int]) -> None:
    """Write the process ids of the job down for the demo, by role."""
    processes = json.dumps({"driver": os.getpid(), **pids})
    replace_atomically(config.stats_folder / "processes.json", processes.encode())


def require_steps(config: GRPOConfig, step: StepInfo) -> None:
    """Refuse a run that has trained more steps than it should have."""
    if step.global_step > config.total_steps:
        raise ConfigError(
            f"config key 'total_steps' is {config.total_steps}, but the run has "
            f"{step.global_step} already"
        )


def note_attempt(
    config: GRPOConfig,
    attempt: Attempt,
    step: StepInfo,
    world_size: int,
) -> None:
    """Record the start of this attempt, its number of trainers, and the reason why the previous one
    ended.
    """
    note = {
        "number": attempt.number,
        "time": time.time(),
        "step": step.global_step,
        "world_size": world_size,
        "loss": None if attempt.event is None else asdict(attempt.event),
    }
    with open(config.stats_folder / "attempts.jsonl", "a") as file:
        file.write(json.dumps(note) + "\n")
    if step.global_step:
        print(f"resumed: step {step.global_step} is next", flush=True)


def split_rows(
    batch: Batch,
    config: GRPOConfig,
    n_ranks: int,
    n_samples: int,
) -> list[tuple[Batch]]:
    """Split a batch evenly by prompts, into one argument tuple per rank. Ranks with the same data
    get the same rows.
    """
    # Samples of a prompt stay together, because GRPO compares them.
    n_prompts = len(batch["input_ids"]) // n_samples
    sharing = config.actor.parallel_strategy.ranks_with_same_data
    n_shares = n_ranks // sharing
    ends = [share * n_prompts // n_shares * n_samples for share in range(n_shares + 1)]
    shares = []
    for rank in range(n_ranks):
        share = rank // sharing
        rows = slice(ends[share], ends[share + 1])
        shares.append(({key: tensor[rows] for key, tensor in batch.items()},))
    return shares


@contextmanager
def show_progress(
    config: GRPOConfig, step: StepInfo
) -> Iterator[Callable[[StepInfo, str, float], None]]:
    """Show a live progress line on a terminal, or else print every tenth step.

    The function that it yields is called after each step, with a statistic as text and the seconds
    of the step.
    """
    columns = (
        TextColumn("GRPO"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[seen]}"),
        TextColumn("{task.fields[seconds]:.2f} s/step"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(
            "", total=config.total_steps, completed=step.global_step, seen="", seconds=0.0
        )

        def advance(step: StepInfo, seen: str, seconds: float) -> None:
            progress.update(task, advance=1, seen=seen, seconds=seconds)
            number = step.global_step
            if not progress.console.is_terminal and number % 10 == 9:
                print(f"step {number}: {seen}, {seconds:.2f} s", flush=True)

        yield advance


C = TypeVar("C", bound=GRPOConfig)


def read_config(
    kind: type[C],
    yaml_file: str,
    about: str | None,
    argv: list[str],
) -> C:
    """Read the configuration from the command line. ``yaml_file`` is relative to this file."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = str(Path(__file__).with_name(yaml_file))
    parser.add_argument("--config", default=default, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides the file")
    args = parser.parse_args(argv)
    config = load_config(kind, args.config, args.overrides)

    # Ray's workers have another working directory.
    fileroot = os.path.abspath(config.recover.fileroot)
    config.fileroot = fileroot
    config.recover.fileroot = fileroot
    return config


def connect_ray(config: GRPOConfig) -> None:
    """Start Ray with room for all workers, or join the cluster. Workers can import the modules next
    to this file.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    path = str(Path(__file__).resolve().parent)
    given = os.environ.get("PYTHONPATH")
    if given:
        path += os.pathsep + given

    # Workers of a local Ray inherit the environment, others are told.
    if config.ray_address == "local":
        os.environ["PYTHONPATH"] = path
        n_cpus = config.n_trainers * config.cpus_per_trainer + config.cpus_per_rollout
        options: dict[str, Any] = {
            "num_cpus": math.ceil(n_cpus),
            "object_store_memory": 256 << 20,
            "include_dashboard": False,
        }
    else:
        options = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}}
    ray.init(address=config.ray_address, logging_level=logging.WARNING, **options)


def run_job(
    config: C,
    make_model: Callable[[Path], Path],
    supervise: Callable[[C, Supervisor], None],
    check_model: Callable[[Path], object] = require_copy_tokenizer,
) -> int:
    """Run a job under a supervisor, unless its run is finished.

    Args:
        config: configuration of the job.
        make_model: creates a model folder at a path, for a job that names no model.
        supervise: called with the configuration and the supervisor, after Ray has started.
        check_model: raises ConfigError if the task cannot use the model in a folder.
    """
    configure_logging(config.log_level)
    # The same command after the end of the run does nothing.
    if config.final_export.exists():
        print(f"the run is finished: {config.final_export}")
        return 0
    if not config.actor.path:
        config.actor.path = str(make_model(config.recover.trial_root / "base_model"))
        config.actor.init_from_scratch = True
    check_model(find_model_folder(config.actor))
    connect_ray(config)
    try:
        supervise(config, Supervisor(config.recover))
    finally:
        ray.shutdown()
    print(f"done: {config.final_export}")
    return 0


def exit_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Call ``main`` with the command line. Print an error or a stop as one line."""
    try:
        sys.exit(main(sys.argv[1:]))
    except JobRefusedError:
        raise  # was logged, and ends with code 75
    except HoldfastError as error:
        sys.exit(f"error: {error}")
    except Preempted as stop:
        print(f"{stop}; the same command goes on from it")
        raise
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from the newest generation")
