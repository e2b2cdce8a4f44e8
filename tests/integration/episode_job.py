"""A job with conversations of four turns, for tests that kill it: one process, ranks as under
torchrun, or a driver on Ray.

A tool is called in a pool after each turn, and an order with an effect outside after the last one.
Published labels depend on the weights, as those of a real publication do.
"""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.engine import FinetuneSpec
from holdfast.engine.api import Batch, StepInfo
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf.versions import version_path
from holdfast.engine.rollouts import (
    CallPool,
    EpisodeEngine,
    RolloutConfig,
    RolloutExecutor,
    SharedRollouts,
    Trajectory,
)
from holdfast.engine.rollouts.trajectory import TokenSequence, to_trajectory
from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from holdfast.utils.distributed import get_rank
from holdfast.utils.errors import CallLost
from holdfast.utils.manifest import write_entry, write_manifest
from tests.engine.rollouts.user_code import note_effect, sum_of
from tests.helpers import PRELOAD
from tests.integration.rollout_job import Policy, Prompts
from tests.limits import stretched

BATCH_SIZE = 6
N_SIBLINGS = 2
N_TURNS = 4
N_TOKENS = 4
MAX_CONCURRENT = 2
TRAINED = "trained.jsonl"
EFFECTS = "effects"
WEIGHTS = "final.pt"
SIGKILLED = -9


@dataclass(frozen=True)
class EpisodeJob:
    """A run.

    Attributes:
        root: folder of all files.
        url: URL of its server.
        steps: length.
        ahead: ``max_head_offpolicyness``.
        freq_steps: steps between generations.
        lr: learning rate of this life.
        noisy: whether steps that are lost come out otherwise the next time.
        ranks: number of trainers. More than one share the rollouts of the first.
        resume_path: see `RecoverConfig`.
        replay: see `RolloutConfig`.
    """

    root: str
    url: str
    steps: int
    ahead: int
    freq_steps: int
    lr: float = 0.01
    noisy: bool = False
    ranks: int = 1
    resume_path: str | None = None
    replay: str = "exact"


class Conversations:
    """Siblings with one prompt. After each turn but the last one they read a tool, and then make
    an order.
    """

    def __init__(self, pool: CallPool, effects: str) -> None:
        self._pool, self._effects = pool, effects

    async def arun_episode(self, engine: EpisodeEngine, data: list[int]) -> Trajectory:
        talks = (self._talk(engine, data, n) for n in range(N_SIBLINGS))
        sequences = await asyncio.gather(*talks)
        rewards = [float(sequence.input_ids[2] % 2 == 0) for sequence in sequences]
        return to_trajectory(sequences, rewards)

    async def _talk(self, engine: EpisodeEngine, prompt: list[int], number: int) -> TokenSequence:
        sequence = TokenSequence()
        sequence.extend_given(prompt)
        for turn in range(N_TURNS):
            request = ModelRequest(
                list(sequence.input_ids), GenerationHyperparameters(max_new_tokens=N_TOKENS)
            )
            sequence.extend_sampled(await engine.agenerate(request))
            if turn < N_TURNS - 1:
                said = await engine.call(self._pool.call, sum_of, sequence.input_ids)
                sequence.extend_given([said, engine.random(number).randrange(9)])
        name = f"{engine} {number}"
        try:
            await engine.call(self._pool.call_once, note_effect, self._effects, name, once=True)
        except CallLost as error:
            assert "was begun before the kill" in str(error)
        return sequence


class Trainer(Policy):
    """The policy of this process, or the share of a rank in it."""

    def __init__(self) -> None:
        super().__init__()
        if dist.is_initialized():
            mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model, mesh=mesh)
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.state = DCPState(self.model, self.optimizer)
        self.engine: Any = self.state  # for a handler

    def step(self, batch: Batch, lr: float, noisy: bool) -> None:
        """Train on the share of this rank."""
        self.optimizer.param_groups[0]["lr"] = lr
        self.train(batch)
        if noisy:
            _disturb(self.model)

    def publish(self, job: EpisodeJob, server: VLLMServer, version: int) -> None:
        """Let the server load the weights. All ranks call it."""
        weights = self.weights()
        if get_rank() == 0:
            _publish(job, weights, server, version)

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights, on every rank."""
        found = {}
        for name, value in self.model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = whole.contiguous()
        return found


class Trainers:
    """The trainers of a driver on Ray, used like one.

    Args:
        group: workers that are `Trainer`.
    """

    def __init__(self, group: Any) -> None:
        self.engine = group

    def step(self, batch: Batch, lr: float, noisy: bool) -> None:
        """Train each rank on its share."""
        n_ranks = self.engine.world_size
        n_rows = len(batch["rewards"]) // n_ranks
        per_rank = []
        for rank in range(n_ranks):
            share = {name: each[rank * n_rows :][:n_rows] for name, each in batch.items()}
            per_rank.append((share, lr, noisy))
        self.engine.call_all("step", per_rank=per_rank)

    def publish(self, job: EpisodeJob, server: VLLMServer, version: int) -> None:
        """Let the server load the weights, which come from the first rank."""
        _publish(job, self.weights(), server, version)

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights."""
        return self.engine.call_all("weights")[0]


