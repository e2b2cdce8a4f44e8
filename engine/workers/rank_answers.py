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
        end = _in(timeout_s)
        while self.pending:
            timeout = None
            if end != math.inf:
                timeout = max(0.0, end - time.monotonic())
            refs = list(self.pending)
            ready, _ = ray.wait(refs, num_returns=1, timeout=timeout)
            if not ready:
                return

            # Others that answer at nearly the same time are taken at once.
            calm = not self._failed
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_TOGETHER_S)
            for ref in ready:
                self._take(ref)

            # The first failure replaces the time limit by its grace period. A later one may only
            # shorten it.
            if self._failed:
                loss = self.lost or (calm and self.pending and dead())
                grace_end = _in(LOSS_GRACE_S if loss else ERROR_GRACE_S)
                end = grace_end if calm else min(end, grace_end)

    @property
    def _failed(self) -> bool:
        return bool(self.lost or self.errors)

    def _take(self, ref: Any) -> None:
        rank = self.pending.pop(ref)
        try:
            self.values[rank] = ray.get(ref)
        except RayError as error:
            # Ray derives a RayTaskError from the class of its cause, which may be in LOST.
            lost = isinstance(error, LOST) and not isinstance(error, RayTaskError)
            kind = self.lost if lost else self.errors
            kind[rank] = error


def _in(timeout_s: float | None) -> float:
    """Time on the monotonic clock after ``timeout_s``, or never."""
    if timeout_s is None:
        return math.inf
    return time.monotonic() + timeout_s


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
    if isinstance(error, RayTaskError):
        return error.cause
    return error


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
    """Ranks that live but will not answer. If they answer pings, they may just be slow, and
    ``stalled_s`` tells for how many seconds they made no progress.
    """

    ranks: list[int]
    symptom: str
    stalled_s: float = 0.0


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
    hang_s = patience.hang_s
    stall_s = math.inf if patience.stall_s is None else patience.stall_s
    every_s = min(PING_EVERY_S, hang_s, stall_s)
    start = time.monotonic()
    end = _in(deadline_s)
    while True:
        # Wait until it is time for the next ping. After an error there is no deadline.
        answers.collect(max(0.0, min(every_s, end - time.monotonic())), dead)
        left_s = math.inf if answers.errors else end - time.monotonic()
        if answers.lost or not answers.pending or left_s <= 0:
            return None
        if answers.errors and dead():
            return None

        pending = sorted(answers.pending.values())
        idle_s = ping({rank: actors[rank] for rank in pending}, min(hang_s, left_s))
        silent = [rank for rank in pending if rank not in idle_s]
        # Idle time before the call does not count.
        since_call_s = time.monotonic() - start

        hung = None
        if silent:
            # With less time than a ping may take, they may be well and just miss the deadline.
            if left_s >= hang_s:
                hung = Hung(silent, f"no answer to a ping within {hang_s:g} s")
        elif not answers.errors and min(since_call_s, *idle_s.values()) >= stall_s:
            hung = Hung(pending, f"no progress for {stall_s:g} s", stall_s)
        if hung or answers.errors:
            answers.collect(0)  # a death in the meantime is reported as a death
            return hung


def ping(actors: Mapping[int, Any], timeout_s: float) -> dict[int, float]:
    """Seconds since the last progress of each rank whose process answers in time, even if its
    worker is busy.
    """
    answers = Answers({})
    for rank, actor in actors.items():
        ref = actor.ping.options(concurrency_group="health").remote()
        answers.pending[ref] = rank
    answers.collect(timeout_s)
    return answers.values
