"""Batches of a map-style dataset under one global cursor, so that a run can resume at any world size.

Every rank walks the same permutation and the same global batches, and takes its own contiguous share of each: what
a step trains on does not depend on how many ranks there are, and the state is the same few plain values on all of
them. A Ray driver, as rank 0 of 1, gets whole batches.

The cursor counts *samples handed out*, and a batch is read only when it is asked for: nothing is prefetched, so a
state taken after training on a batch says exactly what was trained. Reading happens in the caller's thread; data
that is slow to read or decode wants torchdata's ``StatefulDataLoader`` instead, which `RecoverHandler` also takes (see
`position`), with torch's samplers or torchdata's: the order of a resumed epoch is made again (see `epoch_order`).
Do not give that one ``shuffle=True, generator=g``: one generator for the loader and torchdata's own sampler gives
another order from the epoch after the resumed one on (torchdata 0.11).

An epoch's permutation costs 8 bytes a sample and comes from numpy's ``RandomState``, whose streams are frozen (NEP
19): a newer library cannot change the order in the middle of an epoch. No global generator is drawn from.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ...utils.config import require_range
from ...utils.errors import CheckpointMismatchError, ConfigError, DatasetMismatchError
from .fingerprint import dataset_fingerprint

_STATE_VERSION = 1


class MapDataset(Protocol):
    """Anything with a length and samples by index: a list, a torch or a Hugging Face dataset."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One sample."""
        ...


