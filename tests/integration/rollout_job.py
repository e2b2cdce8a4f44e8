"""A driver that samples from servers while it trains a tiny policy, for tests that kill it.

The policy is trained on the servers' tokens, so that its weights reveal a token that was lost,
repeated or taken from another sample. Every step is also written to a file, with its entries in the
ledger.
"""

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from holdfast.engine import FinetuneSpec
from holdfast.engine.api import Batch, StepInfo
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf.versions import version_path
from holdfast.engine.rollouts import (
    CallPool,
    EpisodeEngine,
    RLVRWorkflow,
    RolloutConfig,
    RolloutExecutor,
    Trajectory,
)
from holdfast.engine.rollouts.trajectory import TokenSequence, to_trajectory
from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest
from holdfast.engine.training.batch import map_tensors
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from tests.engine.processors import make_processor, picture
from tests.engine.rollouts.user_code import even_reward
from tests.engine.servers.fake_weights import VOCABULARY
from tests.engine.servers.folders import publish_hashed
from tests.helpers import PRELOAD
from tests.limits import stretched

N_SAMPLES = 2
N_TOKENS = 4
TRAINED = "trained.jsonl"
WEIGHTS = "final.pt"


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        root: folder of all files.
        urls: URLs of its servers.
        steps: length.
        ahead: ``max_head_offpolicyness``.
        picky: whether to reject groups with equal rewards.
        sees: whether prompts have images.
    """

    root: str
    urls: list[str]
    steps: int
    ahead: int
    picky: bool = False
    sees: bool = False

    @property
    def spec(self) -> FinetuneSpec:
        return FinetuneSpec(
            total_train_epochs=100, dataset_size=len(Prompts()), train_batch_size=BATCH_SIZE
        )


BATCH_SIZE = 3


class Prompts:
    """Sample i is the prompt ``[i, 7]``."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> list[int]:
        return [index, 7]


