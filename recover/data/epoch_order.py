"""What the order of an epoch's samples was made from, noted when the epoch begins, so that it can be made again.

A sampler makes an epoch's order of the epoch that it was told (``set_epoch``), or draws it from a generator (torch's
``RandomSampler``, ``SubsetRandomSampler``, ``WeightedRandomSampler``). Neither is part of the state of torchdata's
``StatefulDataLoader``, and in the middle of an epoch neither can be asked for any more: the generator has drawn, and a
sampler that goes on to the next epoch by itself may have done so while batches were read ahead. So `note_order` has the
sampler's ``__iter__`` write an `OrderNote`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from ...engine.api import Stateful
from ...utils.errors import ConfigError

_NOTE = "_holdfast_order_note"


@runtime_checkable
class EpochSampler(Protocol):
    """What orders samples by the epoch that it was told last: torch's ``DistributedSampler``, many datasets."""

    epoch: int

    def set_epoch(self, epoch: int, /) -> None:
        """Order the samples of iterators built from now on as those of ``epoch``."""
        ...


@dataclass(frozen=True)
class EpochOrder:
    """What the order of the epoch under way was made from; of the next one between two epochs.

    Attributes:
        epoch: the epoch that the sampler was at; None when the order does not depend on it, or it is not known.
        generator: the state of the sampler's generator before its first draw, uint8; None when it draws from none, or
            it is not known.
    """

    epoch: int | None = None
    generator: torch.Tensor | None = None


class OrderNote:
    """What the order of a sampler was made from, written when it is iterated over. Only the loader may do that.

    Attributes:
        sampler: whose order.
        order: of the epoch under way; None before its first sample.
        advanced: whether the sampler went on to another epoch by itself when it had given the last sample.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.order: EpochOrder | None = None
        self.advanced = False
        self._resumed: torch.Tensor | None = None
        self._begin = type(sampler).__iter__

    def next_order(self) -> EpochOrder:
        """What the order of an epoch that begins now is made from."""
        if (epoch := _epoch(self.sampler)) is not None:
            return EpochOrder(epoch)
        if self._resumed is not None:
            return EpochOrder(generator=self._resumed)
        generator = _generator(self.sampler)
        return EpochOrder() if generator is None else EpochOrder(generator=generator.get_state())

    def resume(self, generator: torch.Tensor | None) -> None:
        """Have the next order drawn from this state of the generator."""
        self._resumed = generator

    def iterate(self) -> Iterator[Any]:
        """What the sampler's own ``__iter__`` gives."""
        self.order, self.advanced = None, False
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        order, state, generator = self.next_order(), self._resumed, _generator(self.sampler)
        self.order, self._resumed = order, None
        if state is None or generator is None:
            yield from self._begin(self.sampler)
        else:
            before = generator.get_state()
            generator.set_state(state)
            samples = self._begin(self.sampler)
            first = list(islice(samples, 1))
            if generator is torch.default_generator:  # the run has drawn this order earlier
                generator.set_state(before)
            yield from chain(first, samples)
        self.advanced = _epoch(self.sampler) != order.epoch


def note_order(loader: Any) -> OrderNote | None:
    """Have the order of the loader's sampler noted from its next iterator on; None when there is nothing to note.

    The sampler's class becomes a subclass that writes the note. Left alone are samplers whose state the loader saves.
    """
    if not isinstance(loader, DataLoader):
        return None
    holder = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler: Any = getattr(holder, "sampler", None)
    if (note := getattr(sampler, _NOTE, None)) is not None:
        return note
    if isinstance(sampler, Stateful) or (_epoch(sampler) is None and _generator(sampler) is None):
        return None
    if _is_torchdatas(sampler) and (holder is loader or _is_torchdatas(holder)):
        return None
    note, own = OrderNote(sampler), type(sampler)
    sampler.__class__ = type(own.__name__, (own,), {"__iter__": lambda _: note.iterate(), _NOTE: note})
    return note


def epoch_sampler(loader: Any) -> EpochSampler | None:
    """The loader's sampler, or dataset, whose order depends on the epoch that it was told."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    for found in (getattr(loader, "sampler", None), batch_sampler, inner, getattr(loader, "dataset", None)):
        if _epoch(found) is not None:
            return found
    return None


def epoch_order(loader: Any, state_dict: Mapping[str, Any]) -> EpochOrder:
    """What the order of the loader's epoch under way was made from.

    Args:
        loader: a loader that `note_order` has seen before its iterator was built.
        state_dict: what its ``state_dict`` returned just now.

    Raises:
        ConfigError: the order was drawn from a generator before `note_order` had seen the loader.
    """
    note, sampler = note_order(loader), epoch_sampler(loader)
    order = EpochOrder() if note is None else note.order or note.next_order()
    if note is not None and note.order is None and order.generator is not None and batches_given(state_dict):
        raise ConfigError(
            f"{type(note.sampler).__name__} drew the order of this epoch before load had seen the dataloader: it could "
            "not be resumed. Pass the dataloader to load too, and begin to iterate over it after that"
        )
    if sampler is None or (note is not None and note.sampler is sampler):
        return order
    return EpochOrder(int(sampler.epoch), order.generator)


def batches_given(state_dict: Any) -> int | None:
    """Batches of the epoch that a ``StatefulDataLoader`` had given, with and without workers; None: not of one."""
    if not isinstance(state_dict, Mapping):
        return None
    if isinstance(snapshot := state_dict.get("_snapshot"), Mapping):
        return snapshot["_snapshot_step"] + state_dict["_steps_since_snapshot"]
    return state_dict.get("_num_yielded")


def _epoch(sampler: Any) -> int | None:
    return int(sampler.epoch) if isinstance(sampler, EpochSampler) and getattr(sampler, "shuffle", True) else None


def _is_torchdatas(sampler: Any) -> bool:
    """(Which need not be installed.)"""
    return any(base.__module__.partition(".")[0] == "torchdata" for base in type(sampler).__mro__)


def _generator(sampler: Any) -> torch.Generator | None:
    """What a sampler with a ``generator`` draws from: that, or torch's own where it is None."""
    generator = getattr(sampler, "generator", sampler)
    if generator is None:
        return torch.default_generator
    return generator if isinstance(generator, torch.Generator) else None
