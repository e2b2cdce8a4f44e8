"""What an engine counts, saved with its training state."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class EngineCounters:
    """What an engine counts; saved with its training state.

    Attributes:
        version: weight version, as `FSDPEngine.set_version` left it.
        optimizer_steps: updates made.
        skipped_steps: updates not made because the gradient was not finite.
        steps_since_schedule: updates made since the schedule last advanced.
    """

    version: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    steps_since_schedule: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The counts by name."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put counts back."""
        for name in asdict(self):
            setattr(self, name, int(state_dict[name]))
