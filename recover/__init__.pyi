# The public names and where they are; `lazy_loader` imports each when it is first used.

from .config import RecoverConfig as RecoverConfig
from .data.loader import ResumableDataLoader as ResumableDataLoader
from .handler import RecoverHandler as RecoverHandler
from .info import RecoverInfo as RecoverInfo
from .storage.generations import GenerationStore as GenerationStore
from .triggers import SnapshotSchedule as SnapshotSchedule
