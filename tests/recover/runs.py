"""A small training run that draws from every generator, for tests that stop and resume it."""

import hashlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.engine import FinetuneSpec, FSDPEngine, OptimizerConfig, TrainEngineConfig
from holdfast.engine.api import Batch, StepInfo
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from holdfast.utils.record_log import NO_PARENT, RecordLog
from tests.helpers import untimed

IN_BACKGROUND = os.environ.get("HOLDFAST_ASYNC_SAVE", "1") == "1"
"""Whether handlers write in the background and are waited for. Every test and every fault must pass
both ways.
"""
SPEC = FinetuneSpec(total_train_epochs=3, dataset_size=24, train_batch_size=4)
FIRST = StepInfo(epoch=0, epoch_step=0, global_step=0, steps_per_epoch=SPEC.steps_per_epoch)


def step_info(step: int) -> StepInfo:
    """Step ``step`` of a run with the epochs of `SPEC`."""
    return StepInfo.at(step, SPEC.steps_per_epoch)


class SettledHandler(RecoverHandler):
    """A handler that waits for background writes, so that `dump` has the same effect as without
    them.
    """

    def dump(self, *args: Any, **kwargs: Any) -> bool:
        before = self.save_stats.committed
        taken = super().dump(*args, **kwargs)
        return taken and self._settled(before)

    def _settled(self, before: int) -> bool:
        self._saver.settle()
        return self.save_stats.committed > before


def make_handler(
    fileroot: Path | str, notices: Sequence[Any] = (), group: Any = None, **options: Any
) -> RecoverHandler:
    options = {"async_save": IN_BACKGROUND} | options
    config = RecoverConfig(experiment_name="e", trial_name="t", fileroot=str(fileroot), **options)
    kind = SettledHandler if config.async_save else RecoverHandler
    return kind(config, SPEC, notices=notices, group=group)


def draw() -> tuple[float, ...]:
    """Draw a number from each generator. The Gaussian draws leave a cached half behind."""
    return (
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        torch.rand(1).item(),
        torch.randn(1).item(),
    )


