"""A restored loader gives the batches and random draws of one that never stopped, or it is
refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_sampler

from holdfast.engine.api import StepInfo
from holdfast.recover.data.capture import EpochOrder, epoch_order, note_order
from holdfast.recover.data.restore import RestoredEpoch, restore_dataloader
from holdfast.recover.engines import RankEngines
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from holdfast.utils.plain_values import pack_plain, unpack_plain
from holdfast.utils.rng import RngState, capture_rng, restore_rng
from tests.recover.runs import SPEC, Meter, Prompts, Tiny, make_handler, step_info
from tests.tiers import slow_but

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

STEPS = SPEC.total_train_steps


def sampler(shuffle: bool = True, seed: int = 5) -> DistributedSampler:
    return DistributedSampler(Prompts(), 1, 0, shuffle=shuffle, seed=seed)


SEEDS = count()
"""Seeds for processes with different random states."""


def seeded_by_the_process(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Prompts(), batch_size=4, sampler=sampler(seed=next(SEEDS)), **options)


class Batches:
    """A user's batch sampler, without a sampler in it."""

    def __init__(self) -> None:
        self.order = np.random.default_rng(next(SEEDS))

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.order.permutation(24).reshape(6, 4):
            yield rows.tolist()


def drawn_by_numpy(**options: Any) -> StatefulDataLoader:
    batches: Any = Batches()
    return StatefulDataLoader(Prompts(), batch_sampler=batches, **options)


def plain(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Prompts(), batch_size=4, sampler=sampler(), **options)


def in_batch_sampler() -> StatefulDataLoader:
    return StatefulDataLoader(Prompts(), batch_sampler=BatchSampler(sampler(), 4, drop_last=False))


def torchdatas_own(**options: Any) -> StatefulDataLoader:
    own = torchdata_sampler.StatefulDistributedSampler(Prompts(), 1, 0, seed=5)
    return StatefulDataLoader(Prompts(), batch_size=4, sampler=own, **options)


class Advancing(DistributedSampler):
    """Changes to the next epoch by itself, like Accelerate's ``SeedableRandomSampler``."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


def advancing(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(
        Prompts(), batch_size=4, sampler=Advancing(Prompts(), 1, 0, seed=5), **options
    )


class Buckets:
    """Draws batches, and does not say how many, as a sampler that fills batches up to a number of
    tokens.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(24, generator=self.generator)
        for rows in order.split(4):
            yield rows.tolist()


class EstimatedBuckets(Buckets):
    """The same, whose estimate of the number is too high."""

    def __len__(self) -> int:
        return 7


def in_buckets(kind: type[Buckets], **options: Any) -> StatefulDataLoader:
    batches: Any = kind()
    return StatefulDataLoader(Prompts(), batch_sampler=batches, **options)


class OwnShuffle:
    """A user's sampler, which draws from torch's generator at its first index."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(24).tolist()


class ShuffleByNumpy(OwnShuffle):
    """Draws from numpy's global generator, as soon as it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(24).tolist())


