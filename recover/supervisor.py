"""Run a job, and run it again after workers were lost, on the same placement groups.

The job is a function of an `Attempt`; it builds its worker groups through it, restores with `RecoverHandler` and
trains. When a `WorkerLost` leaves the job, every process of the attempt is killed first (a survivor could still
write), and the job is called again with the next attempt. Anything else that leaves the job is a bug, or Ctrl-C, and
is raised at once. The driver itself is not watched: one that was killed needs only the same command again.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray.util.placement_group import PlacementGroup, remove_placement_group

from ..engine.ray_calls import WorkerResources, place, require_ray
from ..engine.worker_group import WorkerGroup
from ..utils.errors import ConfigError, RetriesExhausted, WorkerLost
from ..utils.logging import get_logger
from .config import RecoverConfig

T = TypeVar("T")

logger = get_logger(__name__)


@dataclass
class RecoveryEvent:
    """One loss, and how long coming back from it took.

    Attributes:
        group: name of the worker group that lost ranks.
        ranks: the ranks it lost.
        cause: what was seen of their end.
        attempt: number of the attempt that ended.
        detected_at: when the loss left the job, seconds since the epoch.
        torn_down_s: from then until no process of the attempt was left.
        rebuilt_s: from then until the newest worker group of the next attempt was up; None while there is none.
    """

    group: str
    ranks: list[int]
    cause: str
    attempt: int
    detected_at: float
    torn_down_s: float
    rebuilt_s: float | None = None


_PlacementKey = tuple[str, int, tuple[tuple[str, float], ...]]


@dataclass
class Attempt:
    """One run of the job.

    Attributes:
        number: 0 for the first run.
        last_loss: what ended the attempt before this one; None in the first.
        event: the same with its times, which go on being filled in; None in the first.
    """

    number: int
    last_loss: WorkerLost | None
    _placements: dict[_PlacementKey, PlacementGroup]
    event: RecoveryEvent | None
    _groups: list[WorkerGroup] = field(default_factory=list)

    @property
    def recoveries(self) -> int:
        """How often the job has been run again so far."""
        return self.number

    def worker_group(
        self,
        worker_cls: Callable[..., Any],
        *args: Any,
        name: str,
        world_size: int = 1,
        resources: WorkerResources | None = None,
        start_timeout_s: float = 120.0,
        **kwargs: Any,
    ) -> WorkerGroup:
        """A `WorkerGroup` where the last attempt's group of this name, size and resources was; ended with the attempt.

        Takes what `WorkerGroup` takes, and raises what it raises.

        Raises:
            ConfigError: this attempt has a group of that name already.
        """
        if any(group.name == name for group in self._groups):
            raise ConfigError(f"this attempt has a worker group {name!r} already; give each group its own name")
        resources = resources or WorkerResources()
        key = (name, world_size, tuple(sorted(resources.bundle().items())))
        if key not in self._placements:
            self._placements[key] = place(name, world_size, resources, start_timeout_s)
        group = WorkerGroup(
            worker_cls,
            *args,
            name=name,
            world_size=world_size,
            resources=resources,
            placement_group=self._placements[key],
            start_timeout_s=start_timeout_s,
            **kwargs,
        )
        self._groups.append(group)
        if self.event is not None:
            self.event.rebuilt_s = time.time() - self.event.detected_at
            logger.info("worker group %r is up %.2f s after the loss", name, self.event.rebuilt_s)
        return group

    def _shutdown(self) -> None:
        with ExitStack() as stack:
            for group in self._groups:
                stack.callback(group.shutdown)

    def _kill(self) -> None:
        with ExitStack() as stack:
            for group in self._groups:
                stack.callback(group.kill)


class Supervisor:
    """Runs a job until it returns, fails, or has lost workers too often.

    Args:
        config: its ``retries`` and ``retry_window_s`` say how often that is.

    Attributes:
        events: every loss so far, oldest first.
    """

    def __init__(self, config: RecoverConfig | None = None) -> None:
        self._config = config or RecoverConfig()
        self._retried_at: list[float] = []
        self.events: list[RecoveryEvent] = []

    def run(self, job: Callable[[Attempt], T]) -> T:
        """Call ``job(attempt)`` and return its result; call it again after each `WorkerLost`.

        Worker groups are shut down, and placement groups removed, before this returns or raises.

        Raises:
            ConfigError: Ray is not initialised.
            RetriesExhausted: from the last `WorkerLost`, when there were more than the configuration allows.
            Exception: whatever else the job raised, unchanged and at once.
        """
        require_ray()
        placements: dict[_PlacementKey, PlacementGroup] = {}
        attempt = Attempt(0, None, placements, None)
        try:
            while True:
                try:
                    result = job(attempt)
                    attempt._shutdown()
                    return result
                except WorkerLost as loss:
                    event = self._tear_down(attempt, loss)
                    self._spend_retry(loss)
                    attempt = Attempt(attempt.number + 1, loss, placements, event)
        finally:
            with ExitStack() as stack:
                for placement in placements.values():
                    stack.callback(remove_placement_group, placement)
                stack.callback(attempt._kill)

    def _tear_down(self, attempt: Attempt, loss: WorkerLost) -> RecoveryEvent:
        detected_at = time.time()
        attempt._kill()
        torn_down_s = time.time() - detected_at
        event = RecoveryEvent(loss.group, loss.ranks, loss.cause, attempt.number, detected_at, torn_down_s)
        self.events.append(event)
        logger.warning("attempt %d ended: %s; torn down in %.3f s", attempt.number, loss, torn_down_s)
        return event

    def _spend_retry(self, loss: WorkerLost) -> None:
        now = time.monotonic()
        window_s = self._config.retry_window_s
        self._retried_at = [moment for moment in self._retried_at if now - moment <= window_s]
        if len(self._retried_at) >= self._config.retries:
            raise RetriesExhausted(
                f"workers were lost again after {len(self._retried_at)} retries within {window_s:g} s "
                f"(allowed: {self._config.retries}); the last loss: {loss}. Find what kills them, "
                "or raise retries; the newest checkpoint is intact and the same command resumes from it"
            ) from loss
        self._retried_at.append(now)
