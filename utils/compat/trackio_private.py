"""What trackio keeps to itself."""

from typing import Any


def steps_of(run: Any) -> int | None:
    """How many steps a run has already; None where this trackio does not say, which has no public name for it."""
    return getattr(run, "_next_step", None)
