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


class UnsupportedVersionError(HoldfastError, ImportError):
    """A library is installed in a version that Holdfast does not work with."""


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


class TornSnapshotError(CheckpointWriteError):
    """Tensors were changed while they were copied for a snapshot; it was not committed."""


class MirrorError(CheckpointError, OSError):
    """The mirror could not be reached, or refused, as often as it was tried; what is there may be sound."""


class StaleSnapshotError(CheckpointError, RuntimeError):
    """A snapshot holds the values of the one before, although the optimizer stepped since; it was not committed."""


class FolderInUseError(HoldfastError, RuntimeError):
    """Another job holds the lock of the run's folder; the message names its host, pid and start."""


class ServerError(HoldfastError, RuntimeError):
    """An inference server could not be reached, refused, or did not answer as expected; another one may."""


class BusyServerError(ServerError):
    """A server takes no more requests for now.

    Attributes:
        retry_after_s: when it may be asked again.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class PublishError(ServerError):
    """A server did not confirm the weight version it was told to serve."""


class UnreachableServerError(PublishError):
    """A server does not answer: it, or the network, is down or restarting. Its weights are unknown."""


class NoServerError(UnreachableServerError):
    """No connection to a server could be made, so nothing was sent: it is down or restarting."""


class SlowServerError(PublishError):
    """A server did not answer in time. It may still finish the update, so its weights are unknown."""


class PoisonedServerError(PublishError):
    """A load failed, so that the weights of the server are in pieces. It is paused, and must not be resumed before a
    load has succeeded."""


class WrongContentError(PublishError):
    """A server says that it serves a version, but its answers are those of other weights. It was paused again, or the
    adapters were unloaded again."""


class PromptError(HoldfastError, ValueError):
    """A prompt that an inference server cannot complete, or would die of; it was not sent."""


class RolloutError(HoldfastError, RuntimeError):
    """A ticket cannot be finished; the message names it, its sample of the dataset, and the last cause."""


class RolloutTimeout(RolloutError, TimeoutError):
    """The tickets of a step were not finished in time; the message says which."""


class CallLost(HoldfastError, RuntimeError):
    """A call in a `CallPool` hung, or ended its process, as often as it was tried."""


class PeerError(HoldfastError, RuntimeError):
    """This rank is well, but others failed in the same collective step.

    Attributes:
        what: the step that failed.
        errors: rank -> "Type: message" of every rank that failed.
    """

    def __init__(self, what: str, errors: Mapping[int, str]) -> None:
        super().__init__(what, dict(errors))
        self.what, self.errors = what, dict(errors)

    @property
    def types(self) -> set[str]:
        """Names of the error types that were raised."""
        return {error.partition(":")[0] for error in self.errors.values()}

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


class ResourcesUnavailable(HoldfastError, TimeoutError):
    """The cluster did not have the resources of a worker group in time; checkpoints are intact."""


class ClusterLost(HoldfastError, ConnectionError):
    """Ray's control process is gone, or another one is in its place: nothing can be started; checkpoints are intact."""


class RetriesExhausted(HoldfastError, RuntimeError):
    """Workers were lost more often than the supervisor may retry; the last loss is the ``__cause__``."""


class AttemptEnded(BaseException):
    """A job asks its supervisor for another attempt (`Attempt.start_again`).

    Not an error, so not part of the tree: nothing that handles errors should swallow it.
    """


class Preempted(SystemExit):
    """The run was asked to stop, has snapshotted, and leaves with `EXIT_CODE`; start the same command again.

    Not an error, so not part of the tree: nothing that handles errors should swallow it.

    Attributes:
        reason: what asked for it.
    """

    EXIT_CODE = 75
    """sysexits(3) EX_TEMPFAIL: a temporary failure, the user is invited to try again."""

    def __init__(self, reason: str) -> None:
        super().__init__(self.EXIT_CODE)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Preempted"], tuple[str]]:
        return Preempted, (self.reason,)

    def __str__(self) -> str:
        return f"stopped after a snapshot: {self.reason}"
