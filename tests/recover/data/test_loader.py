"""Every sample once per epoch, despite restarts and other world sizes."""

from collections import Counter
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from holdfast.engine import FinetuneSpec
from holdfast.engine.api import Stateful
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.data.capture import EpochOrder
from holdfast.recover.data.loader import ResumableDataLoader
from holdfast.recover.data.restore import restore_dataloader
from holdfast.utils.errors import CheckpointMismatchError, ConfigError, DatasetMismatchError
from holdfast.utils.rng import capture_rng, restore_rng
from tests.recover.runs import Tiny, step_info


def make_group(samples: int, world_size: int, **options: Any) -> list[ResumableDataLoader]:
    """One loader per rank over ``range(samples)``."""
    options = {"batch_size": 4, "seed": 3} | options
    return [
        ResumableDataLoader(list(range(samples)), rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def walk(group: list[ResumableDataLoader], steps: int) -> list[tuple[int, list[int]]]:
    """(epoch, samples of all ranks in rank order) of the next ``steps`` global batches."""
    streams = [loader.batches() for loader in group]
    seen = []
    for _ in range(steps):
        shares = [next(stream) for stream in streams]
        assert all(shares), "a rank got no sample"
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(loader.state_dict() == group[0].state_dict() for loader in group)
        seen.append((group[0].epoch, [sample for share in shares for sample in share]))
    return seen


def assert_each_sample_once_an_epoch(
    seen: list[tuple[int, list[int]]], samples: int, per_epoch: int
) -> None:
    epochs: dict[int, Counter] = {}
    for epoch, batch in seen:
        epochs.setdefault(epoch, Counter()).update(batch)
    assert sorted(epochs) == list(range(len(epochs)))
    for counter in epochs.values():
        assert max(counter.values()) == 1 and set(counter) <= set(range(samples))
        assert counter.total() == per_epoch


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("samples", "batch_size"), [(23, 5), (20, 5), (11, 7), (7, 7)])
def test_samples_are_seen_once_an_epoch_across_restarts_with_other_ranks(
    shuffle: bool, drop_last: bool, samples: int, batch_size: int
) -> None:
    options = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    steps = 3 * len(make_group(samples, 1, **options)[0])
    reference = walk(make_group(samples, 1, **options), steps)
    per_epoch = samples - samples % batch_size if drop_last else samples
    assert_each_sample_once_an_epoch(reference, samples, per_epoch)
    for killed_at in range(steps + 1):
        before, after = (
            make_group(samples, 1 + killed_at % 3, **options),
            make_group(samples, 3 - killed_at % 2, **options),
        )
        seen = walk(before, killed_at)
        for loader in after:
            loader.load_state_dict(before[0].state_dict())
        assert seen + walk(after, steps - killed_at) == reference


def test_epochs_have_orders_of_their_own_that_seed_and_epoch_decide() -> None:
    def orders(seed: int) -> list[list[int]]:
        (loader,) = make_group(32, 1, seed=seed, batch_size=32)
        return [batch for _, batch in walk([loader], 3)]

    first = orders(1)
    assert first == orders(1)
    assert len({tuple(order) for order in [*first, *orders(2)]}) == 6
    assert all(order != list(range(32)) for order in first)
    # The first shuffle of seed 3 is fixed. A change would reorder runs in the middle of an epoch.
    assert walk(make_group(10, 1, seed=3, batch_size=10), 1) == [
        (0, [9, 1, 0, 8, 2, 4, 3, 5, 7, 6])
    ]


def test_resuming_in_epoch_1_goes_on_in_the_order_of_epoch_1() -> None:
    reference = walk(make_group(12, 1), 6)
    before, after = make_group(12, 1), make_group(12, 1)
    walk(before, 4)
    after[0].load_state_dict(before[0].state_dict())
    assert after[0].epoch == 1
    assert walk(after, 2) == reference[4:]


def test_state_after_the_last_batch_of_an_epoch_starts_the_next() -> None:
    (before,), (after,) = make_group(10, 1), make_group(10, 1)
    assert len(list(before)) == len(before) == 2
    assert (before.epoch, before.state_dict()["cursor"]) == (0, 8)
    after.load_state_dict(before.state_dict())
    resumed = list(after)
    assert len(resumed) == 2 and after.epoch == 1
    assert resumed == list(before)


def test_a_loop_left_early_goes_on_with_the_next_batch() -> None:
    (loader,), (other,) = make_group(17, 1), make_group(17, 1)
    head = list(islice(loader, 2))
    assert loader.state_dict()["cursor"] == 8
    assert head + list(loader) == list(other)


def test_a_sample_that_cannot_be_read_does_not_move_the_cursor() -> None:
    class Flaky(list):
        broken = False

        def __getitem__(self, index: Any) -> Any:
            if self.broken:
                raise OSError("disk gone")
            return super().__getitem__(index)

    dataset = Flaky(range(12))
    loader = ResumableDataLoader(dataset, 4, seed=0)
    first = next(iter(loader))
    state, dataset.broken = loader.state_dict(), True
    with pytest.raises(OSError, match="disk gone"):
        next(iter(loader))
    assert loader.state_dict() == state
    dataset.broken = False
    assert sorted([*first, *(sample for batch in loader for sample in batch)]) == list(range(12))


def test_no_global_generator_is_drawn_from() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    list(make_group(9, 1)[0])
    assert (torch.rand(1).item(), np.random.rand()) == expected


def test_collate_fn_makes_the_batch_of_this_ranks_share() -> None:
    loaders = make_group(8, 2, shuffle=False, batch_size=5, collate_fn=torch.tensor)
    assert [next(iter(loader)).tolist() for loader in loaders] == [[0, 1], [2, 3, 4]]


def test_state_is_plain_and_survives_a_weights_only_file(tmp_path: Path) -> None:
    (loader,), (other,) = make_group(9, 1), make_group(9, 1)
    assert isinstance(loader, Stateful)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "data.pt")
    other.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    assert list(other) == list(loader)


