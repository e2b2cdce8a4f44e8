"""End the processes of a worker group for certain, on every node.

When Ray reports an actor dead, only its socket is closed. The process may live on: SIGKILL takes
effect when the process leaves the kernel, and freeing pinned memory and a CUDA context can take a
minute. Until then it holds the GPU that its successor needs, and may write files. So this module
checks the processes themselves, on other nodes by a task, which takes a second if Ray has to start
a worker for it.

Without an answer there are three cases.

- A raylet that has ended has taken its workers with it.
- A node that is cut off, or whose raylet is stopped, may still run them: they have a lease
  (`LeaseKeeper`), and this module waits until it ends.
- A node that is being drained refuses tasks. Nothing is started on it any more, and its raylet
  kills what Ray told it to kill, which is given `KILLED_BY_RAY_S`.

At the end of a run nothing is started in place of the processes, so nothing is waited for on nodes
that do not answer. Often these nodes are ending together with the driver.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from ...utils.errors import HoldfastError
from ...utils.logging import get_logger
from ...utils.processes import ProcessId, end_processes
from .nodes import NodeTasks, Raylet, ask_raylets, draining_nodes

RAY_KILL_S = 0.3
"""Time for Ray's own kill (usually 10-50 ms, 5 s for a stopped process) before SIGKILL is sent."""
KILLED_BY_RAY_S = 10.0
"""Time for a raylet that is being drained to kill its workers. It kills a stopped one after 5 s."""
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
    have ended by themselves. None at the end of a run: nothing starts in their place. Raises
    HoldfastError if some processes still run after ``timeout_s``.
    """
    began = time.monotonic()
    left = {node: list(found) for node, found in processes.items() if found}
    _leave_to_draining_nodes(left, here, leases)
    while left:
        # A round ends early enough for the next message, or for the error.
        left_s = max(0.0, began + timeout_s - time.monotonic())
        left = _end_round(left, here, group, min(REPORT_EVERY_S, left_s), leases or {})
        if not left:
            return

        waited_s = time.monotonic() - began
        names = "; ".join(f"{_pids(found)} on node {node}" for node, found in left.items())
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


def _leave_to_draining_nodes(
    processes: dict[str, list[ProcessId]], here: str, leases: Mapping[str, float] | None
) -> None:
    """Remove the processes of other nodes that are being drained, once their raylets have had
    `KILLED_BY_RAY_S` to end them.
    """
    others = processes.keys() - {here}
    draining = others & draining_nodes().keys() if others else set()
    waits_s = [0.0]
    for node, state in ask_raylets(draining).items():
        # A node that is cut off ends its processes by their leases, as always.
        if state is Raylet.SILENT:
            continue
        pids = _pids(processes.pop(node))
        logger.info("node %s is being drained: its raylet ends processes %s", node, pids)
        if state is Raylet.WELL and leases is not None:
            lease_s = leases.get(node, math.inf) - time.monotonic()
            waits_s.append(min(KILLED_BY_RAY_S, lease_s))
    time.sleep(max(waits_s))


def _end_round(
    processes: Mapping[str, list[ProcessId]],
    here: str,
    group: str,
    timeout_s: float,
    leases: Mapping[str, float],
) -> dict[str, list[ProcessId]]:
    # The other nodes work while this process ends those of its own node.
    work = {node: (found, RAY_KILL_S, timeout_s) for node, found in processes.items()}
    own = work.pop(here, None)
    tasks = NodeTasks(end_processes, work)
    left: dict[str, list[ProcessId]] = {}
    if own is not None:
        left[here] = end_processes(*own)

    # A node whose leases have ended need not answer any more.
    now = time.monotonic()
    limits_s = {}
    for node in work:
        lease_s = leases.get(node, math.inf) - now
        limits_s[node] = min(NODE_ANSWER_S + timeout_s, lease_s)
    answers, silent = tasks.collect(limits_s)

    states = ask_raylets(silent)
    for node, why in silent.items():
        leased = node in leases and states.get(node) is not Raylet.ENDED
        when = " when their lease is over" if leased else ""
        logger.warning(
            "node %s is dead or does not answer (%s): processes %s of worker group %r there count "
            "as gone%s",
            node,
            why,
            _pids(processes[node]),
            group,
            when,
        )
        if leased:
            time.sleep(max(0.0, leases[node] - time.monotonic()))
    return {node: found for node, found in {**left, **answers}.items() if found}


def _pids(processes: Sequence[ProcessId]) -> list[int]:
    return [process.pid for process in processes]


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
        self._actors = dict(actors)
        self._lease_s = lease_s
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
        every_s = self._lease_s / RENEWALS
        told: dict[int, _Told] = {}
        asked: dict[Any, int] = {}
        while not self._stopped.is_set() and ray.is_initialized():
            # Each rank has one renewal under way.
            for rank in self._actors.keys() - set(asked.values()):
                asked |= self._ask(rank, told.get(rank))
            if not asked:
                return

            refs = list(asked)
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=every_s)
            for ref in ready:
                rank = asked.pop(ref)
                begins = rank not in told
                try:
                    told[rank] = _Told(ray.get(ref), time.monotonic())
                except RayError:  # the rank is dead, or unreachable for a moment
                    continue
                # The first answer is only a stamp. The lease begins with the next renewal.
                if begins:
                    asked |= self._ask(rank, told[rank])
            self._stopped.wait(every_s)

    def _ask(self, rank: int, told: "_Told | None") -> dict[Any, int]:
        """Send a renewal, unless stopped, so that no lease is renewed after `stop` returned."""
        with self._lock:
            if self._stopped.is_set():
                return {}
            stamp = None
            if told is not None:
                stamp = told.stamp
                self._ends[rank] = told.arrived_s + self._lease_s
            renew = self._actors[rank].renew_lease.options(concurrency_group="health")
            return {renew.remote(stamp, self._lease_s): rank}


class _Told(NamedTuple):
    """An answer to a renewal: the time on the rank's clock, and the time on ours at its arrival."""

    stamp: float
    arrived_s: float
