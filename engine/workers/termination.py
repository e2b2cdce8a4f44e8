"""End the processes of a worker group for certain, on every node.

When Ray reports an actor dead, only its socket is closed. The process may live on: SIGKILL takes
effect when the process leaves the kernel, and freeing pinned memory and a CUDA context can take a
minute. Until then it holds the GPU that its successor needs, and may write files. So this module
checks the processes themselves, on other nodes by a task, which takes a second if Ray has to start
a worker for it.

Without an answer there are two cases. A raylet that has ended has taken its workers with it. A node
that is cut off, or whose raylet is stopped, may still run them: they have a lease (`LeaseKeeper`),
and this module waits until it ends.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ...utils.errors import HoldfastError
from ...utils.logging import get_logger
from ...utils.processes import ProcessId, end_processes
from .nodes import NodeTasks, Raylet, ask_raylets

RAY_KILL_S = 0.3
"""Time for Ray's own kill (usually 10-50 ms, 5 s for a stopped process) before SIGKILL is sent."""
REPORT_EVERY_S = 10.0
"""Seconds between log messages about processes that still run."""
NODE_ANSWER_S = 30.0
"""Time for a node to start the task that checks its processes. After that it counts as unreachable.
"""

logger = get_logger(__name__)


def end_on_nodes(
    processes: Mapping[str, Sequence[ProcessId]],
    here: str,
    group: str,
    timeout_s: float,
    leases: Mapping[str, float] | None = None,
) -> None:
    """Wait until ``processes`` (by node) that Ray was told to kill are gone. SIGKILL those that
    remain after a moment.

    Processes on a node that is dead or does not answer count as gone, with a warning, once their
    leases have ended. ``leases`` is the time on the monotonic clock when all processes of a node
    have ended by themselves. Raises HoldfastError if some processes still run after ``timeout_s``.
    """
    began, left = (
        time.monotonic(),
        {node: list(found) for node, found in processes.items() if found},
    )
    while left := _end_round(
        left,
        here,
        group,
        min(REPORT_EVERY_S, max(0.0, began + timeout_s - time.monotonic())),
        leases or {},
    ):
        waited_s = time.monotonic() - began
        names = "; ".join(
            f"{[process.pid for process in found]} on node {node}" for node, found in left.items()
        )
        what = (
            f"processes {names} of worker group {group!r} still run {waited_s:.0f} s after SIGKILL"
        )
        if waited_s >= timeout_s:
            raise HoldfastError(
                f"{what}; they may still write files and hold GPUs, so nothing can be started in "
                "their place. What cannot be killed is stuck in a driver or a file system: look "
                "at it (/proc/<pid>/stack, dmesg), restart its node and start the job again, "
                "which goes on from its newest snapshot. kill_timeout_s of the worker group is "
                "how long it is waited for"
            )
        logger.warning(
            "%s, which frees pinned memory and GPUs first; waiting for up to %g s", what, timeout_s
        )


def _end_round(
    processes: Mapping[str, list[ProcessId]],
    here: str,
    group: str,
    timeout_s: float,
    leases: Mapping[str, float],
) -> dict[str, list[ProcessId]]:
    elsewhere = {
        node: (found, RAY_KILL_S, timeout_s) for node, found in processes.items() if node != here
    }
    tasks = NodeTasks(end_processes, elsewhere)
    left = (
        {here: end_processes(processes[here], RAY_KILL_S, timeout_s)} if here in processes else {}
    )
    now = time.monotonic()
    answers, silent = tasks.collect(
        {
            node: min(NODE_ANSWER_S + timeout_s, leases.get(node, math.inf) - now)
            for node in elsewhere
        }
    )
    states = ask_raylets(silent)
    for node, why in silent.items():
        lease = (
            ""
            if states.get(node) is Raylet.ENDED or node not in leases
            else " when their lease is over"
        )
        logger.warning(
            "node %s is dead or does not answer (%s): processes %s of worker group %r there count as gone%s",
            node, why, [process.pid for process in processes[node]], group, lease,
        )  # fmt: skip
        if lease:
            time.sleep(max(0.0, leases[node] - time.monotonic()))
    return {node: found for node, found in {**left, **answers}.items() if found}


RENEWALS = 20
"""Number of renewals during a lease. A rank that is too busy to answer misses one or two."""


class LeaseKeeper:
    """Renews the leases of ranks on other nodes, on its own thread, until it is stopped.

    The kernel kills a rank whose lease ends, so a rank that the driver cannot reach ends by itself.
    A rank answers each renewal with the time on its clock, the next renewal returns that time, and
    the lease then ends ``lease_s`` after it. A slow renewal therefore adds no more than was left
    when its answer was sent, and the driver knows by its own clock when the rank is gone.
    """

    def __init__(self, actors: Mapping[int, Any], lease_s: float) -> None:
        self._actors, self._lease_s = dict(actors), lease_s
        self._ends: dict[int, float] = {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._renew_on, name="leases", daemon=True).start()

    def stop(self) -> None:
        """Renew no lease from now on."""
        with self._lock:
            self._stopped.set()

    def end_of(self, rank: int) -> float | None:
        """Time on our monotonic clock at which ``rank`` is gone for certain, after `stop`. None if
        it has no lease.
        """
        return self._ends.get(rank)

    def _renew_on(self) -> None:
        told: dict[
            int, tuple[float, float]
        ] = {}  # rank -> time on its clock, and on ours at arrival
        asked: dict[Any, int] = {}
        while not self._stopped.is_set() and ray.is_initialized():
            for rank in self._actors.keys() - set(asked.values()):
                asked |= self._ask(rank, told.get(rank))
            if not asked:
                return
            ready, _ = ray.wait(
                list(asked), num_returns=len(asked), timeout=self._lease_s / RENEWALS
            )
            for ref in ready:
                rank = asked.pop(ref)
                try:
                    begins, told[rank] = rank not in told, (ray.get(ref), time.monotonic())
                except RayError:  # the rank is dead, or unreachable for a moment
                    continue
                if begins:
                    asked |= self._ask(rank, told[rank])
            self._stopped.wait(self._lease_s / RENEWALS)

    def _ask(self, rank: int, told: tuple[float, float] | None) -> dict[Any, int]:
        """Send a renewal, unless stopped, so that no lease is renewed after `stop` returned."""
        with self._lock:
            if self._stopped.is_set():
                return {}
            if told is not None:
                self._ends[rank] = told[1] + self._lease_s
            renew = self._actors[rank].renew_lease.options(concurrency_group="health")
            return {renew.remote(None if told is None else told[0], self._lease_s): rank}
