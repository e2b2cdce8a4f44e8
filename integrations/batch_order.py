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
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from ..recover.data.dataset_fingerprint import probe_dataset
from ..recover.data.restore import same_state
from ..recover.data.samplers import draws_of, replace_iter, restore_draws
from ..utils.compat.torch_private import is_iterated
from ..utils.errors import CheckpointMismatchError
from ..utils.logging import get_logger
from ..utils.rng import RngState, capture_rng, restore_rng

logger = get_logger(__name__)

Moment = dict[str, Any]
"""State of everything that an epoch draws from: ``rng`` (see `capture_rng`) and ``sources``
(`draws_of` of the samplers).
"""

_UNWATCHED = "holdfast_unwatched_iter"


class LoaderNotes:
    """Notes on one loader, torch's ``DataLoader`` or accelerate's version of one.

    Its batch sampler reports every batch before it is fetched (see `replace_iter`).

    Attributes:
        can_skip: whether batches can be skipped without reading them, which a stream does not
            allow.
    """

    def __init__(self, loader: Any) -> None:
        source = inner_sampler(loader)
        # Weak: in a cycle of references, persistent workers are not told to end, and torch waits 5
        # s for each.
        self._loader = weakref.proxy(getattr(loader, "base_dataloader", loader))
        self._sources, dataset = [*_samplers(source), self._loader], loader.dataset
        while isinstance(dataset, IterableDataset):
            self._sources.append(dataset)
            dataset = getattr(dataset, "dataset", None)
        self._persistent = bool(getattr(loader, "persistent_workers", False))
        self._numbered = not getattr(
            loader, "num_workers", 0
        )  # workers are asked ahead, and draw elsewhere
        # Number of the sampler's batches in one batch of the loader. With accelerate's dispatching
        # it covers all ranks.
        self._share = (
            loader.state.num_processes if getattr(loader, "split_batches", None) is False else 1
        )
        self._begin: Moment = {}
        self._workers: Moment = {}  # when a persistent loader drew the seed of its workers
        self._order: Moment = {}  # when the sampler was first asked
        self._order_restored: Moment = {}
        self._fetch: tuple[int, RngState] | None = None
        self._plan: dict[int, Callable[[], None]] = {}
        self._skip = 0
        self._read = array(
            "Q"
        )  # per batch a digest of the indices up to it, empty if they are not plain numbers
        self._expected: tuple[int, str] = 0, ""
        self._first: dict[str, Any] = {}  # see `_note_first`
        self._first_restored: dict[str, Any] = {}
        is_stream = isinstance(loader.dataset, IterableDataset)
        self._dataset = (
            "" if is_stream else probe_dataset(loader.dataset, getattr(loader, "num_workers", 0))
        )
        self.can_skip = source is not None and not is_stream
        if source is not None:
            begin = getattr(
                type(source), _UNWATCHED, type(source).__iter__
            )  # of a loader that was watched before
            watch = weakref.WeakMethod(self._watch)
            replace_iter(
                source,
                lambda sampler: (
                    here(lambda: begin(sampler)) if (here := watch()) else begin(sampler)
                ),
                **{_UNWATCHED: begin},
            )

    def begin_epoch(self) -> None:
        """Note the state before an epoch. Call it before iterating over the loader."""
        self._begin, self._order, self._order_restored = self._moment(), {}, {}
        self._fetch, self._plan, self._skip, self._expected = None, {}, 0, (0, "")
        if self._workers and not is_iterated(
            self._loader
        ):  # the saved run had started its workers before this epoch
            self._order_restored = self._begin
            self._restore(self._workers)

    def state_dict(self, given: int | None) -> dict[str, Any]:
        """Return the tensors and plain values that `resume` needs. ``given`` batches of the epoch
        were trained on, or None between two epochs.
        """
        notes = {"workers": self._workers, "dataset": self._dataset}
        if given is None:
            return {"sources": self._moment()["sources"], **notes, "first": self._first}
        notes |= {
            "begin": self._begin["rng"],
            "sources": self._begin["sources"],
            "order": self._order,
        }
        ahead = self._fetch[1] if self._fetch is not None and self._fetch[0] == given else {}
        return {**notes, "ahead": ahead, "read": _last_digest(self._read[: given * self._share])}

    def other_dataset(self, state: dict[str, Any]) -> str:
        """Return an error message if the dataset is not the saved one, or "" if it is equal or
        cannot be compared.
        """
        saved = state.get("dataset", "")
        own = [
            ", xxh3_128:" not in each for each in (saved, self._dataset)
        ]  # a user's own `fingerprint`
        if not (saved and self._dataset) or saved == self._dataset or own[0] != own[1]:
            return ""
        return (
            f"the run was saved with a dataset of {saved}, this one has {self._dataset}: other "
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
        self._expected = given * self._share, state.get("read", "")
        self._fetch, self._skip = None, given * self._share if skip else 0
        first, second = given * self._share, (given + 1) * self._share
        if ahead := state["ahead"] if self._numbered else {}:
            self._plan = {first: lambda: restore_rng(ahead), second: go_on}
        else:
            self._plan = {first: go_on}

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
        saved, none = (
            iter(state["generators"]),
            torch.empty(0),
        )  # older versions saved only the samplers' generators
        found = [
            next(saved, none) if hasattr(each, "generator") else none for each in self._sources
        ]
        return [{"generator": each} if len(each) else {} for each in found]

    def _moment(self) -> Moment:
        return {"rng": capture_rng(), "sources": [draws_of(source) for source in self._sources]}

    def _restore(self, moment: Moment) -> None:
        for source, draws in zip(self._sources, moment["sources"], strict=False):
            restore_draws(source, draws)
        restore_rng(moment["rng"])

    def _watch(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of a sampler with a note before each."""
        if self._order_restored:
            self._restore(self._order_restored)
        self._order, self._order_restored = self._order_restored or self._moment(), {}
        if self._persistent:
            self._workers = self._workers or self._begin
        self._read, digest, number = array("Q"), xxhash.xxh3_64(), -1
        for number, indices in enumerate(begin()):
            self._compare(number)
            if (numbers := _plain_bytes(indices)) is not None and len(self._read) == number:
                digest.update(numbers)
                self._read.append(digest.intdigest())
            if number == 0:
                self._note_first()
            if number >= self._skip:
                self._before(number)
                yield indices
        self._compare(max(number + 1, self._expected[0]))
        self._before(number + 1)

    def _note_first(self) -> None:
        first, last, restored = (
            _last_digest(self._read[:1]),
            self._first.get("digest"),
            self._first_restored,
        )
        changes = any(hasattr(source, "set_epoch") for source in self._sources)
        drawn = changes or not same_state(self._order, self._moment())
        again = (
            False if drawn else first == last if last else None
        )  # None: not random, but seen only once
        self._first, self._first_restored = {"digest": first, "again": again}, {}
        if restored.get("again") is not False and restored.get("digest", first) != first:
            if restored["again"]:
                raise CheckpointMismatchError(self._other_order("batch of the epoch has"))
            logger.warning("%s", self._other_order("batch of the epoch has"))

    def _other_order(self, found: str) -> str:
        names = ", ".join(
            type(source).__name__ for source in self._sources if source is not self._loader
        )
        return (
            f"{names}: the first {found} other samples than in the run that is resumed, so "
            "samples would be lost or repeated. Make the samplers with the arguments of the run. "
            "A sampler of your own should draw from a generator in one of its attributes, or from "
            "an integer in an attribute named seed: both are saved"
        )

    def _compare(self, count: int) -> None:
        expected, digest = self._expected
        if digest and count == expected and (found := _last_digest(self._read)) and found != digest:
            raise CheckpointMismatchError(
                self._other_order(f"{expected} batches of the epoch have")
            )

    def _before(self, number: int) -> None:
        if number in self._plan:
            self._plan.pop(number)()
        if self._numbered and number % self._share == 0:
            self._fetch = (number // self._share, capture_rng())


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
    found = getattr(
        source, "batch_sampler", None
    )  # `is None` below: the sampler of a stream has no truth value
    return getattr(source, "sampler", None) if found is None else found


def _samplers(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = inner_sampler(source)


def _plain_bytes(indices: Any) -> bytes | None:
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):  # ragged, or on a GPU
        return None
    return numbers.tobytes() if numbers.dtype.kind in "iubU" else None


def _last_digest(read: array) -> str:
    return f"{read[-1]:016x}" if read else ""
