"""Durations of named phases."""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


@contextmanager
def timed(seconds: MutableMapping[str, float], phase: str) -> Iterator[None]:
    """Store the duration of the block in ``seconds[phase]``, also if the block raises."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = time.monotonic() - started


class PhaseTimes:
    """Seconds per phase of a step, for a run's statistics. ``holdfast top`` shows keys that end with ``_s``.

    Args:
        phases: names that every step reports (``sampling``, ``training`` ...), with 0 s if they did not run.
    """

    def __init__(self, *phases: str) -> None:
        self._phases = phases
        self._seconds: dict[str, float] = dict.fromkeys(phases, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to ``name``, also if the block raises. A step may repeat a name."""
        spent: dict[str, float] = {}
        try:
            with timed(spent, name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + spent[name]

    def take(self) -> dict[str, float]:
        """Return ``<phase>_s`` -> seconds since the last call, and start again."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._phases, 0.0)
        return {f"{name}_s": seconds for name, seconds in taken.items()}
