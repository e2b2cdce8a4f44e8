"""`Placements`: where the worker groups of a job are, from one attempt to the next."""

import threading
from dataclasses import dataclass, field

from ..engine.workers.placement import Placement, PlacementRequest, place
from ..utils.errors import WorkerLost
from ..utils.logging import get_logger
from .config import RecoverConfig

logger = get_logger(__name__)


@dataclass
class _Place:
    """Of the worker groups of one name."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    placement: Placement | None = None


class Placements:
    """The placements of a job, which its attempts share; safe to use from many threads.

    Args:
        config: its ``node_wait_s`` and ``shrink_after_s``.
    """

    def __init__(self, config: RecoverConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._removed = threading.Event()
        self._places: dict[str, _Place] = {}

    def get(self, request: PlacementRequest) -> Placement:
        """That of the last attempt, if all of it can still be used, grown where it can be; else another one.

        Raises:
            ConfigError, ResourcesUnavailable: see `place`.
            WorkerLost: the job ends.
        """
        with self._lock:
            if self._removed.is_set():
                raise WorkerLost(request.name, range(request.world_size), "the job has ended")
            at = self._places.setdefault(request.name, _Place())
        with at.lock:
            if at.placement is not None and not (at.placement.request == request and at.placement.is_sound()):
                logger.info("worker group %r is placed anew", request.name)
                at.placement.remove()
                at.placement = None
            if at.placement is None:
                wait_s, shrink_s = self._config.node_wait_s, self._config.shrink_after_s
                at.placement = place(request, wait_s, shrink_after_s=shrink_s, stop=self._removed)
            elif at.placement.can_grow():
                at.placement.grow()
            return at.placement

    def remove(self) -> None:
        """Give everything back to Ray, and let nobody wait any longer."""
        with self._lock:
            self._removed.set()
            places = list(self._places.values())
        for at in places:
            with at.lock:
                if at.placement is not None:
                    at.placement.remove()
