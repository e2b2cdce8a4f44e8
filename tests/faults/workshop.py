"""Builds and copies scenarios in memory, and performs them on warm ranks with or without faults."""

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from examples.copy_task import write_model_folder
from holdfast.engine import save_hf
from tests.faults.nursery import Nursery, nursery
from tests.faults.scenarios import Scenario, sharded_model
from tests.faults.shim import Call, Hook, Shim, read_calls
from tests.faults.snapshots import Trainee
from tests.recover.runs import Tiny, make_handler, step_info

MEMORY = Path("/dev/shm")


@dataclass
class Workshop:
    """Two ranks and a scratch folder.

    Attributes:
        ranks: two ranks.
        folder: a folder in memory, if there is one. A killed process leaves the same files on every
            file system, unlike a power cut, and a thousand snapshots need no disk.
        model: folder with config and tokenizer of a tiny language model.
    """

    ranks: Nursery
    folder: Path
    model: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def build(self, scenario: Scenario) -> "Built":
        """Let the scenario create its folder."""
        base = self.new_path("base")
        base.mkdir()
        outcome = self.ranks.run(partial(_build, scenario, str(base)))
        built = scenario.learn([results[0] for results in outcome.require_success()])
        return Built(self, built, base, _logged(base))

    def new_path(self, name: str) -> Path:
        """Return an unused path."""
        return self.folder / f"{next(self._numbers)}-{name}"


@dataclass
class Built:
    """A scenario with its folder.

    Attributes:
        scenario: the scenario, after `learn`.
        base: its folder, which must not change.
        calls: recorded calls of all ranks, ordered by time.
    """

    workshop: Workshop
    scenario: Scenario
    base: Path
    calls: list[Call]

    def copy(self) -> Path:
        """Make a new copy of the folder."""
        return Path(shutil.copytree(self.base, self.workshop.new_path("copy"), symlinks=True))

    def record(self, root: Path) -> list[Call]:
        """Perform the action without faults in a copy. Returns the calls of all ranks, ordered by
        time.
        """
        self.workshop.ranks.run(partial(perform, self.scenario, str(root), {})).require_success()
        return _logged(root)


@contextmanager
def workshop(setup: Callable[[], None] | None = None) -> Iterator[Workshop]:
    """Make the workshop of a test module. ``setup`` is for `nursery`."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        model = str(write_model_folder(Path(folder, "model"), layers=1, hidden=16))
        with nursery(partial(warm_up, model), setup=setup) as ranks:
            yield Workshop(ranks, Path(folder), model)


def warm_up(model: str, rank: int) -> None:
    """Fill the caches of torch and transformers in the parent of a rank, which saves each rank a
    second.

    A fake group of two ranks fills the caches that depend on the mesh.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = Tiny()
        for step in range(2):
            handler = make_handler(folder, freq_steps=1)
            handler.load(plain.state)
            plain.step()
            handler.dump(plain.state, step_info(step))
            handler.close()
        export = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        save_hf(export, Path(folder) / "export", base_model_path=model)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    trainee = Trainee(rank)
    trainee.train()
    trainee.train()
    sharded_model(model, 0)
    dist.destroy_process_group()


def perform(scenario: Scenario, root: str, hooks: dict[int, Hook], rank: int) -> int:
    """Stage: perform the action under a shim.

    Args:
        scenario: a scenario after `learn`.
        root: a copy of its folder.
        hooks: rank -> hook for its calls.
        rank: this rank.

    Returns:
        The number of successful calls.
    """
    action = scenario.arm(rank, root)
    with Shim(root, hooks.get(rank), log=f"{root}.calls.{rank}", rank=rank) as shim:
        action()
    return len(shim.calls)


def _build(scenario: Scenario, root: str, rank: int) -> Any:
    with Shim(root, log=f"{root}.calls.{rank}", rank=rank):
        return scenario.build(rank, root)


def _logged(root: Path) -> list[Call]:
    return read_calls(*sorted(root.parent.glob(f"{root.name}.calls.*")))
