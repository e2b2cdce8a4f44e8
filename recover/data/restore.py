"""Restore a dataloader to its position: the same batches, in the order of the same epoch, without
an extra random draw.

``load_state_dict`` alone is not enough for torchdata's ``StatefulDataLoader``:

- It builds its iterator when the next loop begins, and draws from torch's global generator for
  that. Every later draw would then differ from a run that was never killed. So the iterator is
  built here, before the generators are restored.
- The iterator uses the order of the epoch that the sampler was given last
  (``DistributedSampler.set_epoch``), or an order that the sampler draws from its generator
  (``RandomSampler``). The loader's state includes neither. So a snapshot holds the origin of the
  order (see `capture`), and the sampler is restored first.
- Restored to the end of an epoch, its first loop has no batch, and a script that loops over epochs
  would skip one. So a finished epoch is ended here.

Afterwards two mistakes are refused: a loader that reports another position than was saved, and a
script that starts in another epoch than the one being read.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...engine.api import StateDict, Stateful, StepInfo
from ...utils.compat.torch_private import count_skipped_once
from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ConfigError,
    HoldfastError,
)
from ...utils.plain_values import read_plain, unpack_plain
from .capture import (
    DATA_STATE,
    EpochOrder,
    EpochSampler,
    OrderNote,
    batches_given,
    epoch_sampler,
    note_order,
    samples_to_draw,
)
from .indices import IndexNote, note_indices
from .moments import same_state
from .samplers import replace_iter, restore_draws
from .trial import check_first_batches, is_of_datasets

_END = object()


def restore_data(
    generation: Path, dataloader: Stateful | None, caller: int, n_callers: int, last_step: StepInfo
) -> "RestoredEpoch | None":
    """Restore the dataloader of the ``caller``-th of ``n_callers`` with different data. Returns the
    rest of its epoch.

    Raises:
        CheckpointMismatchError: there is a state and no dataloader or the reverse, another number
            of callers saved the state and it cannot be shared, or the loader did not take it (see
            `restore_dataloader`).
        CheckpointCorruptError: the file cannot be read.
    """
    path = generation / DATA_STATE
    if dataloader is None and path.exists():
        raise CheckpointMismatchError(
            f"{generation} holds a dataloader's state; pass that dataloader, or data starts over"
        )
    if dataloader is None:
        return None
    if not path.exists():
        raise CheckpointMismatchError(
            f"{generation} holds no dataloader state; was it saved without a dataloader?"
        )
    states, orders, rank_independent = _read(path)
    if len(states) != n_callers and not rank_independent:
        raise CheckpointMismatchError(
            f"{generation} holds dataloader states of {len(states)} ranks with different data, "
            f"now there are {n_callers}; only a dataloader that is rank_independent, as "
            "ResumableDataLoader, can change their number"
        )
    own = 0 if rank_independent else caller
    return restore_dataloader(dataloader, unpack_plain(states[own], path), orders[own], last_step)


def _read(path: Path) -> tuple[list[Any], list[EpochOrder], bool]:
    # States, orders (unknown in files of older versions), and whether any number of processes may
    # use them.
    match read_plain(path):
        case {"states": [_, *_] as states, "rank_independent": rank_independent, **more}:
            unknown = [None] * len(states)
            epochs = more.get("sampler_epochs", unknown)
            generators = more.get("sampler_generators", unknown)
            draws = more.get("sampler_draws", [{}] * len(states))
            indices = more.get("sampler_indices", [{}] * len(states))
            drawn_of = more.get("sampler_drawn_of", unknown)
            orders = list(map(EpochOrder, epochs, generators, draws, indices, drawn_of))
            return list(states), orders, rank_independent
    raise CheckpointCorruptError(
        f"{path} is no dataloader's state; expected 'states' and 'rank_independent'"
    )


def restore_dataloader(
    loader: Stateful, state_dict: StateDict, order: EpochOrder, last_step: StepInfo
) -> "RestoredEpoch | None":
    """Restore a loader completely. Call this before the random generators are restored.

    The order is unknown in generations of older versions: then the sampler's epoch is taken from
    ``last_step``, and its generator is taken to be in its first state, in the first epoch.

    Returns:
        the rest of an epoch whose order depends on the sampler's epoch. None if there is none.

    Raises:
        CheckpointMismatchError: the loader did not return to its position, or its order cannot be
            made again, or is another one.
    """
    # Refuse another order before anything is changed.
    check_first_batches(loader, order.draws)
    _resume_once(loader)
    note = note_order(loader)
    read = note_indices(loader)
    sampler = epoch_sampler(loader)
    generator = _drawn_from(note, order, last_step)
    if read is None and order.indices:
        raise CheckpointMismatchError(
            "the dataloader was saved with a sampler whose state it does not hold, and has another "
            "kind of sampler now: samples would be lost or repeated. Resume with the sampler of "
            "the run"
        )
    samples = samples_to_draw(loader)
    if None not in (samples, order.drawn_of) and samples != order.drawn_of:
        raise CheckpointMismatchError(
            f"the dataset has {samples} samples and had {order.drawn_of} when the order of this "
            "epoch was drawn, and torchdata's sampler would draw another one: samples would be "
            "lost or repeated. Resume with the dataset of the run"
        )
    found = None if sampler is None else int(sampler.epoch)
    built_as = last_step.epoch if order.epoch is None else order.epoch

    def rewind_order() -> None:
        if sampler is not None:
            sampler.set_epoch(built_as)
        restore_draws(sampler if note is None else note.sampler, order.draws)
        if note is not None:
            note.resumed = generator
        if read is not None:
            read.resume(order.indices, batches_given(state_dict))

    # Order first, because the loader builds its iterator when the place is restored.
    rewind_order()
    _restore_place(loader, state_dict, read)
    advanced = sampler is not None and int(sampler.epoch) != built_as
    source: Any = None if note is None else note.sampler
    if read is not None and order.indices:
        source = read.source
    over = _end_if_over(loader, state_dict, last_step, rewind_order, source, read)
    if sampler is None or found is None:
        return None
    if order.epoch is None and int(sampler.epoch) == built_as:
        # The epoch is unknown, so the script must set it. `RestoredEpoch.check` finds a script that
        # never does.
        sampler.set_epoch(found)
    if over:
        return None
    # A sampler that is noted may move on, because its note has the epoch that is being read.
    if advanced and (note is None or note.sampler is not sampler):
        raise CheckpointMismatchError(
            f"{type(sampler).__name__} went on from epoch {built_as} by itself while batches were "
            "read ahead: which epoch they are of was not saved. Use a sampler that changes its "
            "epoch in set_epoch only, or num_workers=0"
        )
    return RestoredEpoch(
        loader, sampler, note, built_as, last_step.next().epoch, known=order.epoch is not None
    )


@dataclass(frozen=True)
class RestoredEpoch:
    """The rest of an epoch that a restored loader still has to yield."""

    loader: Stateful  # its iterator is built already
    sampler: EpochSampler
    note: OrderNote | None
    epoch: int  # epoch of the sampler when the iterator was built
    run_epoch: int  # epoch of the run's next step
    known: bool  # whether ``epoch`` was saved. Otherwise it is the epoch of the run

    def check(self, step: StepInfo) -> None:
        """Check after the first trained step that the script uses the epoch that is being read.

        Raises:
            ConfigError: the sampler is at another epoch.
        """
        told = int(self.sampler.epoch)
        if told == self.epoch or step.epoch != self.run_epoch:
            return
        advanced_by_itself = self.note is not None and self.note.advanced
        if advanced_by_itself and told == self.epoch + 1:
            return
        if _is_over(self.loader, self.loader.state_dict()):
            return
        unsaid = ""
        if not self.known:
            unsaid = (
                ". (An older version saved no epoch: if the script never calls set_epoch, set the "
                "sampler's set_epoch to None before load, for the rest of the run)"
            )
        raise ConfigError(
            f"the sampler is at epoch {told} after the first step since load, but the rest of the "
            f"epoch that was resumed is read in the order of epoch {self.epoch}: samples would be "
            "lost or repeated. Begin the loop over epochs, and set_epoch, with the epoch of "
            f"handler.first_step(info), where info is what load returned; start again{unsaid}"
        )


def _drawn_from(note: OrderNote | None, order: EpochOrder, last_step: StepInfo) -> Tensor | None:
    # State of the generator from which to draw the order. None if the order is not drawn from one.
    here = None if note is None else note.next_order().generator
    if here is None and order.generator is not None:
        raise CheckpointMismatchError(
            "the dataloader was saved with a sampler that draws its order from a generator, and "
            "has another one now: samples would be lost or repeated. Resume with the sampler of "
            "the run"
        )
    if note is None or here is None or order.generator is not None:
        return order.generator
    if last_step.epoch > 0 or note.sampler.generator is None:
        raise CheckpointMismatchError(
            "the generation is of an older version, which did not save what "
            f"{type(note.sampler).__name__} has drawn the order of epoch {last_step.epoch} from: "
            "samples would be lost or repeated. Begin a new run with its weights or, if the "
            "sampler has a generator of its own, resume from a generation of epoch 0 (resume_path)"
        )
    return here


def _resume_once(loader: Any) -> None:
    """Make a stream of Hugging Face's datasets begin its next epoch at its first sample.

    It begins every iteration at the state that it was given, until ``set_epoch`` names another
    epoch (datasets 5.2).
    """
    stream = getattr(loader, "dataset", None)
    if not isinstance(stream, IterableDataset) or not is_of_datasets(stream):
        return
    begin = type(stream).__iter__

    def iterate(stream: Any) -> Iterator[Any]:
        samples = begin(stream)
        first = list(islice(samples, 1))  # has used the state
        stream.load_state_dict(None)
        yield from chain(first, samples)

    replace_iter(stream, iterate)


def _restore_place(loader: Stateful, state_dict: StateDict, read: IndexNote | None) -> None:
    try:
        loader.load_state_dict(state_dict)
        said = loader.state_dict()  # makes torchdata's loader build its iterator
    except HoldfastError:
        raise
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointMismatchError(
            f"{type(loader).__name__} does not take the state of the saved run "
            f"({type(error).__name__}: {error}): expected a loader that is made as in the saved "
            "run, with the same num_workers. Make it so"
        ) from error
    # torchdata counts the batches of a stream a second time when it skips them.
    given = batches_given(state_dict)
    if given is not None and given != batches_given(said):
        count_skipped_once(loader, state_dict)
        said = loader.state_dict()
    if given is None and not same_state(said, state_dict):
        raise CheckpointMismatchError(
            f"{type(loader).__name__}.state_dict() is not what was given to load_state_dict: the "
            "loader is not where it was, or does not say so before its first batch. It must give "
            "back the state that it was restored from"
        )
    if given is not None and given != batches_given(said):
        raise CheckpointMismatchError(
            f"the dataloader was saved after {given} batches of an epoch, and once restored says "
            f"it is after {batches_given(said)}: its load_state_dict does not restore it. Pass "
            "the StatefulDataLoader itself"
        )
    if read is not None:
        read.read_given()


def _end_if_over(
    loader: Stateful,
    state_dict: StateDict,
    last_step: StepInfo,
    rewind_order: Callable[[], None],
    source: Any,
    read: IndexNote | None,
) -> bool:
    # If the epoch is over, consume its end as the training loop did, so that the next loop is the
    # next epoch. Iterators over ``source`` draw its order.
    if not isinstance(loader, DataLoader):
        return False
    if state_dict.get("_iterator_finished"):
        if source is not None:  # the finished loop also drew numbers after the last sample
            rewind_order()
            deque(source, maxlen=0)
        return True
    # Streams and samplers that draw batches of any size know their number only at the end, and
    # some samplers give a wrong one.
    over = last_step.epoch_step == last_step.steps_per_epoch - 1 or _is_over(loader, state_dict)
    if over and next(iter(loader), _END) is not _END:
        rewind_order()
        _restore_place(loader, state_dict, read)
        return False
    return over


def _is_over(loader: Stateful, state_dict: Mapping[str, Any]) -> bool:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        with suppress(TypeError):  # a sampler without a length
            return batches_given(state_dict) == len(loader)
    return False
