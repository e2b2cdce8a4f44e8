"""Capture the position of the dataloader of each process: its state, and the origin of its epoch's
order.

A sampler makes the order from its seed and the epoch given to ``set_epoch``, or draws it from a
generator (torch's ``RandomSampler``, ``SubsetRandomSampler``, ``WeightedRandomSampler``). The state
of torchdata's ``StatefulDataLoader`` includes none of these. In the middle of an epoch it is too
late to ask for them: the generator has drawn, and a sampler may have moved on to the next epoch
while batches were prefetched. So `note_order` makes the sampler's ``__iter__`` write an `OrderNote`
when the epoch begins.

Where else a sampler may draw from, and whether the indices are the same again, see `indices`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...engine.api import Stateful
from ...utils.errors import ConfigError
from ...utils.plain_values import pack_plain
from ..ranks import Ranks
from .indices import draws_nothing, note_indices
from .loader import ORDER_SETTINGS
from .samplers import draws_of, is_torchdatas, replace_iter
from .trial import first_batches

DATA_STATE = "data.pt"
_NOTE = "_holdfast_order_note"
_SETTINGS = ("dataset_fingerprint", *ORDER_SETTINGS)
"""Values in a state that `ResumableDataLoader` compares when it is restored."""


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

    # epoch of the sampler. None if the order does not depend on it, or it is unknown
    epoch: int | None = None
    # state before the first draw, uint8. None if there is none, or it is unknown
    generator: Tensor | None = None
    # seeds and generators of other names and kinds (`draws_of`)
    draws: dict[str, Any] = field(default_factory=dict)
    # indices of the batches that were given (`IndexNote.state`). Empty if there are none
    indices: dict[str, Any] = field(default_factory=dict)
    # size of the dataset of which torchdata's sampler has drawn the order. None if none is drawn
    drawn_of: int | None = None


def capture_data(ranks: Ranks, dataloader: Stateful | None) -> bytes | None:
    """Capture the contents of `DATA_STATE`: the state and epoch order of the loader of every caller
    with its own data.

    Only the first one is captured if any number of callers can resume its state. Collective over
    the callers. Raises `ConfigError` if a state could not be resumed, or only some have a
    dataloader.
    """
    # Ranks with the same data have loaders in the same position: the head of each is enough.
    found = ranks.here(lambda: None if dataloader is None else _capture_loader(dataloader))
    of_heads = {rank: found[rank] for rank in range(0, len(found), ranks.ranks_with_same_data)}
    saved = [loader for loader in of_heads.values() if loader is not None]
    if not saved:
        return None
    if len(saved) < len(of_heads):
        without = [rank for rank, loader in of_heads.items() if loader is None]
        raise ConfigError(f"rank(s) {without} passed no dataloader")
    rank_independent = getattr(dataloader, "rank_independent", False)
    if rank_independent:
        saved = saved[:1]
    orders = [order for _, order in saved]
    data = {
        "rank_independent": rank_independent,
        "states": [state for state, _ in saved],
        "sampler_epochs": [order.epoch for order in orders],
        "sampler_generators": [order.generator for order in orders],
        "sampler_draws": [order.draws for order in orders],
        "sampler_indices": [order.indices for order in orders],
        "sampler_drawn_of": [order.drawn_of for order in orders],
    }
    return pack_plain("dataloader state", data)


def _capture_loader(dataloader: Stateful) -> tuple[bytes, EpochOrder]:
    state_dict = dataloader.state_dict()
    order = epoch_order(dataloader, state_dict)
    draws = order.draws | first_batches(dataloader)
    return pack_plain("dataloader state", state_dict), replace(order, draws=draws)


class OrderNote:
    """Origin of the order of a sampler, written when the loader, and only the loader, iterates over
    it.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.order: EpochOrder | None = None  # of the current epoch, from its first sample on
        # the sampler moved on to another epoch by itself after the last sample
        self.advanced = False
        # after a restore: draw the next order from this state
        self.resumed: Tensor | None = None
        self._begin = type(sampler).__iter__

    def next_order(self) -> EpochOrder:
        """Origin of the order of an epoch that begins now."""
        draws = draws_of(self.sampler)
        draws.pop("generator", None)
        epoch = _epoch(self.sampler)
        if epoch is not None:
            return EpochOrder(epoch, draws=draws)
        state = self.resumed
        if state is None:
            generator = _generator(self.sampler)
            state = None if generator is None else generator.get_state()
        return EpochOrder(generator=state, draws=draws)

    def iterate(self) -> Iterator[Any]:
        """Iterate over the sampler as its own ``__iter__`` does, and note the order."""
        self.order = None
        self.advanced = False
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        # When the first sample is asked for.
        order = self.next_order()
        state = self.resumed
        generator = _generator(self.sampler)
        self.order = order
        self.resumed = None

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