class Pictures(Prompts):
    """Sample i has an image file of its own, and every second sample another image as bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __getitem__(self, index: int) -> Any:
        file = self._folder / f"{index}.png"
        if not file.exists():
            file.write_bytes(picture(index, 28 * (1 + index % 3), 28))
        images = [str(file), picture(100 + index, 56, 28)][: 1 + index % 2]
        content = [{"type": "text", "text": f"w{index}"}, *[{"type": "image"}] * len(images)]
        return {"messages": [{"role": "user", "content": content}], "images": images}


def make_loader(job: Job | None = None) -> ResumableDataLoader:
    dataset = Pictures(Path(job.root) / "images") if job is not None and job.sees else Prompts()
    return ResumableDataLoader(dataset, BATCH_SIZE, seed=5)


async def _sample(engine: EpisodeEngine, prompt: list[int]) -> TokenSequence:
    response = await engine.agenerate(
        ModelRequest(prompt, GenerationHyperparameters(max_new_tokens=N_TOKENS))
    )
    sequence = TokenSequence()
    sequence.extend_given(prompt)
    sequence.extend_sampled(response)
    return sequence


class Workflow:
    """Samples each prompt `N_SAMPLES` times. The reward is 1 if the first token is even."""

    async def arun_episode(self, engine: EpisodeEngine, data: list[int]) -> Trajectory:
        sequences = await asyncio.gather(*(_sample(engine, data) for _ in range(N_SAMPLES)))
        return to_trajectory(
            sequences, [float(sequence.input_ids[2] % 2 == 0) for sequence in sequences]
        )


def _rewards_differ(trajectory: Trajectory) -> bool:
    return bool(trajectory["rewards"].min() < trajectory["rewards"].max())


class Policy:
    """A policy that predicts the next token from the previous one, and its training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = DCPState(self.model, self.optimizer)

    def train(self, batch: Batch) -> None:
        """Run one step of policy gradient with the mean reward as baseline. Also draws a random
        number.
        """
        ids, mask = batch["input_ids"], batch["loss_mask"][:, 1:].float()
        logprobs = self.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        advantages = batch["rewards"] - batch["rewards"].mean() + 0.1 * torch.rand(len(ids))
        ratio = (logprobs - batch["logprobs"][:, 1:]).clamp(-1, 1).exp()
        (-(advantages[:, None] * ratio * mask).sum() / mask.sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Kill:
    """Moment at which a driver is killed.

    Attributes:
        step: number of the step in its life (0, 1 ...) that it has begun. -1: before the first.
        share: delay as a share of the previous step's time, or of 0.3 s. The life ends two steps
            later at the latest, however long the previous step was.
    """

    step: int
    share: float
    _began_s: float | None = None

    def begin(self, step: int) -> None:
        now_s = time.monotonic()
        if step == self.step + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.step:
            before_s = 0.3 if self._began_s is None else now_s - self._began_s
            timer = threading.Timer(self.share * before_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        self._began_s = now_s


def drive(job: Job, kill: Kill | None) -> None:
    """Run the job from its current state, and be killed."""
    torch.set_num_threads(1)
    begin = (lambda _: None) if kill is None else kill.begin
    begin(-1)
    policy, loader, workflow = Policy(), make_loader(job), Workflow()
    if job.sees:
        gconfig = GenerationHyperparameters(n_samples=N_SAMPLES, max_new_tokens=N_TOKENS)
        workflow = RLVRWorkflow(even_reward, gconfig, pool=CallPool(1), processor=make_processor())
    servers = [VLLMServer(url, timeout_s=stretched(20)) for url in job.urls]
    config = RolloutConfig(
        job.ahead, max_concurrent_rollouts=2, total_steps=job.steps, batch_timeout_s=stretched(60)
    )
    accept = _rewards_differ if job.picky else None
    recover = RecoverConfig(experiment_name="e", trial_name="t", fileroot=job.root, freq_steps=1)
    with (
        RolloutExecutor(config, loader, workflow, servers, should_accept=accept) as executor,
        RecoverHandler(recover, job.spec) as handler,
    ):
        handler.register("rollouts", executor)
        info = handler.load(policy.state, dataloader=loader)
        step = first = (
            info.last_step_info.next() if info else StepInfo(0, 0, 0, job.spec.steps_per_epoch)
        )
        while step.global_step < job.steps:
            begin(step.global_step - first.global_step)
            _publish(job, servers, step.global_step)
            executor.set_version(step.global_step)
            batch = executor.next_batch(step.global_step)
            _note(job, executor, step.global_step)
            policy.train(batch)
            handler.dump(policy.state, step, dataloader=loader)
            step = step.next()
        handler.wait()
    torch.save(policy.model.state_dict(), f"{job.root}/{WEIGHTS}")


def _publish(job: Job, servers: list[VLLMServer], version: int) -> None:
    """Update the servers to ``version`` one after the other, so that for a while they serve
    different ones.
    """
    folder = version_path(f"{job.root}/weights", version)
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed life
    path = publish_hashed(folder.parent, version)
    for server in servers:
        server.update_weights_from_disk(path, version)


def _note(job: Job, executor: RolloutExecutor, step: int) -> None:
    rejected = [
        entry["number"]
        for entry in executor.state_dict()["tickets"]
        if entry["step"] == step and entry["outcome"] == "rejected"
    ]
    samples = [
        asdict(ticket)
        | {
            name: each[name][:, -N_TOKENS:].tolist()
            for name in ("input_ids", "logprobs", "versions")
        }
        | {"whole": _digest(each)}
        for ticket, each in executor.next_trajectories(step)
    ]
    line = {
        "life": os.getpid(),
        "step": step,
        "rejected": rejected,
        "samples": samples,
        "stats": executor.stats(),
    }
    file = os.open(f"{job.root}/{TRAINED}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(file, f"{json.dumps(line)}\n".encode())
    os.close(file)


def _digest(trajectory: Trajectory) -> str:
    """Digest of all bits of a trajectory, also of its pixels, but not of the versions, which depend
    on time.
    """
    digest, rest = (
        xxhash.xxh3_64(),
        {name: value for name, value in trajectory.items() if name != "versions"},
    )
    map_tensors(
        rest, lambda tensor: digest.update(tensor.numpy().tobytes()) or tensor
    )  # in the order of entries
    return digest.hexdigest()


def live(job: Job, kill: Kill | None = None) -> int | None:
    """Run one life of a driver in a separate process and return its exit code."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process: Any = context.Process(target=drive, args=(job, kill))
    process.start()
    process.join(stretched(120))
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError("the driver did not end")
    return process.exitcode


def trained(root: str | Path) -> list[dict[str, Any]]:
    """The steps behind the final weights. A step that was trained twice counts from the later
    life.
    """
    kept: dict[int, Any] = {}
    for line in (Path(root) / TRAINED).read_text().splitlines():
        entry = json.loads(line)
        kept = {step: one for step, one in kept.items() if step < entry["step"]} | {
            entry["step"]: entry
        }
    return [kept[step] for step in sorted(kept)]
