"""A driver with conversations of four turns, for tests that kill it.

A tool is called in a pool after each turn, and an order with an effect outside after the last one.
Published labels depend on the weights, as those of a real publication do.
"""

import asyncio
import json
import os
import shutil
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from holdfast.engine import FinetuneSpec
from holdfast.engine.api import StepInfo
from holdfast.engine.hf.versions import version_path
from holdfast.engine.rollouts import (
    CallPool,
    EpisodeEngine,
    RolloutConfig,
    RolloutExecutor,
    Trajectory,
)
from holdfast.engine.rollouts.trajectory import TokenSequence, to_trajectory
from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
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
    """

    root: str
    url: str
    steps: int
    ahead: int
    freq_steps: int
    lr: float = 0.01
    noisy: bool = False


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


def drive(job: EpisodeJob) -> None:
    """Run the job from its current state."""
    torch.set_num_threads(1)
    policy, pool = Policy(), CallPool(1, timeout_s=stretched(20))
    loader = ResumableDataLoader(Prompts(), BATCH_SIZE, seed=5)
    spec = FinetuneSpec(100, len(Prompts()), BATCH_SIZE)
    server = VLLMServer(job.url, timeout_s=stretched(20))
    config = RolloutConfig(
        job.ahead, MAX_CONCURRENT, total_steps=job.steps, batch_timeout_s=stretched(60)
    )
    workflow = Conversations(pool, f"{job.root}/{EFFECTS}")
    recover = RecoverConfig("e", "t", fileroot=job.root, freq_steps=job.freq_steps)
    with (
        pool,
        RolloutExecutor(config, loader, workflow, [server]) as executor,
        RecoverHandler(recover, spec) as handler,
    ):
        handler.register("rollouts", executor)
        info = handler.load(policy.state, dataloader=loader)
        policy.optimizer.param_groups[0]["lr"] = job.lr
        step = StepInfo(0, 0, 0, spec.steps_per_epoch)
        if info is not None:
            step = info.last_step_info.next()
        while step.global_step < job.steps:
            _publish(job, policy, server, step.global_step)
            executor.set_version(step.global_step)
            batch = executor.next_batch(step.global_step)
            _note(job, executor, step.global_step)
            policy.train(batch)
            if job.noisy:
                _disturb(policy)
            handler.dump(policy.state, step, dataloader=loader)
            step = step.next()
        handler.wait()
        executor_stats = executor.stats()
    assert executor_stats["rollouts/log_failed"] == 0
    torch.save(policy.model.state_dict(), f"{job.root}/{WEIGHTS}")


def _publish(job: EpisodeJob, policy: Policy, server: VLLMServer, version: int) -> None:
    folder = version_path(f"{job.root}/weights", version)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = {name: value.contiguous() for name, value in policy.model.state_dict().items()}
    entry = write_entry(folder, "model.safetensors", save(weights))
    write_manifest(folder, [entry], {"weight_version": version})
    server.update_weights_from_disk(str(folder), version)


def _disturb(policy: Policy) -> None:
    noise = int.from_bytes(os.urandom(2), "little") * 1e-9
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(noise)


def _note(job: EpisodeJob, executor: RolloutExecutor, step: int) -> None:
    samples = []
    for ticket, each in executor.next_trajectories(step):
        names = ("input_ids", "loss_mask", "logprobs", "versions")
        samples.append({name: each[name].tolist() for name in names} | {"number": ticket.number})
    line = {"step": step, "samples": samples, "stats": executor.stats()}
    with open(f"{job.root}/{TRAINED}", "a") as file:
        file.write(f"{json.dumps(line)}\n")


def live(job: EpisodeJob, record: Path, kill_after: tuple[int, float] | None) -> int | None:
    """Run one life of a driver and return its exit code.

    Args:
        job: the run.
        record: the record of the server.
        kill_after: tokens that the server samples in this life, and seconds after them, before the
            driver is killed. None: it is not.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process: Any = context.Process(target=drive, args=(job,))
    with open(record, "rb") as file:
        file.seek(0, os.SEEK_END)
        process.start()
        given_up_s = time.monotonic() + stretched(120)
        sampled = 0
        while kill_after is not None and sampled < kill_after[0] and process.is_alive():
            sampled += file.read().count(b'"position"')
            assert time.monotonic() < given_up_s, "the driver samples nothing"
            time.sleep(0.005)
    if kill_after is not None:
        process.join(kill_after[1])
        process.kill()
    process.join(stretched(120))
    assert not process.is_alive(), "the driver did not end"
    return process.exitcode
