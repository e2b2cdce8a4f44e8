"""Notes on the sources of an epoch's batches, so that a resumed run reads the same batches.

The order and contents of batches may come from torch's global generator, from generators and seeds
of the samplers, or from an epoch number. All of them have changed by the middle of an epoch, and
differ in another process. The notes hold:

- Generators of the process, and generators and seeds of the samplers, at the start of the epoch and
  when the sampler was first asked. In between a loader draws a seed for its workers (only in the
  first epoch if they are persistent).
- Generators of the process before each batch was fetched. If a collator or dataset draws (masking,
  augmentation), it draws the same numbers again for a batch that was fetched before the snapshot
  but not trained on. accelerate always reads one batch ahead, to recognise the last.
- A digest of the indices read so far. A resumed run reads them again, and stops if they differ.
  Between two epochs there are none. Then the first batch is compared, if the sampler gave the same
  first batch in each epoch.
- A fingerprint of the dataset (see `probe_dataset`). A resumed run stops if it differs.

From the first batch that was not fetched before the snapshot, the generators continue from the
snapshot. Draws in worker processes (``num_workers``) cannot be noted.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..recover.data.dataset_fingerprint import probe_dataset
from ..recover.data.indices import IndexDigests, other_order
from ..recover.data.moments import Moment, moment_of, restore_moment, same_state
from ..recover.data.samplers import draws_of, replace_iter, restore_draws
from ..utils.compat.torch_private import is_iterated
from ..utils.errors import CheckpointMismatchError
from ..utils.logging import get_logger
from ..utils.rng import RngState, capture_rng, restore_rng

logger = get_logger(__name__)

_UNWATCHED = "holdfast_unwatched_iter"
"""Attribute of a watched sampler's class: the iteration before it was watched."""


class _Fetch(NamedTuple):
    """The generators of the process before a batch of the loader was fetched."""

    number: int
    rng: RngState


