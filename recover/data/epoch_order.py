"""Note what the order of an epoch's samples was made from, so that a resumed run can make the same order again.

A sampler makes the order from its seed and the epoch given to ``set_epoch``, or draws it from a generator (torch's
``RandomSampler``, ``SubsetRandomSampler``, ``WeightedRandomSampler``). The state of torchdata's ``StatefulDataLoader``
includes none of these. In the middle of an epoch it is too late to ask for them: the generator has drawn, and a sampler
may have moved on to the next epoch while batches were prefetched. So `note_order` makes the sampler's ``__iter__``
write an `OrderNote` when the epoch begins.
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
    """A sampler or dataset with an order that depends on its epoch, such as torch's ``DistributedSampler``."""

    epoch: int

    def set_epoch(self, epoch: int, /) -> None:
        """Use the order of ``epoch`` for iterators built from now on."""
        ...


@dataclass(frozen=True)
class EpochOrder:
    """Origin of the order of the current epoch. Between two epochs, of the next one."""

    epoch: int | None = None  # epoch of the sampler. None if the order does not depend on it, or it is unknown
    # state of the sampler's generator before its first draw, uint8. None if it has none, or it is unknown
    generator: torch.Tensor | None = None
    # the sampler's seeds, and its generators of other names and kinds. See `draws_of`
    draws: dict[str, Any] = field(default_factory=dict)


class OrderNote:
    """Origin of the order of a sampler, written when the sampler is iterated over. Only the loader may iterate over it.

    Attributes:
        sampler: the sampler.
        order: order of the current epoch. None before its first sample.
        advanced: whether the sampler moved on to another epoch by itself after the last sample.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.order: EpochOrder | None = None
        self.advanced = False
        self._resumed: torch.Tensor | None = None
        self._begin = type(sampler).__iter__

    def next_order(self) -> EpochOrder:
        """Origin of the order of an epoch that begins now."""
        draws = {name: draw for name, draw in draws_of(self.sampler).items() if name != "generator"}
        if (epoch := _epoch(self.sampler)) is not None:
            return EpochOrder(epoch, draws=draws)
        if self._resumed is not None:
            return EpochOrder(generator=self._resumed, draws=draws)
        generator = _generator(self.sampler)
        return EpochOrder(generator=None if generator is None else generator.get_state(), draws=draws)

    def resume(self, generator: torch.Tensor | None) -> None:
        """Draw the next order from this state of the generator."""
        self._resumed = generator

    def iterate(self) -> Iterator[Any]:
        """Iterate over the sampler as its own ``__iter__`` does, and note the order."""
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
            if generator is torch.default_generator:  # the run drew this order earlier
                generator.set_state(before)
            yield from chain(first, samples)
        self.advanced = _epoch(self.sampler) != order.epoch


def note_order(loader: Any) -> OrderNote | None:
    """Note the order of the loader's sampler, from its next iterator on. Returns None if there is nothing to note.

    The sampler's ``__iter__`` writes the note (see `replace_iter`). For a batch sampler without a ``sampler``, the
    batch sampler itself is noted. Samplers whose state the loader saves are left alone.
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
    """Make ``iter(source)`` return ``iterate(source)``, for this object only.

    The object gets a subclass of its class, because Python looks up ``__iter__`` in the class. Pickles and copies of
    the object have its original class, so worker processes and ``copy.deepcopy`` get the sampler as the user made it.

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
    """Seeds and generator states among the attributes of a sampler, as plain values by name.

    A seed is an integer attribute whose name ends with ``seed``, such as ``DistributedSampler.seed`` and
    ``SeedableRandomSampler.initial_seed``. A generator is one of torch, numpy or Python. A sampler with ``shuffle``
    False has neither.
    """
    if not getattr(source, "shuffle", True):
        return {}
    found = {name: _draw(name, value) for name, value in getattr(source, "__dict__", {}).items()}
    return {name: draw for name, draw in found.items() if draw is not None}


def restore_draws(source: Any, draws: Mapping[str, Any]) -> None:
    """Restore the result of `draws_of`. Names that ``source`` does not have are ignored.

    Raises:
        CheckpointMismatchError: the attribute is another kind of generator than in the saved run.
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
    """The loader's sampler or dataset whose order depends on the epoch, or None."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    for found in (getattr(loader, "sampler", None), batch_sampler, inner, getattr(loader, "dataset", None)):
        if _epoch(found) is not None:
            return found
    return None


def epoch_order(loader: Any, state_dict: Mapping[str, Any]) -> EpochOrder:
    """Origin of the order of the loader's current epoch.

    Args:
        loader: a loader on which `note_order` was called before its iterator was built.
        state_dict: current ``state_dict`` of the loader.

    Raises:
        ConfigError: the order was drawn from a generator before `note_order` was called.
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
    """Batches of the epoch that a ``StatefulDataLoader`` has yielded. None for the state of another loader."""
    if not isinstance(state_dict, Mapping):
        return None
    if isinstance(snapshot := state_dict.get("_snapshot"), Mapping):
        return snapshot["_snapshot_step"] + state_dict["_steps_since_snapshot"]
    return state_dict.get("_num_yielded")


def _epoch(sampler: Any) -> int | None:
    return int(sampler.epoch) if isinstance(sampler, EpochSampler) and getattr(sampler, "shuffle", True) else None


def _is_torchdatas(sampler: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "torchdata" for base in type(sampler).__mro__)


def _generator(sampler: Any) -> torch.Generator | None:
    """Generator of a sampler with the attribute ``generator``. None there means torch's default generator."""
    generator = getattr(sampler, "generator", sampler)
    if generator is None:
        return torch.default_generator
    return generator if isinstance(generator, torch.Generator) else None
