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

RENEWALS = 20
"""In the time of a lease, of which a rank that is too busy to answer loses a twentieth or two."""


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
            for rank in self._actors.keys() - set(asked.values()):
                asked |= self._ask(rank, told.get(rank))
            if not asked:
                return
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=self._lease_s / RENEWALS)
            for ref in ready:
                rank = asked.pop(ref)
                try:
                    begins, told[rank] = rank not in told, (ray.get(ref), time.monotonic())
                except RayError:  # it is dead, or out of reach for a moment
                    continue
                if begins:
                    asked |= self._ask(rank, told[rank])
            self._stopped.wait(self._lease_s / RENEWALS)

    def _ask(self, rank: int, told: tuple[float, float] | None) -> dict[Any, int]:
        """Send a renewal; none once this is stopped, so that no lease is renewed behind the back of who has."""
        with self._lock:
            if self._stopped.is_set():
                return {}
            if told is not None:
                self._ends[rank] = told[1] + self._lease_s
            renew = self._actors[rank].renew_lease.options(concurrency_group="health")
            return {renew.remote(None if told is None else told[0], self._lease_s): rank}
