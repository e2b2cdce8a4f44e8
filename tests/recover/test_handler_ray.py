"""The handler in a Ray driver: the ranks are actors, and the driver has generators, a dataloader
and objects too.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.workers.group import WorkerGroup
from holdfast.engine.workers.placement import Placement, PlacementRequest, WorkerResources, place
from holdfast.utils.errors import CheckpointExistsError, ConfigError, WorkerLost
from holdfast.utils.rng import seed_rng
from tests.engine.meshes import mesh_options
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.ray_helpers import local_ray
from tests.recover.runs import (
    Job,
    Meter,
    draw,
    hidden,
    make_handler,
    make_loader,
    names,
    newest,
    nll,
    step_info,
    stream,
    train_steps,
)

__all__ = ["local_ray"]
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]


class LogprobJob(Job):
    """A job with a loss that every mesh can compute."""

    loss = staticmethod(nll)


class Trainer(LogprobJob):
    """A typical worker of a user, with its own `engines` and `stateful`."""

    def __init__(self, model: str, seed: int, backend: str) -> None:
        super().__init__(model, **mesh_options(backend))
        seed_rng(seed, self.engines["default"].data_parallel_rank)

    def break_meter(self, rank: int, broken: bool) -> None:
        """Make saving the state of this rank's meter fail."""
        if torch.distributed.get_rank() == rank:
            self.meter.mean = threading.Lock() if broken else torch.zeros(2)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(folder, tiny_qwen3())
    return str(folder)


@pytest.fixture(scope="module")
def placement(local_ray: None) -> Iterator[Placement]:
    group = place(PlacementRequest("trainer", 2, WorkerResources()), 30)
    yield group
    group.remove()


class Driver:
    """The driver's part of a run."""

    def __init__(
        self, model: str, placement: Placement, root: Path, seed: int, backend: str = "fsdp:d2"
    ) -> None:
        args = model, seed, backend
        self.group = WorkerGroup(
            Trainer, args=args, world_size=2, placement=placement, name="trainer"
        )
        self._shares_data = backend != "fsdp:d2"
        seed_rng(seed)
        self.loader, self.progress = make_loader("own", 0, 1), Meter()
        self.handler = make_handler(root, freq_steps=1, max_ckpt_to_keep=None)
        self.handler.register("progress", self.progress)
        self.info = self.handler.load(self.group, self.loader)

    def train(self, steps: int) -> list[Any]:
        """Per step: each rank's record, and the driver's draws and counts."""
        records, batches = [], stream(self.loader)
        for _ in range(steps):
            ids = next(batches)
            self.progress.seen += ids
            per_rank = [(ids,), (ids,)] if self._shares_data else [(ids[:2],), (ids[2:],)]
            ranks = self.group.call_all("train", per_rank=per_rank)
            records.append((ranks, draw(), list(self.progress.seen)))
        return records

    def dump(self, step: int, force: bool = False) -> bool:
        return self.handler.dump(self.group, step_info(step), self.loader, force=force)

    def die(self) -> None:
        """End like a killed driver: without process and lock."""
        self.group.kill()
        self.handler.close()


def _draw_in_rank(worker: Trainer) -> None:
    draw()


def _go_on_under_torchrun(rank: int, world_size: int, model: str, root: str, first: int) -> Any:
    """Resume a run that a driver wrote, and write a generation that a driver can resume."""
    seed_rng(50 + rank)
    loader, job, progress, handler = (
        make_loader("own", rank, 2),
        LogprobJob(model),
        Meter(),
        make_handler(root),
    )
    handler.register("meter", job.meter)
    handler.register("progress", progress)
    info = handler.load(job.engine, loader)
    assert info is not None and info.last_step_info.next() == step_info(first)
    seen, records = (
        list(progress.seen),
        [record for _, record in train_steps(job, stream(loader), first, 2)],
    )
    progress.seen = [rank]
    assert handler.dump(job.engine, step_info(first + 1), loader, force=True)
    assert not (newest(root) / "state" / "driver.pt").exists()
    return seen, records, job.snapshot()