def drive(job: EpisodeJob, trainer: Any = None) -> None:
    """Run the job from its current state. In a process group every rank calls it.

    Args:
        job: the run.
        trainer: has the methods of `Trainer`, which is the default.
    """
    torch.set_num_threads(1)
    trainer = trainer or Trainer()
    loader = ResumableDataLoader(Prompts(), BATCH_SIZE, seed=5)
    spec = FinetuneSpec(100, len(Prompts()), BATCH_SIZE)
    server = VLLMServer(job.url, timeout_s=stretched(20))
    config = RolloutConfig(
        job.ahead,
        MAX_CONCURRENT,
        total_steps=job.steps,
        batch_timeout_s=stretched(60),
        replay=job.replay,
    )
    pool = CallPool(1, timeout_s=stretched(20))
    workflow = Conversations(pool, f"{job.root}/{EFFECTS}")

    # Only the leader has an executor.
    executors: list[RolloutExecutor] = []

    def make() -> RolloutExecutor:
        executors.append(RolloutExecutor(config, loader, workflow, [server]))
        return executors[0]

    rollouts = SharedRollouts(make) if dist.is_initialized() else make()
    recover = RecoverConfig(
        "e", "t", fileroot=job.root, freq_steps=job.freq_steps, resume_path=job.resume_path
    )
    with pool, rollouts, RecoverHandler(recover, spec) as handler:
        handler.register("rollouts", rollouts)
        info = handler.load(trainer.engine, dataloader=loader)
        step = StepInfo(0, 0, 0, spec.steps_per_epoch)
        if info is not None:
            step = info.last_step_info.next()
        while step.global_step < job.steps:
            trainer.publish(job, server, step.global_step)
            rollouts.set_version(step.global_step)
            batch = rollouts.next_batch(step.global_step)
            if executors:
                _note(job, executors[0], step.global_step)
            trainer.step(batch, job.lr, job.noisy)
            handler.dump(trainer.engine, step, dataloader=loader)
            step = step.next()
        handler.wait()
        stats = rollouts.stats()
    assert stats["rollouts/log_failed"] == 0
    weights = trainer.weights()
    if executors:
        torch.save(weights, f"{job.root}/{WEIGHTS}")


def drive_rank(job: EpisodeJob, rank: int, store: str) -> None:
    """Run one rank of the job, as torchrun starts it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.ranks)
    drive(job)
    dist.destroy_process_group()


def _publish(
    job: EpisodeJob, weights: dict[str, torch.Tensor], server: VLLMServer, version: int
) -> None:
    folder = version_path(f"{job.root}/weights", version)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    entry = write_entry(folder, "model.safetensors", save(weights))
    write_manifest(folder, [entry], {"weight_version": version})
    server.update_weights_from_disk(str(folder), version)


def _disturb(model: torch.nn.Module) -> None:
    noise = int.from_bytes(os.urandom(2), "little") * 1e-9
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise)


def _note(job: EpisodeJob, executor: RolloutExecutor, step: int) -> None:
    samples = []
    for ticket, each in executor.next_trajectories(step):
        names = ("input_ids", "loss_mask", "logprobs", "versions")
        samples.append({name: each[name].tolist() for name in names} | {"number": ticket.number})
    line = {"step": step, "samples": samples, "stats": executor.stats()}
    with open(f"{job.root}/{TRAINED}", "a") as file:
        file.write(f"{json.dumps(line)}\n")


class Kill(NamedTuple):
    """Moment of a SIGKILL.

    Attributes:
        tokens: number that the server samples in this life before it.
        delay_s: seconds after them.
        rank: which rank is killed. The others are killed up to 0.1 s later.
    """

    tokens: int
    delay_s: float
    rank: int = 0


def live(job: EpisodeJob, record: Path, kill: Kill | None) -> int | None:
    """Run one life and return the exit code of the rank that is killed, or of rank 0.

    Args:
        job: the run.
        record: the record of the server.
        kill: None runs the job to its end.
    """
    processes = _start(job)
    victim = processes[kill.rank if kill is not None else 0]
    if kill is not None:
        wait_for_tokens(record, kill.tokens, victim.is_alive)
        victim.join(kill.delay_s)
        victim.kill()
        time.sleep(kill.delay_s)
    for process in processes:
        if kill is not None:
            process.kill()
        process.join(stretched(120))
        assert not process.is_alive(), "the job did not end"
    return victim.exitcode


def _start(job: EpisodeJob) -> list[Any]:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    if job.ranks == 1:
        processes: list[Any] = [context.Process(target=drive, args=(job,))]
    else:
        store = f"{job.root}/store-{time.monotonic_ns()}"
        ranks = range(job.ranks)
        processes = [context.Process(target=drive_rank, args=(job, at, store)) for at in ranks]
    for process in processes:
        process.start()
    return processes


def wait_for_tokens(record: Path, n_tokens: int, is_alive: Callable[[], bool]) -> None:
    """Wait until the server has sampled so many tokens more, or the job ends."""
    given_up_s = time.monotonic() + stretched(120)
    sampled = 0
    with open(record, "rb") as file:
        file.seek(0, os.SEEK_END)
        while sampled < n_tokens and is_alive():
            sampled += file.read().count(b'"position"')
            assert time.monotonic() < given_up_s, "the job samples nothing"
            time.sleep(0.005)
