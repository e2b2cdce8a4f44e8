"""Time limits of tests: generous, and more so on a slow or busy machine.

Only limits after which a test gives up are stretched, never timeouts that are under test.
"""

import os
import time
from collections.abc import Callable
from statistics import median

VARIABLE = "HOLDFAST_TEST_TIMEOUT_FACTOR"
ADDITIONS = 400_000
ADDITIONS_S = 0.02
"""Seconds that ``ADDITIONS`` take on an idle machine with which the limits were chosen."""
LARGEST = 10.0


def slowness() -> float:
    """How many times longer than there a little work takes here and now, 1 to ``LARGEST``."""
    took = []
    for _ in range(25):
        began = time.perf_counter()
        total = 0
        for number in range(ADDITIONS):
            total += number
        took.append(time.perf_counter() - began)
    return min(max(1.0, median(took) / ADDITIONS_S), LARGEST)


if VARIABLE not in os.environ:  # for all processes that this one starts, too
    os.environ[VARIABLE] = f"{slowness():.1f}"
TIMEOUT_FACTOR = float(os.environ[VARIABLE])
"""Factor for all limits."""

if not 0 < TIMEOUT_FACTOR < float("inf"):
    raise ValueError(f"{VARIABLE} is {TIMEOUT_FACTOR}; expected a positive number, 3 say")


def stretched(limit_s: float) -> float:
    """Convert a limit for an idle machine to a limit for this one."""
    return limit_s * TIMEOUT_FACTOR


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Return as soon as ``condition`` holds."""
    end = time.monotonic() + stretched(limit_s)
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)