class Chunks:
    """A user's batch sampler, around a sampler in an attribute of any name."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.base)
        while batch := list(islice(indices, 4)):
            yield batch


class OfRank(DistributedSampler):
    """The indices of a rank, of the order that another sampler has drawn."""

    def __init__(self, base: Any, shuffle: bool) -> None:
        super().__init__(Prompts(), 1, 0, shuffle=shuffle, seed=5)
        self.base = base

    def __iter__(self) -> Iterator[Any]:
        order = list(self.base)
        return iter([order[index] for index in super().__iter__()])


def by_itself(kind: type, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Prompts(), batch_size=4, sampler=kind(), **options)


def in_chunks(base: Callable[[], Any], **options: Any) -> StatefulDataLoader:
    batches: Any = Chunks(base())
    return StatefulDataLoader(Prompts(), batch_sampler=batches, **options)


def seeded_inside() -> RandomSampler:
    return RandomSampler(Prompts(), generator=torch.Generator().manual_seed(next(SEEDS)))


def of_rank(shuffle: bool) -> StatefulDataLoader:
    sampler = OfRank(RandomSampler(Prompts()), shuffle)
    return StatefulDataLoader(Prompts(), batch_size=4, sampler=sampler)


def drawn(make: Callable[..., Any], own: bool = True) -> Callable[..., StatefulDataLoader]:
    """A function that makes loaders with a sampler of ``make``, on the sampler's own generator or
    torch's.
    """

    def loader(**options: Any) -> StatefulDataLoader:
        generator = torch.Generator().manual_seed(5) if own else None
        return StatefulDataLoader(Prompts(), batch_size=4, sampler=make(generator), **options)

    return loader


def shuffled(generator: torch.Generator | None) -> RandomSampler:
    return RandomSampler(Prompts(), generator=generator)


def with_replacement(generator: torch.Generator | None) -> RandomSampler:
    return RandomSampler(range(40), replacement=True, num_samples=24, generator=generator)


def subset(generator: torch.Generator | None) -> SubsetRandomSampler:
    return SubsetRandomSampler(range(24), generator)


def weighted(generator: torch.Generator | None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * 24, 24, replacement=False, generator=generator)


def drawn_in_batch_sampler(
    make: Callable[..., Any], own: bool = True
) -> Callable[..., StatefulDataLoader]:
    def loader(**options: Any) -> StatefulDataLoader:
        inner = make(generator=torch.Generator().manual_seed(5) if own else None)
        return StatefulDataLoader(
            Prompts(), batch_sampler=BatchSampler(inner, 4, drop_last=False), **options
        )

    return loader


def one_generator_for_both(**options: Any) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(
        Prompts(), 4, sampler=shuffled(generator), generator=generator, **options
    )


class Stream(IterableDataset):
    """Samples in the order of an epoch, like a streaming dataset. Knows its position."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


def stream(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Stream(), batch_size=4, **options)


@dataclass
class Stop:
    """State of a run after a step."""

    state: bytes
    order: EpochOrder
    rng: RngState

    @classmethod
    def of(cls, loader: Any) -> "Stop":
        state = loader.state_dict()
        return cls(pack_plain("it", state), epoch_order(loader, state), capture_rng())

    def restore(
        self, loader: Any, last: StepInfo, order_known: bool = True
    ) -> RestoredEpoch | None:
        torch.manual_seed(99)
        order = self.order if order_known else EpochOrder()
        restored = restore_dataloader(loader, unpack_plain(self.state, "it"), order, last)
        restore_rng(self.rng)
        return restored


def teller(loader: Any) -> Any:
    """Return the object that must be told the epoch."""
    told = loader.batch_sampler.sampler if loader.batch_sampler is not None else None
    return told if hasattr(told, "set_epoch") else loader.dataset


def run(
    loader: Any, first: StepInfo, tell: bool = True
) -> Iterator[tuple[StepInfo, list[int], float]]:
    """Loop over epochs, yielding every step with its batch and a draw like dropout's."""
    note_order(loader)
    step = first
    for epoch in range(first.epoch, SPEC.total_train_epochs):
        if tell:
            teller(loader).set_epoch(epoch)
        for batch in loader:
            yield step, batch.tolist(), torch.rand(1).item()
            step = step.next()


