"""When to snapshot, and when to stop: a schedule, a signal, a notice from outside, or a deadline.

Epochs and steps are counted from the start of the run, so a restart does not shift them. Seconds
are counted on the clock of this process, from its last snapshot, so only one process decides: rank
0 under torchrun, the driver under Ray. A request to stop may reach any rank.

All of them take effect at a step boundary, in `StopRequests.due`, which costs microseconds, and at
most once a second the time of the notices. `signals` handles the signals until then.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

from ..engine.steps import StepInfo
from ..utils.config import require_range
from ..utils.launch import torchrun_grace_s
from ..utils.logging import get_logger
from ..utils.processes import process_started_at
from .deadline import SLURM, end_of_slurm_job, local_time, parse_deadline, require_slurm
from .signals import StopSignals

if TYPE_CHECKING:
    from .config import RecoverConfig
    from .ranks import Ranks

logger = get_logger(__name__)

UNMEASURED_SAVE_S = 60.0
"""Assumed duration of a save before one has been measured."""
UNMEASURED_SHARE = 1 / 3
"""Before a save has been measured, at most this share of the time until the deadline is kept free,
so that a short job trains at all.
"""
SAVE_MARGIN = 1.5
"""A save may take this many times the longest recent one: storage is slowest while many jobs are
preempted.
"""
SLACK_S = 5.0
"""Additional seconds, to agree on the stop and to exit."""
_NOTICE_POLL_S = 1.0
_RECENT = 8
"""Number of recent steps and saves whose longest one counts for a deadline."""


@dataclass(frozen=True)
class StopNotice:
    """A request to stop the run."""

    reason: str  # text for the log and the user
    by: float | None = None  # Unix time when the process will be ended, if known

    def __str__(self) -> str:
        if self.by is None:
            return self.reason
        return f"{self.reason}, which ends the process at {local_time(self.by)}"


class Wanted(IntFlag):
    """Actions after a step. Any caller may set `STOP` and `FORCE`, only the leader sets the other
    flags.
    """

    STOP = 1
    SNAPSHOT = 2
    EXPORT = 4
    SETTLE = 8  # writing in the background has ended, and its result can be collected
    FORCE = 16  # a snapshot although none is due. It must not fail


class Triggers:
    """Schedule, stop requests and pace of one run. A bad value in the configuration raises
    `ConfigError`.
    """

    def __init__(
        self, config: "RecoverConfig", notices: Sequence[Callable[[], StopNotice | None]]
    ) -> None:
        self.schedule = SnapshotSchedule(config.freq_epochs, config.freq_steps, config.freq_secs)
        self.stops = StopRequests(config.stop_signals, config.must_save_by, notices)
        # The last save may have to wait for one that begins now in the background.
        self._n_saves = 2 if config.async_save else 1
        self._saves_s = deque([0.0], _RECENT)
        self._steps_s = deque([0.0], _RECENT)
        self._step_began_s: float | None = None
        self._warned = False  # of torchrun

    @property
    def save_s(self) -> float:
        """Seconds of the longest recent snapshot or export. 0.0 before the first."""
        return max(self._saves_s)

    def saved(self, seconds: float) -> None:
        """Note how long a snapshot or an export took."""
        self._saves_s.append(seconds)

    def step_begins(self) -> None:
        """Note that the next step begins now. The first step of a process is not measured: its
        start is unknown.
        """
        self._step_began_s = time.monotonic()

    def after_step(
        self, ranks: "Ranks", step_info: StepInfo, ask: Callable[[], Wanted]
    ) -> tuple[Wanted, str | None]:
        """Agree on the actions after a step, and on the reason to stop, if there is one. Costs one
        small tensor.

        ``ask`` returns further flags. It is called in every caller, and a failure in one is raised
        in all. A signal may reach only some ranks, or reach them at different steps: the result is
        the same on all.
        """
        if self._step_began_s is not None:
            self._steps_s.append(time.monotonic() - self._step_began_s)
            self._step_began_s = None
        reason: str | None = None

        # Flags of this caller. Those of all callers are combined with a bitwise OR.
        def ask_here() -> int:
            nonlocal reason
            wanted = ask()
            if not ranks.is_leader:
                wanted &= Wanted.FORCE
            elif self.schedule.due(step_info):
                wanted |= Wanted.SNAPSHOT
            reason = self.stops.due(self.save_s, max(self._steps_s), self._n_saves)
            if reason is not None:
                wanted |= Wanted.STOP
            return wanted

        wanted = Wanted(ranks.flags(ask_here))
        if ranks.is_leader:
            self._warn_of_torchrun()
        if Wanted.STOP in wanted:
            # Only the ranks that were asked to stop know why.
            reasons = ranks.here(lambda: reason)
            reason = next(told for told in reasons if told is not None)
            self.stops.signals.grant()
        return wanted, reason

    def left_s(self, ranks: "Ranks") -> float | None:
        """Agree on the seconds until the first process of the run will be ended. None if no caller
        knows. A notice may reach only some ranks.
        """
        answers = ranks.here(self.stops.left_s)
        known = [left_s for left_s in answers if left_s is not None]
        return min(known, default=None)

    def _warn_of_torchrun(self) -> None:
        """Warn once if torchrun would kill its ranks before the snapshot that a signal asks for."""
        grace_s = torchrun_grace_s()
        step_s = max(self._steps_s)
        is_measured = step_s > 0 and self.save_s > 0
        if self._warned or grace_s is None or not is_measured:
            return
        needed_s = step_s + self._n_saves * self.save_s
        if self.stops.deadline is not None or needed_s <= grace_s:
            return
        self._warned = True
        logger.warning(
            "torchrun kills its ranks %g s after it got a signal, but a step takes %.1f s and a "
            "snapshot %.1f s: a run that is asked to stop would lose the steps since its last "
            "snapshot. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=%d for torchrun (torch 2.13 has it), set "
            "recover.must_save_by, or start the ranks with srun instead of torchrun",
            grace_s,
            step_s,
            self.save_s,
            SAVE_MARGIN * needed_s + SLACK_S,
        )


class SnapshotSchedule:
    """Decides after each step whether a snapshot is due: by epochs, steps or seconds, whichever
    comes first.

    See `RecoverConfig` for the frequencies. Steps count from 0: with ``freq_steps`` 10, steps 9,
    19, 29 ... are due. With ``freq_secs`` 0 every step is due. Without any frequency no step is. A
    value out of range raises `ConfigError`.
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
        self._freq_epochs = freq_epochs
        self._freq_steps = freq_steps
        self._freq_secs = freq_secs
        self._clock = clock
        self._last_s = clock()
        self._last_step: int | None = None
        self._owed = False

    @property
    def is_ever_due(self) -> bool:
        """Whether there is a frequency."""
        return (self._freq_epochs, self._freq_steps, self._freq_secs) != (None, None, None)

    def due(self, step_info: StepInfo) -> bool:
        """Whether to snapshot the step that was just trained. False for the step that was marked
        last.

        Asking changes nothing, so asking twice (for an actor and a critic, say) gives the same
        answer.
        """
        # Any of the frequencies is enough.
        if step_info.global_step == self._last_step:
            return False
        if self._owed:
            return True
        if self._freq_secs is not None and self._clock() - self._last_s >= self._freq_secs:
            return True
        if self._freq_steps is not None and (step_info.global_step + 1) % self._freq_steps == 0:
            return True
        epoch_ended = step_info.epoch_step == step_info.steps_per_epoch - 1
        if self._freq_epochs is None or not epoch_ended:
            return False
        return (step_info.epoch + 1) % self._freq_epochs == 0

    def owe(self) -> None:
        """Make every step due until one is marked, because the snapshot that was due could not be
        taken.
        """
        self._owed = True

    def mark(self, step_info: StepInfo) -> None:
        """Restart the clock, because the step was restored, or staged: until its commit, all steps
        would be due.
        """
        self._last_s = self._clock()
        self._last_step = step_info.global_step
        self._owed = False


