"""What the journal of a run says of its attempts: each from its beginning, before `load`, to whatever ended it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...utils.errors import CheckpointNotFoundError
from ..storage.journal import JOURNAL_NAME, last_start, read_journal
from .places import Run

_BOUNDS = ("attempt", "start", "stop", "loss", "failed", "returned", "end")
EVENTS = (*_BOUNDS, "step", "save")


@dataclass
class Attempt:
    """One attempt.

    Attributes:
        number: from 0.
        began: when `load` had returned, or the attempt began, in seconds of the epoch.
        host, pid, world_size: who; no ranks as long as nothing was loaded.
        loaded: whether `load` has returned.
        resumed: the step it was restored to; None: it began afresh.
        load_s: seconds that took.
        process_started: when its process began.
        first, last: steps it has trained; None: none.
        first_at, last_at: when the dumps of these were called.
        ended: when; None: no end was noted.
        stop: why it was asked to stop.
        error: what ended it.
        closed: whether the handler was closed.
        given_up: what made the supervisor begin no other attempt.
        losses: workers that the supervisor has lost meanwhile.
        redone: steps that had been trained before, and were trained again.
        gone_s: from the last step of the attempt before to the first one of this: what its end has cost.
    """

    number: int
    began: float
    host: str
    pid: int
    world_size: int
    resumed: int | None
    load_s: float
    process_started: float
    first: int | None = None
    first_at: float | None = None
    last: int | None = None
    last_at: float | None = None
    ended: float | None = None
    stop: str | None = None
    error: str | None = None
    closed: bool = False
    loaded: bool = True
    given_up: str | None = None
    losses: int = 0
    redone: int = 0
    gone_s: float | None = None

    def verdict(self, is_last: bool, in_use: bool | None) -> str:
        """What ended it, in words; ``in_use`` says whether a job uses the run now, None that this is not known."""
        begins = "" if self.loaded else "before it had loaded: "
        given_up = f"; given up: {self.given_up}" if self.given_up else ""
        if self.ended is None and is_last and in_use is not False:
            goes_on = "goes on" if self.loaded else "begins: its workers start, or it loads"
            return goes_on if in_use else f"{goes_on}, or was killed: the lock of the run cannot tell"
        return begins + self._ending() + given_up

    def _ending(self) -> str:
        if self.ended is None:
            return "killed, or its machine was lost: nothing was noted"
        if self.stop is not None:
            return f"stopped as asked: {self.stop}"
        if self.error is not None:
            return self.error
        return "the handler was closed" if self.closed else "the process ended without closing the handler"


def read_attempts(run: Run) -> list[Attempt]:
    """The attempts of a run on this machine, oldest first.

    Raises:
        ConfigError: it is at a URL.
        CheckpointNotFoundError: it has no journal.
    """
    if not (path := run.trial_root / JOURNAL_NAME).exists():
        raise CheckpointNotFoundError(
            f"there is no {path}: nothing is known of the attempts of this run, which an older version has written"
        )
    return list_attempts(read_journal(run.trial_root, (*_BOUNDS, "step"), ends_of="step"))


def last_attempt(trial_root: Path) -> Attempt | None:
    """The last attempt in a journal, without its steps. Its number counts from the last attempt that has loaded."""
    begin = last_start(trial_root)
    events = read_journal(trial_root, _BOUNDS, since=0 if begin is None else begin[0])
    return next(reversed(list_attempts(events)), None)


def list_attempts(events: Iterable[dict[str, Any]]) -> list[Attempt]:
    """The attempts in the events of a journal. One that ended well before it loaded anything is left out."""
    attempts: list[Attempt] = []
    begins = False  # whether nothing else is known of the last one yet
    for event in events:
        match event["event"]:
            case "attempt":
                if not begins:  # both supervisor and handler tell of it
                    attempts.append(_begin(len(attempts), event, loaded=False))
                begins = True
            case "start":
                if begins or (attempts and _was_restarted(attempts[-1])):
                    attempts.pop()
                attempts.append(_begin(len(attempts), event))
                begins = False
            case "returned":
                if begins:
                    attempts.pop()
                begins = False
            case _ if attempts:
                _go_on(attempts, event)
                begins = begins and attempts[-1].ended is None
    _count_redone(attempts)
    return attempts


def _was_restarted(attempt: Attempt) -> bool:
    """Whether an attempt that began lost a worker group, which was then started again alone."""
    return not attempt.loaded and attempt.losses > 0


def _count_redone(attempts: list[Attempt]) -> None:
    """Count by what all attempts before have reached: the last of them may have ended before its first step."""
    reached = -1
    for attempt in attempts:
        if attempt.first is not None and attempt.last is not None:
            attempt.redone = max(0, min(attempt.last, reached) - attempt.first + 1)
            reached = max(reached, attempt.last)


def _begin(number: int, event: dict[str, Any], loaded: bool = True) -> Attempt:
    return Attempt(
        number,
        began=event["time"],
        host=event.get("host") or "",
        pid=event.get("pid") or 0,
        world_size=event.get("world_size") or 0,
        resumed=event.get("step"),
        load_s=event.get("load_s") or 0.0,
        process_started=event.get("process_started") or event["time"],
        loaded=loaded,
    )


def _go_on(attempts: list[Attempt], event: dict[str, Any]) -> None:
    attempt = attempts[-1]
    match event["event"]:
        case "step":
            if attempt.first is None:
                attempt.first, attempt.first_at = event["step"], event["time"]
                if len(attempts) > 1:
                    left = next((one.last_at for one in reversed(attempts[:-1]) if one.last_at), attempts[0].began)
                    attempt.gone_s = round(event["time"] - left, 3)
            attempt.last, attempt.last_at = event["step"], event["time"]
        case "stop":
            attempt.stop = event.get("reason", "")
        case "loss":
            attempt.losses += 1
            if not attempt.loaded:
                lost = f"worker group {event.get('group')!r} lost rank(s) {event.get('ranks')}: {event.get('cause')}"
                attempt.ended, attempt.error = event["time"], lost
        case "failed":
            if attempt.ended is None:
                attempt.ended, attempt.error = event["time"], event.get("error")
            elif attempt.error != event.get("error"):
                attempt.given_up = event.get("error")
        case "end":
            attempt.ended, attempt.error = event["time"], attempt.error or event.get("error")
            attempt.closed = event.get("how") == "closed"
