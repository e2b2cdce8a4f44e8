"""Wait for the ranks with a pending call, and find those that live but will never answer.

They are pinged every `PING_EVERY_S`. A separate thread answers, even if the worker is busy, unless C code holds the
interpreter. The answer says how long ago the process last made progress (`holdfast.utils.heartbeat`). A process counts
as

- stopped, if it does not answer a ping for ``hang_s``.
- stalled (an endless loop, a collective that nobody else joins), if it answers but neither it nor any other rank with a
  pending call made progress for ``stall_s``. While one rank still does, the others may just wait for it. Without a
  process group computing is progress, so only a rank that does nothing at all is found.

A ping costs about a millisecond, on threads with no other work.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .ray_adapter import Answers

PING_EVERY_S = 5.0
"""Seconds between pings of the ranks with a pending call, and the possible delay in noticing a hang."""


@dataclass(frozen=True)
class Patience:
    """Time limits after which a process with a pending call counts as hung.

    ``hang_s`` limits the time without an answer to a ping (None: no pings). ``stall_s`` limits the time without
    progress.
    """

    hang_s: float | None
    stall_s: float | None = None


@dataclass(frozen=True)
class Hung:
    """Ranks that live but will not answer. If ``stalled``, they answer pings, so they may just be slow."""

    ranks: list[int]
    symptom: str
    stalled: bool = False


def wait_watching(
    answers: Answers,
    actors: Mapping[int, Any],
    patience: Patience,
    deadline_s: float | None,
    dead: Callable[[], Collection[int]] = tuple,
) -> Hung | None:
    """Wait until all have answered, one died, failed or hangs, or ``deadline_s`` is over.

    Fills ``answers``, and returns the hung ranks. After an error only stopped ones count, because the others wait for
    the failed rank. ``dead`` is called after an error and returns ranks known to be dead, which are not pinged, because
    Ray needs two seconds to report a dead node.
    """
    if patience.hang_s is None:
        answers.collect(deadline_s, dead)
        return None
    start = time.monotonic()
    end = math.inf if deadline_s is None else start + deadline_s
    stall_s = math.inf if patience.stall_s is None else patience.stall_s
    every_s = min(PING_EVERY_S, patience.hang_s, stall_s)
    while True:
        answers.collect(max(0.0, min(every_s, end - time.monotonic())), dead)
        left_s = math.inf if answers.errors else end - time.monotonic()
        if answers.lost or not answers.pending or left_s <= 0 or (answers.errors and dead()):
            return None
        pending = sorted(answers.pending.values())
        idle_s = ping({rank: actors[rank] for rank in pending}, min(patience.hang_s, left_s))
        since_call_s = time.monotonic() - start  # idle time before the call does not count
        hung = None
        if silent := [rank for rank in pending if rank not in idle_s]:
            if left_s >= patience.hang_s:  # else they may be well and just miss the deadline
                hung = Hung(silent, f"no answer to a ping within {patience.hang_s:g} s")
        elif not answers.errors and min(since_call_s, *idle_s.values()) >= stall_s:
            hung = Hung(pending, f"no progress for {stall_s:g} s", stalled=True)
        if hung or answers.errors:
            answers.collect(0)  # a death in the meantime is reported as a death
            return hung


def ping(actors: Mapping[int, Any], timeout_s: float) -> dict[int, float]:
    """Seconds since the last progress of each rank whose process answers in time, even if its worker is busy."""
    refs = {actor.ping.options(concurrency_group="health").remote(): rank for rank, actor in actors.items()}
    answers = Answers(refs)
    answers.collect(timeout_s)
    return answers.values
