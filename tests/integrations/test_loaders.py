"""Loaders of scripts, left in the middle of an epoch and taken up again by a fresh one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration

from holdfast.integrations.accelerate import recoverable
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from holdfast.utils.rng import capture_rng, restore_rng
from holdfast.utils.safe_torch import pack_plain, unpack_plain

pytestmark = pytest.mark.timeout(60)

EPOCHS = 3


class Rows(torch.utils.data.Dataset):
    """Samples that are drawn anew whenever they are read."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return (torch.tensor([100.0 * self.epoch + i]) for i in range(14))


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows) + torch.rand(1)


def prepared(**options: Any) -> Any:
    configuration = DataLoaderConfiguration(**options)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(plain(shuffle=True))


def plain(**options: Any) -> Any:
    return DataLoader(Rows(), batch_size=4, collate_fn=collate, **options)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[[], Any]] = {
    "prepared": prepared,
    "prepared, seedable": lambda: prepared(use_seedable_sampler=True, data_seed=5),
    "plain": lambda: plain(shuffle=True),
    "plain, in order": plain,
    "a generator of the loader": lambda: plain(shuffle=True, generator=own_generator()),
    "a generator of the sampler": lambda: plain(sampler=RandomSampler(Rows(), generator=own_generator())),
    "weighted": lambda: plain(sampler=WeightedRandomSampler([1.0] * 14, 14)),
    "DistributedSampler": lambda: plain(sampler=DistributedSampler(Rows(), num_replicas=2, rank=1, shuffle=True)),
    "no batches": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
}


def train(loader: Any, until: int | None = None) -> list[tuple[int, Any, float]]:
    """Epoch, batch and a draw of every step, from where the loader is to its ``until``-th batch."""
    found = []
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            found.append((epoch, batch.tolist(), torch.rand(1).item()))
            if len(found) == until:
                return found
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_left_after_any_batch_gives_the_others_and_draws_as_if_never_left(name: str) -> None:
    torch.manual_seed(1)
    expected = train(recoverable(LOADERS[name]()))
    assert len(expected) >= 2 * EPOCHS and expected[0][1] != expected[len(expected) // EPOCHS][1]
    for cut in range(1, len(expected) + 1):
        torch.manual_seed(1)
        left = recoverable(LOADERS[name]())
        assert train(left, cut) == expected[:cut]
        state, rng = unpack_plain(pack_plain("loader", left.state_dict()), "here"), capture_rng()
        torch.manual_seed(99)
        again = recoverable(LOADERS[name]())
        again.load_state_dict(state)
        torch.rand(3)
        restore_rng(rng)
        assert train(again) == expected[cut:], cut


def test_a_loader_left_twice_in_one_epoch_and_at_once_comes_back() -> None:
    torch.manual_seed(1)
    expected, done = train(recoverable(prepared())), 0
    torch.manual_seed(1)
    loader, rng = recoverable(prepared()), capture_rng()
    for count in (1, 2, 2, 1):
        restore_rng(rng)
        assert train(loader, count) == expected[done : done + count]
        done, state, rng = done + count, loader.state_dict(), capture_rng()
        loader = recoverable(prepared())
        loader.load_state_dict(state)
        assert loader.state_dict() is state


def train_capped(loader: Any, until: int | None = None) -> list[tuple[int, int, Any, float]]:
    """Two steps of each epoch; the third batch is fetched and left, as with ``if step == max_steps: break``."""
    found = []
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            if loader.step.epoch_step == 2:
                break
            found.append((epoch, loader.step.epoch, batch.tolist(), torch.rand(1).item()))
            if len(found) == until:
                return found
    return found


SHORT = ("DistributedSampler", "stream")  # two batches only, and no length


@pytest.mark.parametrize("name", [name for name in LOADERS if name not in SHORT])
def test_an_epoch_left_by_break_is_over_and_a_resume_after_it_gives_the_others(name: str) -> None:
    torch.manual_seed(1)
    expected = train_capped(recoverable(LOADERS[name]()))
    assert [found[:2] for found in expected] == [(epoch, epoch) for epoch in range(EPOCHS) for _ in range(2)]
    for cut in range(1, len(expected) + 1):
        torch.manual_seed(1)
        left = recoverable(LOADERS[name]())
        assert train_capped(left, cut) == expected[:cut]
        state, rng = left.state_dict(), capture_rng()
        torch.manual_seed(99)
        again = recoverable(LOADERS[name]())
        again.load_state_dict(state)
        restore_rng(rng)
        assert train_capped(again) == expected[cut:], cut


def test_an_epoch_left_at_its_last_batch_draws_what_ends_the_order() -> None:
    """Hosts that count batches do not ask for one more; a resumed run has to draw as they do."""
    rows: Any = list(range(8))
    orders = []
    for cut in (None, 2):
        loader = recoverable(DataLoader(rows, batch_size=4, shuffle=True, generator=own_generator()))
        found: list[Any] = []
        for _ in range(3):
            batches = iter(loader)
            found += [next(batches).tolist() for _ in range(2)]
            if cut == len(found):
                state = loader.state_dict()
                loader = recoverable(DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator()))
                loader.load_state_dict(state)
        orders.append(found)
    assert orders[0] == orders[1]


