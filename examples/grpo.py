"""GRPO on Ray that survives the death of any of its processes and ends with the weights of an
undisturbed run.

    python examples/grpo.py [--config examples/grpo_copy.yaml] [key=value ...]

The driver holds the data cursor. Each `TrainWorker` holds a shard of the policy. A `TaskWorker` has
the items, samples with the last published weights, and computes rewards.

- A lost rollout worker is restarted alone (`Sampler`).
- After the loss of a trainer, the `Supervisor` runs `train` again.
- After the loss of the driver, run the same command again.
- After SIGTERM, Ctrl-C, or when Ray drains a node, the job takes a snapshot after the step and
  exits with code 75.

`train` begins by restoring the newest generation. Every random draw is seeded by the step, so
repeated steps are equal.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from copy_task import CopyPrompts, CopyTask, write_model_folder
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
from tasks import Numbers, Task, TaskWorker

from holdfast.engine import StepInfo
from holdfast.engine.worker_group import WorkerGroup, WorkerResources
from holdfast.recover import RecoverHandler, ResumableDataLoader
from holdfast.recover.supervisor import Attempt, Supervisor
from holdfast.utils.errors import WorkerLost
from holdfast.utils.metrics import StatsLogger
from holdfast.utils.timing import PhaseTimes


class Sampler:
    """The rollout worker, with the newest weights of the trainers.

    The worker has no state that could be lost. If it dies, which `ask` or a publishing trainer
    notices, it is restarted alone and gets the same request with the same seed, so the batch is the
    same. The trainers keep their state in memory.
    """

    def __init__(
        self,
        config: GRPOConfig,
        attempt: Attempt,
        rollout: WorkerGroup,
        trainer: WorkerGroup,
    ) -> None:
        self.config = config
        self.attempt = attempt
        self.rollout = rollout
        self.trainer = trainer
        self._times = PhaseTimes("publishing", "sampling")
        self.connect()

    def connect(self) -> None:
        """Name the rollout worker to the trainers, and write the process ids down for the demo."""
        weights = str(self.config.recover.trial_root / "weights")
        self.trainer.call_all("connect", [self.rollout.server()], weights)
        note_processes(self.config, rollout=self.rollout.pids(), trainer=self.trainer.pids())

    def ask(
        self,
        method: str,
        *args: Any,
        publish: bool = True,
        phase: str = "sampling",
    ) -> Any:
        """Publish the weights and call a method of the `TaskWorker`, again after a restart if the
        worker is lost.

        Args:
            method: name of the method.
            args: its arguments.
            publish: False if the method does not use the weights.
            phase: name under which its seconds are logged.
        """
        lost = None
        while True:
            try:
                if lost is not None:
                    self.rollout = self.attempt.restart(lost)  # raises after too many losses
                    self.connect()

                # Before every sampling, also after a recovery.
                if publish:
                    with self._times.phase("publishing"):
                        self.trainer.call_all("publish")
                with self._times.phase(phase):
                    return self.rollout.call(0, method, *args)
            except WorkerLost as loss:
                # If a trainer was lost, the supervisor restarts everything.
                if loss.group != self.rollout.name:
                    raise
                lost = loss

    def take_times(self, seconds: float) -> dict[str, float]:
        """Split the ``seconds`` since the last call into phases for `holdfast top`. The rest is
        training.
        """
        spent = self._times.take()
        return {**spent, "training_s": seconds - sum(spent.values())}


Numbered = Iterator[list[int]]
"""Batches of item numbers, from the data cursor."""


class StepFn(Protocol):
    """One step of a job."""

    def __call__(
        self,
        config: Any,
        sampler: Sampler,
        trainer: WorkerGroup,
        batches: Numbered,
        global_step: int,
    ) -> dict[str, float]:
        """Run the step and return its statistics. Random draws are seeded by the step or come from
        ``batches``.
        """
        ...


def grpo_step(
    config: GRPOConfig,
    sampler: Sampler,
    trainer: WorkerGroup,
    batches: Numbered,
    global_step: int,
) -> dict[str, float]:
    """Sample, reward and train. Samples of a prompt are next to each other in the batch."""
    seed = config.seed * 1_000_003 + global_step
    options = (config.n_samples, config.actor.temperature, seed)
    batch, seen = sampler.ask("sample", next(batches), *options)
    shares = split_rows(batch, config, trainer.world_size, config.n_samples)
    stats = trainer.call_all("train_step", per_rank=shares)[0]
    return {**stats, **seen}


@dataclass(frozen=True)
class Parts:
    """The parts in which similar jobs differ.

    Attributes:
        make_task: see `TaskWorker`.
        fingerprint: identifies the items of the task for the data cursor.
        worker: class of a rank of the policy.
        step: function for one step.
    """

    make_task: Callable[[Any], Task]
    fingerprint: str
    worker: type[TrainWorker] = TrainWorker
    step: StepFn = grpo_step


def copy_digits(config: GRPOConfig, worker: type[TrainWorker] = TrainWorker) -> Parts:
    """Return the parts of a job on the copy task: GRPO, or the training of ``worker``."""
    n = config.n_prompts
    seed = config.seed
    return Parts(partial(CopyTask, n, seed), CopyPrompts(n, seed).fingerprint, worker)


def train(config: GRPOConfig, parts: Parts, attempt: Attempt) -> None:
    """Run the job to its end, from a fresh start or the newest generation."""
    rollout, trainer = start_workers(config, parts, attempt)
    numbers = Numbers(config.n_prompts, parts.fingerprint)
    loader = ResumableDataLoader(numbers, config.batch_size, seed=config.seed)
    with (
        RecoverHandler(config.recover, config.ft_spec, notices=[attempt.draining]) as handler,
        closing(open_stats(config)) as stats_logger,
    ):
        sampler = Sampler(config, attempt, rollout, trainer)
        info = handler.load(trainer, dataloader=loader)
        step = handler.first_step(info)
        require_steps(config, step)
        stats_logger.resume_after(info.last_step_info.global_step if info else None)
        note_attempt(config, attempt, step, trainer.world_size)
        train_steps(config, parts.step, sampler, trainer, loader, handler, stats_logger, step)

    # It may exist already because of recover.hf_freq_steps.
    if not config.final_export.exists():
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
    """Train and log the remaining steps, with snapshots when they are due."""
    batches = loader.batches()
    with show_progress(config, step) as advance:
        while step.global_step < config.total_steps:
            started = time.monotonic()
            stats = one_step(config, sampler, trainer, batches, step.global_step)
            seconds = time.monotonic() - started

            # Log before the snapshot: a kill between the two logs the step twice. The other order
            # would lose the entry.
            times = {**sampler.take_times(seconds), "seconds": seconds, "time": time.time()}
            stats_logger.log(step.global_step, {**stats, **times, **handler.goodput()})
            last = step.global_step == config.total_steps - 1
            saved = handler.dump(trainer, step, dataloader=loader, force=last, metrics=stats)

            # Supervised steps have no reward.
            name = "reward" if "reward" in stats else "loss"
            advance(step, f"{name} {stats[name]:.3f}", seconds)

            # The cluster has room for more trainers: go on from the snapshot with them.
            if saved and not last and sampler.attempt.can_grow():
                handler.wait()
                sampler.attempt.start_again()
            step = step.next()


def start_workers(
    config: GRPOConfig,
    parts: Parts,
    attempt: Attempt,
) -> tuple[WorkerGroup, WorkerGroup]:
    """Start the rollout worker and the trainers at the same time, which is most of the time of a
    recovery.
    """
    pool = ThreadPoolExecutor()
    start = partial(
        pool.submit,
        attempt.worker_group,
        hang_timeout_s=config.hang_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
    )
    try:
        rollout = start(
            TaskWorker,
            args=(parts.make_task, config.actor.path, config.log_level),
            name="rollout",
            process_group=False,
            resources=WorkerResources(
                config.cpus_per_rollout, config.gpus_per_rollout, config.resources_per_rollout
            ),
        )
        trainer = start(
            parts.worker,
            args=(config,),
            name="trainer",
            resources=config.trainer_resources,
            world_size=config.n_trainers,
            min_world_size=config.min_trainers,
            multiple_of=config.actor.parallel_strategy.multiple_of,
            strategy=config.strategy,
        )
        return rollout.result(), trainer.result()
    finally:
        # If one start fails, the supervisor ends the other.
        pool.shutdown(wait=False)


def run_parts(parts: Parts, config: GRPOConfig, supervisor: Supervisor) -> None:
    """Run `train` under a supervisor."""
    supervisor.run(partial(train, config, parts))


def main(argv: list[str]) -> int:
    """Run the job."""
    config = read_config(GRPOConfig, "grpo_copy.yaml", __doc__, argv)
    parts = copy_digits(config)
    return run_job(config, write_model_folder, partial(run_parts, parts))


if __name__ == "__main__":
    exit_with(main)
