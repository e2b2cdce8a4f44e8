"""Seconds of the phases of something, by name."""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


@contextmanager
def timed(seconds: MutableMapping[str, float], phase: str) -> Iterator[None]:
    """Note under ``phase`` how long the block took, also when it raises."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = time.monotonic() - started


class PhaseTimes:
    """What the seconds of a step go to, by phase, for a run's statistics: `holdfast top` shows what ends with ``_s``.

    Args:
        phases: ``sampling``, ``training``, ``publishing`` and others that every step has, if only for 0 s.
    """

    def __init__(self, *phases: str) -> None:
        self._phases = phases
        self._seconds: dict[str, float] = dict.fromkeys(phases, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as ``name``, also when it raises; several times a step, if need be."""
        spent: dict[str, float] = {}
        try:
            with timed(spent, name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + spent[name]

    def take(self) -> dict[str, float]:
        """``<phase>_s`` -> seconds since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._phases, 0.0)
        return {f"{name}_s": seconds for name, seconds in taken.items()}