VARIANTS: dict[str, tuple[Callable[..., Any], dict[str, Any], bool]] = {
    "the epoch is never told": (plain, {}, False),
    "seeded by the process": (seeded_by_the_process, {}, True),
    "in a batch sampler": (in_batch_sampler, {}, True),
    "torchdata's own sampler": (torchdatas_own, {}, True),
    "torchdata's own sampler, workers": (torchdatas_own, {"num_workers": 1}, True),
    "advances by itself": (advancing, {}, False),
    "advances by itself, batches read ahead": (advancing, {"num_workers": 2}, False),
    "draws": (drawn(shuffled), {}, False),
    "draws, workers": (drawn(shuffled), {"num_workers": 2}, False),
    "draws, persistent workers": (
        drawn(shuffled),
        {"num_workers": 2, "persistent_workers": True},
        False,
    ),
    "draws, its generator is the loader's": (one_generator_for_both, {}, False),
    "draws, its generator is the loader's, workers": (
        one_generator_for_both,
        {"num_workers": 2},
        False,
    ),
    "draws from torch's generator": (drawn(shuffled, own=False), {}, False),
    "draws from torch's generator, workers": (
        drawn(shuffled, own=False),
        {"num_workers": 2},
        False,
    ),
    "draws by numpy, in a batch sampler": (drawn_by_numpy, {}, False),
    "draws an unknown number of batches": (partial(in_buckets, Buckets), {}, False),
    "draws an unknown number of batches, a worker": (
        partial(in_buckets, Buckets),
        {"num_workers": 1},
        False,
    ),
    "draws fewer batches than it says": (partial(in_buckets, EstimatedBuckets), {}, False),
    "draws in a batch sampler": (drawn_in_batch_sampler(shuffled), {}, False),
    "draws from torch's generator in a batch sampler": (
        drawn_in_batch_sampler(subset, own=False),
        {},
        False,
    ),
    "draws with replacement": (drawn(with_replacement), {}, False),
    "draws a subset": (drawn(subset, own=False), {}, False),
    "draws by weight": (drawn(weighted, own=False), {"num_workers": 2}, False),
    "draws by itself": (partial(by_itself, OwnShuffle), {}, False),
    "draws by itself, workers": (partial(by_itself, OwnShuffle), {"num_workers": 2}, False),
    "draws by itself from numpy's generator": (partial(by_itself, ShuffleByNumpy), {}, False),
    "draws inside of a batch sampler": (partial(in_chunks, seeded_inside), {}, False),
    "draws inside of a batch sampler, workers": (
        partial(in_chunks, seeded_inside),
        {"num_workers": 2, "snapshot_every_n_steps": 4},
        False,
    ),
    "draws inside of a batch sampler, persistent workers": (
        partial(in_chunks, OwnShuffle),
        {"num_workers": 1, "persistent_workers": True},
        False,
    ),
    "draws inside of a sampler of a rank": (partial(of_rank, False), {}, True),
    "told the epoch, and draws inside": (partial(of_rank, True), {}, True),
    "a stream": (stream, {}, True),
    "a stream, a worker": (stream, {"num_workers": 1}, True),
    "persistent workers": (plain, {"num_workers": 2, "persistent_workers": True}, True),
    "rare snapshots of the workers": (plain, {"num_workers": 2, "snapshot_every_n_steps": 4}, True),
}
QUICK = [name for name, (_, options, _) in VARIANTS.items() if not options]
QUICK += ["a stream, a worker", "persistent workers"]
"""Loaders without worker processes, and some with."""


@pytest.mark.parametrize("variant", slow_but(QUICK, VARIANTS))
def test_a_restored_loader_goes_on_as_if_it_had_never_stopped(variant: str) -> None:
    make, options, tell = VARIANTS[variant]
    torch.manual_seed(1)
    reference, stops, loader = [], [], make(**options)
    for record in run(loader, step_info(0), tell):
        reference.append(record)
        stops.append(Stop.of(loader))
    assert [step.global_step for step, *_ in reference] == list(range(STEPS))
    for last in (0, 5, 7, 11, STEPS - 1):
        resumed = make(**options)
        restored = stops[last].restore(resumed, step_info(last))
        records = []
        for record in run(resumed, step_info(last).next(), tell):
            if restored is not None and not records:
                restored.check(record[0])
            records.append(record)
        assert records == reference[last + 1 :], f"stopped after step {last}"
        is_over = last % 6 == 5
        assert (restored is None) == (is_over or variant.startswith("draws")), (
            "of an epoch that is over nothing is left"
        )


