"""Keeps ranks of other nodes alive, so that those that the driver cannot reach any more end by themselves.

A rank answers each renewal with the time on its clock, and the next renewal brings that back: the kernel of its node
kills it ``lease_s`` after the last time that came back (`holdfast.utils.lease`). However long a renewal is under way,
it brings no more than was left when its answer was sent, so the driver knows by its own clock when the rank is gone.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

RENEWALS = 5
"""In the time of a lease."""


class LeaseKeeper:
    """Renews the leases of some ranks, on a thread of its own, until it is stopped.

    Args:
        actors: the `RankActor` of each rank.
        lease_s: how long each of them lives without a renewal.
    """

    def __init__(self, actors: Mapping[int, Any], lease_s: float) -> None:
        self._actors, self._lease_s = dict(actors), lease_s
        self._ends: dict[int, float] = {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._renew_on, name="leases", daemon=True).start()

    def stop(self) -> None:
        """Renew none from now on."""
        with self._lock:
            self._stopped.set()

    def end_of(self, rank: int) -> float | None:
        """When ``rank`` is gone for sure, once this is stopped, on our monotonic clock; None when it has no lease."""
        return self._ends.get(rank)

    def _renew_on(self) -> None:
        told: dict[int, tuple[float, float]] = {}  # rank -> time on its clock, and on ours when it came
        asked: dict[Any, int] = {}
        while not self._stopped.is_set() and ray.is_initialized():
            with self._lock:
                for rank in self._actors.keys() - set(asked.values()):
                    if not self._stopped.is_set():
                        asked[self._ask(rank, told.get(rank))] = rank
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=self._lease_s / RENEWALS)
            for ref in ready:
                rank = asked.pop(ref)
                try:
                    first, told[rank] = rank not in told, (ray.get(ref), time.monotonic())
                except RayError:
                    del self._actors[rank]  # it is dead, as who waits for its answers is told
                    continue
                if first:
                    with self._lock:  # begins the lease
                        asked[self._ask(rank, told[rank])] = rank
            if not self._actors:
                return
            self._stopped.wait(self._lease_s / RENEWALS)

    def _ask(self, rank: int, told: tuple[float, float] | None) -> Any:
        stamp = None
        if told is not None:
            stamp, came = told
            self._ends[rank] = came + self._lease_s
        renew = self._actors[rank].renew_lease.options(concurrency_group="health")
        return renew.remote(stamp, self._lease_s)
