"""Reserve bundles of the cluster for the ranks of a worker group, wait for them, and give them
back.

A waiting request is a pending placement group in Ray, which autoscalers can see. Nodes that are
draining or do not answer are excluded by label, although Ray may still consider them alive (see
`nodes`). If this Ray does not support labels, a group placed on such a node is given back and
requested again.

A request may accept fewer ranks. The rest stays pending while the placed ranks start. Once Ray has
reserved the rest too, a new group can use both.
"""

import contextlib
import inspect
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...utils.compat.ray_private import free_by_node, started_here
from ...utils.config import require_choice
from ...utils.errors import ConfigError, ResourcesUnavailable, WorkerLost
from ...utils.logging import get_logger
from .nodes import alive_nodes, nodes_to_avoid
from .rank_answers import headline

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Ray's strategies: as few nodes as possible, as many as possible, all on one node, each on its own
node.
"""
# seconds to wait for Ray before checking nodes and limits again; Ray needs whole seconds
_ROUND_S = 2
_LOCAL_WAIT_S = 30.0
"""Seconds to wait in a cluster that no node can join. Busy resources there are free soon, or never.
"""
# seconds before retrying after a group was placed on a bad node
_RETRY_S = 1.0
# seconds between log messages about missing resources
_REPORT_EVERY_S = 30.0
_KNOWS_LABELS = "bundle_label_selector" in inspect.signature(placement_group).parameters

logger = get_logger(__name__)


@dataclass(frozen=True)
class WorkerResources:
    """Resources that Ray reserves for one rank. ``cpus`` is also the rank's number of torch
    threads.

    ``custom`` maps names of your own resources to amounts: ``{"ssd": 1}``.
    """

    cpus: float = 1
    gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """The placement group bundle of one rank."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.custom}
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True)
class PlacementRequest:
    """Request of a worker group to the cluster: a bundle with ``resources`` for each of
    ``world_size`` ranks.

    ``strategy`` is one of `STRATEGIES`. With ``min_world_size`` (None: all ranks) fewer ranks are
    acceptable, in multiples of ``multiple_of``, unless the strategy places all or none. ConfigError
    if the request is empty or impossible.
    """

    name: str
    world_size: int
    resources: WorkerResources
    strategy: str = "PACK"
    min_world_size: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        require_choice("strategy", self.strategy, STRATEGIES)
        if self.world_size < 1 or not self.resources.bundle():
            raise ConfigError(
                f"worker group {self.name!r} asks for {self.world_size} rank(s) of "
                f"{self.resources}; expected at least one"
            )
        if not 1 <= self.least <= self.world_size:
            raise ConfigError(
                f"worker group {self.name!r} has min_world_size {self.min_world_size}; expected 1 "
                f"to world_size, {self.world_size}"
            )
        if self.multiple_of < 1 or self.world_size % self.multiple_of:
            raise ConfigError(
                f"worker group {self.name!r} asks for {self.world_size} rank(s); expected a "
                f"multiple of multiple_of, {self.multiple_of}"
            )
        if self.least < self.world_size and self.strategy.startswith("STRICT"):
            raise ConfigError(
                f"worker group {self.name!r} has min_world_size {self.min_world_size} and "
                f"strategy {self.strategy}, which places all ranks at once; use PACK or SPREAD"
            )

    @property
    def least(self) -> int:
        """Smallest acceptable number of ranks."""
        if self.min_world_size is None:
            return self.world_size
        return self.min_world_size

    def __str__(self) -> str:
        return f"{self.world_size} x {self.resources.bundle()} ({self.strategy})"