def _stopped_after(
    last: int, make: Callable[..., Any] = plain, tell: bool = True
) -> tuple[Stop, list[list[int]]]:
    """State of a run after step ``last``, and its remaining batches."""
    loader = make()
    records = run(loader, step_info(0), tell)
    *_, _ = islice(records, last + 1)
    stop = Stop.of(loader)
    return stop, [batch for _, batch, _ in records]


@pytest.mark.parametrize("last", [1, 5, 8])
def test_a_generation_without_the_samplers_epoch_has_its_last_steps_one(last: int) -> None:
    stop, rest = _stopped_after(last)
    loader = plain()
    restored = stop.restore(loader, step_info(last), order_known=False)
    resumed = run(loader, step_info(last).next())
    assert next(resumed)[1] == rest[0]
    if restored is not None:
        restored.check(step_info(last + 1))
    assert [batch for _, batch, _ in resumed] == rest[1:]


def test_a_script_without_epochs_silently_resumes_no_generation_without_them() -> None:
    stop, _ = _stopped_after(8)
    loader = plain()
    restored = stop.restore(loader, step_info(8), order_known=False)
    assert restored is not None
    next(run(loader, step_info(9), tell=False))
    with pytest.raises(
        ConfigError, match=r"sampler is at epoch 0 .* in the order of epoch 1.* set_epoch to None"
    ):
        restored.check(step_info(9))


def test_a_script_without_epochs_can_resume_a_generation_without_them() -> None:
    stop, rest = _stopped_after(8, tell=False)
    resumed = plain()
    teller(resumed).set_epoch = None  # the workaround in the error message
    assert stop.restore(resumed, step_info(8), order_known=False) is None
    assert [batch for _, batch, _ in run(resumed, step_info(9), tell=False)] == rest


@pytest.mark.parametrize(
    "make", [plain, advancing, drawn(shuffled), drawn_in_batch_sampler(shuffled)]
)
def test_an_epoch_that_was_saved_after_its_loop_is_over(
    make: Callable[..., StatefulDataLoader],
) -> None:
    loader, reference = make(), []
    note_order(loader)
    for epoch in range(3):
        if make is plain:
            teller(loader).set_epoch(epoch)
        reference.append([batch.tolist() for batch in loader])
        if epoch == 0:
            stop = Stop.of(loader)
    resumed = make()
    assert stop.restore(resumed, step_info(5)) is None
    for epoch in (1, 2):
        if make is plain:
            teller(resumed).set_epoch(epoch)
        assert [batch.tolist() for batch in resumed] == reference[epoch]


def test_a_loader_with_more_batches_than_steps_is_not_taken_for_ended() -> None:
    def longer() -> StatefulDataLoader:
        return StatefulDataLoader(Prompts(), batch_size=3, sampler=sampler())

    stop, rest = _stopped_after(5, longer)
    loader = longer()
    assert stop.restore(loader, step_info(5)) is not None
    assert [batch.tolist() for batch in loader] == rest[:2]


@pytest.mark.parametrize("last", [0, 23])
def test_a_sampler_without_batches_draws_its_order_again(last: int) -> None:
    def single() -> StatefulDataLoader:
        return StatefulDataLoader(
            Prompts(), None, sampler=shuffled(torch.Generator().manual_seed(5))
        )

    loader = single()
    note_order(loader)
    samples = chain.from_iterable(repeat(loader))
    trained = [int(next(samples)) for _ in range(25 + last)]
    assert trained[:24] != trained[24:]
    stop, rest = Stop.of(loader), [int(next(samples)) for _ in range(40)]
    resumed = single()
    stop.restore(resumed, StepInfo(1, last, 24 + last, 24))
    assert [int(sample) for sample in islice(chain.from_iterable(repeat(resumed)), 40)] == rest


