"""State of each server of a fleet, for logs and statistics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ServerState(StrEnum):
    """Whether a server may generate, and the reason if not."""

    SERVING = "serving"
    """The server confirmed the weights published last. During a publication, it confirmed the weights before."""
    BEHIND = "behind"
    """The server answers, but serves other weights or failed to load the published ones."""
    PAUSED = "paused"
    """The server answers and completes nothing: an update failed, or its publisher was killed."""
    GONE = "gone"
    """The server does not answer."""


@dataclass(frozen=True)
class ServerReport:
    """Report on one server.

    Attributes:
        name, state: name in logs, last known state.
        label: `weights_label` of the served weights. None: unknown.
        error: last error. None once the server serves.
        seconds: seconds of each phase of its last update, and of all together (``total``).
    """

    name: str
    state: ServerState = ServerState.BEHIND
    label: str | None = None
    error: str | None = "it has not been told of any weights yet"
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        detail = f" {self.label}" if self.state is ServerState.SERVING else f" ({self.error})" if self.error else ""
        return f"{self.name} is {self.state}{detail}"


def server_stats(reports: Iterable[ServerReport]) -> dict[str, float]:
    """Statistics: ``servers_<state>`` (number of servers) and ``update_<phase>_s`` (seconds of the slowest server)."""
    reports = list(reports)
    counts = {f"servers_{state}": float(sum(report.state is state for report in reports)) for state in ServerState}
    phases = sorted({phase for report in reports for phase in report.seconds})
    slowest = {phase: max(report.seconds.get(phase, 0.0) for report in reports) for phase in phases}
    return counts | {f"update_{phase}_s": seconds for phase, seconds in slowest.items()}
