"""GRPO on Ray that survives the death of any of its processes and ends with the weights of a run nobody touched.

    python examples/grpo.py [--config examples/grpo_copy.yaml] [key=value ...]

The driver holds the data cursor; `TrainWorker`s hold a shard of the policy each; a `TaskWorker` has the items, samples
with the last published weights and rewards. A rollout worker that is lost is started again alone (`Sampler`). After the
loss of a trainer the `Supervisor` runs `train` again; after that of the driver, run the same command again. Either way
`train` begins by restoring the newest generation, and everything it draws is seeded by the step, so the steps it does
again are the same. SIGTERM, Ctrl-C, or Ray draining a node: it snapshots after the step and exits with code 75.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent))
from copy_task import CopyPrompts, CopyTask, write_model_folder
from grpo_job import (
    GRPOConfig,
    TrainWorker,
    exit_with,
    note_attempt,
    open_stats,
    read_config,
    run_job,
    show_progress,
    split_rows,
)
from tasks import Numbers, Task, TaskWorker

from holdfast.engine import StepInfo
from holdfast.engine.worker_group import WorkerGroup, WorkerResources
from holdfast.recover import RecoverHandler, ResumableDataLoader
from holdfast.recover.supervisor import Attempt, Supervisor
from holdfast.utils.errors import ConfigError, WorkerLost
from holdfast.utils.files import replace_atomically
from holdfast.utils.metrics import StatsLogger
from holdfast.utils.timing import PhaseTimes


class Sampler:
    """The rollout worker, with the trainers' newest weights.

    It keeps nothing that cannot be handed to it again. So when it is lost (found by `ask` here, or by a trainer that
    publishes to it), only it is started again, and it is asked again, with the same seed: the same batch comes of it.
    The trainers and their state stay in memory.
    """

    def __init__(self, config: GRPOConfig, attempt: Attempt, rollout: WorkerGroup, trainer: WorkerGroup) -> None:
        self.config, self.attempt, self.rollout, self.trainer = config, attempt, rollout, trainer
        self._times = PhaseTimes("publishing", "sampling")
        self.connect()

    def connect(self) -> None:
        """Tell the trainers which process to publish to, and people (and the demo) which processes there are."""
        servers, weights = [self.rollout.server()], self.config.recover.trial_root / "weights"
        self.trainer.call_all("connect", servers, str(weights))
        pids = {group.name: group.pids() for group in (self.rollout, self.trainer)}
        processes = json.dumps({"driver": os.getpid(), **pids})
        replace_atomically(self.config.stats_folder / "processes.json", processes.encode())

    def ask(self, method: str, *args: Any, publish: bool = True, phase: str = "sampling") -> Any:
        """Publish the weights, unless they are not used, and call a method of the `TaskWorker`, come what may.

        ``phase`` is what its seconds are logged as.
        """
        lost = None
        while True:
            try:
                if lost is not None:
                    self.rollout = self.attempt.restart(lost)  # until there were too many losses
                    self.connect()
                if publish:
                    with self._times.phase("publishing"):
                        self.trainer.call_all("publish")  # always before sampling: also after a recovery
                with self._times.phase(phase):
                    return self.rollout.call(0, method, *args)
            except WorkerLost as loss:
                if loss.group != self.rollout.name:
                    raise  # a trainer: the supervisor starts everything again
                lost = loss

    def take_times(self, seconds: float) -> dict[str, float]:
        """What the ``seconds`` since the last call went to, for `holdfast top`: what is not in `ask` is training."""
        spent = self._times.take()
        return {**spent, "training_s": seconds - sum(spent.values())}


Numbered = Iterator[list[int]]
"""Batches of numbers of items, from the data cursor."""


class StepFn(Protocol):
    """One step of a job; its statistics."""

    def __call__(
        self, config: Any, sampler: Sampler, trainer: WorkerGroup, batches: Numbered, global_step: int
    ) -> dict[str, float]:
        """Everything it draws is seeded by the step, or comes from ``batches``."""
        ...


def grpo_step(
    config: GRPOConfig, sampler: Sampler, trainer: WorkerGroup, batches: Numbered, global_step: int
) -> dict[str, float]:
    """Sample, reward, and train; samples of a prompt next to each other."""
    seed = config.seed * 1_000_003 + global_step
    batch, seen = sampler.ask("sample", next(batches), config.n_samples, config.actor.temperature, seed)
    stats = trainer.call_all("train_step", per_rank=split_rows(batch, trainer.world_size, config.n_samples))[0]
    return {**stats, **seen}


@dataclass(frozen=True)
class Parts:
    """In what jobs differ that are run like this one.

    Attributes:
        make_task: see `TaskWorker`.
        fingerprint: tells the task's items from those of another, for the data cursor.
        worker: a rank of the policy.
        step: one step.
    """

    make_task: Callable[[Any], Task]
    fingerprint: str
    worker: type[TrainWorker] = TrainWorker
    step: StepFn = grpo_step


def copy_digits(config: GRPOConfig, worker: type[TrainWorker] = TrainWorker) -> Parts:
    """GRPO, or what ``worker`` does, on the copy task."""
    n, seed = config.n_prompts, config.seed
    return Parts(partial(CopyTask, n, seed), CopyPrompts(n, seed).fingerprint, worker)


def train(config: GRPOConfig, parts: Parts, attempt: Attempt) -> None:
    """The job, from wherever it is to the end."""
    rollout, trainer = start_workers(config, parts, attempt)
    numbers = Numbers(config.n_prompts, parts.fingerprint)
    loader = ResumableDataLoader(numbers, config.batch_size, seed=config.seed)
    with (
        RecoverHandler(config.recover, config.ft_spec, notices=[attempt.draining]) as handler,
        closing(open_stats(config)) as stats_logger,
    ):
        sampler = Sampler(config, attempt, rollout, trainer)
        info = handler.load(trainer, dataloader=loader)
        step = info.last_step_info.next() if info else StepInfo(0, 0, 0, config.ft_spec.steps_per_epoch)
        if step.global_step > config.total_steps:
            raise ConfigError(
                f"config key 'total_steps' is {config.total_steps}, but the run has {step.global_step} already"
            )
        stats_logger.resume_after(info.last_step_info.global_step if info else None)
        note_attempt(config, attempt, step, trainer.world_size)
        train_steps(config, parts.step, sampler, trainer, loader, handler, stats_logger, step)
    if not config.final_export.exists():  # recover.hf_freq_steps may have made it
        trainer.call_all("export", str(config.final_export))


def train_steps(
    config: GRPOConfig,
    one_step: StepFn,
    sampler: Sampler,
    trainer: WorkerGroup,
    loader: ResumableDataLoader,
    handler: RecoverHandler,
    stats_logger: StatsLogger,
    step: StepInfo,
) -> None:
    """The steps that are left, each logged, and a snapshot when it is due."""
    batches = loader.batches()
    with show_progress() as progress:
        task = progress.add_task("", total=config.total_steps, completed=step.global_step, seen="", seconds=0.0)
        while step.global_step < config.total_steps:
            started = time.monotonic()
            stats = one_step(config, sampler, trainer, batches, step.global_step)
            seconds = time.monotonic() - started
            # Logged before the snapshot: a kill between the two logs the step again, the other order would lose it.
            times = {**sampler.take_times(seconds), "seconds": seconds, "time": time.time()}
            stats_logger.log(step.global_step, {**stats, **times})
            last = step.global_step == config.total_steps - 1
            saved = handler.dump(trainer, step, dataloader=loader, force=last, metrics=stats)
            seen = next(f"{name} {stats[name]:.3f}" for name in ("reward", "loss") if name in stats)
            progress.update(task, advance=1, seen=seen, seconds=seconds)
            if not progress.console.is_terminal and step.global_step % 10 == 9:
                print(f"step {step.global_step}: {seen}, {seconds:.2f} s", flush=True)
            if saved and not last and sampler.attempt.can_grow():
                handler.wait()
                sampler.attempt.start_again()
            step = step.next()


def start_workers(config: GRPOConfig, parts: Parts, attempt: Attempt) -> tuple[WorkerGroup, WorkerGroup]:
    """The rollout worker and the trainers, started at the same time: a recovery waits for little else."""
    pool = ThreadPoolExecutor()
    patience = {"hang_timeout_s": config.hang_timeout_s, "stall_timeout_s": config.stall_timeout_s}
    start = partial(pool.submit, attempt.worker_group, **patience)
    try:
        each = WorkerResources(config.cpus_per_rollout, config.gpus_per_rollout, config.resources_per_rollout)
        sampler = (parts.make_task, config.actor.path, config.log_level)
        rollout = start(TaskWorker, args=sampler, name="rollout", process_group=False, resources=each)
        each = WorkerResources(config.cpus_per_trainer, config.gpus_per_trainer, config.resources_per_trainer)
        ranks = {"world_size": config.n_trainers, "min_world_size": config.min_trainers, "strategy": config.strategy}
        trainer = start(parts.worker, args=(config,), name="trainer", resources=each, **ranks)
        return rollout.result(), trainer.result()
    finally:
        pool.shutdown(wait=False)  # should one fail, the supervisor ends the other


def run_parts(parts: Parts, config: GRPOConfig, supervisor: Supervisor) -> None:
    """Run `train` under a supervisor."""
    supervisor.run(partial(train, config, parts))


def main(argv: list[str]) -> int:
    """Run the job."""
    config = read_config(GRPOConfig, "grpo_copy.yaml", __doc__, argv)
    return run_job(config, write_model_folder, partial(run_parts, copy_digits(config)))


if __name__ == "__main__":
    exit_with(main)
