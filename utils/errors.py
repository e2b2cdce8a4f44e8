"""All errors that Holdfast raises on purpose. Each is a `HoldfastError` and also a builtin error.

Callers catch `HoldfastError`, or the builtin that they would have caught anyway (``except
FileNotFoundError``). All can be pickled, because Ray carries them from worker to driver. A message
says what was found, what was expected, and what to do.
"""

import os
import signal
from collections.abc import Mapping, Sequence


class HoldfastError(Exception):
    """Base class of all errors of this package."""


# Configurations, batches and data.


class ConfigError(HoldfastError, ValueError):
    """A configuration key or value cannot be used. The message names the key."""


class UnsupportedVersionError(HoldfastError, ImportError):
    """The installed version of a library does not work with Holdfast."""


class EngineOffloadedError(HoldfastError, RuntimeError):
    """A method needs weights or optimizer state that `FSDPEngine.offload` has moved away."""


class BatchError(HoldfastError, ValueError):
    """A batch has keys, shapes or contents that cannot be trained on."""


class DatasetMismatchError(HoldfastError, ValueError):
    """A data position was given to another dataset than the one it was saved for."""


# Checkpoints and their folders.


class CheckpointError(HoldfastError):
    """Base class of errors of checkpoints."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint exists at the given place."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A save would have overwritten something that exists."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """Files are missing or short, or their bytes are not those that were committed."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is sound, but belongs to another model: its keys, shapes or dtypes differ."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written. Nothing became visible and no older checkpoint was
    touched.
    """


class TornSnapshotError(CheckpointWriteError):
    """Tensors were changed while a snapshot copied them. The snapshot was not committed."""


class MirrorError(CheckpointError, OSError):
    """Every attempt to use the mirror failed. Its contents may be sound."""


class StaleSnapshotError(CheckpointError, RuntimeError):
    """A snapshot equals the previous one, although the optimizer has stepped since. It was not
    committed.
    """


class FolderInUseError(HoldfastError, RuntimeError):
    """Another job holds the lock of the run's folder. The message names its host, pid and start
    time.
    """


class JobRefusedError(FolderInUseError, SystemExit):
    """A job may not start, because another one holds the lock of its folder.

    A process that does not catch it ends with `code`, as after a stop, so that a scheduler starts
    the same command again. Python then prints no traceback, so the error is logged.
    """

    code = os.EX_TEMPFAIL


# Inference servers, and the weights that they serve.


class ServerError(HoldfastError, RuntimeError):
    """An inference server could not be reached, refused a request, or gave an unexpected answer.
    Others may work.
    """


class BusyServerError(ServerError):
    """A server takes no more requests for now.

    Attributes:
        retry_after_s: seconds after which the server may be asked again.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        # All arguments go to the base class, which pickles them.
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class PublishError(ServerError):
    """A server did not confirm the weight version that it should serve."""


class UnreachableServerError(PublishError):
    """A server does not answer. The server or the network is down or restarting, and its weights
    are unknown.
    """


class NoServerError(UnreachableServerError):
    """No connection to a server could be made, so nothing was sent. The server is down or
    restarting.
    """


class CutOffError(NoServerError):
    """A request was given up before its answer came, because its server was removed."""


class SlowServerError(PublishError):
    """A server did not answer in time. It may still finish the update: its weights are unknown."""


class PoisonedServerError(PublishError):
    """A load failed half-way, so the server holds parts of two versions. It is paused until a load
    succeeds.
    """


class WrongContentError(PublishError):
    """A server reports the new version but answers with other weights. It was paused, or its
    adapters were unloaded.
    """


# Rollouts.


class PromptError(HoldfastError, ValueError):
    """A prompt that no inference server should complete. It was not sent, or its images were read
    in another way.
    """


class RolloutError(HoldfastError, RuntimeError):
    """A ticket cannot be finished. The message names it, its dataset sample and the last cause."""


class RolloutTimeout(RolloutError, TimeoutError):
    """The tickets of a step were not finished in time. The message lists them."""


class CallLost(HoldfastError, RuntimeError):
    """A call in a `CallPool` hung or ended its process at every attempt, or a call with
    ``once=True`` was begun before a kill, and whether it took effect is not known.
    """


# Ranks, workers and the cluster.


class PeerError(HoldfastError, RuntimeError):
    """Other ranks failed in the same collective step. This rank did not.

    Attributes:
        what: name of the step that failed.
        errors: maps each rank that failed to "Type: message".
    """

    def __init__(self, what: str, errors: Mapping[int, str]) -> None:
        errors = dict(errors)
        super().__init__(what, errors)
        self.what = what
        self.errors = errors

    @property
    def types(self) -> set[str]:
        """Names of the error types that were raised."""
        types = set()
        for error in self.errors.values():
            name, _, _ = error.partition(":")
            types.add(name)
        return types

    def __str__(self) -> str:
        causes = [f"rank {rank}: {error}" for rank, error in sorted(self.errors.items())]
        return f"{self.what} failed on {'; '.join(causes)}"


class WorkerLost(HoldfastError, RuntimeError):
    """Worker processes died or stopped answering. The work can be tried again, because the code is
    not the cause.

    Attributes:
        group: name of the worker group.
        ranks: lost ranks, ascending.
        cause: what was observed when they were lost.
    """

    def __init__(self, group: str, ranks: Sequence[int], cause: str) -> None:
        super().__init__(group, list(ranks), cause)
        self.group = group
        self.ranks = sorted(ranks)
        self.cause = cause

    def __str__(self) -> str:
        return f"worker group {self.group!r} lost rank(s) {self.ranks}: {self.cause}"


class ResourcesUnavailable(HoldfastError, TimeoutError):
    """The cluster did not have the resources of a worker group in time. Checkpoints are intact."""


class ClusterLost(HoldfastError, ConnectionError):
    """Ray's control process is gone or was replaced, so nothing can be started. Checkpoints are
    intact.
    """


class RetriesExhausted(HoldfastError, RuntimeError):
    """Workers were lost more often than the supervisor may retry. The last loss is the
    ``__cause__``.
    """


# Ends of a run.


class StopRequested(HoldfastError, RuntimeError):
    """The process was asked to stop while it waited for something that may never come."""


class AttemptEnded(BaseException):
    """A job asks its supervisor for another attempt (`Attempt.start_again`).

    It is not a `HoldfastError`, because code that handles errors must not swallow it.
    """


class Preempted(SystemExit):
    """The run was asked to stop, has saved a snapshot, and exits with `EXIT_CODE`. The same command
    resumes it.

    It is not a `HoldfastError`, because code that handles errors must not swallow it.

    Attributes:
        reason: who or what asked for the stop.
    """

    EXIT_CODE = os.EX_TEMPFAIL
    """75 of sysexits(3): a temporary failure after which the user may try again."""

    def __init__(self, reason: str) -> None:
        super().__init__(self.EXIT_CODE)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Preempted"], tuple[str]]:
        return Preempted, (self.reason,)

    def __str__(self) -> str:
        return f"stopped after a snapshot: {self.reason}"


class Terminated(SystemExit):
    """SIGTERM ended a supervised job that had nothing to save: its workers started, or were lost.
    The same command goes on from the newest snapshot. As `Preempted` it is no `HoldfastError`.
    """

    code = 128 + signal.SIGTERM
    """143, by which a shell reports a process that SIGTERM has ended."""