def require_state(loader: Any) -> None:
    """Refuse a loader that cannot tell its position, such as torch's ``DataLoader``. None is no
    loader.

    Raises:
        ConfigError: it lacks ``state_dict`` or ``load_state_dict``, accelerate wraps it, or
            torchdata's sampler draws from the loader's generator.
    """
    # Accelerate's have both methods in any case, and ask the loader inside.
    inner = getattr(loader, "base_dataloader", loader)
    has_state = hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")
    if has_state and inner is not loader:
        raise ConfigError(
            "the dataloader is of an Accelerator with use_stateful_dataloader=True, and tells its "
            "place only after its first batch, so that every restart would be refused; make the "
            "Accelerator without use_stateful_dataloader, and give the loader in `recoverable` of "
            "holdfast.integrations.accelerate"
        )
    if isinstance(loader, DataLoader) and has_state:
        _require_other_generator(loader)
    if loader is None or has_state:
        return
    raise ConfigError(
        f"the dataloader is a {type(inner).__name__}, which lacks state_dict/load_state_dict, so "
        "that a restart could not find its place; give a ResumableDataLoader, torchdata's "
        "StatefulDataLoader, or torch's DataLoader in `recoverable` of "
        "holdfast.integrations.accelerate"
    )


def _require_other_generator(loader: DataLoader) -> None:
    """Refuse a sampler of torchdata on the generator of its loader.

    In an epoch the sampler draws its order, and then the loader a number. A restore sets the
    generator back and draws the order only.
    """
    sampler, is_saved = _order_of(loader)
    own = getattr(sampler, "generator", None)
    if not is_saved or own is None or own is not loader.generator:
        return
    raise ConfigError(
        f"torchdata's {type(sampler).__name__} and the {type(loader).__name__} draw from one "
        "generator, which torchdata restores without the draw of the loader, so that later epochs "
        "would have another order after a resume; instead of shuffle=True give the loader "
        "sampler=torch.utils.data.RandomSampler(dataset, generator=generator)"
    )


def require_same_settings(ranks: Ranks, dataloader: Any) -> None:
    """Refuse ``rank_independent`` loaders that differ in dataset, seed or batches, because only the
    first one's state is saved. Collective over the callers.

    The position is not compared: with `SharedRollouts` only the loader of rank 0 moves.

    Raises:
        ConfigError: a rank has other settings than the first one. Raised on all ranks.
    """
    found = ranks.here(lambda: _settings(dataloader))
    given = {rank: settings for rank, settings in enumerate(found) if settings}
    saved = next(iter(given.values()), {})
    others = [rank for rank, settings in given.items() if settings != saved]
    if not others:
        return
    other = given[others[0]]
    differing = [key for key in _SETTINGS if other.get(key) != saved.get(key)]
    raise ConfigError(
        f"the dataloader of rank(s) {others} has another {', '.join(differing)} than that of the "
        "first rank, whose state is saved for all, so that a restart would be refused; give every "
        "rank the same dataset and settings, and share the batches by `rank` and `world_size`"
    )


def _settings(loader: Any) -> dict[str, Any]:
    if not getattr(loader, "rank_independent", False):
        return {}
    state = loader.state_dict()
    return {key: state[key] for key in _SETTINGS if key in state}