class Placement:
    """Bundles reserved in Ray, one per rank of a worker group. Several groups can be built on them
    in turn.

    ``groups`` are reserved for the ranks that can start. ``rest``, for the other ranks, is only
    requested.
    """

    def __init__(
        self,
        request: PlacementRequest,
        groups: Sequence[PlacementGroup],
        rest: PlacementGroup | None = None,
    ) -> None:
        self.request = request
        self._groups = list(groups)
        self._rest = rest

    @property
    def world_size(self) -> int:
        """Number of ranks with a bundle."""
        return sum(group.bundle_count for group in self._groups)

    def slot(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Ray's scheduling strategy for the actor of ``rank``."""
        for group in self._groups:
            if rank < group.bundle_count:
                return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            rank -= group.bundle_count
        raise ConfigError(
            f"worker group {self.request.name!r} has more ranks than the {self.world_size} placed"
        )

    def ids(self) -> list[str]:
        """Ray's names of the placement groups in use."""
        return [group.id.hex() for group in self._groups]

    def is_sound(self) -> bool:
        """Whether every bundle is on a node that can be given work."""
        return _on_good_nodes(self._groups)

    def can_grow(self) -> bool:
        """Whether Ray has since reserved the bundles of the missing ranks."""
        with contextlib.suppress(RayError):
            return self._rest is not None and _on_good_nodes([self._rest])
        return False

    def grow(self) -> None:
        """Add those bundles for the next worker group."""
        assert self._rest is not None, "nobody was left out"
        self._groups.append(self._rest)
        self._rest = None

    def remove(self) -> None:
        """Give everything back to Ray, if it still runs."""
        for group in [*self._groups, self._rest]:
            _give_back(group)


def place(
    request: PlacementRequest,
    timeout_s: float,
    *,
    shrink_after_s: float | None = None,
    stop: threading.Event | None = None,
) -> Placement:
    """Reserve bundles for the ranks, and wait until the cluster has them.

    Args:
        request: the request.
        timeout_s: time limit.
        shrink_after_s: seconds to wait for all ranks if fewer are acceptable. None: ``timeout_s``.
        stop: set to give up.

    Raises:
        ConfigError: this process has started the cluster, which no node will join, and it is too
            small.
        ResourcesUnavailable: there was not enough within ``timeout_s``.
        WorkerLost: ``stop`` was set.
    """
    world_size = request.world_size
    can_shrink = request.least < world_size
    if shrink_after_s is None:
        shrink_after_s = timeout_s
    shrink_after_s = min(shrink_after_s, timeout_s)
    if started_here():
        timeout_s = min(timeout_s, _LOCAL_WAIT_S)
        if not _fits_here(request):
            shrink_after_s = 0.0

    stop = stop or threading.Event()
    began = time.monotonic()
    reported_s = -math.inf
    group = None
    avoided: dict[str, str] = {}
    try:
        while True:
            # The request excludes bad nodes by name, so it is made again if others become bad.
            now_avoided = nodes_to_avoid()
            if group is None or now_avoided != avoided:
                _give_back(group)
                avoided = now_avoided
                group = _reserve(request, world_size, avoided)
            if group.wait(_ROUND_S):
                if _on_good_nodes([group]):
                    return Placement(request, [group])
                _give_back(group)
                group = None
                stop.wait(_RETRY_S)
            if stop.is_set():
                raise WorkerLost(request.name, range(world_size), "the job has ended")

            # Bundles of the pending request would be missing for the smaller one.
            waited_s = time.monotonic() - began
            if can_shrink and waited_s >= shrink_after_s:
                _give_back(group)
                group = None
                placement = _place_fewer(request, avoided)
                if placement is not None:
                    return placement

            if waited_s >= timeout_s:
                raise ResourcesUnavailable(
                    f"worker group {request.name!r} needs {request}, which Ray could not reserve "
                    f"within {timeout_s:g} s: {_shortage(request, avoided)}. Ask for less, bring "
                    "nodes, or wait for longer (recover.node_wait_s, without a Supervisor "
                    "start_timeout_s); checkpoints are intact, and the same command resumes from "
                    "the newest"
                )
            # Say now and then what is missing, for whoever watches the log.
            if waited_s - reported_s >= _REPORT_EVERY_S:
                reported_s = waited_s
                logger.warning(
                    "worker group %r has waited %.0f s, of up to %g s, for %s: %s",
                    request.name, waited_s, timeout_s, request, _shortage(request, avoided),
                )  # fmt: skip
    except BaseException:
        _give_back(group)
        raise


def _fits_here(request: PlacementRequest) -> bool:
    """Whether a cluster that no node can join has room for all ranks. ConfigError if it never has
    room for enough.
    """
    room = _room(request, alive_nodes())
    if room < request.least:
        raise ConfigError(
            f"worker group {request.name!r} needs {request}, more than this Ray has, which the "
            f"job itself has started: {_shortage(request, {})}. Ask for less, or start Ray with "
            "more"
        )
    return room >= request.world_size


def _place_fewer(request: PlacementRequest, avoided: Mapping[str, str]) -> Placement | None:
    """Place as many ranks as there is room for now, if that is acceptable. The others stay
    requested.
    """
    free = free_by_node()
    usable = alive_nodes().keys() - avoided.keys()
    room = _room(request, {node: free.get(node, {}) for node in usable})

    # The most ranks come first, in multiples of ``multiple_of``.
    step = request.multiple_of
    most = min(room, request.world_size - 1)
    for world_size in range(most - most % step, request.least - 1, -step):
        group = _reserve(request, world_size, avoided)
        # There was room when it was counted, but others may have been faster.
        if group.wait(_ROUND_S) and _on_good_nodes([group]):
            logger.warning(
                "worker group %r goes on with %d of %d ranks, %s: %s",
                request.name, world_size, request.world_size, request, _shortage(request, avoided),
            )  # fmt: skip
            rest = _reserve(request, request.world_size - world_size, {})
            return Placement(request, [group], rest)
        _give_back(group)
    return None


def _reserve(
    request: PlacementRequest, world_size: int, avoided: Mapping[str, str]
) -> PlacementGroup:
    bundles = [request.resources.bundle()] * world_size
    options = {}
    if avoided and _KNOWS_LABELS:
        nodes = ",".join(sorted(avoided))
        selector = {"ray.io/node-id": f"!in({nodes})"}
        options["bundle_label_selector"] = [selector] * world_size
    return placement_group(bundles, strategy=request.strategy, **options)


def _give_back(group: PlacementGroup | None) -> None:
    if group is None or not ray.is_initialized():
        return
    try:
        remove_placement_group(group)
    except RayError as error:
        # Its control process was restarted and does not know the group.
        logger.warning(
            "Ray does not take back the resources of a worker group: %s", headline(error)
        )


def _on_good_nodes(groups: Sequence[PlacementGroup]) -> bool:
    # A group loses this state when one of its nodes dies.
    tables = [placement_group_table(group) for group in groups]
    if any(table["state"] != "CREATED" for table in tables):
        return False
    nodes: set[str] = set()
    for table in tables:
        nodes.update(table["bundles_to_node_id"].values())
    return nodes <= alive_nodes().keys() - nodes_to_avoid().keys()


def _room(request: PlacementRequest, nodes: Mapping[str, Mapping[str, float]]) -> int:
    """Number of ranks for which ``nodes`` (resources by name of a node) have room."""
    bundle = request.resources.bundle()
    ranks = []
    for has in nodes.values():
        # Ray counts in ten-thousandths, so 0.3 / 0.1 must give 3.
        fits = (int(has.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items())
        ranks.append(min(fits))

    if request.strategy == "STRICT_PACK":
        return max(ranks, default=0)
    if request.strategy == "STRICT_SPREAD":
        return sum(min(1, n) for n in ranks)
    return sum(ranks)


def _shortage(request: PlacementRequest, avoided: Mapping[str, str]) -> str:
    # Nodes that get no work do not count, and are named with the reason.
    there = {node: has for node, has in alive_nodes().items() if node not in avoided}
    free_now = free_by_node()
    free = {node: free_now.get(node, {}) for node in there}
    passed_over = "".join(
        f"; node {node} is given nothing, because {why}" for node, why in avoided.items()
    )
    return (
        f"{len(there)} node(s) have {_sums(request, there)}, room for {_room(request, there)} "
        f"rank(s); free are {_sums(request, free)}, room for {_room(request, free)}{passed_over}"
    )


def _sums(request: PlacementRequest, nodes: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Sum over ``nodes`` of each resource in the request."""
    sums = {}
    for name in request.resources.bundle():
        sums[name] = sum(has.get(name, 0.0) for has in nodes.values())
    return sums
