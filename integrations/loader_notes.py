"""What the batches of an epoch depend on, noted while a loader is read: a run resumed in it reads the same ones.

A loader's order and contents may come from torch's global generator, from the sampler's own, or from an epoch number;
who resumes in the middle of an epoch finds all of them elsewhere. So three things are noted:

- the generators of the process, and of the samplers, when the epoch began: its order is drawn from them again;
- the generators of the process before each batch was fetched: a collator or dataset that draws (masking, augmentation)
  draws the same again for a batch that was fetched ahead, but not trained on, at the snapshot (accelerate is always one
  ahead, to know the last);
- from the first batch that is fetched after that on, the generators are those of the snapshot.

Draws in the processes of ``num_workers`` cannot be noted.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ..utils.rng import RngState, capture_rng, restore_rng


class LoaderNotes:
    """Notes of one loader (torch's ``DataLoader``, or what accelerate made of one).

    The class of its batch sampler becomes a subclass that tells of every batch before it is fetched.

    Attributes:
        can_skip: whether batches can be left out without reading them; not those of a stream.
    """

    def __init__(self, loader: Any) -> None:
        source = inner_sampler(loader)
        self._samplers = list(_samplers(source))
        self._numbered = not getattr(loader, "num_workers", 0)  # workers are asked ahead, and draw elsewhere
        self._share = _share(loader)
        self._begin: RngState = {}
        self._generators: list[torch.Tensor] = []
        self._fetch: tuple[int, RngState] | None = None
        self._plan: dict[int, Callable[[], None]] = {}
        self._skip = 0
        self.can_skip = source is not None and not isinstance(loader.dataset, IterableDataset)
        if source is not None:
            _watch(source, self)

    def begin_epoch(self) -> None:
        """An epoch begins: call it before the loader is iterated over."""
        self._begin, self._generators = capture_rng(), self._sampler_generators()
        self._fetch, self._plan, self._skip = None, {}, 0

    def state_dict(self, given: int | None) -> dict[str, Any]:
        """What `resume` needs, tensors and plain values, after ``given`` batches of the epoch; None: between epochs."""
        if given is None:
            return {"generators": self._sampler_generators()}
        ahead = self._fetch[1] if self._fetch is not None and self._fetch[0] == given else {}
        return {"begin": self._begin, "generators": self._generators, "ahead": ahead}

    def resume(self, state: dict[str, Any], given: int, go_on: Callable[[], None], *, skip: bool = False) -> None:
        """Have the next iteration be that of the epoch that was left after ``given`` batches.

        The generators of the process are those of the epoch's beginning from here on.

        Args:
            state: what `state_dict` returned.
            given: batches of the epoch that were trained on.
            go_on: puts the generators of the process to where they were at the snapshot; called once, at the first
                batch that was not fetched then, or by `settle`.
            skip: leave out ``given`` batches here; else the host does, by reading on.
        """
        self._begin, self._generators = state["begin"], state["generators"]
        self.set_generators(state)
        restore_rng(self._begin)
        self._fetch, self._skip = None, given * self._share if skip else 0
        first, second = given * self._share, (given + 1) * self._share
        if ahead := state["ahead"] if self._numbered else {}:
            self._plan = {first: lambda: restore_rng(ahead), second: go_on}
        else:
            self._plan = {first: go_on}

    def settle(self) -> None:
        """The first batch is there: what `resume` has planned happens now, if it has not yet."""
        for number in sorted(self._plan):
            self._plan.pop(number)()

    def set_generators(self, state: dict[str, Any]) -> None:
        """Put the samplers' own generators to where they were."""
        for sampler, generator in zip(self._samplers, state["generators"], strict=False):
            if isinstance(sampler.generator, torch.Generator) and len(generator):
                sampler.generator.set_state(generator)

    def _sampler_generators(self) -> list[torch.Tensor]:
        """Of each sampler that may have one; empty where it has none yet."""
        found = (sampler.generator for sampler in self._samplers)
        return [each.get_state() if each is not None else torch.empty(0, dtype=torch.uint8) for each in found]

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same, with a word before each."""
        number = -1
        for number, indices in enumerate(batches):
            if number < self._skip:
                continue
            self._before(number)
            yield indices
        self._before(number + 1)

    def _before(self, number: int) -> None:
        if number in self._plan:
            self._plan.pop(number)()
        if self._numbered and number % self._share == 0:
            self._fetch = (number // self._share, capture_rng())


def inner_sampler(source: Any) -> Any:
    """The batch sampler, else the sampler, of a loader or of a sampler around another one; None if it has neither."""
    found = getattr(source, "batch_sampler", None)  # (one of a stream has no truth value: it has no length)
    return getattr(source, "sampler", None) if found is None else found


def _samplers(source: Any) -> Iterator[Any]:
    """Those in a batch sampler, however wrapped, that have a place for a generator."""
    while source is not None:
        if hasattr(source, "generator"):
            yield source
        source = inner_sampler(source)


def _share(loader: Any) -> int:
    """Batches of the sampler in one that is handed out: those of all ranks, where accelerate dispatches them."""
    return loader.state.num_processes if getattr(loader, "split_batches", None) is False else 1


def _watch(source: Any, notes: LoaderNotes) -> None:
    own = type(source)
    begin = getattr(own, "unwatched_iter", own.__iter__)  # of a loader that was watched before
    source.__class__ = type(
        own.__name__, (own,), {"__iter__": lambda self: notes.watch(begin(self)), "unwatched_iter": begin}
    )