def note_order(loader: Any) -> OrderNote | None:
    """Note the order of the loader's sampler, and its indices, from its next iterator on. Returns
    None if the order has no known origin to note.

    For a batch sampler without a ``sampler``, the batch sampler itself is noted. Samplers whose
    state the loader saves are left alone.
    """
    note = _note_origin(loader)
    note_indices(loader)  # around the first note
    return note


def _note_origin(loader: Any) -> OrderNote | None:
    if not isinstance(loader, DataLoader):
        return None
    sampler, is_saved = _order_of(loader)
    note = getattr(sampler, _NOTE, None)
    if note is not None:
        return note

    # Samplers whose state the loader saves, and those whose order is always the same.
    if isinstance(sampler, Stateful) or is_saved:
        return None
    if _epoch(sampler) is None and _generator(sampler) is None and not draws_of(sampler):
        return None

    note = OrderNote(sampler)
    replace_iter(sampler, lambda _: note.iterate(), **{_NOTE: note})
    return note


def _order_of(loader: DataLoader) -> tuple[Any, bool]:
    """Return the sampler that decides the order, and whether torchdata saves its state."""
    # torch iterates over the batch sampler, and a batch sampler over its sampler.
    holder = loader if loader.batch_sampler is None else loader.batch_sampler
    inner: Any = getattr(holder, "sampler", None)
    sampler = holder if inner is None else inner
    is_saved = is_torchdatas(sampler) and (holder is loader or is_torchdatas(holder))
    return sampler, is_saved


def epoch_sampler(loader: Any) -> EpochSampler | None:
    """Return the loader's sampler, else its dataset, if its order depends on an epoch
    (``set_epoch``), else None.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    )
    return next((found for found in candidates if _epoch(found) is not None), None)


def epoch_order(loader: Any, state_dict: Mapping[str, Any]) -> EpochOrder:
    """Origin of the order of the epoch of a loader that is now at ``state_dict``.

    Raises:
        ConfigError: the order was drawn from a generator before `note_order` was called.
    """
    note = note_order(loader)
    read = note_indices(loader)
    given = batches_given(state_dict)
    order = EpochOrder()
    if note is not None:
        order = note.order or note.next_order()

    # Nothing is known about indices that were drawn before the notes.
    unseen: Any = None
    if note is not None and note.order is None and order.generator is not None:
        unseen = note.sampler
    if read is not None and not read.has_begun and order.epoch is None:
        unseen = read.source
    if given and unseen is not None and not draws_nothing(unseen):
        raise ConfigError(
            f"{type(unseen).__name__} drew the order of this epoch before load had seen the "
            "dataloader: it could not be resumed. Pass the dataloader to load too, and begin to "
            "iterate over it after that"
        )

    sampler = epoch_sampler(loader)
    if sampler is not None and (note is None or note.sampler is not sampler):
        draws = order.draws or draws_of(sampler)
        order = replace(order, epoch=int(sampler.epoch), draws=draws)
    if read is not None:
        return replace(order, indices=read.state(given))
    if given and not state_dict.get("_iterator_finished"):
        order = replace(order, drawn_of=samples_to_draw(loader))
    return order


def samples_to_draw(loader: Any) -> int | None:
    """Size of the dataset if torchdata's sampler draws the order. torchdata saves the sampler's
    generator, which gives another order of another number. None for other loaders.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    _, is_saved = _order_of(loader)
    return len(loader.dataset) if is_saved else None  # type: ignore[arg-type]


def batches_given(state_dict: Any) -> int | None:
    """Batches of the epoch that a ``StatefulDataLoader`` has yielded. None for the state of another
    loader.
    """
    if not isinstance(state_dict, Mapping):
        return None
    snapshot = state_dict.get("_snapshot")
    if isinstance(snapshot, Mapping):
        return snapshot["_snapshot_step"] + state_dict["_steps_since_snapshot"]
    return state_dict.get("_num_yielded")


def _epoch(sampler: Any) -> int | None:
    if isinstance(sampler, EpochSampler) and getattr(sampler, "shuffle", True):
        return int(sampler.epoch)
    return None


def _generator(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", sampler)
    if generator is None:  # torch's samplers then use the default one
        return torch.default_generator
    return generator if isinstance(generator, torch.Generator) else None
