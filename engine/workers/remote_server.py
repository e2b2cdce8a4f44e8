"""An inference server that runs as one rank of another `WorkerGroup`."""

from dataclasses import dataclass
from typing import Any

from ...utils.errors import WorkerLost
from .rank_answers import Answers, Patience, headline, raise_cause, wait_watching


@dataclass(frozen=True)
class RemoteServer:
    """An `InferenceServer` in front of one rank of a `WorkerGroup`. Picklable, so that a trainer's
    rank can hold it.

    An answer may take ``timeout_s``. Meanwhile pings may take ``hang_timeout_s`` (None: no pings).
    """

    actor: Any
    group: str
    rank: int
    timeout_s: float
    hang_timeout_s: float | None

    @property
    def name(self) -> str:
        """Name in logs and errors."""
        return f"rank {self.rank} of worker group {self.group!r}"

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Let the worker load the folder ``path``. Raises its errors, and WorkerLost if it dies,
        hangs, or is late.
        """
        call = self.actor.call.remote("update_weights_from_disk", (path, version), {})
        rank = self.rank
        answers = Answers({call: rank})
        patience = Patience(self.hang_timeout_s)
        hung = wait_watching(answers, {rank: self.actor}, patience, self.timeout_s)

        if rank in answers.values:
            return answers.values[rank]
        if rank in answers.errors:
            raise_cause(answers.errors[rank])
        if rank in answers.lost:
            error = answers.lost[rank]
            cause = f"died during the update ({headline(error)})"
            raise WorkerLost(self.group, [rank], cause) from error
        symptom = hung.symptom if hung else f"no answer within {self.timeout_s:g} s"
        raise WorkerLost(self.group, [rank], f"{symptom} during update_weights_from_disk()")