class ResumableDataLoader:
    """Iterates over batches from where it is to the end of the epoch; the next iteration is the next epoch.

    Leaving a ``for`` loop early and starting another goes on in the same epoch, with the next batch.

    Attributes:
        dataset: see below.
        batch_size: see below.
        rank_independent: the state is the same on every rank and can be resumed by any number of them. A loader that
            does not say so (torchdata's) is only resumed by as many processes as it was saved by.
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
            dataset: map-style; reading a sample twice must give the same sample.
            batch_size: samples of a *global* batch. Of its n samples, rank r of w gets those from ``r * n // w`` to
                ``(r + 1) * n // w``: shares that differ by at most one.
            seed: together with the epoch, the seed of the permutation; from 0 to 2**32 - 1.
            shuffle: walk each epoch in an order of its own, instead of the dataset's.
            drop_last: leave out the samples after the last whole batch of an epoch.
            rank: this process among those that share a batch.
            world_size: how many share it.
            collate_fn: makes a batch of a list of samples; None hands out the list.

        Raises:
            ConfigError: the dataset is empty or has no whole batch, a rank would get no sample, a value is out of
                range, or the dataset cannot be told from another (see `dataset_fingerprint`).
        """
        require_range("batch_size", batch_size, low=1)
        require_range("seed", seed, low=0, high=2**32 - 1)
        require_range("world_size", world_size, low=1)
        require_range("rank", rank, low=0, high=world_size - 1)
        self._samples, self._fingerprint = len(dataset), dataset_fingerprint(dataset)
        if drop_last and self._samples < batch_size:
            raise ConfigError(
                f"batch_size {batch_size} is larger than the dataset of {self._samples} samples, so an epoch would "
                f"have no batch; use a smaller batch_size or drop_last=False"
            )
        self.dataset, self._collate = dataset, collate_fn
        self.batch_size, self._seed, self._shuffle, self._drop_last = batch_size, seed, shuffle, drop_last
        self._rank, self._world_size = rank, world_size
        self._check_shares()
        self._epoch = self._cursor = 0
        self._order = self._permutation(0)

    @property
    def epoch(self) -> int:
        """Epoch of the batch handed out last; 0 before the first."""
        return self._epoch

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever the cursor is."""
        full, rest = divmod(self._samples, self.batch_size)
        return full if self._drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Any]:
        """The batches left in this epoch, or all of the next epoch when none is."""
        if not self._has_batch():
            self._seek(self._epoch + 1, 0)
        epoch = self._epoch
        while self._epoch == epoch and self._has_batch():
            yield self._take()

    def batches(self) -> Iterator[Any]:
        """Batches without end, epoch after epoch."""
        while True:
            yield from self

    def index_batches(self) -> Iterator[list[int]]:
        """`batches` of indices into the dataset, for who reads the samples itself (`holdfast.engine.rollouts`)."""
        while True:
            if not self._has_batch():
                self._seek(self._epoch + 1, 0)
            indices, self._cursor = self._next_share()
            yield indices

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, in plain values that are the same on every rank.

        The batch handed out last counts as consumed: ask after training on it. ``cursor`` counts samples of
        ``epoch`` over all ranks.
        """
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "batch_size": self.batch_size,
            "dataset_fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; the next batch is the one after its last.

        The world size may be another. What decides which samples are in which batch (dataset, seed, shuffle,
        batch_size, drop_last) must be the same.

        Raises:
            CheckpointMismatchError: not a state of this class, or of a version this code does not know.
            DatasetMismatchError: the dataset is another one.
            ConfigError: seed, shuffle, batch_size or drop_last differ. After any of the three errors the loader is
                where it was.
        """
        ours = self.state_dict()
        if not isinstance(state_dict, dict):
            raise CheckpointMismatchError(f"a dataloader state is a {type(state_dict).__name__}; expected a dict")
        if state_dict.keys() != ours.keys() or state_dict["version"] != _STATE_VERSION:
            raise CheckpointMismatchError(
                f"a dataloader state with {sorted(map(str, state_dict))} (version {state_dict.get('version')}) is not "
                f"one of ResumableDataLoader; expected {sorted(ours)} (version {_STATE_VERSION})"
            )
        for key, own in ours.items():
            kind, found = type(own), state_dict[key]
            if not isinstance(found, kind) or isinstance(found, bool) != (kind is bool):
                raise CheckpointMismatchError(
                    f"a dataloader state has {key} {found!r}, a {type(found).__name__}; expected a {kind.__name__}"
                )
        if state_dict["dataset_fingerprint"] != self._fingerprint:
            raise DatasetMismatchError(
                f"the data cursor was saved for a dataset of {state_dict['dataset_fingerprint']}, this one has "
                f"{self._fingerprint}; resume with the dataset of the run, or start a new run"
            )
        for key in ("seed", "shuffle", "batch_size", "drop_last"):
            if state_dict[key] != ours[key]:
                raise ConfigError(
                    f"dataloader {key} is {ours[key]!r}, but the run was saved with {state_dict[key]!r}; samples "
                    f"would be lost or repeated. Resume with {key}={state_dict[key]!r}"
                )
        epoch, cursor = state_dict["epoch"], state_dict["cursor"]
        if epoch < 0 or not 0 <= cursor <= self._samples:
            raise CheckpointMismatchError(f"epoch {epoch}, cursor {cursor} is not in {self._samples} samples")
        self._seek(epoch, cursor)

    def _has_batch(self) -> bool:
        return self._samples - self._cursor >= (self.batch_size if self._drop_last else 1)

    def _take(self) -> Any:
        """This rank's share of the next batch. The cursor moves only after every sample was read."""
        indices, end = self._next_share()
        samples = [self.dataset[index] for index in indices]
        batch = samples if self._collate is None else self._collate(samples)
        self._cursor = end
        return batch

    def _next_share(self) -> tuple[list[int], int]:
        """Indices of this rank's share of the next batch, and the cursor after it."""
        end = min(self._cursor + self.batch_size, self._samples)
        indices = self._order[self._cursor : end].tolist()
        first, last = (len(indices) * share // self._world_size for share in (self._rank, self._rank + 1))
        return indices[first:last], end

    def _seek(self, epoch: int, cursor: int) -> None:
        if epoch != self._epoch:
            self._order = self._permutation(epoch)
        self._epoch, self._cursor = epoch, cursor

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._samples)
        return np.random.RandomState([self._seed, epoch]).permutation(self._samples)

    def _check_shares(self) -> None:
        """Every rank must get a sample of every batch, the last one of an epoch included."""
        last = 0 if self._drop_last else self._samples % self.batch_size
        smallest = last or self.batch_size
        if smallest < self._world_size:
            raise ConfigError(
                f"a batch of {smallest} samples cannot be shared by {self._world_size} ranks "
                f"(batch_size {self.batch_size}, drop_last {self._drop_last}, {self._samples} samples); "
                f"use fewer ranks or another batch_size (or, but not in the middle of a run, drop_last=True)"
            )