def test_another_dataset_is_refused_with_both_fingerprints_and_moves_no_loader() -> None:
    (saved,) = make_group(12, 1)
    next(iter(saved))
    state = saved.state_dict()
    for dataset in (
        list(range(11)),
        [99, *range(12)],
        [*range(11), 99],
        [str(i) for i in range(12)],
        list(range(11, -1, -1)),
    ):
        loader = ResumableDataLoader(dataset, 4, seed=3)
        before = loader.state_dict()
        with pytest.raises(DatasetMismatchError) as caught:
            loader.load_state_dict(state)
        assert state["dataset_fingerprint"] in str(caught.value)
        assert before["dataset_fingerprint"] in str(caught.value)
        assert loader.state_dict() == before


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"shuffle": False}, {"batch_size": 3}, {"drop_last": False}]
)
def test_settings_that_would_reorder_samples_are_refused_by_name(change: dict[str, Any]) -> None:
    (key, value), (saved,) = *change.items(), make_group(12, 1)
    (other,) = make_group(12, 1, **change)
    with pytest.raises(
        ConfigError, match=rf"{key} is {value}.*saved with {saved.state_dict()[key]}"
    ):
        other.load_state_dict(saved.state_dict())


def test_a_state_of_something_else_or_of_a_newer_version_is_refused() -> None:
    (loader,) = make_group(12, 1)
    state = loader.state_dict()
    values = (
        {"version": 2},
        {"cursor": 13},
        {"epoch": -1},
        {"cursor": 2.5},
        {"epoch": None},
        {"shuffle": 1},
        {"seed": "3"},
        {"cursor": True},
        {"cursor": 3},
        {"cursor": -4},
        {"epoch": 10**30},
    )
    wrong: Any
    for wrong in (
        {},
        {"_snapshot": {}},
        {1: 2},
        None,
        7,
        [],
        *(state | change for change in values),
    ):
        with pytest.raises(CheckpointMismatchError):
            loader.load_state_dict(wrong)
        assert loader.state_dict() == state


@pytest.mark.parametrize("cursor", [3, 14])
def test_a_cursor_that_no_batch_ends_at_is_refused_with_words(cursor: int) -> None:
    (loader,) = make_group(15, 1)
    with pytest.raises(
        CheckpointMismatchError,
        match=f"cursor {cursor}, which no loader of 15 samples in batches of 4",
    ):
        loader.load_state_dict(loader.state_dict() | {"cursor": cursor})
    (loader,) = make_group(15, 1, drop_last=False)
    loader.load_state_dict(loader.state_dict() | {"cursor": 15, "epoch": 2**32 - 1})