class LoaderNotes:
    """Notes on one loader, torch's ``DataLoader`` or accelerate's version of one.

    Its batch sampler reports every batch before it is fetched (see `replace_iter`).

    Attributes:
        can_skip: whether batches can be skipped without reading them. Batches of a stream, and
            batches that accelerate dispatches, cannot.
    """

    def __init__(self, loader: Any) -> None:
        source = inner_sampler(loader)
        dataset = loader.dataset
        n_workers = getattr(loader, "num_workers", 0)
        is_stream = isinstance(dataset, IterableDataset)

        # Weak: in a cycle of references, persistent workers are not told to end, and torch waits 5
        # s for each.
        self._loader = weakref.proxy(getattr(loader, "base_dataloader", loader))
        self._sources = [*_samplers(source), self._loader]
        self._dataset = ""
        if not is_stream:
            self._dataset = probe_dataset(dataset, n_workers)
        while isinstance(dataset, IterableDataset):
            self._sources.append(dataset)
            dataset = getattr(dataset, "dataset", None)
        # A dispatcher completes the last batch of the epoch with samples of the first one that it
        # reads.
        is_dispatched = getattr(loader, "split_batches", None) is not None
        self.can_skip = source is not None and not is_stream and not is_dispatched

        # Workers are asked ahead, and draw elsewhere.
        self._persistent = bool(getattr(loader, "persistent_workers", False))
        self._numbered = not n_workers

        # Number of the sampler's batches in one batch of the loader. With accelerate's dispatching
        # it covers all ranks.
        self._share = 1
        if getattr(loader, "split_batches", None) is False:
            self._share = loader.state.num_processes

        # States when the epoch began, when a persistent loader drew the seed of its workers, and
        # when the sampler was first asked.
        self._begin: Moment = {}
        self._workers: Moment = {}
        self._order: Moment = {}
        self._order_restored: Moment = {}

        self._read = IndexDigests()
        self._expected_count = 0
        self._expected_digest = ""
        self._first: dict[str, Any] = {}  # see `_note_first`
        self._first_restored: dict[str, Any] = {}

        # What `resume` has planned, by the number of the batch that it comes before.
        self._plan: dict[int, Callable[[], None]] = {}
        self._skip = 0
        self._fetch: _Fetch | None = None
        if source is not None:
            self._watch_iteration(source)

    def _watch_iteration(self, source: Any) -> None:
        """Make iterations over ``source`` go through `_watch`, while these notes live."""
        kind = type(source)
        begin = getattr(kind, _UNWATCHED, kind.__iter__)  # of a loader that was watched before
        watch = weakref.WeakMethod(self._watch)

        def iterate(sampler: Any) -> Iterator[Any]:
            here = watch()
            if here is None:
                return begin(sampler)
            return here(lambda: begin(sampler))

        replace_iter(source, iterate, **{_UNWATCHED: begin})

    def begin_epoch(self) -> None:
        """Note the state before an epoch. Call it before iterating over the loader."""
        self._begin = self._moment()
        self._order = {}
        self._order_restored = {}
        self._fetch = None
        self._plan = {}
        self._skip = 0
        self._expected_count = 0
        self._expected_digest = ""
        # The saved run had started its workers before this epoch.
        if self._workers and not is_iterated(self._loader):
            self._order_restored = self._begin
            self._restore(self._workers)

    def state_dict(self, given: int | None) -> dict[str, Any]:
        """Return the tensors and plain values that `resume` needs. ``given`` batches of the epoch
        were trained on, or None between two epochs.
        """
        notes = {"workers": self._workers, "dataset": self._dataset}
        if given is None:
            now = self._moment()
            return {
                **notes,
                "sources": now["sources"],
                "first": self._first,
            }

        # The next batch may be fetched already. Then its draws are repeated.
        ahead: RngState = {}
        if self._fetch is not None and self._fetch.number == given:
            ahead = self._fetch.rng
        return {
            **notes,
            "begin": self._begin["rng"],
            "sources": self._begin["sources"],
            "order": self._order,
            "ahead": ahead,
            "read": self._read.after(given * self._share),
        }

    def other_dataset(self, state: dict[str, Any]) -> str:
        """Return an error message if the dataset is not the saved one, or "" if it is equal or
        cannot be compared.
        """
        saved = state.get("dataset", "")
        own = self._dataset
        if not saved or not own or saved == own:
            return ""
        # A user's own `fingerprint` is not comparable with a digest.
        if _is_digest(saved) != _is_digest(own):
            return ""
        return (
            f"the run was saved with a dataset of {saved}, this one has {own}: other "
            "samples, or another order, so samples would be lost or repeated. Shuffle and prepare "
            "it with the seed of the run (TRL's shuffle_dataset takes args.seed)"
        )

    def resume(
        self, state: dict[str, Any], given: int, go_on: Callable[[], None], *, skip: bool = False
    ) -> None:
        """Make the next iteration continue an epoch after ``given`` batches, from the result of
        `state_dict`.

        Sets the generators of the process to the start of the epoch.

        Args:
            state, given: of the snapshot.
            go_on: restores the generators of the process to the snapshot. It is called once, at the
                first batch that was not fetched before the snapshot, or by `settle`.
            skip: whether to skip ``given`` batches here. Otherwise the host reads and drops them.

        Raises:
            CheckpointMismatchError: a sampler has another kind of generator, or, while batches are
                read, the first ``given`` batches have other indices than in the run.
        """
        self.restore_sources(state)
        self._begin = {"rng": state["begin"], "sources": self._saved_sources(state)}
        self._order_restored = state.get("order", {})
        self._restore(self._workers or self._begin)
        first = given * self._share
        second = first + self._share
        self._expected_count = first
        self._expected_digest = state.get("read", "")
        self._fetch = None
        self._skip = 0
        if skip:
            self._skip = first

        # A batch that was fetched before the snapshot draws what it drew then.
        self._plan = {first: go_on}
        ahead = state["ahead"]
        if self._numbered and ahead:
            self._plan = {first: lambda: restore_rng(ahead), second: go_on}

    def settle(self) -> None:
        """Run the remaining actions of `resume`, after the first batch has arrived."""
        while self._plan:
            self._plan.pop(min(self._plan))()

    def restore_sources(self, state: dict[str, Any]) -> None:
        """Restore the generators and seeds of the samplers. `CheckpointMismatchError`: a generator
        of another kind.
        """
        self._workers = state.get("workers", {})
        self._first = self._first_restored = state.get("first", {})
        for source, draws in zip(self._sources, self._saved_sources(state), strict=False):
            restore_draws(source, draws)

    def _saved_sources(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        if "sources" in state:
            return state["sources"]

        # Older versions saved only the samplers' generators, one for each that has the attribute.
        saved = iter(state["generators"])
        found: list[dict[str, Any]] = []
        for source in self._sources:
            draws = {}
            if hasattr(source, "generator"):
                generator = next(saved, ())
                if len(generator):
                    draws["generator"] = generator
            found.append(draws)
        return found

    def _moment(self) -> Moment:
        return moment_of(self._sources)

    def _restore(self, moment: Moment) -> None:
        restore_moment(self._sources, moment)

    def _watch(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of a sampler with a note before each."""
        if self._order_restored:
            self._restore(self._order_restored)
        self._order = self._order_restored or self._moment()
        self._order_restored = {}
        if self._persistent:
            self._workers = self._workers or self._begin

        self._read = IndexDigests()
        number = -1
        for number, indices in enumerate(begin()):
            self._compare(number)
            self._read.add(indices)
            if number == 0:
                self._note_first()
            if number >= self._skip:
                self._before(number)
                yield indices

        # An epoch that is shorter than what the run had read has other samples, too.
        self._compare(max(number + 1, self._expected_count))
        self._before(number + 1)

    def _note_first(self) -> None:
        """Note the digest of the first batch, and whether each epoch has the same: ``again``.
        It is None if only one epoch was seen.
        """
        first = self._read.after(1)
        last = self._first.get("digest")
        restored = self._first_restored

        # A batch that depends on the epoch or on draws is not the same again.
        changes = any(hasattr(source, "set_epoch") for source in self._sources)
        if not changes:
            now = self._moment()
            changes = not same_state(self._order, now)
        again = None
        if changes:
            again = False
        elif last:
            again = first == last
        self._first = {"digest": first, "again": again}
        self._first_restored = {}

        # Only a batch that was seen twice is proof of another order.
        if restored.get("again") is not False and restored.get("digest", first) != first:
            message = self._other_order("batch of the epoch has")
            if restored["again"]:
                raise CheckpointMismatchError(message)
            logger.warning("%s", message)

    def _other_order(self, found: str) -> str:
        names = []
        for source in self._sources:
            if source is not self._loader:
                names.append(type(source).__name__)
        return other_order(", ".join(names), found)

    def _compare(self, count: int) -> None:
        if not self._expected_digest or count != self._expected_count:
            return
        found = self._read.after(count)
        if found and found != self._expected_digest:
            raise CheckpointMismatchError(self._other_order(f"{count} batches of the epoch have"))

    def _before(self, number: int) -> None:
        if number in self._plan:
            self._plan.pop(number)()
        if self._numbered and number % self._share == 0:
            self._fetch = _Fetch(number // self._share, capture_rng())


def persistent_state(loader: Any) -> list[dict[str, Any]] | None:
    """Return `draws_of` of a loader's samplers, or None if it has no running persistent workers."""
    loader = getattr(loader, "base_dataloader", loader)
    if not isinstance(loader, DataLoader) or not is_iterated(loader):
        return None
    return [draws_of(source) for source in _samplers(inner_sampler(loader))]


def restore_persistent(loader: Any, saved: list[dict[str, Any]]) -> None:
    """Make a new loader continue like the one of `persistent_state`, whose persistent workers ran.

    A loader draws a seed for its workers when they start. The run drew it before its snapshot, so a
    separate generator provides it here.
    """
    loader = getattr(loader, "base_dataloader", loader)
    for source, draws in zip(_samplers(inner_sampler(loader)), saved, strict=False):
        restore_draws(source, draws)
    loader.generator = torch.Generator()


def inner_sampler(source: Any) -> Any:
    """Return the batch sampler, else the sampler, of a loader or wrapping sampler. None if it has
    neither.
    """
    found = getattr(source, "batch_sampler", None)
    if found is None:  # the sampler of a stream has no truth value
        found = getattr(source, "sampler", None)
    return found


def _samplers(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = inner_sampler(source)


def _is_digest(fingerprint: str) -> bool:
    return ", xxh3_128:" in fingerprint
