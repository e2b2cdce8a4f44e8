"""`Triggers`: what has to follow a step, agreed on by all ranks with one small tensor."""

from collections.abc import Callable, Sequence
from enum import IntFlag

from ...engine.api import StepInfo
from ..config import RecoverConfig
from ..coordinator import Ranks
from .schedule import Pace, SnapshotSchedule
from .signals import StopNotice, StopRequests


class Wanted(IntFlag):
    """What follows a step. `STOP` and `FORCE` count from any process that calls the handler, the others from the
    leader."""

    STOP = 1
    FORCE = 16
    """A snapshot although none is due, and one that must not fail."""
    SNAPSHOT = 2
    EXPORT = 4
    SETTLE = 8
    """What was written in the background has ended, and is to be looked at."""


class Triggers:
    """The schedule of one run, its pace, and what may ask it to stop.

    Args:
        config: its frequencies, ``stop_signals`` and ``must_save_by``.
        notices: see `StopRequests`.

    Raises:
        ConfigError: see `SnapshotSchedule` and `StopRequests`.
    """

    def __init__(self, config: RecoverConfig, notices: Sequence[Callable[[], StopNotice | None]]) -> None:
        self.schedule = SnapshotSchedule(config.freq_epochs, config.freq_steps, config.freq_secs)
        self.pace = Pace()
        self.stops = StopRequests(config.stop_signals, config.must_save_by, notices)
        self._n_saves = 2 if config.async_save else 1  # a last one may have to wait for one that is begun now

    def after_step(self, ranks: Ranks, step_info: StepInfo, ask: Callable[[], Wanted]) -> tuple[Wanted, str | None]:
        """What has to follow the step; the same on all ranks, after one small tensor when nothing has to.

        Args:
            ranks: who agrees.
            step_info: the step that was just trained.
            ask: what else is wanted; called in every process that calls the handler. What it raises in one is raised
                in all.

        Returns:
            what is wanted, and why the run has to stop, if it has to: a signal need not reach all ranks, nor at the
            same step.
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
