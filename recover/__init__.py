"""When to snapshot, where snapshots live, and how a job comes back.

`Supervisor` needs the ``ray`` extra and is imported from `holdfast.recover.supervisor`.
"""

from .config import RecoverConfig
from .dataloader import ResumableDataLoader
from .handler import RecoverHandler
from .info import RecoverInfo
from .schedule import SnapshotSchedule
from .store import GenerationStore

__all__ = [
    "GenerationStore",
    "RecoverConfig",
    "RecoverHandler",
    "RecoverInfo",
    "ResumableDataLoader",
    "SnapshotSchedule",
]
