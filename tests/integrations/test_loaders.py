"""Loaders of scripts, stopped in the middle of an epoch and resumed by a new loader."""

import copy
import gc
import pickle
import random
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration

from holdfast.integrations.accelerate import recoverable
from holdfast.utils.errors import CheckpointMismatchError, ConfigError, DatasetMismatchError
from holdfast.utils.plain_values import pack_plain, unpack_plain
from holdfast.utils.rng import capture_rng, restore_rng
from tests.recover.runs import Tiny, make_handler

pytestmark = pytest.mark.timeout(60)

EPOCHS = 3


class Rows(torch.utils.data.Dataset):
    """Samples with new random values at every read."""

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


class Shuffled(Sampler):
    """A user's sampler, with the generator of another library."""

    def __init__(self, generator: Any) -> None:
        self.order = generator

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[int]:
        found = list(range(14))
        self.order.shuffle(found)
        return iter(found)


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows) + torch.rand(1)


def prepared(**options: Any) -> Any:
    configuration = DataLoaderConfiguration(**options)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(plain(shuffle=True))


def plain(**options: Any) -> Any:
    return DataLoader(Rows(), batch_size=4, collate_fn=collate, **options)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def seeded(sampler: Any, **options: Any) -> Any:
    return sampler(Rows(), seed=torch.initial_seed(), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "prepared": prepared,
    "prepared, seedable": lambda: prepared(use_seedable_sampler=True, data_seed=5),
    "prepared, seeded by the process": lambda: prepared(use_seedable_sampler=True),
    "prepared, dispatched": lambda: prepared(dispatch_batches=True),
    "plain": lambda: plain(shuffle=True),
    "plain, in order": plain,
    "a generator of the loader": lambda: plain(shuffle=True, generator=own_generator()),
    "a generator of the sampler": lambda: plain(
        sampler=RandomSampler(Rows(), generator=own_generator())
    ),
    "weighted": lambda: plain(sampler=WeightedRandomSampler([1.0] * 14, 14)),
    "DistributedSampler": lambda: plain(
        sampler=DistributedSampler(Rows(), num_replicas=2, rank=1, shuffle=True)
    ),
    "DistributedSampler, seeded by the process": lambda: plain(
        sampler=seeded(DistributedSampler, num_replicas=1, rank=0)
    ),
    "numpy's Generator": lambda: plain(
        sampler=Shuffled(np.random.default_rng(torch.initial_seed()))
    ),
    "numpy's RandomState": lambda: plain(
        sampler=Shuffled(np.random.RandomState(torch.initial_seed()))
    ),
    "python's Random": lambda: plain(sampler=Shuffled(random.Random(torch.initial_seed()))),
    "no batches": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
}


def train(loader: Any, until: int | None = None) -> list[tuple[int, Any, float]]:
    """Epoch, batch and random draw of every step, from the loader's position to its ``until``-th
    batch.
    """
    found = []
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            found.append((epoch, batch.tolist(), torch.rand(1).item()))
            if len(found) == until:
                return found
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_left_after_any_batch_gives_the_others_and_draws_as_if_never_left(
    name: str,
) -> None:
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
    """Two steps of each epoch. The third batch is fetched and dropped, as with ``if step ==
    max_steps: break``.
    """
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
    assert [found[:2] for found in expected] == [
        (epoch, epoch) for epoch in range(EPOCHS) for _ in range(2)
    ]
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


