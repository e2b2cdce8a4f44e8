"""Streams: killed in an epoch they go on with the next sample, or the run is refused or warned at
its start.
"""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.integrations.accelerate import recoverable
from holdfast.recover.data import trial
from holdfast.recover.data.capture import EpochOrder
from holdfast.recover.data.restore import restore_dataloader
from holdfast.recover.data.trial import first_batches, try_stream
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from holdfast.utils.rng import capture_rng, rng_digest
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, Tiny, make_handler, step_info
from tests.tiers import slow_but

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Numbers(IterableDataset):
    """A stream without a state of its own, in the order of ``order``."""

    def __init__(
        self, order: Callable[[list[int]], Any] = iter, n: int = SPEC.dataset_size
    ) -> None:
        self.order = order
        self.n = n

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(self.order(list(range(first, self.n, step))))


class Buffered(IterableDataset):
    """A stream that saves the position of its source, but not the buffer that it shuffles."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        buffer, draws = [], random.Random(3)
        while self.at < SPEC.dataset_size:
            buffer.append(self.at)
            self.at += 1
            if len(buffer) > 6:
                yield buffer.pop(draws.randrange(6))
        yield from buffer
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Counting(IterableDataset):
    """A stream in another order each time that it is begun, as with webdataset's ``detshuffle``."""

    def __init__(self) -> None:
        self.n_begun = 0

    def __iter__(self) -> Iterator[int]:
        self.n_begun += 1
        return iter(random.Random(self.n_begun).sample(range(SPEC.dataset_size), SPEC.dataset_size))


class KeepingItsPlace(IterableDataset):
    """A stream that goes on where it was left, and begins again after its end."""

    def __init__(self, size: int = SPEC.dataset_size) -> None:
        self.at = 0
        self.size = size

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1
        self.at = 0


class CountingInState(IterableDataset):
    """The same, with everything that it counts in its state."""

    def __init__(self) -> None:
        self.n_begun = self.at = 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.n_begun).sample(range(SPEC.dataset_size), SPEC.dataset_size)
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.n_begun += 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class Told(IterableDataset):
    """A stream in the order of the epoch that ``set_epoch`` names."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(SPEC.dataset_size), SPEC.dataset_size))


def numbers(batch: list[Any]) -> list[int]:
    return [row["i"] if isinstance(row, dict) else int(row) for row in batch]


def stateful(stream: Any, workers: int = 0, **options: Any) -> StatefulDataLoader:
    if workers:
        options |= {"num_workers": workers, "multiprocessing_context": "fork"}
    return StatefulDataLoader(stream, batch_size=4, collate_fn=numbers, **options)


def shards(**shuffle: Any) -> Any:
    """Four shards of Hugging Face's datasets."""
    stream = (
        pytest.importorskip("datasets")
        .Dataset.from_dict({"i": list(range(24))})
        .to_iterable_dataset(4)
    )
    return stream.shuffle(**shuffle) if shuffle else stream


def interleaved() -> Any:
    datasets = pytest.importorskip("datasets")
    parts = [shards().take(12), shards().skip(12)]
    return datasets.interleave_datasets(
        parts, probabilities=[0.5, 0.5], seed=1, stopping_strategy="all_exhausted"
    )


def shuffled_by_python(rows: list[int]) -> list[int]:
    random.shuffle(rows)
    return rows


SHARDS_ONLY = {"seed": 1, "buffer_size": 1, "max_buffer_input_shards": 1}
RESUMED: dict[str, Callable[[], Any]] = {
    "no state": lambda: stateful(Numbers()),
    "no state, workers": lambda: stateful(Numbers(), 2, snapshot_every_n_steps=2),
    "no state, shuffled in workers": lambda: stateful(Numbers(shuffled_by_python), 2),
    "a place that is kept until the end": lambda: stateful(KeepingItsPlace()),
    "another order in each epoch, counted in its state": lambda: stateful(CountingInState()),
    "counted by workers that end with the epoch": lambda: stateful(Counting(), 1),
    "an order of the epoch": lambda: stateful(Told()),
    "an order of the epoch, workers": lambda: stateful(Told(), 1),
    "datasets": lambda: stateful(shards()),
    "datasets, workers": lambda: stateful(shards(), 2),
    "datasets, persistent workers": lambda: stateful(shards(), 2, persistent_workers=True),
    "datasets, order of the shards": lambda: stateful(shards(**SHARDS_ONLY)),
    "datasets, order of the shards, workers": lambda: stateful(shards(**SHARDS_ONLY), 2),
    "datasets, interleaved": lambda: stateful(interleaved().take(24)),
}


