"""Counters of an engine, saved with its training state."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...utils.logging import get_logger
from ..api import StateDict, Stateful

logger = get_logger(__name__)

# Fields that every checkpoint has.
_COUNTS = (
    "version",
    "optimizer_steps",
    "skipped_steps",
    "steps_since_schedule",
)


@dataclass
class EngineCounters:
    """Counters of an engine, and the objects registered with it. Saved with the training state.

    ``version`` is the policy version of the weights. ``skipped_steps`` had a gradient that was not
    finite. ``steps_since_schedule`` counts updates since the schedule last advanced. ``states`` are
    registered objects by name, whose states are plain values, the same on every rank. ``mesh`` has
    the sizes d, r, c, t and e of the engine's mesh, for people who look at a checkpoint: a load
    ignores those of the save.
    """

    version: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    steps_since_schedule: int = 0
    states: dict[str, Stateful] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)

    OPTIONAL: ClassVar = ("states", "mesh")
    """Names that a checkpoint may lack."""

    def state_dict(self) -> StateDict:
        """Counters by name, ``mesh`` if it is known, and ``states`` if any object is registered."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        if self.mesh:
            counts["mesh"] = self.mesh
        states = {name: thing.state_dict() for name, thing in self.states.items()}
        if states:
            counts["states"] = states
        return counts

    def check_state_dict(self, state_dict: StateDict) -> None:
        """Let registered objects with a ``check_state_dict`` refuse their state. Nothing changes.

        Raises:
            CheckpointMismatchError: the state is not for one of them.
        """
        saved = state_dict.get("states", {})
        for name, thing in self.states.items():
            check = getattr(thing, "check_state_dict", None)
            if name in saved and check is not None:
                check(saved[name])

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore counters and objects. An object without saved state keeps its initial state, with
        a warning.
        """
        for name in _COUNTS:
            setattr(self, name, int(state_dict[name]))

        saved = state_dict.get("states", {})
        for name, thing in self.states.items():
            if name in saved:
                thing.load_state_dict(saved[name])
            else:
                logger.warning("the checkpoint has no state of %r; it starts anew", name)

        for name in sorted(saved.keys() - self.states.keys()):
            logger.warning(
                "the checkpoint has a state of %r, which this engine was not given; it is ignored",
                name,
            )
