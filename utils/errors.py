"""Every error Holdfast raises on purpose: one tree, each leaf also a builtin, all picklable.

Callers catch ``HoldfastError`` for anything of ours, or the builtin they would have caught anyway
(``except FileNotFoundError``). All of them survive pickling, because Ray carries them from worker to
driver. A message says what was found, what was expected, and what to do.
"""

from collections.abc import Mapping, Sequence


class HoldfastError(Exception):
    """Root of the tree."""


class ConfigError(HoldfastError, ValueError):
    """A configuration key or value that cannot be used; the message names the key."""


class BatchError(HoldfastError, ValueError):
    """A batch whose keys, shapes or contents cannot be trained on."""


class DatasetMismatchError(HoldfastError, ValueError):
    """A data cursor was given to a dataset other than the one it was saved for."""


class CheckpointError(HoldfastError):
    """Anything wrong with a checkpoint; the subclasses say what."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A save would have written over something that exists."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """Files are missing, short, or not the bytes that were committed."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A sound checkpoint, but not of this model: other keys, shapes or dtypes."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written; nothing became visible and nothing older was touched."""


class PublishError(HoldfastError, RuntimeError):
    """A server did not confirm the weight version it was told to serve."""


class PeerError(HoldfastError, RuntimeError):
    """This rank is well, but others failed in the same collective step.

    Attributes:
        what: the step that failed.
        errors: rank -> "Type: message" of every rank that failed.
    """

    def __init__(self, what: str, errors: Mapping[int, str]) -> None:
        super().__init__(what, dict(errors))
        self.what, self.errors = what, dict(errors)

    def __str__(self) -> str:
        causes = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(self.errors.items()))
        return f"{self.what} failed on {causes}"


class WorkerLost(HoldfastError, RuntimeError):
    """Worker processes died (or stopped answering); the work can be tried again, the code is not to blame.

    Attributes:
        group: name of the worker group.
        ranks: the ranks that were lost, ascending.
        cause: what was seen of their end.
    """

    def __init__(self, group: str, ranks: Sequence[int], cause: str) -> None:
        super().__init__(group, list(ranks), cause)
        self.group, self.ranks, self.cause = group, sorted(ranks), cause

    def __str__(self) -> str:
        return f"worker group {self.group!r} lost rank(s) {self.ranks}: {self.cause}"


class RetriesExhausted(HoldfastError, RuntimeError):
    """Workers were lost more often than the supervisor may retry; the last loss is the ``__cause__``."""