def _lives(rank: int, world_size: int, name: str, root: str, killed_after: int) -> None:
    """Train from where the last life was killed, and write each batch to a file before its
    snapshot.
    """
    tiny, loader = Tiny(), RESUMED[name]()
    with (
        make_handler(root, freq_steps=1, async_save=False) as handler,
        open(f"{root}/batches", "a") as file,
    ):
        info = handler.load(tiny.state, loader)
        step = step_info(0) if info is None else info.last_step_info.next()
        for epoch in range(step.epoch, SPEC.total_train_epochs):
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(epoch)
            for batch in loader:
                print(json.dumps(batch), file=file, flush=True)
                handler.dump(tiny.state, step, loader)
                if step.global_step == killed_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                step = step.next()


@pytest.mark.parametrize("name", slow_but(["no state"], RESUMED))
def test_a_run_on_a_stream_that_is_killed_has_the_batches_of_one_that_is_not(
    name: str, tmp_path: Path
) -> None:
    found = []
    for root, kills in ((tmp_path / "untouched", []), (tmp_path / "killed", [5, 8])):
        root.mkdir()
        for killed_after in kills:
            with pytest.raises(AssertionError, match="died without a word"):
                run_ranks(_lives, 1, name, str(root), killed_after)
        run_ranks(_lives, 1, name, str(root), -1)
        found.append([json.loads(line) for line in (root / "batches").read_text().splitlines()])
    untouched, killed = found
    assert len(untouched) == SPEC.total_train_steps
    assert killed == untouched


BUFFER = {"seed": 1, "buffer_size": 8}
FORGETFUL: dict[str, tuple[Callable[[], Any], str]] = {
    "a buffer": (
        lambda: stateful(Buffered()),
        "the state of Buffered lacks samples that it has read ahead",
    ),
    "a buffer of datasets": (
        lambda: stateful(shards(**BUFFER)),
        "goes on with other samples than the loader",
    ),
    "a buffer of datasets, workers": (
        lambda: stateful(shards(**BUFFER), 2),
        "not take its own state.*: IndexError: l",
    ),
    "another order in each epoch": (
        lambda: stateful(Counting()),
        "in its second epoch: Counting has another order each time that a process begins it",
    ),
    "another order in each epoch, without state": (
        lambda: DataLoader(Counting(), 4, collate_fn=numbers),
        "in its second epoch: Counting has another order",
    ),
    "another order in each epoch, persistent workers": (
        lambda: stateful(Counting(), 1, persistent_workers=True),
        "in its second epoch: Counting has another order",
    ),
    "persistent workers that are not told the epoch": (
        lambda: stateful(Told(), 1, persistent_workers=True),
        "in its second epoch: Told has another order.*and workers that end with the epoch",
    ),
    "no seed": (
        lambda: stateful(shards(buffer_size=1)),
        "is shuffled without a seed.*give shuffle a seed",
    ),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["a buffer", "a buffer of datasets", "another order in each epoch", "no seed"], FORGETFUL
    ),
)
def test_a_stream_that_would_lose_samples_is_refused_before_the_first_step(
    name: str, tmp_path: Path
) -> None:
    make, message = FORGETFUL[name]
    loader = make()
    if not isinstance(loader, StatefulDataLoader):
        loader = recoverable(loader)
    with pytest.raises(ConfigError, match=message), make_handler(tmp_path, freq_steps=1) as handler:
        handler.load(Tiny().state, loader)


def test_the_order_of_a_second_epoch_does_not_matter_to_a_run_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try_stream(stateful(Counting()), n_epochs=1)
    assert not [record for record in caplog.records if record.name.startswith("holdfast")]


def test_a_second_epoch_of_a_long_stream_that_goes_on_in_its_middle_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try_stream(stateful(KeepingItsPlace(1000)))
    (record,) = [record for record in caplog.records if record.name.startswith("holdfast")]
    assert "in its second epoch, begun before the end of the first: " in record.getMessage()


