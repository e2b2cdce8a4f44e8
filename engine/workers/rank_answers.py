"""Answers of ranks to one call: results, errors of the code, deaths of processes, and ranks that
will never answer.

Ranks with a pending call are pinged every `PING_EVERY_S`. A separate thread answers, even if the
worker is busy, unless C code holds the interpreter, and says how long ago the process made progress
(`holdfast.utils.heartbeat`). A process counts as

- stopped, if it does not answer a ping for ``hang_s``.
- stalled (an endless loop, a collective that nobody else joins), if it answers but neither it nor
  any other rank with a pending call made progress for ``stall_s``. While one rank still does, the
  others may just wait for it.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from ...utils.distributed import collective_broke
from ...utils.errors import ConfigError, PeerError, WorkerLost

ERROR_GRACE_S = 1.0
"""Seconds after a rank's error in which other ranks may still answer or turn out to be dead."""
LOSS_GRACE_S = 0.2
"""Seconds to wait after a death for reports of others that died with it, so that all are named."""
LOST = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    OutOfMemoryError,
    ObjectLostError,
    LocalRayletDiedError,
)
"""Errors that Ray raises for a call whose process is gone."""
_TOGETHER_S = 0.02
"""Answers within this time of another are collected with it. The cost of each `ray.wait` grows with
the number of pending calls, so one wait per rank would grow with its square.
"""
PING_EVERY_S = 5.0
"""Seconds between pings of the ranks with a pending call, and the possible delay in noticing a
hang.
"""


@dataclass
class Answers:
    """Answers so far. Each rank is in exactly one of these."""

    pending: dict[Any, int]
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RayError] = field(default_factory=dict)
    lost: dict[int, RayError] = field(default_factory=dict)

    def collect(self, timeout_s: float | None, dead: Callable[[], Collection[int]] = tuple) -> None:
        """Wait until all have answered or ``timeout_s`` is over. After the first failure its grace
        period counts.

        ``dead`` is called after an error and returns the ranks known to be dead, even if Ray has
        not reported them yet.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.pending:
            timeout = None if end == math.inf else max(0.0, end - time.monotonic())
            refs = list(self.pending)
            if not ray.wait(refs, num_returns=1, timeout=timeout)[0]:
                return
            calm = not (self.lost or self.errors)
            for ref in ray.wait(refs, num_returns=len(refs), timeout=_TOGETHER_S)[0]:
                self._take(ref)
            if self.lost or self.errors:
                loss = self.lost or (calm and self.pending and dead())
                grace_end = time.monotonic() + (LOSS_GRACE_S if loss else ERROR_GRACE_S)
                end = grace_end if calm else min(end, grace_end)

    def _take(self, ref: Any) -> None:
        rank = self.pending.pop(ref)
        try:
            self.values[rank] = ray.get(ref)
        except RayError as error:
            # Ray derives a RayTaskError from the class of its cause, which may be in LOST.
            lost = isinstance(error, LOST) and not isinstance(error, RayTaskError)
            (self.lost if lost else self.errors)[rank] = error


def require_ray() -> None:
    """Raise ConfigError unless Ray is initialised in this process."""
    if not ray.is_initialized():
        raise ConfigError(
            "Ray is not initialised in this process; call ray.init() before making worker groups"
        )


def culprit(errors: Mapping[int, RayError]) -> tuple[RayError, int]:
    """The error that explains the others, and its rank.

    In order: a lost worker of another group, a bug, a collective that broke, and a peer's report
    about another rank.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        cause = cause_of(errors[rank])
        return (
            not isinstance(cause, WorkerLost),
            isinstance(cause, PeerError),
            collective_broke(cause),
            rank,
        )

    rank = min(errors, key=order)
    return errors[rank], rank


def cause_of(error: RayError) -> BaseException:
    """The worker's exception, or Ray's own error."""
    return error.cause if isinstance(error, RayTaskError) else error


def raise_cause(error: RayError) -> NoReturn:
    """Raise the worker's exception from Ray's error, which has the worker's traceback."""
    if isinstance(error, RayTaskError):
        raise error.cause from error
    raise error


def headline(error: BaseException | None) -> str:
    """First line of an error, for a message."""
    if error is None:
        return "the process is gone"
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


@dataclass(frozen=True)
class Patience:
    """Time limits for an answer to a ping (None: no pings), and for any progress."""

    hang_s: float | None
    stall_s: float | None = None


@dataclass(frozen=True)
class Hung:
    """Ranks that live but will not answer. If ``stalled``, they answer pings, so they may just be
    slow.
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
    """Fill ``answers`` until all are there, a rank died, failed or hangs, or ``deadline_s`` is
    over.

    Returns the hung ranks. After an error only stopped ones count, because the others wait for the
    failed one. ``dead`` is called then and returns ranks known to be dead, which are not pinged:
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
    """Seconds since the last progress of each rank whose process answers in time, even if its
    worker is busy.
    """
    refs = {
        actor.ping.options(concurrency_group="health").remote(): rank
        for rank, actor in actors.items()
    }
    answers = Answers(refs)
    answers.collect(timeout_s)
    return answers.values
