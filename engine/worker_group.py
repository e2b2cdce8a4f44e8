"""`WorkerGroup` and what goes with it, under their public names; needs the ``ray`` extra."""

from .workers.client import RemoteServer
from .workers.group import WorkerGroup, WorkerResources, place

__all__ = ["RemoteServer", "WorkerGroup", "WorkerResources", "place"]