def test_samplers_are_told_the_next_epoch_after_a_break() -> None:
    loader = recoverable(LOADERS["stream"]())
    assert [next(iter(loader))[0].item() for _ in range(3)] == [0.0, 100.0, 200.0]


def test_accelerates_own_state_and_skip_read_another_order(tmp_path: Path) -> None:
    """The control: its default sampler draws the order of the epoch again, from where the generators were left."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(plain(shuffle=True))
    batches: Any = iter(loader)
    next(batches)
    accelerator.save_state(str(tmp_path))
    expected = [(batch // 1).tolist() for batch in batches]
    torch.manual_seed(99)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(plain(shuffle=True))
    accelerator.load_state(str(tmp_path))
    skipped: Any = accelerator.skip_first_batches(loader, 1)
    assert [(batch // 1).tolist() for batch in skipped] != expected


def test_steps_are_counted_with_accumulation_and_over_epochs() -> None:
    loader = recoverable(plain(), gradient_accumulation_steps=3)
    assert len(loader) == 4 and loader.steps_per_epoch == 2
    with pytest.raises(ConfigError, match="no batch was handed out yet"):
        _ = loader.step
    steps = [loader.step for _ in range(2) for _ in loader]
    assert [(step.epoch, step.epoch_step, step.global_step) for step in steps] == [
        (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 0, 2), (1, 0, 2), (1, 1, 3),
    ]  # fmt: skip
    assert loader.step == steps[-1]


def test_other_loaders_and_states_are_refused() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with pytest.raises(ConfigError, match="a list is no loader"):
        recoverable([1, 2])
    with pytest.raises(ConfigError, match="saves its own state: pass it to the handler"):
        recoverable(StatefulDataLoader(Rows()))
    with pytest.raises(ConfigError, match="expected at least 1"):
        recoverable(plain(), gradient_accumulation_steps=0)
    state = recoverable(plain()).state_dict()
    with pytest.raises(CheckpointMismatchError, match="has 7 batches an epoch, the run was saved with 4"):
        recoverable(DataLoader(Rows(), batch_size=2)).load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match=r"a state with \['epoch'\] is not one of RecoverableLoader"):
        recoverable(plain()).load_state_dict({"epoch": 1})


@pytest.mark.parametrize(("rows", "split", "refused"), [(16, False, False), (20, False, True), (22, True, True)])
def test_ranks_with_other_numbers_of_batches_are_refused(rows: int, split: bool, refused: bool) -> None:
    lengths, samplers = [], []
    for rank in range(2):
        inner = BatchSampler(range(rows), 4, drop_last=False)  # type: ignore[arg-type]
        sampler = BatchSamplerShard(inner, 2, rank, split_batches=split, even_batches=False)
        lengths.append(len(list(sampler)))
        samplers.append(sampler)
    assert (lengths[0] != lengths[1]) == refused
    for sampler in samplers:
        loader = DataLoader(range(rows), batch_sampler=sampler)  # type: ignore[arg-type]
        if refused:
            with pytest.raises(ConfigError, match="some ranks have one batch more than others"):
                recoverable(loader)
        else:
            recoverable(loader)


def test_what_cannot_be_noted_is_told(caplog: pytest.LogCaptureFixture) -> None:
    recoverable(plain(num_workers=1))
    recoverable(DataLoader(Stream()))
    assert "in the 1 worker processes of the loader cannot be restored" in caplog.text
    assert "no sampler: a resumed run reads the epoch from its beginning" in caplog.text
