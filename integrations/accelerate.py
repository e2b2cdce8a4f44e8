"""Loaders that resume at their exact batch, for scripts with Accelerate or a plain loop with
``fully_shard``.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loader, trained = recoverable(loader), (model, optimizer, scheduler) with
    RecoverHandler(RecoverConfig(freq_steps=10), FinetuneSpec(epochs, loader.steps_per_epoch, 1)) as
    handler:
        handler.load(trained, dataloader=loader)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...
                handler.dump(trained, loader.step, dataloader=loader)

`recoverable` takes a loader of ``accelerator.prepare`` or torch's ``DataLoader``, with any sampler:
seedable or not, sharded over ranks, ``DistributedSampler``. torchdata's ``StatefulDataLoader`` is
passed to the handler directly.
"""

from collections.abc import Iterator
from typing import Any, cast

from torch.utils.data import DataLoader

from ..engine.api import StateDict, Stateful, StepInfo
from ..utils.errors import CheckpointMismatchError, ConfigError, DatasetMismatchError
from ..utils.logging import get_logger
from ..utils.rng import capture_rng, restore_rng
from .batch_order import LoaderNotes, inner_sampler

logger = get_logger(__name__)


def recoverable(loader: Any, *, gradient_accumulation_steps: int = 1) -> "RecoverableLoader":
    """Wrap a loader, so that it can be passed as ``dataloader`` to `RecoverHandler.load` and
    ``dump``.

    Args:
        loader: loader of ``accelerator.prepare``, or a ``DataLoader``. Do not iterate over it
            elsewhere.
        gradient_accumulation_steps: batches per step, for `RecoverableLoader.step`.

    Raises:
        ConfigError: it is not a loader, it saves its own state (which would then be restored
            twice), or ranks have different numbers of batches.
    """
    return RecoverableLoader(loader, gradient_accumulation_steps)


