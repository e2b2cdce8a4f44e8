"""Loaders whose sampler is told the epoch: a resumed epoch continues in its own order, or the run
is stopped.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.engine.dcp.state import DCPState
from holdfast.recover.data.capture import DATA_STATE
from holdfast.recover.data.restore import restore_data
from holdfast.utils.errors import ConfigError, PeerError
from holdfast.utils.plain_values import pack_plain, read_plain
from holdfast.utils.rng import seed_rng
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, Prompts, Tiny, digest, make_handler, step_info

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

LAST = SPEC.total_train_steps - 1
KILLED_AFTER = (1, 5, 8, 11, 15, LAST)
"""Steps in the middle of each epoch of six steps, and at its end."""


class Script:
    """A typical fully_shard script, with dropout, so that one random draw too many changes the
    result.
    """

    def __init__(
        self, root: Path | str, rank: int, world_size: int, workers: int = 0, shuffle: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = DCPState(self.model, self.optimizer)
        seed_rng(7, rank)
        self.sampler = DistributedSampler(Prompts(), world_size, rank, shuffle=shuffle, seed=5)
        options: Any = (
            {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        )
        self.loader = StatefulDataLoader(Prompts(), batch_size=2, sampler=self.sampler, **options)
        self.epochs_behind = 0
        self.handler = make_handler(root, freq_steps=1, max_ckpt_to_keep=None, async_save=False)

    def train(self) -> Iterator[tuple[int, list[int]]]:
        """Resume if there is a generation, and yield each step with its batch after its
        snapshot.
        """
        info = self.handler.load(self.state, self.loader)
        step = step_info(0) if info is None else info.last_step_info.next()
        for epoch in range(step.epoch, SPEC.total_train_epochs):
            self.sampler.set_epoch(epoch - self.epochs_behind)
            for batch in self.loader:
                self.model(batch[:, None].float()).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.handler.dump(self.state, step, self.loader)
                yield step.global_step, batch.tolist()
                step = step.next()
        self.handler.close()

    def digest(self) -> str:
        return digest({"it": self.state})


def _generations(root: Path) -> Path:
    return root / "e" / "t" / "recover"


def _killed_after_every_step(
    rank: int, world_size: int, root: str, workers: int, shuffle: bool
) -> None:
    untouched = Script(f"{root}/untouched", rank, world_size, workers, shuffle)
    batches, final = list(untouched.train()), untouched.digest()
    assert [step for step, _ in batches] == list(range(LAST + 1))
    orders = {str([batch for step, batch in batches if step // 6 == epoch]) for epoch in range(3)}
    assert len(orders) == (3 if shuffle else 1)
    for last in KILLED_AFTER if shuffle else KILLED_AFTER[1:3]:
        resumed = Script(_cut_after(last, root, rank), rank, world_size, workers, shuffle)
        assert list(resumed.train()) == batches[last + 1 :], f"killed after step {last}"
        assert resumed.digest() == final, f"killed after step {last}"


def _cut_after(last: int, root: str, rank: int) -> Path:
    """A folder of runs in the state of the undisturbed run after step ``last``."""
    name, again = f"global_step_{last}", Path(root, str(last))
    if rank == 0:
        shutil.copytree(_generations(Path(root, "untouched")) / name, _generations(again) / name)
    dist.barrier()
    return again


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "shuffle"), [(0, True), (2, True), (0, False), (2, False)])
def test_a_resumed_epoch_has_the_batches_and_weights_of_one_unkilled(
    tmp_path: Path, workers: int, shuffle: bool
) -> None:
    run_ranks(_killed_after_every_step, 2, str(tmp_path), workers, shuffle)


def _a_script_that_starts_over_on_one_rank(rank: int, world_size: int, root: str) -> str:
    list(islice(Script(f"{root}/untouched", rank, world_size).train(), 9))
    script = Script(_cut_after(8, root, rank), rank, world_size)
    script.epochs_behind = rank
    steps = script.train()
    try:
        next(steps)
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"


def test_a_script_that_starts_over_on_one_rank_is_stopped_on_all(tmp_path: Path) -> None:
    for told in run_ranks(_a_script_that_starts_over_on_one_rank, 2, str(tmp_path)):
        assert "ConfigError: the sampler is at epoch 0 after the first step since load" in told


def test_a_generation_of_before_samplers_seeds_were_saved_is_resumed(tmp_path: Path) -> None:
    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(
            Prompts(), batch_size=4, sampler=DistributedSampler(Prompts(), 1, 0, seed=5)
        )

    left = loader()
    handler = make_handler(tmp_path, freq_steps=1, async_save=False)
    handler.load({"it": Tiny()}, left)
    batches = iter(left)
    next(batches)
    handler.dump({"it": Tiny()}, step_info(0), left)
    handler.close()
    (generation,) = _generations(tmp_path).glob("global_step_0")
    saved = read_plain(generation / DATA_STATE)
    assert saved.pop("sampler_draws") == [{"seed": 5}]
    (tmp_path / DATA_STATE).write_bytes(pack_plain("data", saved))
    again = loader()
    restore_data(tmp_path, again, 0, 1, step_info(0))
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


def _until(rank: int, world_size: int, root: str, killed_after: int) -> tuple[list[Any], str]:
    script, batches = Script(root, rank, world_size), []
    for step, batch in script.train():
        batches.append((step, batch))
        if step == killed_after:  # the snapshot is committed, because both ranks have agreed on it
            os.kill(os.getpid(), signal.SIGKILL)
    return batches, script.digest()


@pytest.mark.slow
def test_a_run_killed_in_two_epochs_ends_as_one_that_was_not(tmp_path: Path) -> None:
    untouched = run_ranks(_until, 2, str(tmp_path / "untouched"), -1)
    for killed_after in (8, 14):
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(_until, 2, str(tmp_path / "killed"), killed_after)
    for (batches, weights), (resumed, resumed_weights) in zip(
        untouched, run_ranks(_until, 2, str(tmp_path / "killed"), -1), strict=True
    ):
        assert resumed == batches[15:] and resumed_weights == weights
