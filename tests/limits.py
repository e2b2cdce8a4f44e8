"""Time limits of tests: generous, and more so on a busy machine.

Only limits after which a test gives up are stretched, never timeouts that are under test.
"""

import os
import time
from collections.abc import Callable

TIMEOUT_FACTOR = float(os.environ.get("HOLDFAST_TEST_TIMEOUT_FACTOR", "1"))
"""Factor for all limits, for a slow machine."""
MOST_CROWDED = 10.0

if not 0 < TIMEOUT_FACTOR < float("inf"):
    raise ValueError(
        f"HOLDFAST_TEST_TIMEOUT_FACTOR is {TIMEOUT_FACTOR}; expected a positive number, 3 say"
    )


def crowding() -> float:
    """Number of processes that want each core, over the last minute: 1 to ``MOST_CROWDED``."""
    wanted = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, wanted), MOST_CROWDED)


def stretched(limit_s: float) -> float:
    """Convert a limit for an idle machine to a limit for this one, now."""
    return limit_s * TIMEOUT_FACTOR * crowding()


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Return as soon as ``condition`` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < stretched(limit_s), "it did not come to that"
        time.sleep(0.005)