class RecoverableLoader:
    """Iterator over a loader, epoch after epoch. After a restore it starts with the rest of the
    saved epoch.

    A snapshot is exact if the last batch was trained on and nothing of the next one. Every
    iteration is one epoch. The loader calls ``set_epoch`` of the samplers, so scripts need not.

    Attributes:
        loader: the wrapped loader.
    """

    def __init__(self, loader: Any, gradient_accumulation_steps: int = 1) -> None:
        if not isinstance(loader, DataLoader) and not hasattr(loader, "dataset"):
            raise ConfigError(
                f"a {type(loader).__name__} is no loader; expected a DataLoader, or a prepared one"
            )
        inner = getattr(loader, "base_dataloader", loader)
        saves_itself = isinstance(inner, Stateful)
        if saves_itself and inner is not loader:
            raise ConfigError(
                "the loader is of an Accelerator with use_stateful_dataloader=True, and saves its "
                "own state: make the Accelerator without use_stateful_dataloader"
            )
        if saves_itself:
            raise ConfigError(
                f"{type(loader).__name__} saves its own state: pass it to the handler as "
                "dataloader, not to recoverable"
            )
        if _is_uneven(getattr(loader, "batch_sampler", None)):
            raise ConfigError(
                "with even_batches=False some ranks have one batch more than others, and a "
                "snapshot is of all ranks: set drop_last=True, or leave even_batches True"
            )
        if gradient_accumulation_steps < 1:
            raise ConfigError(
                f"gradient_accumulation_steps is {gradient_accumulation_steps}; expected at least 1"
            )
        self.loader = loader
        self._accumulated = gradient_accumulation_steps
        self._notes = LoaderNotes(loader)

        # The place: batches that were given in this epoch, and steps of the epochs before.
        self._epoch = self._given = self._steps = 0
        self._restored: dict[str, Any] | None = None
        self._batches: Iterator[Any] = iter(())

        if getattr(loader, "num_workers", 0):
            logger.warning(
                "random numbers that dataset or collate_fn draw in the %d worker processes of the "
                "loader cannot be restored: if they do, use num_workers=0",
                loader.num_workers,
            )
        if not self._notes.can_skip:
            logger.warning(
                "the batches of a stream, or of dispatch_batches, cannot be skipped: a resumed run "
                "reads the epoch from its beginning to its place"
            )

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """Current epoch, or the epoch of the next iteration."""
        return self._epoch + (self._restored is not None and self._is_over)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch, including a shorter last one."""
        return -(-len(self) // self._accumulated)

    @property
    def step(self) -> StepInfo:
        """Step of the last batch.

        Raises:
            ConfigError: there was no batch yet.
        """
        per_epoch = self.steps_per_epoch

        # The step is in this epoch, or else the last one of the epoch before.
        if self._given:
            in_epoch = (self._given - 1) // self._accumulated
            return StepInfo(self._epoch, in_epoch, self._steps + in_epoch, per_epoch)
        if not self._steps:
            raise ConfigError("no batch was handed out yet: there is no step")
        return StepInfo(self._epoch - 1, per_epoch - 1, self._steps - 1, per_epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of a restored epoch, or else the next epoch. An epoch that a loop has left
        early is over.
        """
        if self._restored is None and self._given:
            if self._is_over:
                # A loop that stopped at the last batch: the samplers make their final draws.
                next(self._batches, None)
            self._finish()
        restored = self._restored
        self._restored = None
        if restored is not None and self._is_over:
            self._exhaust(restored)
            restored = None
        yield from self._rest(restored)
        self._finish()

    def state_dict(self) -> StateDict:
        """Return epoch, number of batches given, and the notes on their sources."""
        if self._restored is not None:
            return self._restored
        return {
            "epoch": self._epoch,
            "given": self._given,
            "steps": self._steps,
            "length": self._length(),
            "batch_size": self._batch_size(),
            "notes": self._notes.state_dict(self._given or None),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from ``state_dict`` at the next iteration.

        Raises:
            CheckpointMismatchError: it is not a state of such a loader, or of one with another
                number of batches, or of a stream with other batches.
            DatasetMismatchError: the dataset has other samples, or the same in another order.
        """
        # Older versions saved no batch size.
        if state_dict.keys() - {"batch_size"} != {"epoch", "given", "steps", "length", "notes"}:
            raise CheckpointMismatchError(
                f"a state with {sorted(state_dict)} is not one of RecoverableLoader"
            )
        if state_dict["length"] != self._length():
            raise CheckpointMismatchError(
                f"the loader has {self._length()} batches an epoch, the run was saved with "
                f"{state_dict['length']}; samples would be lost or repeated. Resume with the "
                "dataset, batch size and ranks of the run"
            )
        batch_size = self._batch_size()
        saved_size = state_dict.get("batch_size", batch_size)
        if batch_size != saved_size:
            raise CheckpointMismatchError(
                f"the stream gives batches of {batch_size}, the run was saved with {saved_size}; "
                "samples would be lost or repeated. Resume with the batch size and ranks of the run"
            )
        message = self._notes.other_dataset(state_dict["notes"])
        if message:
            raise DatasetMismatchError(
                f"{message}. If it is the same data, give it a `fingerprint` attribute"
            )
        self._restored = state_dict
        self._epoch = state_dict["epoch"]
        self._given = state_dict["given"]
        self._steps = state_dict["steps"]

    def _rest(self, restored: dict[str, Any] | None) -> Iterator[Any]:
        """Yield the batches that are left of a restored epoch, or all of a new one."""
        notes = self._notes
        given = self._given
        self._set_epoch()
        if restored is not None and given:
            now = capture_rng()
            notes.resume(restored["notes"], given, lambda: restore_rng(now), skip=notes.can_skip)
        else:
            if restored is not None:
                notes.restore_sources(restored["notes"])
            notes.begin_epoch()

        # Batches that cannot be skipped are read and dropped.
        self._batches = iter(self.loader)
        if not notes.can_skip:
            for _ in range(given):
                next(self._batches, None)
        for batch in self._batches:
            notes.settle()
            self._given += 1
            yield batch
        notes.settle()

    def _exhaust(self, restored: dict[str, Any]) -> None:
        """Finish an epoch that was saved after its last batch, so that the samplers make their
        final draws.
        """
        # The process goes on with its own generators, which the samplers change here.
        now = capture_rng()
        for _ in self._rest(restored):
            raise CheckpointMismatchError(
                "the loader gives batches after the last one of the epoch that was saved"
            )
        restore_rng(now)
        self._finish()

    def _finish(self) -> None:
        self._batches = iter(())
        self._steps += -(-self._given // self._accumulated)
        self._epoch += 1
        self._given = 0

    def _set_epoch(self) -> None:
        """Call ``set_epoch`` of every sampler and dataset that has it. accelerate's loaders pass it
        on themselves.
        """
        # Samplers may refer to each other in a circle.
        found: list[Any] = []
        source: Any = self.loader
        while source is not None and not any(source is each for each in found):
            found.append(source)
            source = inner_sampler(source)
        for each in (*found, cast(Any, self.loader.dataset)):
            if hasattr(each, "set_epoch"):
                each.set_epoch(self._epoch)

    @property
    def _is_over(self) -> bool:
        """Whether the epoch has no batch left."""
        return self._given > 0 and self._given == self._length()

    def _batch_size(self) -> int | None:
        """Samples that a stream is asked for at a time. None with a length, because other batches
        show in the indices.
        """
        if self._length() is not None:
            return None
        return getattr(self.loader, "batch_size", None)

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:  # a stream has no length
            return None


def _is_uneven(sampler: Any) -> bool:
    if getattr(sampler, "even_batches", True) or sampler.drop_last:
        return False
    ranks = sampler.num_processes
    batches = sampler.batch_sampler
    if not sampler.split_batches:
        return len(batches) % ranks != 0

    # Samples of the last batch, which only the first ranks receive.
    last = len(batches.sampler) % batches.batch_size
    return 0 < last <= batches.batch_size // ranks * (ranks - 1)
