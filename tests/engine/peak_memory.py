"""How much memory an action takes at its peak."""

import os
from collections.abc import Callable
from pathlib import Path

CAN_MEASURE = os.access("/proc/self/clear_refs", os.W_OK)
"""Whether the peak can be reset here."""


def peak_growth_bytes(action: Callable[[], object]) -> int:
    """By how much this process's memory grew at most while ``action`` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10
