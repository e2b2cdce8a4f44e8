"""The attempts in a run's journal.

An attempt goes from its beginning, before `load`, to whatever ended it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ...utils.errors import CheckpointNotFoundError
from ..storage.journal import BOUNDS, JOURNAL_NAME, Event, last_start, read_journal


@dataclass
class AttemptRecord:
    """One attempt as the journal records it."""

    number: int  # from 0
    began: float  # when `load` returned, or the attempt began, in seconds since the epoch
    host: str  # of the leader
    pid: int  # of the leader
    world_size: int  # 0 before anything is loaded
    resumed: int | None  # step that was restored. None for a fresh start
    load_s: float  # seconds that `load` took
    recorded: int | None  # records of unfinished episodes that `load` has read. None without a log
    process_started: float  # when the process began
    first: int | None = None  # first trained step, None if there is none
    first_at: float | None = None  # when `dump` was called for the first step
    last: int | None = None  # last trained step, None if there is none
    last_at: float | None = None  # when `dump` was called for the last step
    ended: float | None = None  # when the attempt ended. None if the journal has no end
    stop: str | None = None  # why the attempt was asked to stop
    error: str | None = None  # error that ended the attempt
    closed: bool = False  # whether the handler was closed
    loaded: bool = True  # whether `load` has returned
    given_up: str | None = None  # why the supervisor began no other attempt
    total_steps: int | None = None  # of the run, as its ft_spec says. None in older journals
    supervised: bool = False  # whether a supervisor began the attempt
    returned: bool = False  # whether the job of the supervisor returned after it
    losses: int = 0  # number of worker losses during the attempt
    redone: int = 0  # steps that an earlier attempt had trained already
    # Seconds from the last step of the previous attempt to the first step of this one.
    gone_s: float | None = None

    def verdict(self, is_last: bool, in_use: bool | None) -> str:
        """Describe how the attempt ended. ``in_use`` is `Use.known` of the run."""
        # Only the last attempt may go on, and not if it is known that nobody uses the run.
        if self.ended is None and is_last and in_use is not False:
            goes_on = "goes on"
            if not self.loaded:
                goes_on = "begins: its workers start, or it loads"
            if in_use:
                return goes_on
            return f"{goes_on}, or was killed: the lock of the run cannot tell"

        text = self._ending()
        if not self.loaded:
            text = f"before it had loaded: {text}"
        if self.given_up:
            text += f"; given up: {self.given_up}"
        return text

    def _ending(self) -> str:
        if self.ended is None:
            return "killed, or its machine was lost: nothing was noted"
        if self.stop is not None:
            return f"stopped as asked: {self.stop}"
        if self.error is not None:
            return self.error
        if self.closed:
            return "the handler was closed"
        return "the process ended without closing the handler"


def read_attempts(trial_root: Path) -> list[AttemptRecord]:
    """The attempts of a run, oldest first. Raises `CheckpointNotFoundError` if the run has no
    journal, and OSError if it cannot be read.
    """
    path = trial_root / JOURNAL_NAME
    if not path.exists():
        raise CheckpointNotFoundError(
            f"there is no {path}: nothing is known of the attempts of this run, which an older "
            "version has written"
        )
    events = read_journal(trial_root, (*BOUNDS, "step"), ends_of="step", must_read=True)
    return list_attempts(events)


def last_attempt(trial_root: Path) -> AttemptRecord | None:
    """The last attempt in a journal, without its steps. Its number counts from the last attempt
    that has loaded. Raises OSError if the journal cannot be read.
    """
    # Entries before the last start do not matter, and may be many.
    start = last_start(trial_root)
    begin = 0 if start is None else start[0]
    attempts = list_attempts(read_journal(trial_root, BOUNDS, since=begin, must_read=True))
    return attempts[-1] if attempts else None


def list_attempts(events: Iterable[Event]) -> list[AttemptRecord]:
    """Group the events of a journal into attempts. An attempt that ended well before it loaded is
    left out.
    """
    attempts: list[AttemptRecord] = []
    begins = False  # whether the last attempt has only its beginning so far
    supervisor: int | None = None  # pid of the last driver that had a supervisor
    for event in events:
        match event["event"]:
            case "attempt":
                # Both the supervisor and the handler write this event.
                if event.get("supervised"):
                    supervisor = event.get("pid")
                if not begins:
                    attempts.append(_begin(len(attempts), event, loaded=False))
                begins = True
            case "start":
                if begins or _waits_for_start(attempts):
                    attempts.pop()
                attempts.append(_begin(len(attempts), event))
                begins = False
            case "returned":
                if begins:
                    attempts.pop()
                begins = False
                if attempts:
                    attempts[-1].returned = True
            case _ if attempts:
                _go_on(attempts, event)
                begins = begins and attempts[-1].ended is None
        if attempts:
            attempts[-1].supervised = attempts[-1].pid == supervisor
    _count_redone(attempts)
    return attempts


def _waits_for_start(attempts: list[AttemptRecord]) -> bool:
    """Whether the last attempt had not loaded, and lost a worker group that was then started again
    alone.
    """
    if not attempts:
        return False
    last = attempts[-1]
    return not last.loaded and last.losses > 0


def _count_redone(attempts: list[AttemptRecord]) -> None:
    # By all earlier attempts, because the last one may have ended before its first step.
    reached = -1
    for attempt in attempts:
        if attempt.first is None or attempt.last is None:
            continue
        again = min(attempt.last, reached) - attempt.first + 1
        attempt.redone = max(0, again)
        reached = max(reached, attempt.last)


def _begin(number: int, event: Event, loaded: bool = True) -> AttemptRecord:
    return AttemptRecord(
        number,
        began=event["time"],
        host=event.get("host") or "",
        pid=event.get("pid") or 0,
        world_size=event.get("world_size") or 0,
        resumed=event.get("step"),
        load_s=event.get("load_s") or 0.0,
        recorded=event.get("recorded"),
        process_started=event.get("process_started") or event["time"],
        loaded=loaded,
        total_steps=event.get("total_steps"),
    )


def _go_on(attempts: list[AttemptRecord], event: Event) -> None:
    """Add an event to the last attempt."""
    attempt = attempts[-1]
    match event["event"]:
        case "step":
            if attempt.first is None:
                attempt.first = event["step"]
                attempt.first_at = event["time"]
                attempt.gone_s = _time_since(attempts, event["time"])
            attempt.last = event["step"]
            attempt.last_at = event["time"]
        case "stop":
            attempt.stop = event.get("reason", "")
            # It came after the error, when the supervisor was about to begin the next attempt.
            attempt.error = None
        case "loss":
            attempt.losses += 1
            if not attempt.loaded:
                attempt.ended = event["time"]
                attempt.error = (
                    f"worker group {event.get('group')!r} lost rank(s) {event.get('ranks')}: "
                    f"{event.get('cause')}"
                )
        case "failed":
            # The supervisor notes the error of an attempt, and may give up with another one.
            error = event.get("error")
            if attempt.ended is None:
                attempt.ended = event["time"]
                attempt.error = error
            elif attempt.error != error:
                attempt.given_up = error
        case "end":
            attempt.ended = event["time"]
            attempt.error = attempt.error or event.get("error")
            attempt.closed = event.get("how") == "closed"


def _time_since(attempts: list[AttemptRecord], moment: float) -> float | None:
    """Seconds since the last step before the last attempt. None for the first attempt."""
    if len(attempts) < 2:
        return None

    # Without any step, since the very beginning.
    left = attempts[0].began
    for before in islice(reversed(attempts), 1, None):
        if before.last_at:
            left = before.last_at
            break
    return round(moment - left, 3)
