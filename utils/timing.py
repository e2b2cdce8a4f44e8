"""Durations of named phases, and of pauses between attempts."""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def timed(seconds: MutableMapping[str, float], phase: str) -> Iterator[None]:
    """Add the duration of the block to ``seconds[phase]``, also if the block raises."""
    started = time.monotonic()
    try:
        yield
    finally:
        before = seconds.get(phase, 0.0)
        seconds[phase] = before + time.monotonic() - started


def doubled(first_s: float, times: int, longest_s: float) -> float:
    """Double a pause so often, up to ``longest_s``. ``times`` may have any size."""
    # 2.0 ** 1024 is an OverflowError.
    return min(first_s * 2.0 ** min(times, 1000), longest_s)


class PhaseTimes:
    """Seconds per phase of a step, for a run's statistics. ``holdfast top`` shows keys that end
    with ``_s``.

    Every step reports ``phases`` (``sampling``, ``training`` ...), with 0 s if they did not run.
    """

    def __init__(self, *phases: str) -> None:
        self._phases = phases
        self._seconds: dict[str, float] = dict.fromkeys(phases, 0.0)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the duration of a block to ``name``, also if the block raises. A step may repeat a
        name.
        """
        return timed(self._seconds, name)

    def take(self) -> dict[str, float]:
        """Return ``<phase>_s`` -> seconds since the last call, and start again."""
        taken = self._seconds
        self._seconds = dict.fromkeys(self._phases, 0.0)
        return {f"{name}_s": seconds for name, seconds in taken.items()}