class StopRequests:
    """Collects requests to stop, and decides at every step boundary whether the run must.

    Args:
        signals: see `StopSignals`.
        must_save_by: see `parse_deadline`, or `SLURM`, whose answer `find_deadline` waits for. If
            it passes during a recovery, the run stops at its next step.
        notices: functions that report a request from outside, called at most once a second. Each
            must return soon and not raise.
        clock: returns Unix time.
    """

    def __init__(
        self,
        signals: Sequence[str],
        must_save_by: str | float | None,
        notices: Sequence[Callable[[], StopNotice | None]] = (),
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.signals = StopSignals(signals, lambda name: self.request(StopNotice(name)))
        self._must_save_by = must_save_by
        self._notices = tuple(notices)
        self._clock = clock
        self.deadline: float | None = None
        self._left_s = 0.0  # from the moment when the deadline became known
        if must_save_by == SLURM:
            require_slurm()
        elif must_save_by is not None:
            self._set_deadline(parse_deadline(must_save_by, process_started_at()))
        self._noticed_s = -_NOTICE_POLL_S
        self._requested: StopNotice | None = None
        self._ended_by: float | None = None  # the earliest time that a request has told

    def find_deadline(self, ranks: "Ranks") -> None:
        """Ask SLURM for the end of the job, in the leader, for all callers. Does nothing with
        another ``must_save_by``, or if the end is known.

        Raises `ConfigError` if SLURM tells no end.
        """
        if self._must_save_by == SLURM and self.deadline is None:
            deadline = ranks.decide_slowly(end_of_slurm_job)
            self._set_deadline(deadline)

    def _set_deadline(self, deadline: float) -> None:
        self.deadline = deadline
        self._left_s = max(0.0, deadline - self._clock())

    def request(self, notice: StopNotice) -> None:
        """Request a stop at the next step boundary, from any thread or signal handler. The first
        reason and the earliest end of the process are kept.
        """
        self._requested = self._requested or notice
        ends = [end for end in (self._ended_by, notice.by) if end is not None]
        self._ended_by = min(ends, default=None)

    def due(self, save_s: float, step_s: float, n_saves: int = 1) -> str | None:
        """Return the reason to snapshot and stop now, before another step. None if the run may
        continue.

        A signal, a request or a notice stops the run at once. A deadline stops it if ``n_saves``
        saves that start after one more step might not end in time. ``save_s`` is 0 if none was
        measured.
        """
        self._ask_notices()
        if self._requested is not None:
            return str(self._requested)
        if self.deadline is None:
            return None
        # Time for one more step, the saves after it, and the exit.
        if save_s:
            kept_s = n_saves * save_s * SAVE_MARGIN
            saving = f"a save of {n_saves * save_s:.1f} s"
        else:
            kept_s = n_saves * UNMEASURED_SAVE_S * SAVE_MARGIN
            kept_s = min(kept_s, UNMEASURED_SHARE * self._left_s)
            saving = f"a first save, for which {kept_s:.1f} s are kept"
        if self._clock() + step_s + kept_s + SLACK_S < self.deadline:
            return None
        return (
            f"recover.must_save_by {self._must_save_by!r}, which is {local_time(self.deadline)}, "
            f"is too near for another step of {step_s:.1f} s and then {saving}"
        )

    def left_s(self) -> float | None:
        """Seconds until the process will be ended, less ``SLACK_S``. None if that is not known."""
        ends = [end for end in (self.deadline, self._ended_by) if end is not None]
        if not ends:
            return None
        return max(0.0, min(ends) - self._clock() - SLACK_S)

    def _ask_notices(self) -> None:
        now_s = time.monotonic()
        # A notice may ask a server.
        if now_s - self._noticed_s < _NOTICE_POLL_S:
            return
        self._noticed_s = now_s
        for notice in self._notices:
            found = notice()
            if found is not None:
                self.request(found)
