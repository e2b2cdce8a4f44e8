"""Record of whether this process was asked to stop, for code that waits for others.

A job that is asked to stop finishes its step (`holdfast.recover.signals`). A wait for something
that may never come, such as an inference server, must not keep it from its end until somebody kills
it.
"""

import time

from .errors import StopRequested

PATIENCE_S = 5.0
"""Seconds from the request to the end of waits, so that a server which is just being woken or
loaded does not cost the step.
"""


class _Request:
    """State of the whole process, because signals come to a process."""

    reason: str | None = None
    since = 0.0


def note_stop(reason: str) -> None:
    """Record that this process was asked to stop. Called by signal handlers."""
    if _Request.reason is None:
        _Request.since = time.monotonic()
    _Request.reason = reason


def forget_stop() -> None:
    """Forget it, because it was answered."""
    _Request.reason = None


def require_no_stop(awaited: str) -> None:
    """Raise StopRequested if this process was asked to stop `PATIENCE_S` ago. Called while it waits
    for ``awaited``, at least every second.
    """
    if _Request.reason is not None and time.monotonic() - _Request.since >= PATIENCE_S:
        raise StopRequested(
            f"{_Request.reason} came while the job waited for {awaited}; the same command goes on "
            "from the newest snapshot"
        )