def digest(states: Mapping[str, DCPState]) -> str:
    """SHA-256 of all model and optimizer tensors, whole. All ranks call it."""
    found = hashlib.sha256()
    for name, state in sorted(states.items()):
        for key, tensor in sorted(state.live_tensors().items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(f"{name}.{key}".encode() + whole.detach().cpu().numpy().tobytes())
    return found.hexdigest()


class Meter:
    """A user's object: plain values and tensors."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.mean = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen), "mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.mean = state_dict["seen"], state_dict["mean"]


class Diary:
    """An object that follows a log: its state is its entries so far, and the log has later ones."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.read: list[str] = []  # entries that came from the log
        self.log: RecordLog | None = None
        self.followed: list[tuple[bool, bool]] = []  # whether there is a log, and ``went_back``
        self._log_id: str | None = NO_PARENT

    def note(self, entry: str, *, durably: bool = False) -> None:
        """Add an entry. With ``durably`` it survives a power cut when this returns."""
        self.entries.append(entry)
        if self.log is not None:
            place = self.log.append(entry.encode())
            if durably:
                self.log.sync(place)

    def state_dict(self) -> dict[str, Any]:
        return {"entries": list(self.entries), "log": None if self.log is None else self.log.id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.entries = list(state_dict["entries"])
        self._log_id = state_dict.get("log")

    def follow_log(self, log: RecordLog | None, went_back: bool) -> None:
        self.followed.append((log is not None, went_back))
        if log is not None:
            self.log = log
            self.read = [payload.decode(errors="replace") for payload in log.read(self._log_id)]
            for entry in self.read:
                if entry not in self.entries:
                    self.entries.append(entry)
            log.start(self._log_id)


class Tiny:
    """A trainer without an engine: a plain module in one process."""

    def __init__(self, width: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.state = DCPState(self.model, self.optimizer, self.scheduler)

    def step(self) -> str:
        """Train once on random numbers and return the digest of everything."""
        self.model(torch.randn(5, self.model.in_features)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return self.digest()

    def digest(self) -> str:
        return digest({"default": self.state}) + str(self.scheduler.get_last_lr())


class Prompts(Dataset):
    """Sample i is i."""

    def __len__(self) -> int:
        return SPEC.dataset_size

    def __getitem__(self, index: int) -> int:
        return index


def make_loader(kind: str, rank: int, world_size: int) -> Any:
    """``own``: Holdfast's loader. ``torchdata``: a typical loader, with a separate order on each
    rank.
    """
    if kind == "own":
        return ResumableDataLoader(Prompts(), 4, seed=3, rank=rank, world_size=world_size)
    sampler = RandomSampler(Prompts(), generator=torch.Generator().manual_seed(rank))
    return StatefulDataLoader(Prompts(), batch_size=4, sampler=sampler, collate_fn=list)


def make_engine(path: str, **changes: Any) -> FSDPEngine:
    optimizer = changes.pop("optimizer", OptimizerConfig(lr=1e-2, lr_scheduler_type="linear"))
    engine = FSDPEngine(
        TrainEngineConfig(path=path, dtype="float32", optimizer=optimizer, **changes)
    )
    engine.create_process_group()
    engine.initialize(None, SPEC)
    return engine


def make_batch(ids: list[int]) -> Batch:
    """Four to six tokens per sample, derived from its number."""
    lengths = torch.tensor([4 + i % 3 for i in ids])
    mask = torch.arange(6)[None] < lengths[:, None]
    tokens = torch.stack([(torch.arange(6) * (i + 1) + i) % 15 for i in ids])
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), "loss_mask": mask.long()}


def token_count(mb: Batch) -> torch.Tensor:
    return mb["loss_mask"].sum()


def nll(output: Any, mb: Batch) -> torch.Tensor:
    """A loss of log-probabilities, which every mesh can compute."""
    return -(output.logprobs * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def square_loss(output: torch.Tensor, mb: Batch) -> torch.Tensor:
    """A loss of logits or values."""
    return (output - 1).square().mean()


class Job:
    """The ranks' part of a run: engines, and a user object per rank."""

    loss: Any = staticmethod(square_loss)
    """Loss of engines that are no critics."""

    def __init__(self, model: str, names: tuple[str, ...] = ("default",), **changes: Any) -> None:
        self.engines = {
            name: make_engine(model, is_critic=name == "critic", **changes) for name in names
        }
        self.meter = Meter()
        self.stateful = {"meter": self.meter}

    @property
    def engine(self) -> Any:
        """The argument for a handler under torchrun."""
        return self.engines if len(self.engines) > 1 else next(iter(self.engines.values()))

    def train(self, ids: list[int]) -> dict[str, Any]:
        """Train every engine for one step and return everything that tests compare."""
        stats = {}
        for name, engine in self.engines.items():
            loss = square_loss if engine.config.is_critic else self.loss
            stats[name] = untimed(engine.train_batch(make_batch(ids), loss, token_count))
            engine.step_lr_scheduler()
            engine.set_version(engine.get_version() + 1)
        self.meter.seen += ids
        self.meter.mean = self.meter.mean + torch.rand(2)
        return {"ids": ids, "stats": stats, "draws": draw(), **self.snapshot()}

    def snapshot(self) -> dict[str, Any]:
        """Everything except the generators."""
        engines = self.engines.items()
        return {
            "digest": digest(
                {name: engine.dcp_state(engine.optimizer is not None) for name, engine in engines}
            ),
            "counters": {name: engine.counters.state_dict() for name, engine in engines},
            "meter": (list(self.meter.seen), self.meter.mean.tolist()),
        }


def stream(loader: Any) -> Iterator[list[int]]:
    """Batches of sample numbers, epoch after epoch."""
    return chain.from_iterable(repeat(loader))


def train_steps(
    job: Job, batches: Iterator[list[int]], first: int, steps: int
) -> Iterator[tuple[StepInfo, Any]]:
    """``(step info, record)`` of each step."""
    for step in range(first, first + steps):
        yield step_info(step), job.train(next(batches))


def newest(fileroot: Path | str) -> Path:
    """The newest generation's folder."""
    root = Path(fileroot) / "e" / "t" / "recover"
    return max(root.glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1]))


def hidden(fileroot: Path | str) -> list[str]:
    """Names of hidden folders: staging, deleted and quarantined ones."""
    return sorted(path.name for path in (Path(fileroot) / "e" / "t" / "recover").glob(".*"))


def run_until(root: Path, steps: int, first: int = 0, **options: Any) -> list[str]:
    """Train steps ``first`` to ``steps - 1`` with a snapshot of each, and return the digest after
    each.
    """
    handler, tiny = make_handler(root, freq_steps=1, **options), Tiny()
    info = handler.load(tiny.state)
    assert (info.last_step_info.next().global_step if info else 0) == first
    digests = []
    for step in range(first, steps):
        digests.append(tiny.step())
        assert handler.dump(tiny.state, step_info(step))
    handler.wait()
    handler.close()
    return digests


def names(root: Path) -> list[str]:
    """Folder names of the generations."""
    return sorted(path.name for path in (root / "e" / "t" / "recover").glob("global_step_*"))
