"""Capture the position of the dataloader of each process: its state, and the origin of its epoch's
order.

A sampler makes the order from its seed and the epoch given to ``set_epoch``, or draws it from a
generator (torch's ``RandomSampler``, ``SubsetRandomSampler``, ``WeightedRandomSampler``). The state
of torchdata's ``StatefulDataLoader`` includes none of these. In the middle of an epoch it is too
late to ask for them: the generator has drawn, and a sampler may have moved on to the next epoch
while batches were prefetched. So `note_order` makes the sampler's ``__iter__`` write an `OrderNote`
when the epoch begins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from ...engine.api import Stateful
from ...utils.errors import ConfigError
from ...utils.plain_values import pack_plain
from ..ranks import Ranks
from .samplers import draws_of, replace_iter
from .trial import first_batches

DATA_STATE = "data.pt"
_NOTE = "_holdfast_order_note"


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler or dataset with an order that depends on its epoch, such as torch's
    ``DistributedSampler``.
    """

    epoch: int

    def set_epoch(self, epoch: int, /) -> None:
        """Use the order of ``epoch`` for iterators built from now on."""
        ...


@dataclass(frozen=True)
class EpochOrder:
    """Origin of the order of the current epoch. Between two epochs, of the next one."""

    epoch: int | None = (
        None  # epoch of the sampler. None if the order does not depend on it, or it is unknown
    )
    generator: torch.Tensor | None = (
        None  # state before the first draw, uint8. None if there is none, or it is unknown
    )
    draws: dict[str, Any] = field(
        default_factory=dict
    )  # seeds and generators of other names and kinds (`draws_of`)


def capture_data(ranks: Ranks, dataloader: Stateful | None) -> bytes | None:
    """Capture the contents of `DATA_STATE`: the state and epoch order of the loader of every caller
    with its own data.

    Only the first one is captured if any number of callers can resume its state. Collective over
    the callers. Raises `ConfigError` if a state could not be resumed, or only some have a
    dataloader.
    """
    found = ranks.here(lambda: None if dataloader is None else _capture_loader(dataloader))
    of_heads = {rank: found[rank] for rank in range(0, len(found), ranks.ranks_with_same_data)}
    captured = [each for each in of_heads.values() if each is not None]
    if not captured:
        return None
    if len(captured) < len(of_heads):
        raise ConfigError(
            f"rank(s) {[i for i, each in of_heads.items() if each is None]} passed no dataloader"
        )
    rank_independent = getattr(dataloader, "rank_independent", False)
    saved = captured[:1] if rank_independent else captured
    data = {
        "rank_independent": rank_independent,
        "states": [state for state, _ in saved],
        "sampler_epochs": [order.epoch for _, order in saved],
        "sampler_generators": [order.generator for _, order in saved],
        "sampler_draws": [order.draws for _, order in saved],
    }
    return pack_plain("dataloader state", data)


def _capture_loader(dataloader: Stateful) -> tuple[bytes, EpochOrder]:
    state_dict = dataloader.state_dict()
    order = epoch_order(dataloader, state_dict)
    first = first_batches(dataloader)
    return pack_plain("dataloader state", state_dict), replace(order, draws=order.draws | first)