def test_an_epoch_left_at_its_last_batch_makes_the_last_draws_of_its_order() -> None:
    """Hosts that count batches do not ask for one more, so a resumed run has to draw as they do."""
    rows: Any = list(range(8))
    orders = []
    for cut in (None, 2):
        loader = recoverable(
            DataLoader(rows, batch_size=4, shuffle=True, generator=own_generator())
        )
        found: list[Any] = []
        for _ in range(3):
            batches = iter(loader)
            found += [next(batches).tolist() for _ in range(2)]
            if cut == len(found):
                state = loader.state_dict()
                loader = recoverable(
                    DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator())
                )
                loader.load_state_dict(state)
        orders.append(found)
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    "cut", [2, 6, 8, 13]
)  # in the first epoch, after it, in the second, in the third
def test_persistent_workers_read_the_rest_of_an_epoch_in_its_order(cut: int) -> None:
    def loader() -> Any:
        rows: Any = list(range(24))
        return recoverable(
            DataLoader(rows, 4, shuffle=True, num_workers=1, persistent_workers=True)
        )

    torch.manual_seed(1)
    expected = train(loader())
    torch.manual_seed(1)
    left = loader()
    assert train(left, cut) == expected[:cut]
    state, rng = left.state_dict(), capture_rng()
    torch.manual_seed(99)
    again = loader()
    again.load_state_dict(state)
    restore_rng(rng)
    assert train(again) == expected[cut:]


def test_an_unreferenced_loader_is_freed_at_once_with_its_workers() -> None:
    rows: Any = list(range(24))
    others = active_children()  # such as the server that forks the ranks of other tests
    loader = recoverable(DataLoader(rows, 4, shuffle=True, num_workers=1, persistent_workers=True))
    batches = iter(loader)
    next(batches)
    (worker,) = set(active_children()).difference(others)
    gc.disable()  # a garbage collection delays the end of a worker by 5 s
    try:
        del loader, batches
        assert not worker.is_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("cut", [1, 4])
def test_a_sampler_with_another_order_is_refused(cut: int) -> None:
    rows: Any = list(range(14))
    left = recoverable(DataLoader(rows, 4, sampler=rows))
    batches = iter(left)
    for _ in range(cut):
        next(batches)
    again = recoverable(DataLoader(rows, 4, sampler=rows[::-1]))
    again.load_state_dict(left.state_dict())
    with pytest.raises(
        CheckpointMismatchError, match=f"the first {cut} batches of the epoch have other samples"
    ):
        next(iter(again))


def between_epochs(epochs: int, order: Callable[[int], list[int]]) -> dict[str, Any]:
    sampler = Settable(order(0))
    loader = recoverable(DataLoader(FOURTEEN, 4, sampler=sampler))
    for epoch in range(epochs):
        sampler.order = order(epoch)
        assert len(list(loader)) == 4
    return unpack_plain(pack_plain("loader", loader.state_dict()), "here")


FOURTEEN: Any = list(range(14))


class Settable(Sampler):
    """A user's sampler that walks a list."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def rotated(by: int) -> list[int]:
    return FOURTEEN[by:] + FOURTEEN[:by]


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_another_fixed_order_is_noticed_also_between_epochs(
    epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After one epoch there is only a message, because the script may set an order for each
    epoch.
    """
    state = between_epochs(epochs, lambda _: rotated(0))
    again = recoverable(DataLoader(FOURTEEN, 4, sampler=Settable(rotated(3))))
    again.load_state_dict(state)
    if epochs == 1:
        assert (
            len(list(again)) == 4
            and "the first batch of the epoch has other samples" in caplog.text
        )
        return
    with pytest.raises(
        CheckpointMismatchError, match="the first batch of the epoch has other samples"
    ):
        next(iter(again))


