"""The attempts in a run's journal.

An attempt goes from its beginning, before `load`, to whatever ended it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...utils.errors import CheckpointNotFoundError
from ..storage.journal import JOURNAL_NAME, last_start, read_journal

_BOUNDS = ("attempt", "start", "stop", "loss", "failed", "returned", "end")
EVENTS = (*_BOUNDS, "step", "save")


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
    losses: int = 0  # number of worker losses during the attempt
    redone: int = 0  # steps that an earlier attempt had trained already
    gone_s: float | None = (
        None  # seconds from the last step of the previous attempt to the first step of this one
    )

    def verdict(self, is_last: bool, in_use: bool | None) -> str:
        """Describe how the attempt ended. ``in_use`` is `Use.known` of the run."""
        if self.ended is None and is_last and in_use is not False:
            goes_on = "goes on" if self.loaded else "begins: its workers start, or it loads"
            return (
                goes_on if in_use else f"{goes_on}, or was killed: the lock of the run cannot tell"
            )
        ending = (
            "the handler was closed"
            if self.closed
            else "the process ended without closing the handler"
        )
        if self.ended is None:
            ending = "killed, or its machine was lost: nothing was noted"
        elif self.stop is not None:
            ending = f"stopped as asked: {self.stop}"
        elif self.error is not None:
            ending = self.error
        begins = "" if self.loaded else "before it had loaded: "
        return begins + ending + (f"; given up: {self.given_up}" if self.given_up else "")


def read_attempts(trial_root: Path) -> list[AttemptRecord]:
    """The attempts of a run, oldest first. Raises `CheckpointNotFoundError` if the run has no
    journal.
    """
    if not (path := trial_root / JOURNAL_NAME).exists():
        raise CheckpointNotFoundError(
            f"there is no {path}: nothing is known of the attempts of this run, which an older "
            "version has written"
        )
    return list_attempts(read_journal(trial_root, (*_BOUNDS, "step"), ends_of="step"))


def last_attempt(trial_root: Path) -> AttemptRecord | None:
    """The last attempt in a journal, without its steps. Its number counts from the last attempt
    that has loaded.
    """
    begin = last_start(trial_root)
    events = read_journal(trial_root, _BOUNDS, since=0 if begin is None else begin[0])
    return next(reversed(list_attempts(events)), None)


def list_attempts(events: Iterable[dict[str, Any]]) -> list[AttemptRecord]:
    """Group the events of a journal into attempts. An attempt that ended well before it loaded is
    left out.
    """
    attempts: list[AttemptRecord] = []
    begins = False  # whether the last attempt has only its beginning so far
    for event in events:
        match event["event"]:
            case "attempt":
                if not begins:  # both the supervisor and the handler write this event
                    attempts.append(_begin(len(attempts), event, loaded=False))
                begins = True
            case "start":
                # Or it had not loaded, and lost a worker group that was then started again alone.
                if begins or (attempts and not attempts[-1].loaded and attempts[-1].losses > 0):
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


def _count_redone(attempts: list[AttemptRecord]) -> None:
    reached = -1  # by all earlier attempts: the last one may have ended before its first step
    for attempt in attempts:
        if attempt.first is not None and attempt.last is not None:
            attempt.redone = max(0, min(attempt.last, reached) - attempt.first + 1)
            reached = max(reached, attempt.last)


def _begin(number: int, event: dict[str, Any], loaded: bool = True) -> AttemptRecord:
    return AttemptRecord(
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


def _go_on(attempts: list[AttemptRecord], event: dict[str, Any]) -> None:
    attempt = attempts[-1]
    match event["event"]:
        case "step":
            if attempt.first is None:
                attempt.first, attempt.first_at = event["step"], event["time"]
                if len(attempts) > 1:
                    before = islice(reversed(attempts), 1, None)
                    left = next((one.last_at for one in before if one.last_at), attempts[0].began)
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
