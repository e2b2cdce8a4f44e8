"""Results of Ray calls (answers, errors of the code, deaths of processes), and the rank's actor as Ray runs it."""

import math
import os
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
from ...utils.processes import ProcessId
from .actor import RankActor, device_index

ERROR_GRACE_S = 1.0
"""Seconds after a rank's error in which other ranks may still answer or turn out to be dead."""
LOSS_GRACE_S = 0.2
"""Seconds to wait after a death for reports of others that died with it, so that all are named."""
LOST = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError, ObjectLostError, LocalRayletDiedError)
"""Errors that Ray raises for a call whose process is gone."""
_TOGETHER_S = 0.02
"""Answers within this time of another are collected with it. The cost of each `ray.wait` grows with the number of
pending calls, so one wait per rank would grow with its square."""


@dataclass
class Answers:
    """Answers so far. Each rank is in exactly one of these."""

    pending: dict[Any, int]
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RayError] = field(default_factory=dict)
    lost: dict[int, RayError] = field(default_factory=dict)

    def collect(self, timeout_s: float | None, dead: Callable[[], Collection[int]] = tuple) -> None:
        """Wait until all have answered or ``timeout_s`` is over. After the first failure its grace period replaces the
        timeout.

        ``dead`` is called after an error and returns the ranks known to be dead, even if Ray has not reported them yet.
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
        except RayTaskError as error:  # first, because Ray derives it from the class of its cause, which may be in LOST
            self.errors[rank] = error
        except LOST as error:
            self.lost[rank] = error
        except RayError as error:
            self.errors[rank] = error


def require_ray() -> None:
    """Raise ConfigError unless Ray is initialised in this process."""
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised in this process; call ray.init() before making worker groups")


def culprit(errors: Mapping[int, RayError]) -> tuple[RayError, int]:
    """The error that explains the others, and its rank.

    In order: a lost worker of another group, a bug, a collective that broke, and a peer's report about another rank.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        cause = cause_of(errors[rank])
        return not isinstance(cause, WorkerLost), isinstance(cause, PeerError), collective_broke(cause), rank

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
class RankProcess:
    """Process of a rank: its id, the address and Ray's name of its node, and torch's index of its GPU."""

    id: ProcessId
    host: str
    node_id: str
    device: int | None


class RayActor(RankActor):
    """`RankActor` with information that only Ray has."""

    def start(self, serve_store: bool) -> tuple[RankProcess, int]:
        """Describe this process, and return the port of the store that it serves (0 without one)."""
        host = ray.util.get_node_ip_address()
        gpus = ray.get_gpu_ids()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
        device = device_index(gpus, visible) if gpus else None
        where = RankProcess(self.process(), host, ray.get_runtime_context().get_node_id(), device)
        return where, self.serve_store(host) if serve_store else 0
