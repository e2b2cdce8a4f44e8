"""When to snapshot: every so many epochs, steps or seconds, whichever comes first.

Epochs and steps are counted from the start of the run, not from the last snapshot, so a restart does not shift
them. Seconds are counted on a monotonic clock from the last snapshot (or from the start of this process); that
clock is the process's own, so exactly one process may decide: rank 0 under torchrun, the driver under Ray.
"""

import time
from collections import deque
from collections.abc import Callable

from ...engine.api import StepInfo
from ...utils.config import require_range

_PACE_OF = 8
"""How many of the last steps and snapshots a `Pace` remembers."""


class SnapshotSchedule:
    """Says whether a step that was just trained should be snapshotted. Nothing of it needs to be saved."""

    def __init__(
        self,
        freq_epochs: int | None = None,
        freq_steps: int | None = None,
        freq_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Any of the three makes a snapshot due; with all of them None none ever is.

        Args:
            freq_epochs: after the last step of every such epoch.
            freq_steps: after every such step: 10 means steps 9, 19, 29 ...
            freq_secs: when this many seconds have passed since the last snapshot; 0 means every step.
            clock: seconds that never go back.

        Raises:
            ConfigError: a frequency is out of range.
        """
        require_range("freq_epochs", freq_epochs, low=1)
        require_range("freq_steps", freq_steps, low=1)
        require_range("freq_secs", freq_secs, low=0.0)
        self._freq_epochs, self._freq_steps, self._freq_secs = freq_epochs, freq_steps, freq_secs
        self._clock = clock
        self._last_s = clock()
        self._last_step: int | None = None

    @property
    def is_ever_due(self) -> bool:
        """Whether there is a frequency."""
        return (self._freq_epochs, self._freq_steps, self._freq_secs) != (None, None, None)

    def due(self, step_info: StepInfo) -> bool:
        """Whether the step ``step_info``, just trained, should be snapshotted now.

        Only a question: asking twice (for an actor and a critic, say) gives the same answer. False for the step
        that was marked last, so that no step is snapshotted twice.
        """
        if step_info.global_step == self._last_step:
            return False
        return self._epoch_due(step_info) or self._step_due(step_info) or self._time_due()

    def mark(self, step_info: StepInfo) -> None:
        """The snapshot of ``step_info`` was taken, or the run was just restored to it: restart the clock.

        With snapshots written in the background, mark when one is staged: waiting for its commit would make every
        step until then due as well.
        """
        self._last_s = self._clock()
        self._last_step = step_info.global_step

    def _epoch_due(self, step_info: StepInfo) -> bool:
        ended = step_info.epoch_step == step_info.steps_per_epoch - 1
        return self._freq_epochs is not None and ended and (step_info.epoch + 1) % self._freq_epochs == 0

    def _step_due(self, step_info: StepInfo) -> bool:
        return self._freq_steps is not None and (step_info.global_step + 1) % self._freq_steps == 0

    def _time_due(self) -> bool:
        return self._freq_secs is not None and self._clock() - self._last_s >= self._freq_secs


class Pace:
    """How long steps and snapshots have lately taken: what a deadline is judged by.

    Attributes:
        save_s: the longest of the last snapshots and exports; 0.0 before the first.
        step_s: the longest of the last steps, snapshots left out; 0.0 before the first.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._saves, self._steps = deque([0.0], _PACE_OF), deque([0.0], _PACE_OF)

    @property
    def save_s(self) -> float:
        """See the class."""
        return max(self._saves)

    @property
    def step_s(self) -> float:
        """See the class."""
        return max(self._steps)

    def step_begins(self) -> None:
        """The next step begins now."""
        self._began = time.monotonic()

    def step_ends(self) -> None:
        """The step that began last ends now; the first one of a process, which nobody saw begin, is not measured."""
        if self._began is not None:
            self._steps.append(time.monotonic() - self._began)
            self._began = None

    def saved(self, seconds: float) -> None:
        """A snapshot or an export took ``seconds``."""
        self._saves.append(seconds)
