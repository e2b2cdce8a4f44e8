"""Waits for the ranks with a pending call, and finds those of them that live but will never answer.

They are pinged every `PING_EVERY_S`. A thread of their own answers, however slow the worker is, unless C code holds the
interpreter; it says how long ago the process last made progress (`holdfast.utils.heartbeat`). So a process is found

- stopped: it leaves a ping unanswered for ``hang_s``;
- in an endless loop, or in a collective that nobody else joins: it answers, but made no progress for ``stall_s``, and
  nor did any other that has a pending call. While one of them still does, the others may just wait for it. Without a
  process group nobody waits for a rank, and computing is progress: only one that does nothing at all is found.

A ping costs about a millisecond, on threads that do nothing else.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .ray_adapter import Answers

PING_EVERY_S = 5.0
"""How often the ranks with a pending call are pinged; also how late a hang may be noticed beyond its timeout."""


@dataclass(frozen=True)
class Patience:
    """What a process that has a pending call may do before it counts as hung.

    Attributes:
        hang_s: leave a ping unanswered for so long; None: none is pinged, so none is found hung.
        stall_s: answer pings, but make no progress for so long; None: for ever.
    """

    hang_s: float | None
    stall_s: float | None = None


@dataclass(frozen=True)
class Hung:
    """Ranks that live but will not answer.

    Attributes:
        ranks: which.
        symptom: how that was seen.
        stalled: they answer pings, so they may just be slow.
    """

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
    """Wait until all have answered, one died, failed or was found hung, or ``deadline_s`` is over.

    Args:
        answers: filled in.
        actors: the `RankActor` of each rank.
        patience: when a rank counts as hung.
        deadline_s: None waits as long as all live and none hangs.
        dead: asked after an error for ranks that are known to be dead, which are not pinged: Ray takes two seconds to
            say so of a node.

    Returns:
        the ranks found hung. After an error only stopped ones count: the others wait for the rank that raised it.
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
        since_call_s = time.monotonic() - start  # a worker that was idle before is not to blame for that
        hung = None
        if silent := [rank for rank in pending if rank not in idle_s]:
            if left_s >= patience.hang_s:  # else they may be well, and miss the deadline at worst
                hung = Hung(silent, f"no answer to a ping within {patience.hang_s:g} s")
        elif not answers.errors and min(since_call_s, *idle_s.values()) >= stall_s:
            hung = Hung(pending, f"no progress for {stall_s:g} s", stalled=True)
        if hung or answers.errors:
            answers.collect(0)  # a death that came meanwhile is told as one
            return hung


def ping(actors: Mapping[int, Any], timeout_s: float) -> dict[int, float]:
    """Seconds since the last progress of each rank whose process answers in time, however busy its worker is."""
    refs = {actor.ping.options(concurrency_group="health").remote(): rank for rank, actor in actors.items()}
    answers = Answers(refs)
    answers.collect(timeout_s)
    return answers.values
