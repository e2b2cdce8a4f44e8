"""A dataloader put back to its place: the same batches, in the order of the same epoch, and no random draw too many.

``load_state_dict`` alone is not enough for torchdata's ``StatefulDataLoader``:

- It builds its iterator when the next loop begins, and draws from torch's global generator for that: every later draw
  would differ from those of a run that was never killed. So the iterator is built here, before the generators are
  restored.
- That iterator has the order of the epoch that the sampler was told last (torch's ``DistributedSampler.set_epoch``),
  which is no part of the loader's state, and which a script sets only once it knows where it resumes. So a snapshot
  remembers the sampler's epoch, and the sampler is told it first.
- Restored to the end of an epoch, its first loop has no batch: a script that loops over epochs would skip one. So an
  epoch that is over is ended here.

What is wrong after that is refused: a loader that says another place than was saved, and a script that starts in
another epoch than the one that is being read.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..engine.api import Stateful, StepInfo
from ..engine.tensors import bytes_of
from ..utils.errors import CheckpointMismatchError, ConfigError
from .dataloader import ResumableDataLoader

_END = object()


@runtime_checkable
class EpochSampler(Protocol):
    """What orders samples by the epoch that it was told last: torch's ``DistributedSampler``, many datasets."""

    epoch: int

    def set_epoch(self, epoch: int, /) -> None:
        """Order the samples of iterators built from now on as those of ``epoch``."""
        ...


def sampler_epoch(loader: Any) -> int | None:
    """The epoch that the loader's sampler was told last; None when its order does not depend on one."""
    sampler = _epoch_sampler(loader)
    return None if sampler is None else int(sampler.epoch)


def restore_dataloader(
    loader: Stateful, state_dict: dict[str, Any], epoch: int | None, last_step: StepInfo
) -> "RestoredEpoch | None":
    """Put a loader back, completely; call it before the random generators are restored.

    Args:
        loader: anything stateful; what the module says is done for torch's ``DataLoader`` and its subclasses.
        state_dict: what its ``state_dict`` returned.
        epoch: what `sampler_epoch` returned then; None when nobody asked (a generation of an older version): the epoch
            of ``last_step`` is taken.
        last_step: the last step that was trained.

    Returns:
        what is left of an epoch whose order depends on the sampler's; None when nothing is.

    Raises:
        CheckpointMismatchError: the loader is not where it was, or its sampler advances its epoch by itself while
            batches are read ahead, so that the epoch of these batches is not known.
    """
    sampler = _epoch_sampler(loader)
    if sampler is None:
        _restore_place(loader, state_dict)
        _end_if_over(loader, state_dict, last_step)
        return None
    found, built_as = int(sampler.epoch), last_step.epoch if epoch is None else epoch
    sampler.set_epoch(built_as)
    _restore_place(loader, state_dict)
    advanced = int(sampler.epoch) != built_as
    # Not known, the epoch is left for the script to say: `RestoredEpoch.check` then finds one that never says it.
    sampler.set_epoch(found if epoch is None else epoch)
    if _end_if_over(loader, state_dict, last_step):
        return None
    if advanced:
        raise CheckpointMismatchError(
            f"{type(sampler).__name__} went on from epoch {built_as} by itself while batches were read ahead: which "
            "epoch they are of was not saved. Use a sampler that changes its epoch in set_epoch only, or num_workers=0"
        )
    return RestoredEpoch(loader, sampler, built_as, last_step.next().epoch)


@dataclass(frozen=True)
class RestoredEpoch:
    """The rest of an epoch that a restored loader still has to give.

    Attributes:
        loader: whose iterator is built already.
        sampler: the loader's.
        epoch: what the sampler was told when that was built.
        run_epoch: the epoch of the run's next step.
    """

    loader: Stateful
    sampler: EpochSampler
    epoch: int
    run_epoch: int

    def check(self, step: StepInfo) -> None:
        """See, after the first step that was trained, that the script takes the rest for what it is.

        Raises:
            ConfigError: the sampler is at another epoch.
        """
        told = int(self.sampler.epoch)
        if told == self.epoch or step.epoch != self.run_epoch or _is_over(self.loader, self.loader.state_dict()):
            return
        raise ConfigError(
            f"the sampler is at epoch {told} after the first step since load, but the rest of the epoch that was "
            f"resumed is read in the order of epoch {self.epoch}: samples would be lost or repeated. Begin the loop "
            "over epochs, and set_epoch, with the epoch of last_step_info.next() of what load returned; start again"
        )


def _epoch_sampler(loader: Any) -> EpochSampler | None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    for found in (getattr(loader, "sampler", None), batch_sampler, inner, getattr(loader, "dataset", None)):
        if isinstance(found, EpochSampler) and getattr(found, "shuffle", True):
            return found
    return None


def _restore_place(loader: Stateful, state_dict: dict[str, Any]) -> None:
    loader.load_state_dict(state_dict)
    said = loader.state_dict()  # has torchdata's build its iterator
    if isinstance(loader, ResumableDataLoader):
        return  # it has looked itself, and its batch size may be another
    given = _batches_given(state_dict)
    if given is None and not _equal(said, state_dict):
        raise CheckpointMismatchError(
            f"{type(loader).__name__}.state_dict() is not what was given to load_state_dict: the loader is not where "
            "it was, or does not say so before its first batch. It must give back the state that it was restored from"
        )
    if given is not None and given != _batches_given(said):
        raise CheckpointMismatchError(
            f"the dataloader was saved after {given} batches of an epoch, and once restored says it is after "
            f"{_batches_given(said)}: its load_state_dict does not restore it. Pass the StatefulDataLoader itself"
        )


def _batches_given(state_dict: Any) -> int | None:
    """Batches of the epoch that a ``StatefulDataLoader`` had given, with and without workers; None: not of one."""
    if not isinstance(state_dict, Mapping):
        return None
    if isinstance(snapshot := state_dict.get("_snapshot"), Mapping):
        return snapshot["_snapshot_step"] + state_dict["_steps_since_snapshot"]
    return state_dict.get("_num_yielded")


def _end_if_over(loader: Stateful, state_dict: dict[str, Any], last_step: StepInfo) -> bool:
    """Take the end of an epoch that is over, as the loop that trained it did, so that the next loop is the next epoch;
    whether it is over."""
    if not isinstance(loader, DataLoader):
        return False
    if state_dict.get("_iterator_finished"):
        return True
    if isinstance(loader.dataset, IterableDataset):  # how long it is only its end tells
        over = last_step.epoch_step == last_step.steps_per_epoch - 1
    else:
        over = _is_over(loader, state_dict)
    if over and next(iter(loader), _END) is not _END:
        _restore_place(loader, state_dict)
        return False
    return over


def _is_over(loader: Stateful, state_dict: Mapping[str, Any]) -> bool:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        with suppress(TypeError):  # a sampler without a length
            return _batches_given(state_dict) == len(loader)
    return False


def _equal(one: Any, other: Any) -> bool:
    """Whether two states hold the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and torch.equal(bytes_of(one.contiguous()), bytes_of(other.contiguous()))  # (NaN equals NaN)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
