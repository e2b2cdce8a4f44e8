"""Public names of `WorkerGroup` and its placement. Needs the ``ray`` extra."""

from .workers.group import WorkerGroup
from .workers.placement import STRATEGIES, Placement, PlacementRequest, WorkerResources, place
from .workers.remote_server import RemoteServer

__all__ = [
    "STRATEGIES",
    "Placement",
    "PlacementRequest",
    "RemoteServer",
    "WorkerGroup",
    "WorkerResources",
    "place",
]
