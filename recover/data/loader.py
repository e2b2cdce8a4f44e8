"""Batches of a map-style dataset with one global cursor, so that a run can resume at any world
size.

All ranks walk the same permutation and the same global batches, and each takes its own contiguous
share of every batch. So a step trains on the same samples at any number of ranks, and the state is
the same few plain values on all of them.

The cursor counts *samples handed out*, and nothing is prefetched, so a state taken after training
on a batch says exactly which samples were trained. Samples are read in the caller's thread. If they
are slow to read, use torchdata's ``StatefulDataLoader`` instead, which `RecoverHandler` takes too
(see `capture` and `restore`). That loader with ``shuffle=True, generator=g`` is refused: with one
generator for the loader and torchdata's own sampler, the order would differ from the epoch after
the resumed one on (torchdata 0.11).

A permutation costs 8 bytes per sample and comes from numpy's ``RandomState``, whose streams are
frozen (NEP 19), so a newer library cannot change the order in the middle of an epoch. No global
generator is used.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Subset

from ...engine.api import StateDict
from ...utils.config import require_range
from ...utils.errors import CheckpointMismatchError, ConfigError, DatasetMismatchError
from ...utils.logging import get_logger
from .dataset_fingerprint import MapDataset, dataset_fingerprint

logger = get_logger(__name__)

ORDER_SETTINGS = ("seed", "shuffle", "batch_size", "drop_last")
"""Values in a state that decide which samples are in which batch."""

_STATE_VERSION = 1
_EPOCHS = 2**32  # an epoch is a part of a seed of numpy's RandomState, which has 32 bits


class ResumableDataLoader:
    """Iterates over the batches of an epoch from its current position. The next iteration is the
    next epoch.

    If a ``for`` loop ends early, the next loop continues in the same epoch with the next batch.

    Example:

        loader = ResumableDataLoader(prompts, 256, seed=0, rank=rank, world_size=world_size)
        info = handler.load(engine, dataloader=loader)
        for batch in loader.batches():
            train(batch)
            handler.dump(engine, step_info, dataloader=loader)

    Attributes:
        dataset: the dataset.
        batch_size: samples of a global batch.
        rank_independent: True, because the state is the same on every rank and can be resumed by
            any number of them. A loader without this attribute (torchdata's) can only be resumed by
            as many processes as saved it.
    """

    rank_independent = True

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Start at epoch 0.

        Args:
            dataset: map-style dataset. Reading a sample twice must give the same sample.
            batch_size: samples of a *global* batch. If it has n samples, rank r of w gets samples
                ``r * n // w`` to ``(r + 1) * n // w``. The shares differ by at most one sample.
            seed: seed of the permutations, together with the epoch. From 0 to 2**32 - 1.
            shuffle: use a new order in each epoch instead of the dataset's order.
            drop_last: leave out the samples after the last whole batch of an epoch.
            rank: number of this process among those that share a batch.
            world_size: number of processes that share a batch. A Ray driver uses 1 and gets whole
                batches.
            collate_fn: makes a batch from a list of samples. None returns the list.

        Raises:
            ConfigError: the dataset is empty or has no whole batch, a rank would get no sample, a
                value is out of range, or the dataset has no fingerprint (see
                `dataset_fingerprint`).
        """
        require_range("batch_size", batch_size, low=1)
        require_range("seed", seed, low=0, high=2**32 - 1)
        require_range("world_size", world_size, low=1)
        require_range("rank", rank, low=0, high=world_size - 1)
        self._samples = len(dataset)
        self._fingerprint = dataset_fingerprint(dataset)
        if drop_last and self._samples < batch_size:
            raise ConfigError(
                f"batch_size {batch_size} is larger than the dataset of {self._samples} samples, "
                "so an epoch would have no batch; use a smaller batch_size or drop_last=False"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._rank = rank
        self._world_size = world_size
        self._collate = collate_fn
        self._require_shares(self._samples)

        # The epoch that is being read. Its dataset may have been shorter.
        self._epoch = 0
        self._cursor = 0
        self._of_epoch = self._samples
        self._fingerprint_of_epoch = self._fingerprint
        self._order = self._permutation(0, self._samples)

    @property
    def epoch(self) -> int:
        """Epoch of the last batch. 0 before the first batch."""
        return self._epoch

    def __len__(self) -> int:
        """Number of batches in a whole epoch, at any position."""
        full, rest = divmod(self._samples, self.batch_size)
        has_short_batch = rest > 0 and not self._drop_last
        return full + has_short_batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch, or the whole next epoch if this one is finished."""
        # A restore in the middle of the loop may change the epoch, which ends the loop.
        if not self._has_batch():
            self._begin_next_epoch()
        epoch = self._epoch
        while self._epoch == epoch and self._has_batch():
            indices, end = self._next_share()
            samples = [self.dataset[index] for index in indices]
            batch = samples if self._collate is None else self._collate(samples)
            self._cursor = end  # only after every sample was read
            yield batch

    def batches(self) -> Iterator[Any]:
        """Yield batches without end, epoch after epoch."""
        while True:
            yield from self

    def index_batches(self) -> Iterator[list[int]]:
        """Yield batches of dataset indices, for callers that read the samples
        (`holdfast.engine.rollouts`).
        """
        while True:
            if not self._has_batch():
                self._begin_next_epoch()
            indices, self._cursor = self._next_share()
            yield indices

    def state_dict(self) -> StateDict:
        """Position of the loader, the same on every rank. ``cursor`` counts samples of ``epoch``
        over all ranks.

        The last batch counts as consumed, so call this after training on it.
        """
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "batch_size": self.batch_size,
            "dataset_fingerprint": self._fingerprint_of_epoch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from ``state_dict``. The next batch is the one after its last batch.

        The world size may differ. Dataset (`DatasetMismatchError`), seed, shuffle, batch_size and
        drop_last (`ConfigError`) must be the same, because they decide which samples are in which
        batch. Only samples at the end of the dataset may be new: they are read from the next epoch
        on. After an error the loader has not moved.
        """
        # The form of the state.
        ours = self.state_dict()
        if not isinstance(state_dict, dict):
            raise CheckpointMismatchError(
                f"a dataloader state is a {type(state_dict).__name__}; expected a dict"
            )
        if state_dict.keys() != ours.keys() or state_dict["version"] != _STATE_VERSION:
            raise CheckpointMismatchError(
                f"a dataloader state with {sorted(map(str, state_dict))} (version "
                f"{state_dict.get('version')}) is not one of ResumableDataLoader; expected "
                f"{sorted(ours)} (version {_STATE_VERSION})"
            )
        for key, own in ours.items():
            kind = type(own)
            found = state_dict[key]
            if not isinstance(found, kind) or isinstance(found, bool) != (kind is bool):
                raise CheckpointMismatchError(
                    f"a dataloader state has {key} {found!r}, a {type(found).__name__}; expected "
                    f"a {kind.__name__}"
                )

        for key in ORDER_SETTINGS:
            if state_dict[key] != ours[key]:
                raise ConfigError(
                    f"dataloader {key} is {ours[key]!r}, but the run was saved with "
                    f"{state_dict[key]!r}; samples would be lost or repeated. Resume with "
                    f"{key}={state_dict[key]!r}"
                )

        # The position.
        epoch = state_dict["epoch"]
        cursor = state_dict["cursor"]
        fingerprint = state_dict["dataset_fingerprint"]
        samples = self._samples_saved(fingerprint)
        at_a_batch = cursor % self.batch_size == 0 or (cursor == samples and not self._drop_last)
        if not (0 <= epoch < _EPOCHS and 0 <= cursor <= samples and at_a_batch):
            raise CheckpointMismatchError(
                f"a dataloader state has epoch {epoch} and cursor {cursor}, which no loader of "
                f"{samples} samples in batches of {self.batch_size} reaches; expected an epoch "
                f"from 0 to {_EPOCHS - 1}, and a cursor at the end of a batch. The state is "
                "damaged: resume from another generation"
            )
        if samples != self._samples:
            self._require_shares(samples)
            logger.warning(
                "the dataset has grown from %d to %d samples: the rest of epoch %d has the old "
                "ones, and the new ones come in from epoch %d on",
                samples,
                self._samples,
                epoch,
                epoch + 1,
            )
        self._seek(epoch, cursor, samples, fingerprint)

    def _samples_saved(self, saved: str) -> int:
        """Return the number of samples of a saved epoch, which are all of the dataset's, or its
        first ones.
        """
        if saved == self._fingerprint:
            return self._samples
        count = saved.partition(" ")[0]
        if count.isdecimal() and 0 < int(count) < self._samples:
            first: Any = Subset(self.dataset, range(int(count)))  # type: ignore[arg-type]
            if dataset_fingerprint(first) == saved:
                return int(count)
        raise DatasetMismatchError(
            f"the data cursor was saved for a dataset of {saved}, this one has "
            f"{self._fingerprint}; resume with the dataset of the run (samples may be added at "
            "its end only), or start a new run"
        )

    def _require_shares(self, samples: int) -> None:
        """Refuse a number of ranks that the smallest batch of an epoch cannot be shared by."""
        rest = 0 if self._drop_last else samples % self.batch_size
        smallest = rest or self.batch_size
        if smallest < self._world_size:
            raise ConfigError(
                f"a batch of {smallest} samples cannot be shared by {self._world_size} ranks "
                f"(batch_size {self.batch_size}, drop_last {self._drop_last}, {samples} samples); "
                "use fewer ranks or another batch_size (or, but not in the middle of a run, "
                "drop_last=True)"
            )

    def _has_batch(self) -> bool:
        return self._of_epoch - self._cursor >= (self.batch_size if self._drop_last else 1)

    def _next_share(self) -> tuple[list[int], int]:
        # Indices of this rank's share of the next batch, and the cursor after it.
        end = min(self._cursor + self.batch_size, self._of_epoch)
        batch = self._order[self._cursor : end].tolist()
        first = len(batch) * self._rank // self._world_size
        last = len(batch) * (self._rank + 1) // self._world_size
        return batch[first:last], end

    def _begin_next_epoch(self) -> None:
        self._seek(self._epoch + 1, 0, self._samples, self._fingerprint)

    def _seek(self, epoch: int, cursor: int, samples: int, fingerprint: str) -> None:
        if (epoch, samples) != (self._epoch, self._of_epoch):
            self._order = self._permutation(epoch, samples)
        self._epoch = epoch
        self._cursor = cursor
        self._of_epoch = samples
        self._fingerprint_of_epoch = fingerprint

    def _permutation(self, epoch: int, samples: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(samples)
        return np.random.RandomState([self._seed, epoch]).permutation(samples)
