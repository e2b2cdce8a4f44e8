"""Two accounts of what a run trained, however often it was killed, for tests that no sample is lost or repeated.

Each process appends the sample numbers of a step to a file when it has trained them; and the weights themselves count,
one weight a sample and epoch, so that a sample that was lost, repeated or trained in another epoch shows in the last
generation whatever the file says.
"""

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.engine import FinetuneSpec
from holdfast.engine.api import StepInfo
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import GenerationStore, RecoverConfig, RecoverHandler, ResumableDataLoader


@dataclass(frozen=True)
class Run:
    """A dataset and how it is walked, however often that is interrupted."""

    samples: int
    epochs: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def spec(self) -> FinetuneSpec:
        return FinetuneSpec(self.epochs, self.samples, self.batch_size)

    def loaders(self, ranks: Iterable[int] = (0,), world_size: int = 1) -> list[ResumableDataLoader]:
        """One loader a rank."""
        order = {"seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last}
        data = list(range(self.samples))
        return [ResumableDataLoader(data, self.batch_size, rank=r, world_size=world_size, **order) for r in ranks]

    def order(self, epoch: int) -> list[int]:
        """All samples as docs/checkpoint-format.md says that an epoch walks them."""
        if not self.shuffle:
            return list(range(self.samples))
        return np.random.RandomState([self.seed, epoch]).permutation(self.samples).tolist()

    def batches(self, loader: ResumableDataLoader) -> Iterator[list[int]]:
        """What is left of the run."""
        for batch in loader.batches():
            if loader.epoch == self.epochs:
                return
            yield batch

    @property
    def most_ranks(self) -> int:
        """How many ranks get a sample of each batch."""
        return self.batch_size if self.drop_last else self.samples % self.batch_size or self.batch_size


@dataclass(frozen=True)
class Life:
    """A run's time between two restarts.

    Attributes:
        world_size: number of ranks.
        freq_steps: steps between snapshots.
        steps: trained before the victim is killed; None: nobody is, the run goes to its end.
        moment: when in the last of them: ``trained`` (not dumped), ``dumping``, or ``dumped``.
        calls: into the file system that a ``dumping`` victim gets done.
        victim: a rank.
    """

    world_size: int
    freq_steps: int = 1
    steps: int | None = None
    moment: str = "trained"
    calls: int = 0
    victim: int = 0


class Step(NamedTuple):
    """What one global step trained: ``ids`` of all ranks in rank order."""

    epoch: int
    ids: list[int]


class Counting:
    """A model with a weight for each sample of each epoch: how often it was trained."""

    def __init__(self, run: Run) -> None:
        self.samples, self.model = run.samples, _Weights(run.epochs * run.samples)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if dist.is_initialized():
            fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (self.world_size,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state = DCPState(self.model, self.optimizer)

    def train(self, epoch: int, ids: list[int]) -> None:
        """One step; gradients are averaged over the ranks."""
        rows = torch.tensor([epoch * self.samples + i for i in ids])
        (-self.model(rows) * self.world_size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counts(self) -> list[float]:
        """The weights, whole; all ranks call it."""
        seen = self.model.seen.detach()
        return (seen.full_tensor() if isinstance(seen, DTensor) else seen).tolist()


class _Weights(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(count))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.seen[rows].sum()


def handler_of(run: Run, root: Path | str, **options: Any) -> RecoverHandler:
    config = RecoverConfig(experiment_name="e", trial_name="t", fileroot=str(root), **options)
    return RecoverHandler(config, run.spec)


def live(run: Run, life: Life, root: str, number: int, ranks: list[int]) -> list[float]:
    """Be the ranks ``ranks`` of a life, all in this process; returns at the end of the run, if it gets there."""
    handler, counting = handler_of(run, root, freq_steps=life.freq_steps), Counting(run)
    loaders = run.loaders(ranks, life.world_size)
    info = handler.load(counting.state, loaders[0])
    for loader in loaders[1:] if info else ():
        loader.load_state_dict(loaders[0].state_dict())
    step = info.last_step_info.next() if info else StepInfo(0, 0, 0, run.spec.steps_per_epoch)
    ledger = os.open(f"{root}/ledger-{number:02d}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for trained, shares in enumerate(zip(*map(run.batches, loaders), strict=True), start=1):
        counting.train(loaders[0].epoch, list(chain(*shares)))
        for rank, ids in zip(ranks, shares, strict=True):
            line = [step.global_step, rank, life.world_size, loaders[0].epoch, ids]
            os.write(ledger, f"{json.dumps(line)}\n".encode())
        dies = trained == life.steps and life.victim in ranks
        if dies and life.moment == "trained":
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and life.moment == "dumping":
            _die_after(life.calls, root)
        handler.dump(counting.state, step, loaders[0])
        handler.wait()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        step = step.next()
    if step.global_step > 0:
        handler.dump(counting.state, replace(step, global_step=step.global_step - 1), loaders[0], force=True)
    handler.close()
    return counting.counts()


def _die_after(calls: int, root: str) -> None:
    left = calls

    def countdown(event: str, args: tuple) -> None:
        nonlocal left
        if event.startswith(("open", "os.", "shutil.")) and root in str(args):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(countdown)


def newest_step(root: Path) -> int:
    """The step that a restart goes on from; -1 is the start."""
    return max((g.step for g in GenerationStore(root / "e" / "t" / "recover").generations()), default=-1)


def history(root: Path) -> list[Step]:
    """The steps that led to the newest generation: what a later life trained again counts from the later life."""
    kept: dict[int, dict[int, Any]] = {}
    for ledger in sorted(root.glob("ledger-*")):
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        first = min((line[0] for line in lines), default=len(kept))
        kept = {step: ranks for step, ranks in kept.items() if step < first}
        for step, rank, *rest in lines:
            assert rank not in kept.setdefault(step, {}), f"rank {rank} trained step {step} twice in {ledger.name}"
            kept[step][rank] = rest
    steps = []
    for step in range(newest_step(root) + 1):
        ranks = kept[step]
        ((world_size, epoch),) = {tuple(line[:2]) for line in ranks.values()}
        assert sorted(ranks) == list(range(world_size)), f"step {step} was not trained by all ranks"
        steps.append(Step(epoch, [i for _, line in sorted(ranks.items()) for i in line[2]]))
    return steps


def assert_trained_once(run: Run, steps: list[Step]) -> None:
    """Every sample of every epoch once, in the order of an uninterrupted run; only what is no batch is left out."""
    (loader,) = run.loaders()
    assert [step.ids for step in steps] == list(run.batches(loader))
    assert [step.epoch for step in steps] == sorted(step.epoch for step in steps)
    for epoch in range(run.epochs):
        order = run.order(epoch)
        seen = [i for step in steps if step.epoch == epoch for i in step.ids]
        assert seen == order[: len(seen)], f"epoch {epoch} is out of order"
        assert len(order) - len(seen) < (run.batch_size if run.drop_last else 1), f"epoch {epoch} lost samples"


def assert_counted_once(run: Run, steps: list[Step], counts: list[float]) -> None:
    """The weights say the same."""
    expected = Counter(step.epoch * run.samples + i for step in steps for i in step.ids)
    assert set(expected.values()) == {1} and counts == [expected[i] for i in range(run.epochs * run.samples)]


def random_run(draw: random.Random) -> tuple[Run, list[Life]]:
    """Sizes that nothing divides, and lives that end at any moment; the last one does not."""
    run = Run(draw.choice([7, 11, 13, 23, 29, 31]), draw.randint(2, 4), 2, draw.randrange(1000))
    run = replace(run, shuffle=draw.random() < 0.8, drop_last=draw.random() < 0.5)
    run = replace(run, batch_size=draw.randint(1, min(9, run.samples)))
    lives = []
    for _ in range(draw.randint(2, 7)):
        moment, ranks = draw.choice(["trained", "dumping", "dumped"]), draw.randint(1, min(4, run.most_ranks))
        lives.append(Life(ranks, draw.randint(1, 3), draw.randint(1, 9), moment, draw.randrange(40)))
    return run, [*lives, replace(lives[-1], steps=None)]
