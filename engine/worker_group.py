"""`WorkerGroup` and what goes with it, under their public names; needs the ``ray`` extra."""

from .workers.client import RemoteServer
from .workers.group import WorkerGroup
from .workers.placement import STRATEGIES, Placement, PlacementRequest, WorkerResources, place

__all__ = ["STRATEGIES", "Placement", "PlacementRequest", "RemoteServer", "WorkerGroup", "WorkerResources", "place"]