@pytest.mark.parametrize("steps", [2, 4, 6, 8])  # in an epoch of 4 batches, and at its end
def test_samples_added_at_the_end_of_the_dataset_come_in_with_the_next_epoch(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch that was begun keeps its samples and its order, also over a second restart."""
    group = make_group(16, 2)
    walk(group, steps)
    state, rest = group[0].state_dict(), walk(group, -steps % 4)
    longer = make_group(24, 2)
    for loader in longer:
        loader.load_state_dict(state)
    assert "has grown from 16 to 24 samples" in caplog.text
    first, begun = walk(longer, len(rest) // 2), longer[0].state_dict()
    for loader in (again := make_group(24, 2)):
        loader.load_state_dict(begun)
    assert first + walk(again, len(rest) - len(first)) == rest
    following = walk(again, 6)
    assert sorted(chain.from_iterable(batch for _, batch in following)) == list(range(24))
    assert {epoch for epoch, _ in following} == {(steps - 1) // 4 + 1}


def test_a_run_whose_dataset_has_grown_goes_on_after_one_refusal_that_names_the_option(
    tmp_path: Path,
) -> None:
    def train(samples: int, steps: int, **options: Any) -> list[list[int]]:
        spec = FinetuneSpec(total_train_epochs=9, dataset_size=samples, train_batch_size=4)
        config = RecoverConfig(
            experiment_name="e", trial_name="t", fileroot=str(tmp_path), freq_steps=1
        )
        loader, tiny, found = ResumableDataLoader(list(range(samples)), 4, seed=3), Tiny(), []
        with RecoverHandler(config, spec, **options) as handler:
            info, batches = handler.load(tiny.state, loader), loader.batches()
            step = handler.first_step(info)
            for _ in range(steps):
                found.append(next(batches))
                handler.dump(tiny.state, step, loader)
                step = step.next()
            handler.wait()
        return found

    epoch = train(16, 2)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"4 steps an epoch, .* has 6; .*epochs_may_change=True.*handler.first_step",
    ):
        train(24, 1)
    epoch += train(24, 1, epochs_may_change=True)
    found = train(24, 7)
    assert sorted(chain(*epoch, found[0])) == list(range(16))
    assert sorted(chain(*found[1:])) == list(range(24))


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (0, {}, "dataset is empty"),
        (3, {"batch_size": 4}, "batch_size 4 is larger than the dataset of 3 samples"),
        (9, {"batch_size": 0}, "'batch_size' is 0"),
        (9, {"seed": -1}, "'seed' is -1"),
        (9, {"rank": 2, "world_size": 2}, "'rank' is 2"),
        (9, {"batch_size": 2, "world_size": 3}, "batch of 2 samples cannot be shared by 3 ranks"),
        (
            9,
            {"batch_size": 4, "world_size": 2, "drop_last": False},
            "batch of 1 samples cannot be shared by 2 ranks",
        ),
    ],
)
def test_unusable_settings_are_refused_at_the_start(
    samples: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ResumableDataLoader(list(range(samples)), **{"batch_size": 4, "seed": 3, **options})


class Squares(Dataset):
    """Map-style, for torchdata."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index * index


def make_torchdata(num_workers: int, own_sampler: bool) -> StatefulDataLoader:
    """A plain loader, or one with a sampler that has its own generator, as in verl."""
    if not own_sampler:
        return StatefulDataLoader(Squares(), batch_size=4, shuffle=True, num_workers=num_workers)
    sampler = RandomSampler(Squares(), generator=torch.Generator().manual_seed(5))
    return StatefulDataLoader(Squares(), batch_size=4, sampler=sampler, num_workers=num_workers)


def train_steps(loader: StatefulDataLoader, steps: int) -> list[tuple[list[int], float]]:
    """Batches, epoch after epoch, each with a draw from the global generator, as dropout would
    make.
    """
    stream = chain.from_iterable(repeat(loader))
    return [(next(stream).tolist(), torch.rand(1).item()) for _ in range(steps)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("num_workers", "own_sampler", "killed_after"),
    [(0, False, 2), (0, False, 6), (0, True, 7), (0, True, 12), (2, False, 2), (2, True, 6)],
)
def test_torchdatas_stateful_dataloader_resumes_with_the_same_samples_and_draws(
    num_workers: int, own_sampler: bool, killed_after: int, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    reference = train_steps(make_torchdata(num_workers, own_sampler), 18)
    assert sorted(chain.from_iterable(batch for batch, _ in reference[:6])) == [
        i * i for i in range(23)
    ]

    torch.manual_seed(1)
    loader = make_torchdata(num_workers, own_sampler)
    assert isinstance(loader, Stateful)
    assert train_steps(loader, killed_after) == reference[:killed_after]
    torch.save({"data": loader.state_dict(), "rng": capture_rng()}, tmp_path / "data.pt")

    torch.manual_seed(99)
    resumed, state = (
        make_torchdata(num_workers, own_sampler),
        torch.load(tmp_path / "data.pt", weights_only=True),
    )
    restore_dataloader(resumed, state["data"], EpochOrder(), step_info(killed_after - 1))
    restore_rng(state["rng"])
    assert train_steps(resumed, 18 - killed_after) == reference[killed_after:]
