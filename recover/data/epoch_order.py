"""What the order of an epoch's samples was made from, noted when the epoch begins, so that it can be made again.

A sampler makes an epoch's order from its seed and the epoch given to ``set_epoch``, or draws it from a generator
(torch's ``RandomSampler``, ``SubsetRandomSampler``, ``WeightedRandomSampler``). None of them is part of the state of
torchdata's ``StatefulDataLoader``, and the middle of an epoch is too late to ask for them: the generator has drawn, and
a sampler that goes on to the next epoch by itself may have done so while batches were read ahead. So `note_order` has
the sampler's ``__iter__`` write an `OrderNote`.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

from ...engine.api import Stateful
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger

logger = get_logger(__name__)

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
        draws: the sampler's seeds and its generators of other names and kinds; see `draws_of`.
    """

    epoch: int | None = None
    generator: torch.Tensor | None = None
    draws: dict[str, Any] = field(default_factory=dict)


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
        draws = {name: draw for name, draw in draws_of(self.sampler).items() if name != "generator"}
        if (epoch := _epoch(self.sampler)) is not None:
            return EpochOrder(epoch, draws=draws)
        if self._resumed is not None:
            return EpochOrder(generator=self._resumed, draws=draws)
        generator = _generator(self.sampler)
        return EpochOrder(generator=None if generator is None else generator.get_state(), draws=draws)

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

    The sampler's ``__iter__`` writes the note (see `replace_iter`). A batch sampler without a ``sampler`` is noted
    itself. Samplers whose state the loader saves are left alone.
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


def replace_iter(source: Any, iterate: Callable[[Any], Iterator[Any]], **attributes: Any) -> None:
    """Have ``iter(source)`` return ``iterate(source)``, for this object only.

    The object gets a subclass of its class, since Python looks for ``__iter__`` in the class. Pickles and copies of the
    object are of its own class: worker processes and ``copy.deepcopy`` get the sampler as the user made it.

    Args:
        source: a sampler or batch sampler.
        iterate: called with ``source``.
        attributes: further attributes of the subclass.
    """
    own: Any = type(source)

    def reduce(self: Any, protocol: int) -> Any:
        make, given, *state = own.__reduce_ex__(self, protocol)
        return (_make, tuple(own if each is type(self) else each for each in (make, *given)), *state)

    body: dict[str, Any] = {
        "__iter__": iterate,
        "__reduce_ex__": reduce,
        "__module__": own.__module__,
        "__doc__": own.__doc__,
    }
    source.__class__ = type(own.__name__, (own,), body | attributes)


def _make(make: Callable[..., Any], *given: Any) -> Any:
    return make(*given)


def draws_of(source: Any) -> dict[str, Any]:
    """The seeds and the states of the generators among the attributes of a sampler, as plain values by name.

    A seed is an integer in an attribute whose name ends with ``seed``, as ``DistributedSampler.seed`` and
    ``SeedableRandomSampler.initial_seed``. A generator is one of torch, numpy or python. A sampler with ``shuffle``
    False has neither.
    """
    if not getattr(source, "shuffle", True):
        return {}
    found = {name: _draw(name, value) for name, value in getattr(source, "__dict__", {}).items()}
    return {name: draw for name, draw in found.items() if draw is not None}


def restore_draws(source: Any, draws: Mapping[str, Any]) -> None:
    """Put back what `draws_of` returned; names that ``source`` has no such attribute for are left out.

    Raises:
        CheckpointMismatchError: the attribute is a generator of another kind than the run had.
    """
    for name, draw in draws.items():
        value = getattr(source, name, None)
        here = _draw(name, value)
        if here is None:
            continue
        kinds = [each.get("bit_generator") if isinstance(each, dict) else type(each) for each in (here, draw)]
        if kinds[0] != kinds[1]:
            raise CheckpointMismatchError(
                f"{name} of {type(source).__name__} is {value!r}, and was another kind of generator or seed when the "
                "run was saved: samples would be lost or repeated. Resume with the sampler of the run"
            )
        match value:
            case torch.Generator():
                value.set_state(draw)
            case np.random.Generator():
                value.bit_generator.state = draw
            case np.random.RandomState():
                value.set_state(draw)
            case random.Random():
                version, words, gauss = draw
                value.setstate((version, tuple(words), gauss))
            case _ if value != draw:
                logger.info(
                    "%s.%s is %s here: the run goes on with its own, %s", type(source).__name__, name, here, draw
                )
                setattr(source, name, draw)


def _draw(name: str, value: Any) -> Any:
    match value:
        case torch.Generator():
            return value.get_state()
        case np.random.Generator():
            return _plain(value.bit_generator.state)
        case np.random.RandomState():
            return _plain(value.get_state(legacy=False))
        case random.Random() if not isinstance(value, random.SystemRandom):
            return _plain(value.getstate())
        case int() if name.endswith("seed") and not isinstance(value, bool):
            return value
        case _:
            return None


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(each) for key, each in state.items()}
    if isinstance(state, tuple):
        return [_plain(each) for each in state]
    return state.tolist() if isinstance(state, np.ndarray) else state


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
    return EpochOrder(int(sampler.epoch), order.generator, order.draws or draws_of(sampler))


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