def test_a_trial_tells_a_stream_its_own_epoch_again() -> None:
    stream = Told()
    stream.set_epoch(4)
    with pytest.raises(ConfigError, match="second epoch"):
        try_stream(stateful(stream, 1, persistent_workers=True))
    assert stream.epoch == 4


@pytest.mark.parametrize("dataset", [list(range(24)), Numbers()])
def test_batches_in_the_order_in_which_workers_finish_are_refused(dataset: Any) -> None:
    loader = stateful(dataset, 2, in_order=False)
    with pytest.raises(
        ConfigError, match=r"2 workers finish \(in_order=False\).*use in_order=True"
    ):
        try_stream(loader)
    try_stream(stateful(list(range(24)), 1, in_order=False))
    loader = stateful(list(range(24)), 2, in_order=False)
    loader.inexact = True
    try_stream(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("n", slow_but([0, 5], [0, 1, 5, 9]))
def test_a_stream_shorter_than_a_trial_is_tried_in_its_middle(
    n: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    try_stream(stateful(Numbers(n=n), workers))
    assert not [record for record in caplog.records if record.name.startswith("holdfast")]


def test_a_stream_that_may_lose_samples_is_trained_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = stateful(Buffered())
    loader.inexact = True
    try_stream(loader)
    assert "would lose samples and repeat others" in caplog.text


def shuffled_by_the_system(rows: list[int]) -> list[int]:
    random.SystemRandom().shuffle(rows)
    return rows


@pytest.mark.parametrize(
    "make",
    [
        lambda: stateful(Numbers(shuffled_by_python)),
        lambda: stateful(Numbers(shuffled_by_the_system), 1),
        lambda: DataLoader(Numbers(shuffled_by_the_system), 4),
    ],
)
def test_a_stream_in_a_random_order_is_reported(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    try_stream(make())
    assert "Numbers gives other samples each time that it is begun" in caplog.text


def test_a_stream_whose_samples_cannot_be_compared_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try_stream(DataLoader(Numbers(lambda rows: [object() for _ in rows]), 4, collate_fn=list))
    assert (
        "whether a resumed run finds its place in Numbers could not be tried (ConfigError: a sample"
        in caplog.text
    )


def test_a_stream_that_begins_otherwise_in_a_restarted_process_is_refused() -> None:
    loader = stateful(Numbers())
    try_stream(loader)
    batches = iter(loader)
    next(batches)
    state, order = loader.state_dict(), EpochOrder(draws=first_batches(loader))
    again = stateful(Numbers(lambda rows: rows[::-1]))
    try_stream(again)
    with pytest.raises(
        CheckpointMismatchError, match="begins with other samples than in the saved run"
    ):
        restore_dataloader(again, state, order, step_info(0))
    again.inexact = True
    restore_dataloader(again, state, order, step_info(0))


class Lines(IterableDataset):
    """The rest of a file that this process has opened."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.n_begun = 0

    def __iter__(self) -> Iterator[int]:
        self.n_begun += 1
        while line := self.file.read(1):
            yield line[0]


def test_a_trial_leaves_no_draw_no_read_and_no_iteration_behind(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(range(200)))
    stream = Lines(tmp_path / "numbers")
    next(iter(stream))
    before = rng_digest(capture_rng())
    try_stream(DataLoader(stream, 4))
    assert rng_digest(capture_rng()) == before
    assert next(iter(stream)) == 1 and stream.n_begun == 2


@pytest.mark.slow  # torch waits 5 s for the worker
def test_a_worker_that_hangs_ends_the_trial_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "_BATCH_TIMEOUT_S", 1)
    try_stream(stateful(Numbers(lambda rows: (signal.pause() or row for row in rows))))
    assert "could not be tried (RuntimeError: DataLoader timed out after 1 seconds)" in caplog.text


def test_a_loader_of_nodes_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    try_stream(nodes.Loader(nodes.IterableWrapper(range(4))))
    assert "torchdata.nodes is resumed only as far as its nodes say" in caplog.text


def test_persistent_workers_of_datasets_that_are_not_forked_are_refused() -> None:
    loader = StatefulDataLoader(
        shards(), 4, num_workers=1, persistent_workers=True, multiprocessing_context="spawn"
    )
    with pytest.raises(ConfigError, match="persistent workers that are not forked"):
        try_stream(loader)
