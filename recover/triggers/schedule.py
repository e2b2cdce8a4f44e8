"""Decide after each step: take a snapshot, make an export, stop, or collect a result.

Epochs and steps are counted from the start of the run, not from the last snapshot, so a restart does not shift them.
Seconds are counted on the monotonic clock of this process, from the last snapshot or from the start of the process.
Only one process may therefore decide: rank 0 under torchrun, the driver under Ray.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntFlag

from ...engine.api import StepInfo
from ...utils.config import require_range
from ..config import RecoverConfig
from ..ranks.coordinator import Ranks
from .signals import StopNotice, StopRequests

_RECENT = 8
"""Number of recent steps and snapshots that a `Pace` remembers."""


class Wanted(IntFlag):
    """Actions after a step. Any caller may set `STOP` and `FORCE`, only the leader sets the other flags."""

    STOP = 1
    FORCE = 16
    """A snapshot although none is due. It must not fail."""
    SNAPSHOT = 2
    EXPORT = 4
    SETTLE = 8
    """Writing in the background has ended, and its result can be collected."""


class Triggers:
    """Schedule, pace and stop requests of one run. A bad value in the configuration raises `ConfigError`."""

    def __init__(self, config: RecoverConfig, notices: Sequence[Callable[[], StopNotice | None]]) -> None:
        self.schedule = SnapshotSchedule(config.freq_epochs, config.freq_steps, config.freq_secs)
        self.pace = Pace()
        self.stops = StopRequests(config.stop_signals, config.must_save_by, notices)
        self._n_saves = 2 if config.async_save else 1  # the last one may have to wait for one that begins now

    def after_step(self, ranks: Ranks, step_info: StepInfo, ask: Callable[[], Wanted]) -> tuple[Wanted, str | None]:
        """Agree on the actions after a step. Costs one small tensor if there are none.

        ``ask`` returns further flags. It is called in every caller, and a failure in one is raised in all.

        Returns:
            the flags, and the reason to stop, if there is one. Both are the same on all ranks: a signal may reach only
            some ranks, or reach them at different steps.
        """
        self.pace.step_ends()
        reason: str | None = None

        def ask_here() -> int:
            nonlocal reason
            wanted = ask()
            if not ranks.is_leader:
                wanted &= Wanted.FORCE
            elif self.schedule.due(step_info):
                wanted |= Wanted.SNAPSHOT
            reason = self.stops.due(self.pace.save_s, self.pace.step_s, self._n_saves)
            return wanted | Wanted.STOP if reason is not None else wanted

        wanted = Wanted(ranks.flags(ask_here))
        if Wanted.STOP in wanted:
            reason = next(told for told in ranks.here(lambda: reason) if told is not None)
            self.stops.grant()
        return wanted, reason


class SnapshotSchedule:
    """Decides by epochs, steps and seconds, whichever comes first. None of its state needs to be saved.

    The frequencies are those of `RecoverConfig`. With ``freq_steps`` 10, steps 9, 19, 29 ... are due. With 0 for
    ``freq_secs`` every step is due, without any frequency none is. A value out of range raises `ConfigError`.
    """

    def __init__(
        self,
        freq_epochs: int | None = None,
        freq_steps: int | None = None,
        freq_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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
        """Whether to snapshot the step that was just trained. False for the step that was marked last.

        Asking changes nothing, so asking twice (for an actor and a critic, say) gives the same answer.
        """
        if step_info.global_step == self._last_step:
            return False
        if self._freq_secs is not None and self._clock() - self._last_s >= self._freq_secs:
            return True
        if self._freq_steps is not None and (step_info.global_step + 1) % self._freq_steps == 0:
            return True
        epoch_ended = step_info.epoch_step == step_info.steps_per_epoch - 1
        return self._freq_epochs is not None and epoch_ended and (step_info.epoch + 1) % self._freq_epochs == 0

    def mark(self, step_info: StepInfo) -> None:
        """Restart the clock, because the step was snapshotted or restored.

        A snapshot that is written in the background is marked when it is staged. If it were marked at its commit, every
        step until then would be due as well.
        """
        self._last_s = self._clock()
        self._last_step = step_info.global_step


class Pace:
    """Durations of recent steps and saves, from which `StopRequests` judges a deadline."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._saves, self._steps = deque([0.0], _RECENT), deque([0.0], _RECENT)

    @property
    def save_s(self) -> float:
        """Longest of the recent snapshots and exports. 0.0 before the first."""
        return max(self._saves)

    @property
    def step_s(self) -> float:
        """Longest of the recent steps, without their snapshots. 0.0 before the first."""
        return max(self._steps)

    def step_begins(self) -> None:
        """Note that the next step begins now."""
        self._began = time.monotonic()

    def step_ends(self) -> None:
        """Note that the step ends now. The first step of a process is not measured, because its start is unknown."""
        if self._began is not None:
            self._steps.append(time.monotonic() - self._began)
            self._began = None

    def saved(self, seconds: float) -> None:
        """Note how long a snapshot or an export took."""
        self._saves.append(seconds)
