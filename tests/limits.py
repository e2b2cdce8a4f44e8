"""Time limits of tests: generous, and ``HOLDFAST_TEST_TIMEOUT_FACTOR`` times as generous on a slow or busy machine.

Only limits after which a test gives up are stretched, never the timeouts that a test is about.
"""

import os

TIMEOUT_FACTOR = float(os.environ.get("HOLDFAST_TEST_TIMEOUT_FACTOR", "1"))
"""What every limit is multiplied by."""

if not 0 < TIMEOUT_FACTOR < float("inf"):
    raise ValueError(f"HOLDFAST_TEST_TIMEOUT_FACTOR is {TIMEOUT_FACTOR}; expected a positive number, 3 say")


def stretched(limit_s: float) -> float:
    """``limit_s`` seconds of a machine that is not busy, in seconds of this one."""
    return limit_s * TIMEOUT_FACTOR