def test_the_first_epoch_of_an_older_version_is_drawn_again() -> None:
    stop, rest = _stopped_after(2, drawn(shuffled), tell=False)
    loader = drawn(shuffled)()
    assert stop.restore(loader, step_info(2), order_known=False) is None
    assert [batch for _, batch, _ in run(loader, step_info(3), tell=False)] == rest


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "torch's generator"])
def test_a_run_killed_in_a_drawn_epoch_trains_each_sample_once(tmp_path: Path, own: bool) -> None:
    def live(root: Path, steps: int) -> list[list[int]]:
        tiny, loader = Tiny(), drawn(shuffled, own)()
        torch.manual_seed(1)
        with make_handler(root, freq_steps=1) as handler:
            info = handler.load(tiny.state, loader)
            first = step_info(0) if info is None else info.last_step_info.next()
            batches = []
            for step, batch, _ in islice(run(loader, first, tell=False), steps):
                batches.append(batch)
                handler.dump(tiny.state, step, loader)
        return batches

    untouched = live(tmp_path / "untouched", STEPS)
    assert (
        sorted(chain.from_iterable(untouched[6:12])) == list(range(24))
        and untouched[6:12] != untouched[:6]
    )
    assert [batch for _ in range(3) for batch in live(tmp_path / "killed", 8)] == untouched


# Remaining errors are refused


class AdvancingWithState(torchdata_sampler.StatefulDistributedSampler):
    """Advances by itself, but saves no epoch."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


def test_a_sampler_state_that_advanced_by_reading_ahead_is_refused() -> None:
    def loader() -> StatefulDataLoader:
        own = AdvancingWithState(Prompts(), 1, 0, seed=5)
        return StatefulDataLoader(Prompts(), batch_size=4, sampler=own, num_workers=1)

    stop, rest = _stopped_after(2, loader)
    resumed = loader()
    stop.restore(resumed, step_info(2))
    assert [batch.tolist() for batch in resumed] == rest[:3]
    stop, _ = _stopped_after(4, loader)
    with pytest.raises(
        CheckpointMismatchError, match="AdvancingWithState went on from epoch 1 by itself while"
    ):
        stop.restore(loader(), step_info(4))


@pytest.mark.parametrize(("last", "own"), [(8, True), (2, False)])
def test_an_older_generation_whose_order_cannot_be_redrawn_is_refused(last: int, own: bool) -> None:
    stop, _ = _stopped_after(last, drawn(shuffled, own), tell=False)
    with pytest.raises(
        CheckpointMismatchError,
        match="older version, which did not save what RandomSampler has drawn",
    ):
        stop.restore(drawn(shuffled, own)(), step_info(last), order_known=False)


def test_a_generation_of_a_sampler_that_draws_is_not_resumed_with_another() -> None:
    stop, _ = _stopped_after(2, drawn(shuffled), tell=False)
    with pytest.raises(
        CheckpointMismatchError, match="draws its order from a generator, and has another one now"
    ):
        stop.restore(StatefulDataLoader(Prompts(), batch_size=4, shuffle=True), step_info(2))


class Unrepeatable(OwnShuffle):
    """Draws from a generator that nobody can see."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(next(SEEDS)).permutation(24).tolist()


def shuffled_list(**options: Any) -> StatefulDataLoader:
    order = np.random.default_rng(next(SEEDS)).permutation(24)
    return StatefulDataLoader(Prompts(), 4, sampler=order.tolist(), **options)


def shuffled_list_of_batches() -> StatefulDataLoader:
    order = np.random.default_rng(next(SEEDS)).permutation(24)
    return StatefulDataLoader(Prompts(), batch_sampler=order.reshape(6, 4).tolist())


def without_batches() -> StatefulDataLoader:
    return StatefulDataLoader(
        Prompts(), None, sampler=Unrepeatable(), collate_fn=lambda sample: torch.tensor(sample)
    )


def of_a_dataset_that_grows() -> StatefulDataLoader:
    samples: Any = range(24 + next(SEEDS))
    inner = RandomSampler(samples, generator=torch.Generator().manual_seed(5))
    return StatefulDataLoader(samples, batch_size=4, sampler=inner, drop_last=True)


