"""Measure the peak memory of an action."""

import os
from collections.abc import Callable
from pathlib import Path

CAN_MEASURE = os.access("/proc/self/clear_refs", os.W_OK)
"""Whether the peak can be reset here."""


def peak_growth_bytes(action: Callable[[], object]) -> int:
    """Measure the growth of this process's memory during ``action``."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10