def test_a_script_that_sets_the_order_of_each_epoch_is_resumed_between_epochs() -> None:
    again = recoverable(DataLoader(FOURTEEN, 4, sampler=Settable(rotated(2))))
    again.load_state_dict(between_epochs(2, rotated))
    assert next(iter(again)).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_saved_between_epochs_are_no_false_alarm(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for epochs in (1, 2):
        torch.manual_seed(1)
        left = recoverable(LOADERS[name]())
        for _ in range(epochs):
            list(left)
        state, rng = left.state_dict(), capture_rng()
        expected = [batch.tolist() for batch in left]
        torch.manual_seed(99)
        again = recoverable(LOADERS[name]())
        again.load_state_dict(state)
        restore_rng(rng)
        assert [batch.tolist() for batch in again] == expected
    assert "other samples" not in caplog.text and "cannot see" not in caplog.text


class Prompts(torch.utils.data.Dataset):
    """Texts that ``read`` may change when they are read."""

    def __init__(self, read: Callable[[str], Any] = str, order: int = 1) -> None:
        self.texts, self.read = [f"prompt {i}" for i in range(14)][::order], read

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Any:
        return self.read(self.texts[index])


def augmented(text: str) -> tuple[str, float, float, float]:
    return text, torch.rand(1).item(), np.random.rand(), random.random()


@pytest.mark.parametrize("make", [str, augmented, lambda text: (text, np.arange(3))])
@pytest.mark.parametrize("cut", [2, 4, None])
def test_a_dataset_in_another_order_is_refused_also_if_it_augments(
    make: Any, cut: int | None
) -> None:
    torch.manual_seed(1)
    left = recoverable(DataLoader(Prompts(make), 4, shuffle=True, collate_fn=list))
    for number, _ in enumerate(left, 1):
        if number == cut:
            break
    state = unpack_plain(pack_plain("loader", left.state_dict()), "here")
    torch.manual_seed(99)
    again = recoverable(DataLoader(Prompts(make), 4, shuffle=True, collate_fn=list))
    again.load_state_dict(state)
    again = recoverable(DataLoader(Prompts(make, order=-1), 4, shuffle=True, collate_fn=list))
    with pytest.raises(
        DatasetMismatchError, match=r"14 samples, xxh3_128:\w+: other samples, or another order"
    ):
        again.load_state_dict(state)


def with_own_generator() -> Any:
    generator = np.random.default_rng()
    return Prompts(lambda text: (text, generator.random()))


def with_fingerprint(value: str) -> Any:
    rows = Prompts()
    rows.fingerprint = value  # type: ignore[attr-defined]
    return rows


NOT_COMPARED = {
    "a generator of its own": (with_own_generator, 0, "two readings of a sample differ"),
    "objects": (lambda: Prompts(lambda text: object()), 0, "no canonical bytes"),
    "other indices": (lambda: Prompts(lambda text: {}[text]), 0, "KeyError: 'prompt 0'"),
    "read by workers": (Prompts, 1, "in 1 worker processes only"),
}


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_a_dataset_that_cannot_be_compared_is_resumed_with_a_message(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, workers, reason = NOT_COMPARED[name]
    state = recoverable(DataLoader(make(), 4, num_workers=workers)).state_dict()
    recoverable(DataLoader(make(), 4, num_workers=workers)).load_state_dict(state)
    assert (
        "cannot see whether its Prompts has the samples of the run" in caplog.text
        and reason in caplog.text
    )


def test_a_fingerprint_of_the_users_is_compared_with_its_like_alone() -> None:
    state = recoverable(DataLoader(with_fingerprint("v1"), 4, num_workers=1)).state_dict()
    recoverable(DataLoader(with_fingerprint("v1"), 4)).load_state_dict(state)
    recoverable(DataLoader(Prompts(order=-1), 4)).load_state_dict(state)
    with pytest.raises(DatasetMismatchError, match="14 samples, v1, this one has 14 samples, v2"):
        recoverable(DataLoader(with_fingerprint("v2"), 4)).load_state_dict(state)


def test_comparing_the_dataset_leaves_no_draw_behind(caplog: pytest.LogCaptureFixture) -> None:
    class Drawing(Prompts):
        def __init__(self) -> None:
            super().__init__(augmented)
            self.own = np.random.default_rng(5)

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index), self.own.random()

    torch.manual_seed(1)
    rows, before = Drawing(), augmented("")
    torch.manual_seed(1)
    np_state, state = np.random.get_state(), random.getstate()
    recoverable(DataLoader(rows, 4))
    assert torch.rand(1).item() == before[1] and random.getstate() == state
    assert np.random.get_state()[1].tolist() == np_state[1].tolist()  # type: ignore[index]
    assert rows.own.random() == np.random.default_rng(5).random() and "cannot see" in caplog.text


@pytest.mark.slow
def test_workers_that_are_spawned_get_a_dataset_that_holds_the_sampler_of_the_loader() -> None:
    rows, twin = HoldsItsSampler(), HoldsItsSampler()
    for each in (rows, twin):
        each.sampler = DistributedSampler(each, num_replicas=1, rank=0)
    options: Any = {"num_workers": 1, "multiprocessing_context": "spawn"}
    watched = recoverable(DataLoader(rows, 4, sampler=rows.sampler, **options))
    expected = [batch.tolist() for batch in DataLoader(twin, 4, sampler=twin.sampler)]
    assert [batch.tolist() for batch in watched] == expected


class HoldsItsSampler(torch.utils.data.Dataset):
    sampler: Any = None

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> int:
        return index * index


def test_samplers_are_pickled_and_copied_as_the_user_made_them() -> None:
    for name in ("plain", "weighted", "DistributedSampler", "prepared, seedable"):
        loader = LOADERS[name]()
        own = type(loader.batch_sampler)
        batches = iter(recoverable(recoverable(loader).loader))
        next(batches)
        for twin in (
            pickle.loads(pickle.dumps(loader.batch_sampler)),
            copy.deepcopy(loader.batch_sampler),
        ):
            assert type(twin) is own and len(list(twin)) == len(loader)
            assert vars(twin).keys() == vars(loader.batch_sampler).keys()


def test_samplers_are_told_the_next_epoch_after_a_break() -> None:
    loader = recoverable(LOADERS["stream"]())
    assert [next(iter(loader))[0].item() for _ in range(3)] == [0.0, 100.0, 200.0]


def test_a_stream_with_other_batches_is_refused() -> None:
    loader = recoverable(LOADERS["stream"]())
    next(iter(loader))
    state = loader.state_dict()
    again = recoverable(DataLoader(Stream(), batch_size=2))
    with pytest.raises(CheckpointMismatchError, match=r"batches of 2, .* saved with 4;"):
        again.load_state_dict(state)


def test_accelerates_own_state_and_skip_read_another_order(tmp_path: Path) -> None:
    """The control: Accelerate's default sampler draws the order of the epoch again, with other
    random numbers.
    """
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
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 0, 2),
        (1, 0, 2),
        (1, 1, 3),
    ]
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
    with pytest.raises(
        CheckpointMismatchError, match="has 7 batches an epoch, the run was saved with 4"
    ):
        recoverable(DataLoader(Rows(), batch_size=2)).load_state_dict(state)
    with pytest.raises(
        CheckpointMismatchError, match=r"a state with \['epoch'\] is not one of RecoverableLoader"
    ):
        recoverable(plain()).load_state_dict({"epoch": 1})


def test_a_stateful_loader_of_accelerate_is_refused_with_what_to_do(tmp_path: Path) -> None:
    loader = prepared(use_stateful_dataloader=True)
    with pytest.raises(ConfigError, match="make the Accelerator without use_stateful_dataloader"):
        recoverable(loader)
    advice = "every restart would be refused; .* and give the loader in `recoverable`"
    with make_handler(tmp_path) as handler, pytest.raises(ConfigError, match=advice):
        handler.load(Tiny().state, loader)


@pytest.mark.parametrize(
    ("rows", "split", "refused"), [(16, False, False), (20, False, True), (22, True, True)]
)
def test_ranks_with_other_numbers_of_batches_are_refused(
    rows: int, split: bool, refused: bool
) -> None:
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


def test_positions_that_cannot_be_noted_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    recoverable(plain(num_workers=1))
    recoverable(DataLoader(Stream()))
    assert "in the 1 worker processes of the loader cannot be restored" in caplog.text
    assert "of a stream, or of dispatch_batches, cannot be skipped" in caplog.text
