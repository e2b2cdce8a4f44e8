"""Steps and epochs of a run. Needs no torch."""

import operator
from dataclasses import dataclass
from typing import SupportsIndex, cast

from ..utils.config import require_at_least, require_numbers, require_range
from ..utils.errors import ConfigError


@dataclass(frozen=True)
class FinetuneSpec:
    """Length of the run, which determines the schedule and the epochs."""

    # passes over the dataset
    total_train_epochs: int
    # samples in the dataset
    dataset_size: int
    # samples per step, over all ranks
    train_batch_size: int
    # the run ends after this many steps, if that is sooner
    max_train_steps: int | None = None

    def __post_init__(self) -> None:
        require_numbers(self)
        require_at_least(self, total_train_epochs=1, train_batch_size=1, max_train_steps=1)
        if self.dataset_size < self.train_batch_size:
            raise ConfigError(
                f"dataset_size {self.dataset_size} is smaller than train_batch_size "
                f"{self.train_batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one epoch (the last, short one is dropped)."""
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        """Steps of the whole run."""
        steps = self.total_train_epochs * self.steps_per_epoch
        if self.max_train_steps is None:
            return steps
        return min(steps, self.max_train_steps)


@dataclass(frozen=True)
class StepInfo:
    """A step of a run. Steps count from 0. NumPy integers, 3.0 etc. become int, anything else
    raises `ConfigError`.
    """

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            whole = value
            if isinstance(value, float) and value.is_integer():
                whole = int(value)
            try:
                number = operator.index(cast(SupportsIndex, whole))
            except TypeError as error:
                raise ConfigError(f"StepInfo.{name} is {value!r}; expected an int") from error
            object.__setattr__(self, name, number)

    @staticmethod
    def at(global_step: int, steps_per_epoch: int) -> "StepInfo":
        """The step with number ``global_step`` in a run whose epochs all have ``steps_per_epoch``
        steps.
        """
        require_range("global_step", global_step, low=0)
        require_range("steps_per_epoch", steps_per_epoch, low=1)
        epoch, epoch_step = divmod(global_step, steps_per_epoch)
        return StepInfo(epoch, epoch_step, global_step, steps_per_epoch)

    def next(self) -> "StepInfo":
        """The next step, from which a run that restored this one continues."""
        epoch = self.epoch
        epoch_step = self.epoch_step + 1
        if epoch_step == self.steps_per_epoch:
            epoch += 1
            epoch_step = 0
        return StepInfo(epoch, epoch_step, self.global_step + 1, self.steps_per_epoch)