class OrderNote:
    """Origin of the order of a sampler, written when the loader, and only the loader, iterates over
    it.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.order: EpochOrder | None = None  # of the current epoch, from its first sample on
        self.advanced = (
            False  # the sampler moved on to another epoch by itself after the last sample
        )
        self.resumed: torch.Tensor | None = (
            None  # after a restore: draw the next order from this state
        )
        self._begin = type(sampler).__iter__

    def next_order(self) -> EpochOrder:
        """Origin of the order of an epoch that begins now."""
        draws = {name: draw for name, draw in draws_of(self.sampler).items() if name != "generator"}
        if (epoch := _epoch(self.sampler)) is not None:
            return EpochOrder(epoch, draws=draws)
        if self.resumed is not None:
            return EpochOrder(generator=self.resumed, draws=draws)
        generator = _generator(self.sampler)
        return EpochOrder(
            generator=None if generator is None else generator.get_state(), draws=draws
        )

    def iterate(self) -> Iterator[Any]:
        """Iterate over the sampler as its own ``__iter__`` does, and note the order."""
        self.order, self.advanced = None, False
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        order, state, generator = self.next_order(), self.resumed, _generator(self.sampler)
        self.order, self.resumed = order, None
        if state is None or generator is None:
            yield from self._begin(self.sampler)
        else:
            before = generator.get_state()
            generator.set_state(state)
            samples = self._begin(self.sampler)
            first = list(islice(samples, 1))
            if generator is torch.default_generator:  # the run drew this order earlier
                generator.set_state(before)
            yield from chain(first, samples)
        self.advanced = _epoch(self.sampler) != order.epoch


def note_order(loader: Any) -> OrderNote | None:
    """Note the order of the loader's sampler, from its next iterator on. Returns None if there is
    nothing to note.

    For a batch sampler without a ``sampler``, the batch sampler itself is noted. Samplers whose
    state the loader saves are left alone.
    """
    if not isinstance(loader, DataLoader):
        return None
    holder = loader if loader.batch_sampler is None else loader.batch_sampler
    inner: Any = getattr(holder, "sampler", None)
    sampler = holder if inner is None else inner
    if (note := getattr(sampler, _NOTE, None)) is not None:
        return note
    if isinstance(sampler, Stateful):
        return None
    if _epoch(sampler) is None and _generator(sampler) is None and not draws_of(sampler):
        return None
    if _is_torchdatas(sampler) and (holder is loader or _is_torchdatas(holder)):
        return None
    note = OrderNote(sampler)
    replace_iter(sampler, lambda _: note.iterate(), **{_NOTE: note})
    return note


def epoch_sampler(loader: Any) -> EpochSampler | None:
    """Return the loader's sampler, else its dataset, if its order depends on an epoch
    (``set_epoch``), else None.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    for found in (
        getattr(loader, "sampler", None),
        batch_sampler,
        inner,
        getattr(loader, "dataset", None),
    ):
        if _epoch(found) is not None:
            return found
    return None


def epoch_order(loader: Any, state_dict: Mapping[str, Any]) -> EpochOrder:
    """Origin of the order of the epoch of a loader that is now at ``state_dict``.

    Raises:
        ConfigError: the order was drawn from a generator before `note_order` was called.
    """
    note, sampler = note_order(loader), epoch_sampler(loader)
    order = EpochOrder() if note is None else note.order or note.next_order()
    if (
        note is not None
        and note.order is None
        and order.generator is not None
        and batches_given(state_dict)
    ):
        raise ConfigError(
            f"{type(note.sampler).__name__} drew the order of this epoch before load had seen the "
            "dataloader: it could not be resumed. Pass the dataloader to load too, and begin to "
            "iterate over it after that"
        )
    if sampler is None or (note is not None and note.sampler is sampler):
        return order
    return EpochOrder(int(sampler.epoch), order.generator, order.draws or draws_of(sampler))


def batches_given(state_dict: Any) -> int | None:
    """Batches of the epoch that a ``StatefulDataLoader`` has yielded. None for the state of another
    loader.
    """
    if not isinstance(state_dict, Mapping):
        return None
    if isinstance(snapshot := state_dict.get("_snapshot"), Mapping):
        return snapshot["_snapshot_step"] + state_dict["_steps_since_snapshot"]
    return state_dict.get("_num_yielded")


def _epoch(sampler: Any) -> int | None:
    return (
        int(sampler.epoch)
        if isinstance(sampler, EpochSampler) and getattr(sampler, "shuffle", True)
        else None
    )


def _is_torchdatas(sampler: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "torchdata" for base in type(sampler).__mro__)


def _generator(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", sampler)
    if generator is None:  # torch's samplers then use the default one
        return torch.default_generator
    return generator if isinstance(generator, torch.Generator) else None
