"""What Ray says when calls end: answers, errors of the code, deaths of processes."""

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

from ...utils.collective_errors import collective_broke
from ...utils.errors import ConfigError, PeerError, WorkerLost
from ...utils.processes import ProcessId
from .actor import RankActor, device_index

ERROR_GRACE_S = 1.0
"""How long after a rank's error others may still turn out to be dead, or answer."""
LOSS_GRACE_S = 0.2
"""How long after a death others that died with it may be reported, so that all of them are named."""
LOST = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    OutOfMemoryError,
    ObjectLostError,
    LocalRayletDiedError,
)
"""What Ray raises for a call whose process is gone."""
_TOGETHER_S = 0.02
"""Answers that come so soon after another are taken with it: to ask about all that are pending costs with their number,
and to do so for each of many ranks with its square."""


@dataclass
class Answers:
    """What came back so far: each rank is in exactly one of these."""

    pending: dict[Any, int]
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RayError] = field(default_factory=dict)
    lost: dict[int, RayError] = field(default_factory=dict)

    def collect(self, timeout_s: float | None, dead: Callable[[], Collection[int]] = tuple) -> None:
        """Wait until all have answered or ``timeout_s`` is over; from a mishap on, until its grace is over instead.

        ``dead`` says after an error which ranks are known to be dead, whatever Ray says of them by then.
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
        except RayTaskError as error:  # first: Ray derives it from the class of its cause, which may be one of LOST
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

    A lost worker of another group, else a bug, else a collective that broke down, else what peers say of another rank.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        cause = cause_of(errors[rank])
        return not isinstance(cause, WorkerLost), isinstance(cause, PeerError), collective_broke(cause), rank

    rank = min(errors, key=order)
    return errors[rank], rank


def cause_of(error: RayError) -> BaseException:
    """What the worker raised, or Ray's own error."""
    return error.cause if isinstance(error, RayTaskError) else error


def raise_cause(error: RayError) -> NoReturn:
    """Raise what the worker raised, from Ray's error, which has the worker's traceback."""
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
    """The process of a rank, the address and Ray's name of its node, and which of the GPUs torch sees there is its."""

    id: ProcessId
    host: str
    node_id: str
    device: int | None


class RayActor(RankActor):
    """`RankActor`, with what only Ray can tell it."""

    def start(self, serve_store: bool) -> tuple[RankProcess, int]:
        """Who and where this process is, and the port of the store it serves (0 without)."""
        host = ray.util.get_node_ip_address()
        gpus = ray.get_gpu_ids()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
        device = device_index(gpus, visible) if gpus else None
        where = RankProcess(self.process(), host, ray.get_runtime_context().get_node_id(), device)
        return where, self.serve_store(host) if serve_store else 0
