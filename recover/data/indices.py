"""Follow the indices that a loader reads from its sampler, so that a resumed epoch has the same
ones or is refused.

A loader that skips batches asks its sampler for the whole epoch again. What the sampler draws from
may not be known from outside: the global generators, or those of samplers inside of it. So the
notes hold the state of all of them when an iteration began and when its first index was asked for,
and a digest of the indices of the batches that were given. A restore draws from these states, and
compares the digest.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from ...engine.api import Stateful
from ...utils.errors import CheckpointMismatchError
from ...utils.rng import capture_rng, restore_rng
from .moments import Moment, moment_of, restore_moment, same_state, samplers_in
from .samplers import is_torchdatas, replace_iter

_NOTE = "_holdfast_index_note"


class IndexDigests:
    """Digest of the indices of an epoch after each batch. They end at the first batch that is not
    plain numbers or strings.
    """

    def __init__(self) -> None:
        self.count = 0  # batches
        self._digest = xxhash.xxh3_64()
        self._after = array("Q")

    def add(self, indices: Any) -> None:
        """Add the indices of a batch."""
        plain = _plain_bytes(indices)
        if plain is not None and len(self._after) == self.count:
            self._digest.update(plain)
            self._after.append(self._digest.intdigest())
        self.count += 1

    def after(self, count: int) -> str:
        """Return the digest of the first ``count`` batches, or of all if there are fewer. Empty if
        there is none.
        """
        digests = self._after[:count]
        if not digests:
            return ""
        return f"{digests[-1]:016x}"


def other_order(names: str, found: str) -> str:
    """Return the error message for samplers with other indices than in the saved run."""
    return (
        f"{names}: the first {found} other samples than in the run that is resumed, so "
        "samples would be lost or repeated. Make the samplers with the arguments of the run. "
        "A sampler of your own should draw from a generator in one of its attributes, or from "
        "an integer in an attribute named seed: both are saved"
    )


class IndexNote:
    """Indices that the loader, and only the loader, reads from ``source``.

    Args:
        source: the sampler or batch sampler that the loader iterates over.
        batch_size: number of indices of ``source`` in a batch. 1 if they are batches already.

    Attributes:
        has_begun: whether an iteration was seen.
    """

    def __init__(self, source: Any, batch_size: int) -> None:
        self.source = source
        self.has_begun = False
        self._batch_size = batch_size
        self._begin: Callable[[Any], Iterator[Any]] = type(source).__iter__
        self._digests = IndexDigests()

        # Before the iteration began, and before its first index. Empty if nothing was drawn then.
        self._begun: Moment = {}
        self._first: Moment = {}

        # What `resume` has planned for the next iteration, until its first index is asked for.
        self._resumed: Mapping[str, Any] = {}
        self._given = 0
        self._current = _Ahead(iter(()))

    def iterate(self) -> Iterator[Any]:
        """Iterate over the source as its own ``__iter__`` does, and note the indices."""
        self.has_begun = True
        before = self._moment()
        indices = self._begin(self.source)
        if isinstance(indices, Stateful):  # the loader saves its state
            return indices
        self._current = _Ahead(self._read(indices, self._if_drawn_since(before)))
        return self._current

    def state(self, given: int | None) -> dict[str, Any]:
        """Return the tensors and plain values that `resume` needs after ``given`` batches."""
        read = self._digests.after(given or 0)
        if not read:
            return {}
        return {"begun": self._begun, "first": self._first, "read": read}

    def resume(self, state: Mapping[str, Any], given: int | None) -> None:
        """Make the next iteration repeat that of a `state`. An empty one plans nothing.

        When its first ``given`` batches are read, it raises `CheckpointMismatchError` if they have
        other indices.
        """
        self._resumed = state
        self._given = given or 0

    def read_given(self) -> None:
        """Read the first batches now, if the loader skips them only at its next one."""
        if self._resumed:
            self._current.read(self._given * self._batch_size)

    def _read(self, indices: Iterator[Any], begun: Moment) -> Iterator[Any]:
        # When the first index is asked for.
        resumed = self._resumed
        self._resumed = {}
        if resumed:
            self._begun = resumed["begun"]
            self._first = resumed["first"]
            indices = self._drawn_again(indices)
        else:
            self._begun = begun
            before = self._moment()
            first = list(islice(indices, 1))
            self._first = self._if_drawn_since(before)
            indices = chain(first, indices)

        digests = IndexDigests()
        self._digests = digests
        batch = []
        for index in indices:
            batch.append(index)
            if len(batch) == self._batch_size:
                digests.add(batch)
                batch = []
                if digests.count == self._given:
                    self._compare(resumed)
            yield index

        # A shorter last batch, or an epoch that is shorter than what the run had read.
        if batch:
            digests.add(batch)
        self._compare(resumed)

    def _drawn_again(self, indices: Iterator[Any]) -> Iterator[Any]:
        # The run drew these numbers earlier: its global generators go on from where they are.
        now = capture_rng()
        if self._begun:
            self._restore(self._begun)
            indices = self._begin(self.source)
        self._restore(self._first)
        first = list(islice(indices, 1))
        restore_rng(now)
        return chain(first, indices)

    def _compare(self, resumed: Mapping[str, Any]) -> None:
        if not resumed or self._digests.after(self._given) == resumed["read"]:
            return
        names = ", ".join(type(sampler).__name__ for sampler in samplers_in(self.source))
        found = f"{self._given} batches of the epoch have"
        raise CheckpointMismatchError(
            f"{other_order(names, found)}. Resume with the dataset of the run, too"
        )

    def _moment(self) -> Moment:
        return moment_of(samplers_in(self.source))

    def _if_drawn_since(self, before: Moment) -> Moment:
        # A snapshot of many ranks would otherwise hold the generators of each for nothing.
        return {} if same_state(before, self._moment()) else before

    def _restore(self, moment: Moment) -> None:
        if moment:
            restore_moment(samplers_in(self.source), moment)


class _Ahead(Iterator[Any]):
    """Iterator whose next values can be read before they are asked for."""

    def __init__(self, values: Iterator[Any]) -> None:
        self._values = values
        self._ahead: deque[Any] = deque()

    def read(self, count: int) -> None:
        self._ahead.extend(islice(self._values, count))

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.popleft()
        return next(self._values)


class ListedIndices:
    """A list of indices, or another sampler whose class cannot be replaced."""

    _indices: Any = ()

    def __init__(self, indices: Any) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indices, name)


def note_indices(loader: Any) -> IndexNote | None:
    """Note the indices that a loader reads, from its next iterator on. Returns None if it saves the
    state of its sampler, or reads a stream.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None

    # torch iterates over the batch sampler. Only torchdata's own saves where it is.
    holder: Any = loader
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    batch_size = 1
    if is_torchdatas(loader.batch_sampler):
        holder = loader.batch_sampler
        name = "sampler"
        batch_size = holder.batch_size
    source = getattr(holder, name)

    note = getattr(source, _NOTE, None)
    if note is not None:
        return note
    if isinstance(source, Stateful) or is_torchdatas(source):
        return None

    try:
        return _follow(source, batch_size)
    except (AttributeError, TypeError):
        listed = ListedIndices(source)
        vars(holder)[name] = listed  # torch's loader refuses to set it
        return _follow(listed, batch_size)


def draws_nothing(source: Any) -> bool:
    """Whether the order of a sampler is known to be always the same."""
    if isinstance(source, BatchSampler):
        return draws_nothing(source.sampler)
    if isinstance(source, DistributedSampler):
        return not source.shuffle
    return isinstance(source, SequentialSampler | ListedIndices | Sequence)


def _follow(source: Any, batch_size: int) -> IndexNote:
    note = IndexNote(source, batch_size)
    replace_iter(source, lambda _: note.iterate(), **{_NOTE: note})
    return note


def _plain_bytes(indices: Any) -> bytes | None:
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):  # ragged, or on a GPU
        return None
    if numbers.dtype.kind not in "iubU":
        return None
    return numbers.tobytes()
