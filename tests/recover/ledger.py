"""Two records of trained samples, for tests that no sample is lost or repeated, however often the
run was killed.

Each process appends the sample numbers of a trained step to a file. The model also counts: it has
one weight per sample and epoch, so that the last generation reveals every sample that was lost,
repeated or trained in another epoch, independently of the file.
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
    """A dataset and the way through it, across any number of restarts."""

    samples: int
    epochs: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def spec(self) -> FinetuneSpec:
        return FinetuneSpec(self.epochs, self.samples, self.batch_size)

    def loaders(
        self, ranks: Iterable[int] = (0,), world_size: int = 1
    ) -> list[ResumableDataLoader]:
        """One loader per rank."""
        order = {"seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last}
        data = list(range(self.samples))
        return [
            ResumableDataLoader(data, self.batch_size, rank=r, world_size=world_size, **order)
            for r in ranks
        ]

    def order(self, epoch: int) -> list[int]:
        """All samples in the order of an epoch, according to docs/checkpoint-format.md."""
        if not self.shuffle:
            return list(range(self.samples))
        return np.random.RandomState([self.seed, epoch]).permutation(self.samples).tolist()

    def batches(self, loader: ResumableDataLoader) -> Iterator[list[int]]:
        """Yield the remaining batches of the run."""
        for batch in loader.batches():
            if loader.epoch == self.epochs:
                return
            yield batch

    @property
    def most_ranks(self) -> int:
        """Largest number of ranks that all get a sample of each batch."""
        return (
            self.batch_size if self.drop_last else self.samples % self.batch_size or self.batch_size
        )


@dataclass(frozen=True)
class Life:
    """A run between two restarts.

    Attributes:
        world_size: number of ranks.
        freq_steps: steps between snapshots.
        steps: number of steps before the victim is killed. None: no kill, the run finishes.
        moment: moment of the kill in the last step: ``trained`` (not dumped), ``dumping``, or
            ``dumped``.
        calls: number of file system calls that a ``dumping`` victim completes.
        victim: the rank to kill.
    """

    world_size: int
    freq_steps: int = 1
    steps: int | None = None
    moment: str = "trained"
    calls: int = 0
    victim: int = 0


class Step(NamedTuple):
    """The samples of one global step: ``ids`` of all ranks in rank order."""

    epoch: int
    ids: list[int]


class Counting:
    """A model with a weight for each sample of each epoch, which counts how often it was
    trained.
    """

    def __init__(self, run: Run) -> None:
        self.samples, self.model = run.samples, _Weights(run.epochs * run.samples)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if dist.is_initialized():
            fully_shard(
                self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (self.world_size,))
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state = DCPState(self.model, self.optimizer)

    def train(self, epoch: int, ids: list[int]) -> None:
        """Train one step. Gradients are averaged over the ranks."""
        rows = torch.tensor([epoch * self.samples + i for i in ids])
        (-self.model(rows) * self.world_size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counts(self) -> list[float]:
        """The whole weights. All ranks call it."""
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
    """Live a life as the given ranks, all in this process. Returns if the run reaches its end."""
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
        handler.dump(
            counting.state, replace(step, global_step=step.global_step - 1), loaders[0], force=True
        )
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
    """The step from which a restart continues, -1 for the start."""
    return max(
        (g.step for g in GenerationStore(root / "e" / "t" / "recover").generations()), default=-1
    )


def history(root: Path) -> list[Step]:
    """The steps that led to the newest generation. A step that was trained twice counts from the
    later life.
    """
    kept: dict[int, dict[int, Any]] = {}
    for ledger in sorted(root.glob("ledger-*")):
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        first = min((line[0] for line in lines), default=len(kept))
        kept = {step: ranks for step, ranks in kept.items() if step < first}
        for step, rank, *rest in lines:
            assert rank not in kept.setdefault(step, {}), (
                f"rank {rank} trained step {step} twice in {ledger.name}"
            )
            kept[step][rank] = rest
    steps = []
    for step in range(newest_step(root) + 1):
        ranks = kept[step]
        ((world_size, epoch),) = {tuple(line[:2]) for line in ranks.values()}
        assert sorted(ranks) == list(range(world_size)), f"step {step} was not trained by all ranks"
        steps.append(Step(epoch, [i for _, line in sorted(ranks.items()) for i in line[2]]))
    return steps


def assert_trained_once(run: Run, steps: list[Step]) -> None:
    """Check that every epoch has all samples once, in the order of an uninterrupted run, without
    incomplete batches.
    """
    (loader,) = run.loaders()
    assert [step.ids for step in steps] == list(run.batches(loader))
    assert [step.epoch for step in steps] == sorted(step.epoch for step in steps)
    for epoch in range(run.epochs):
        order = run.order(epoch)
        seen = [i for step in steps if step.epoch == epoch for i in step.ids]
        assert seen == order[: len(seen)], f"epoch {epoch} is out of order"
        assert len(order) - len(seen) < (run.batch_size if run.drop_last else 1), (
            f"epoch {epoch} lost samples"
        )


def assert_counted_once(run: Run, steps: list[Step], counts: list[float]) -> None:
    """Check the same with the model's weights."""
    expected = Counter(step.epoch * run.samples + i for step in steps for i in step.ids)
    assert set(expected.values()) == {1} and counts == [
        expected[i] for i in range(run.epochs * run.samples)
    ]


def random_run(draw: random.Random) -> tuple[Run, list[Life]]:
    """Sizes without common divisors, and lives that end at random moments, except the last one."""
    run = Run(draw.choice([7, 11, 13, 23, 29, 31]), draw.randint(2, 4), 2, draw.randrange(1000))
    run = replace(run, shuffle=draw.random() < 0.8, drop_last=draw.random() < 0.5)
    run = replace(run, batch_size=draw.randint(1, min(9, run.samples)))
    lives = []
    for _ in range(draw.randint(2, 7)):
        moment, ranks = (
            draw.choice(["trained", "dumping", "dumped"]),
            draw.randint(1, min(4, run.most_ranks)),
        )
        lives.append(
            Life(ranks, draw.randint(1, 3), draw.randint(1, 9), moment, draw.randrange(40))
        )
    return run, [*lives, replace(lives[-1], steps=None)]