UNREPEATABLE: dict[str, Callable[[], StatefulDataLoader]] = {
    "a sampler": partial(by_itself, Unrepeatable),
    "a sampler, a worker": partial(by_itself, Unrepeatable, num_workers=1),
    "in a batch sampler": partial(in_chunks, Unrepeatable),
    "in a batch sampler, a worker": partial(in_chunks, Unrepeatable, num_workers=1),
    "without batches": without_batches,
    "a list": shuffled_list,
    "a list of batches": shuffled_list_of_batches,
    "a dataset that has grown": of_a_dataset_that_grows,
}


@pytest.mark.parametrize("last", [1, 3, 5])
@pytest.mark.parametrize("make", UNREPEATABLE.values(), ids=UNREPEATABLE)
def test_an_order_that_is_not_the_one_of_the_run_is_refused(
    make: Callable[[], StatefulDataLoader], last: int
) -> None:
    stop, _ = _stopped_after(last, make, tell=False)
    with pytest.raises(
        CheckpointMismatchError, match=f"first {last + 1} batches of the epoch have other samples"
    ):
        stop.restore(make(), step_info(last))


def shuffled_by_torchdata(n_samples: int) -> StatefulDataLoader:
    samples: Any = range(n_samples)
    return StatefulDataLoader(samples, batch_size=4, shuffle=True, drop_last=True)


def spread_by_torchdata(n_samples: int) -> StatefulDataLoader:
    samples: Any = range(n_samples)
    own = torchdata_sampler.StatefulDistributedSampler(samples, 1, 0, seed=5)
    return StatefulDataLoader(samples, batch_size=4, sampler=own, drop_last=True)


@pytest.mark.parametrize("last", [1, 5])
@pytest.mark.parametrize("make", [shuffled_by_torchdata, spread_by_torchdata])
def test_an_order_that_torchdata_has_drawn_is_not_resumed_over_another_number_of_samples(
    make: Callable[[int], StatefulDataLoader], last: int
) -> None:
    stop, rest = _stopped_after(last, partial(make, 24), tell=False)
    with pytest.raises(CheckpointMismatchError, match="has 26 samples and had 24 when the order"):
        stop.restore(make(26), step_info(last))
    loader = make(24)
    stop.restore(loader, step_info(last))
    assert [batch for _, batch, _ in run(loader, step_info(last).next(), tell=False)] == rest


def test_a_list_that_is_the_same_again_is_resumed() -> None:
    def listed() -> StatefulDataLoader:
        return StatefulDataLoader(Prompts(), 4, sampler=list(range(23, -1, -1)))

    stop, rest = _stopped_after(8, listed, tell=False)
    loader = listed()
    assert stop.restore(loader, step_info(8)) is None
    assert [batch for _, batch, _ in run(loader, step_info(9), tell=False)] == rest


def test_a_generation_without_the_indices_is_resumed() -> None:
    make = partial(in_chunks, lambda: range(24))
    stop, rest = _stopped_after(8, make, tell=False)
    loader = make()
    assert stop.restore(loader, step_info(8), order_known=False) is None
    assert [batch for _, batch, _ in run(loader, step_info(9), tell=False)] == rest


def test_a_generation_of_a_users_sampler_is_not_resumed_with_torchdatas() -> None:
    stop, _ = _stopped_after(2, partial(by_itself, OwnShuffle), tell=False)
    with pytest.raises(CheckpointMismatchError, match="has another kind of sampler now"):
        stop.restore(StatefulDataLoader(Prompts(), batch_size=4, shuffle=True), step_info(2))


class StatefulIterator:
    """A user's sampler with an iterator that saves its state."""

    def __init__(self) -> None:
        self.order = torch.randperm(24).tolist()

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return _StatefulIndices(self.order)


class _StatefulIndices:
    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if not self.order:
            raise StopIteration
        index, *self.order = self.order
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order = state_dict["order"]


