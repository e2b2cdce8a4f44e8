"""Run a job, and run it again after workers were lost, on the same placement groups.

The job is a function of an `Attempt`; it builds its worker groups through it, restores with `RecoverHandler` and
trains. When a `WorkerLost` leaves the job, every process of the attempt is killed first (a survivor could still
write), and the job is called again with the next attempt. Anything else that leaves the job is a bug, or Ctrl-C, and
is raised at once. The driver itself is not watched: one that was killed needs only the same command again.
"""

import threading
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


@dataclass
class Attempt:
    """One run of the job.

    Threads of the job may start and use a worker group each at the same time. One group that still starts when the
    attempt ends, because another was lost say, ends with it, and its `worker_group` raises `WorkerLost`.

    Attributes:
        number: 0 for the first run.
        last_loss: what ended the attempt before this one; None in the first.
        event: the same with its times, which go on being filled in; None in the first.
    """

    number: int
    last_loss: WorkerLost | None
    _placements: "_Placements"
    event: RecoveryEvent | None
    _groups: dict[str, WorkerGroup] = field(default_factory=dict)
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
            ConfigError: this attempt has, or tried to start, a group of that name already.
        """
        resources = resources or WorkerResources()
        group = WorkerGroup(
            worker_cls,
            *args,
            name=name,
            world_size=world_size,
            resources=resources,
            placement_group=self._placements.get(name, world_size, resources, start_timeout_s),
            start_timeout_s=start_timeout_s,
            on_created=self._admit,
            **kwargs,
        )
        if self.event is not None:
            self.event.rebuilt_s = time.time() - self.event.detected_at
            logger.info("worker group %r is up %.2f s after the loss", name, self.event.rebuilt_s)
        return group

    def _admit(self, group: WorkerGroup) -> None:
        """Take in a group before its processes start, so that whatever becomes of them they end with the attempt."""
        with self._lock:
            if self._ended:
                raise WorkerLost(group.name, range(group.world_size), f"attempt {self.number} has ended")
            if group.name in self._groups:
                raise ConfigError(f"this attempt has a worker group {group.name!r} already; give each its own name")
            self._groups[group.name] = group

    def _shutdown(self) -> None:
        self._end(WorkerGroup.shutdown)

    def _kill(self) -> None:
        self._end(WorkerGroup.kill)

    def _end(self, end: Callable[[WorkerGroup], None]) -> None:
        with self._lock:
            self._ended = True
        with ExitStack() as stack:
            for group in self._groups.values():
                stack.callback(end, group)


class _Placements:
    """The placement groups of a job, which its attempts share; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[tuple[object, ...], PlacementGroup] = {}
        self._removed = False

    def get(self, name: str, world_size: int, resources: WorkerResources, timeout_s: float) -> PlacementGroup:
        """The one for this name, size and resources, made when there is none; raises as `place` does."""
        key = (name, world_size, *sorted(resources.bundle().items()))
        with self._lock:
            if self._removed:
                raise WorkerLost(name, range(world_size), "the job has ended")
            if key not in self._groups:
                self._groups[key] = place(name, world_size, resources, timeout_s)
            return self._groups[key]

    def remove(self) -> None:
        """Give everything back to Ray."""
        with self._lock, ExitStack() as stack:
            self._removed = True
            for group in self._groups.values():
                stack.callback(remove_placement_group, group)


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
        placements = _Placements()
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
            try:
                attempt._kill()
            finally:
                placements.remove()

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
