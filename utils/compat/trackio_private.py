"""Private names of trackio."""

from typing import Any


def steps_of(run: Any) -> int | None:
    """Return the number of steps of a run, or None if this version of trackio does not tell."""
    return getattr(run, "_next_step", None)
