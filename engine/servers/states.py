"""What a fleet knows of each of its servers, for people and for the statistics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ServerState(StrEnum):
    """Whether a server may be asked to generate, and if not, why."""

    SERVING = "serving"
    """It confirmed the weights that were published last; until it has answered to the publication under way, those
    before."""
    BEHIND = "behind"
    """It answers, but serves other weights, or failed to load those."""
    PAUSED = "paused"
    """It answers, but completes nothing: an update failed, or its publisher was killed."""
    GONE = "gone"
    """It does not answer."""


@dataclass(frozen=True)
class ServerReport:
    """One server, as a fleet last saw it.

    Attributes:
        name: what logs call it.
        state: see there.
        label: of the weights it is known to serve (`weights_label`); None: not known.
        error: what went wrong last; None once it serves.
        seconds: of each phase of its last update, ``total`` among them.
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
    """Numbers for the statistics: ``servers_<state>``, how many are in it, and ``update_<phase>_s``, of the slowest."""
    reports = list(reports)
    counts = {f"servers_{state}": float(sum(report.state is state for report in reports)) for state in ServerState}
    phases = sorted({phase for report in reports for phase in report.seconds})
    slowest = {phase: max(report.seconds.get(phase, 0.0) for report in reports) for phase in phases}
    return counts | {f"update_{phase}_s": seconds for phase, seconds in slowest.items()}
