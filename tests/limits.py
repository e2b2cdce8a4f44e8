"""Time limits of tests: generous, and ``HOLDFAST_TEST_TIMEOUT_FACTOR`` times as generous on a slow
or busy machine.

Only limits after which a test gives up are stretched, never timeouts that are under test.
"""

import os
import time
from collections.abc import Callable

TIMEOUT_FACTOR = float(os.environ.get("HOLDFAST_TEST_TIMEOUT_FACTOR", "1"))
"""Factor for all limits."""

if not 0 < TIMEOUT_FACTOR < float("inf"):
    raise ValueError(
        f"HOLDFAST_TEST_TIMEOUT_FACTOR is {TIMEOUT_FACTOR}; expected a positive number, 3 say"
    )


def stretched(limit_s: float) -> float:
    """Convert a limit for an idle machine to a limit for this one."""
    return limit_s * TIMEOUT_FACTOR


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Return as soon as ``condition`` holds."""
    end = time.monotonic() + stretched(limit_s)
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)
