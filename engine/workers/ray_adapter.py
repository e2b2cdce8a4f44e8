"""What Ray reserves, and what it says when calls end: answers, errors of the code, deaths of processes.

With `group` and `ray_private` (in ``compat``) the only engine file that imports ray.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
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
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...utils.errors import ConfigError, PeerError, WorkerLost
from ...utils.logging import get_logger
from ..collective_errors import collective_broke
from ..compat.ray_private import draining_deadlines

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
_NODES_EVERY_S = 1.0
"""How often Ray is asked which nodes are dead while they are waited for: it finds out before their tasks fail."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class WorkerResources:
    """What one rank needs: Ray's logical resources, ``custom`` ones by name. ``cpus`` is also its torch threads."""

    cpus: float = 1
    gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """The placement group bundle of one rank."""
        return {name: n for name, n in {"CPU": self.cpus, "GPU": self.gpus, **self.custom}.items() if n}


@dataclass
class Answers:
    """What came back so far: each rank is in exactly one of these."""

    pending: dict[Any, int]
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RayError] = field(default_factory=dict)
    lost: dict[int, RayError] = field(default_factory=dict)

    def collect(self, timeout_s: float | None) -> None:
        """Wait until all have answered or ``timeout_s`` is over; from a mishap on, until its grace is over instead."""
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
                grace_end = time.monotonic() + (LOSS_GRACE_S if self.lost else ERROR_GRACE_S)
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


class NodeTasks:
    """A function called once on each of some nodes, in a task that takes no resources.

    Args:
        fn: called; importable on the nodes.
        args: Ray's name of a node -> the arguments there.
    """

    def __init__(self, fn: Callable[..., Any], args: Mapping[str, tuple]) -> None:
        self._refs: dict[Any, str] = {}
        for node, given in args.items():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(fn)  # type: ignore[call-overload]
            self._refs[task.remote(*given)] = node

    def collect(self, timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
        """What the nodes answered within ``timeout_s``; and of those that did not, why."""
        answers, silent, end = {}, {}, time.monotonic() + timeout_s
        while self._refs and (left_s := end - time.monotonic()) > 0:
            ready, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=min(_NODES_EVERY_S, left_s))
            for ref in ready:
                node = self._refs.pop(ref)
                try:
                    answers[node] = ray.get(ref)
                except RayError as error:
                    silent[node] = headline(error)
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            for ref, node in list(self._refs.items()):
                if node not in alive:
                    del self._refs[ref]
                    silent[node] = "Ray says that it is dead"
        return answers, silent | dict.fromkeys(self._refs.values(), f"no answer within {timeout_s:g} s")


def require_ray() -> None:
    """Raise ConfigError unless Ray is initialised in this process."""
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised in this process; call ray.init() before making worker groups")


def draining_nodes(timeout_s: float = 2.0) -> dict[str, float | None]:
    """Nodes that Ray was told to drain: node id -> unix time when each will be gone, None when nobody said.

    None of them when Ray does not answer in time. Ray shows this only to its own libraries (Serve, Train), so a version
    that does so in another way is warned about, and has none.
    """
    try:
        deadlines = draining_deadlines(timeout_s)
    except RayError as error:
        logger.warning("Ray could not say which nodes are drained: %s", headline(error))
        return {}
    if deadlines is None:
        _warn_of_no_drain_notices()
        return {}
    return {node: end_ms / 1000 or None for node, end_ms in deadlines.items()}


@cache
def _warn_of_no_drain_notices() -> None:
    logger.warning("Ray %s does not say which nodes are drained; its notices will not stop the run", ray.__version__)


def place(name: str, world_size: int, resources: WorkerResources, timeout_s: float) -> PlacementGroup:
    """Reserve a bundle for each rank, on as few nodes as possible.

    Raises:
        ConfigError: the cluster did not have the resources within ``timeout_s``.
    """
    bundle = resources.bundle()
    if world_size < 1 or not bundle:
        raise ConfigError(f"worker group {name!r} asks for {world_size} rank(s) of {resources}; expected at least one")
    group = placement_group([bundle] * world_size, strategy="PACK")
    if not group.wait(math.ceil(timeout_s)):  # Ray cuts it to whole seconds
        remove_placement_group(group)
        raise ConfigError(
            f"worker group {name!r} needs {world_size} x {bundle}, which Ray could not reserve within {timeout_s:g} s; "
            f"the cluster has {ray.cluster_resources()}, of which free: {ray.available_resources()}. "
            "Ask for less, or start Ray with more"
        )
    return group


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
