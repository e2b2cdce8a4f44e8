"""Measure the peak memory of an action."""

import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

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


def peak_allocated_bytes(action: Callable[[], object]) -> int:
    """Measure the largest sum of bytes that torch holds on the CPU for what ``action`` allocates,
    memory inside of operators included.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    allocations = [event for event in events if event.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in allocations))