def test_an_iterator_that_saves_its_state_is_left_alone() -> None:
    make = partial(by_itself, StatefulIterator)
    torch.manual_seed(1)
    loader = make()
    batches = run(loader, step_info(0), tell=False)
    *_, _ = islice(batches, 3)
    stop = Stop.of(loader)
    resumed = make()
    assert stop.restore(resumed, step_info(2)) is None
    assert [batch.tolist() for batch in resumed] == [batch for _, batch, _ in islice(batches, 3)]


def test_torchdatas_sampler_on_the_generator_of_its_loader_is_refused(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    refused = StatefulDataLoader(Prompts(), 4, shuffle=True, generator=generator)
    advice = r"sampler=torch.utils.data.RandomSampler\(dataset, generator=generator\)"
    with make_handler(tmp_path) as handler, pytest.raises(ConfigError, match=advice):
        handler.load(Tiny().state, refused)

    # The remedy, and a sampler whose generator is its own.
    for loader in (one_generator_for_both(), StatefulDataLoader(Prompts(), 4, shuffle=True)):
        with make_handler(tmp_path) as handler:
            handler.load(Tiny().state, loader)


@pytest.mark.parametrize(
    ("make", "name"),
    [(drawn(shuffled), "RandomSampler"), (partial(by_itself, OwnShuffle), "OwnShuffle")],
)
def test_an_order_drawn_before_load_is_refused_at_the_first_dump(
    tmp_path: Path, make: Callable[[], StatefulDataLoader], name: str
) -> None:
    tiny, loader = Tiny(), make()
    batches = iter(loader)
    with make_handler(tmp_path, freq_steps=1) as handler:
        handler.load(tiny.state, loader)
        next(batches)
        with pytest.raises(
            ConfigError, match=f"{name} drew the order of this epoch before load had seen"
        ):
            handler.dump(tiny.state, step_info(0), loader)


FIXED: dict[str, Callable[[], StatefulDataLoader]] = {
    "a list": lambda: StatefulDataLoader(Prompts(), 4, sampler=list(range(24))),
    "a range": lambda: StatefulDataLoader(Prompts(), 4, sampler=range(24)),
    "batches in order": lambda: in_chunks_of_torch(SequentialSampler(Prompts())),
    "a part in order": lambda: StatefulDataLoader(Prompts(), 4, sampler=sampler(shuffle=False)),
    "in order": lambda: StatefulDataLoader(Prompts(), 4),
}


def in_chunks_of_torch(inner: Any) -> StatefulDataLoader:
    batches = BatchSampler(inner, 4, drop_last=False)
    return StatefulDataLoader(Prompts(), batch_sampler=batches)


@pytest.mark.parametrize("make", FIXED.values(), ids=FIXED)
def test_an_order_that_is_always_the_same_may_be_begun_before_load(
    tmp_path: Path, make: Callable[[], StatefulDataLoader]
) -> None:
    tiny, loader = Tiny(), make()
    batches = iter(loader)
    with make_handler(tmp_path, freq_steps=1) as handler:
        handler.load(tiny.state, loader)
        next(batches)
        handler.dump(tiny.state, step_info(0), loader)
    expected = [batch.tolist() for batch in batches]

    resumed = make()
    with make_handler(tmp_path, freq_steps=1) as handler:
        assert handler.load(tiny.state, resumed) is not None
        assert [batch.tolist() for batch in resumed] == expected


def test_a_script_that_resumes_into_another_epoch_is_stopped_at_dump(tmp_path: Path) -> None:
    handler, tiny, loader = make_handler(tmp_path, freq_steps=1), Tiny(), plain()
    handler.load(tiny.state, loader)
    for step, *_ in islice(run(loader, step_info(0)), 9):
        handler.dump(tiny.state, step, loader)
    handler.close()
    handler, loader = make_handler(tmp_path, freq_steps=1), plain()
    info = handler.load(tiny.state, loader)
    assert info and teller(loader).epoch == 1
    teller(loader).set_epoch(0)
    next(iter(loader))
    with pytest.raises(
        ConfigError,
        match=r"sampler is at epoch 0 .* in the order of epoch 1.* handler.first_step\(info\)",
    ):
        handler.dump(tiny.state, handler.first_step(info), loader)
    handler.close()
    with make_handler(tmp_path, freq_steps=1) as handler:
        info = handler.load(tiny.state, loader := plain())
        assert info and info.last_step_info == step_info(8), "nothing was committed"
        for step, *_ in run(loader, step_info(9)):
            handler.dump(tiny.state, step, loader)


def test_a_sampler_that_does_not_shuffle_may_be_at_any_epoch() -> None:
    def ordered() -> StatefulDataLoader:
        return StatefulDataLoader(Prompts(), batch_size=4, sampler=sampler(shuffle=False))

    stop, rest = _stopped_after(8, ordered)
    loader = ordered()
    assert stop.order.epoch is None and stop.restore(loader, step_info(8)) is None
    assert [batch for _, batch, _ in run(loader, step_info(9))] == rest


class _Deaf(StatefulDataLoader):
    """Ignores its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Counter(Meter):
    """A stateful object instead of a loader. With ``deaf``, it ignores the state to load."""

    def __init__(self, deaf: bool = False) -> None:
        super().__init__()
        self.deaf = deaf

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.deaf:
            super().load_state_dict(state_dict)


def _with_a_worker() -> StatefulDataLoader:
    return plain(num_workers=1)


def _deaf() -> StatefulDataLoader:
    return _Deaf(Prompts(), batch_size=4, sampler=sampler())


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (
            plain,
            _deaf,
            "saved after 1 batches .* says it is after 0: its load_state_dict does not restore it",
        ),
        (
            _with_a_worker,
            plain,
            r"does not take the state .*: expected a loader that is made .* the same num_workers",
        ),
        (
            _Counter,
            lambda: _Counter(deaf=True),
            r"_Counter.state_dict\(\) is not what was given to load_state_dict",
        ),
    ],
)
def test_a_loader_elsewhere_is_refused_before_an_engine_is_touched(
    tmp_path: Path, saved: Callable[[], Any], resumed: Callable[[], Any], message: str
) -> None:
    handler, tiny, loader = make_handler(tmp_path, freq_steps=1), Tiny(), saved()
    handler.load(tiny.state, loader)
    tiny.step()
    if isinstance(loader, _Counter):
        loader.seen, loader.mean = [1, 2], torch.tensor([0.5, torch.nan])
    else:
        next(iter(loader))
    handler.dump(tiny.state, step_info(0), loader)
    handler.close()
    fresh = Tiny()
    before = fresh.digest()
    with pytest.raises(CheckpointMismatchError, match=message):
        make_handler(tmp_path).load(fresh.state, resumed())
    assert fresh.digest() == before
    with make_handler(tmp_path) as handler:
        assert (
            handler.load(fresh.state, saved()) is not None
            and fresh.digest() == tiny.digest() != before
        )


class _Driven:
    """All ranks of a driver (only one), in the driver's process."""

    world_size = 1

    def __init__(self, target: RankEngines) -> None:
        self._target = target

    def run_all(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return [fn(self._target, *args)]

    run_in_background = run_all


def test_a_driver_resumes_its_loader_in_the_order_of_its_epoch(tmp_path: Path) -> None:
    tiny, reference = Tiny(), []
    ranks = _Driven(RankEngines({"default": tiny.state}))
    for first in (0, 9):
        with make_handler(tmp_path, freq_steps=1) as handler:
            torch.manual_seed(first)
            handler.load(ranks, loader := plain())
            for record in run(loader, step_info(first)):
                if first == 0:
                    reference.append(record)
                    if len(reference) <= 9:
                        handler.dump(ranks, record[0], loader)
                else:
                    handler.dump(ranks, record[0], loader)
                    assert record == reference[record[0].global_step]
