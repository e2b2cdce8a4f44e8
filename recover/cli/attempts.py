"""What the journal of a run says of its attempts: each from a `load` to whatever ended it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...utils.errors import CheckpointNotFoundError
from ...utils.folder_lock import is_locked
from ..storage.journal import JOURNAL_NAME, read_journal
from .places import LOCK_NAME, Run

EVENTS = ("start", "step", "save", "stop", "loss", "end")


@dataclass
class Attempt:
    """One attempt.

    Attributes:
        number: from 0.
        began: when `load` had returned, in seconds of the epoch.
        host, pid, world_size: who.
        resumed: the step it was restored to; None: it began afresh.
        load_s: seconds that took.
        process_started: when its process began.
        first, last: steps it has trained; None: none.
        first_at, last_at: when the dumps of these were called.
        ended: when; None: no end was noted.
        stop: why it was asked to stop.
        error: what ended it.
        closed: whether the handler was closed.
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
    losses: int = 0
    redone: int = 0
    gone_s: float | None = None

    def verdict(self, is_last: bool, in_use: bool) -> str:
        """What ended it, in words."""
        if self.ended is None and is_last and in_use:
            return "goes on"
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
    return list_attempts(read_journal(run.trial_root, EVENTS))


def list_attempts(events: Iterable[dict[str, Any]]) -> list[Attempt]:
    """The attempts in the events of a journal; what comes before the first start is left out."""
    attempts: list[Attempt] = []
    for event in events:
        if event["event"] == "start":
            attempts.append(_begin(len(attempts), event))
        elif attempts:
            _go_on(attempts, event)
    _count_redone(attempts)
    return attempts


def _count_redone(attempts: list[Attempt]) -> None:
    """Count by what all attempts before have reached: the last of them may have ended before its first step."""
    reached = -1
    for attempt in attempts:
        if attempt.first is not None and attempt.last is not None:
            attempt.redone = max(0, min(attempt.last, reached) - attempt.first + 1)
            reached = max(reached, attempt.last)


def _begin(number: int, event: dict[str, Any]) -> Attempt:
    return Attempt(
        number,
        began=event["time"],
        host=event.get("host", ""),
        pid=event.get("pid", 0),
        world_size=event.get("world_size", 0),
        resumed=event.get("step"),
        load_s=event.get("load_s", 0.0),
        process_started=event.get("process_started", event["time"]),
    )


def _go_on(attempts: list[Attempt], event: dict[str, Any]) -> None:
    attempt = attempts[-1]
    match event["event"]:
        case "step":
            if attempt.first is None:
                attempt.first, attempt.first_at = event["step"], event["time"]
                if len(attempts) > 1 and (left := attempts[-2].last_at or attempts[-2].began) is not None:
                    attempt.gone_s = round(event["time"] - left, 3)
            attempt.last, attempt.last_at = event["step"], event["time"]
        case "stop":
            attempt.stop = event.get("reason", "")
        case "loss":
            attempt.losses += 1
        case "end":
            attempt.ended, attempt.error = event["time"], event.get("error")
            attempt.closed = event.get("how") == "closed"


def is_in_use(trial_root: Path) -> bool:
    """Whether a job uses the run now: somebody holds its lock."""
    return is_locked(trial_root / LOCK_NAME)