@pytest.mark.slow
def test_a_killed_group_goes_on_bit_for_bit_under_torchrun_and_back(
    model: str, placement: Placement, tmp_path: Path
) -> None:
    driver = Driver(model, placement, tmp_path, seed=7)
    assert driver.info is None
    driver.train(4)
    assert driver.dump(3) and not driver.dump(3)
    seen = list(driver.progress.seen)
    expected = driver.train(4)
    driver.die()
    assert sorted(os.listdir(newest(tmp_path) / "state")) == [
        "driver.pt",
        "model_files_default.pt",
        "rank_00000.pt",
        "rank_00001.pt",
    ]

    resumed = Driver(model, placement, tmp_path, seed=8)
    assert resumed.info and resumed.info.last_step_info.next() == step_info(4)
    assert resumed.info.weight_versions == {"default": 4} and resumed.info.world_size == 2
    draw()
    resumed.group.run_all(_draw_in_rank)
    resumed.handler.restore_rng()
    assert resumed.train(4) == expected
    resumed.die()

    there = run_ranks(_go_on_under_torchrun, 2, model, str(tmp_path), 4)
    for rank, (found, records, _) in enumerate(there):
        assert found == seen and records == [ranks[rank] for ranks, _, _ in expected[:2]]

    back = Driver(model, placement, tmp_path, seed=9)
    assert back.info and back.info.last_step_info.next() == step_info(6)
    assert back.group.call_all("snapshot") == [snapshot for _, _, snapshot in there]
    assert back.progress.seen == [0], "rank 0's, for the run had no driver"
    assert [ranks for ranks, _, _ in back.train(2)] == [ranks for ranks, _, _ in expected[2:]]
    back.die()


@pytest.mark.slow
def test_a_killed_group_goes_on_bit_for_bit_on_a_mesh_and_then_on_another(
    model: str, placement: Placement, tmp_path: Path
) -> None:
    driver = Driver(model, placement, tmp_path, 7, "fsdp:d1c2")
    driver.train(2)
    assert driver.dump(1)
    expected = driver.train(2)
    driver.die()
    resumed = Driver(model, placement, tmp_path, 8, "fsdp:d1c2")
    assert resumed.train(2) == expected
    (first, second), _, _ = expected[-1]
    assert first == second and len(first["ids"]) == 4
    assert resumed.dump(3)
    seen = list(resumed.progress.seen)
    resumed.die()
    other = Driver(model, placement, tmp_path, 9, "fsdp:d2")
    assert (
        other.group.call_all("snapshot")[0]["digest"] == first["digest"]
        and other.progress.seen == seen
    )
    (mine, new), _, _ = other.train(1)[0]
    assert len({*mine["ids"], *new["ids"]}) == 4 and mine["draws"] != new["draws"]
    other.die()


@pytest.mark.slow
def test_the_failure_or_death_of_a_rank_leaves_no_generation(
    model: str, placement: Placement, tmp_path: Path
) -> None:
    driver = Driver(model, placement, tmp_path, seed=1)
    assert driver.dump(0)
    driver.group.call_all("break_meter", 1, True)
    with pytest.raises(ConfigError, match="state of 'meter' cannot be saved"):
        driver.dump(1)
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []
    driver.group.call_all("break_meter", 1, False)
    blocked = newest(tmp_path).with_name("global_step_1")
    blocked.write_text("in the way")
    with pytest.raises(CheckpointExistsError, match="global_step_1 exists already"):
        driver.dump(1)
    blocked.unlink()
    assert driver.dump(1, force=True)

    threading.Timer(0.3, os.kill, (driver.group.pids()[1], signal.SIGKILL)).start()
    step, start = 1, time.monotonic()
    with pytest.raises(WorkerLost):
        while time.monotonic() - start < 30:
            step += 1
            driver.dump(step)
    assert hidden(tmp_path) == []
    assert driver.handler.store.verify(newest(tmp_path)).last_step_info.global_step >= step - 1
