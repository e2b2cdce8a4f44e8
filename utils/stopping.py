"""Record of whether this process was asked to stop, for code that waits for others.

A job that is asked to stop finishes its step (`holdfast.recover.signals`). A wait for something
that may never come, such as an inference server, must not keep it from its end until somebody kills
it.
"""

import time

from .errors import StopRequested

PATIENCE_S = 5.0
"""Seconds from the request, and from the start of a wait, to its end, so that a server which is
just being woken or loaded does not cost the step.
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


def require_no_stop(awaited: str, since: float) -> None:
    """Raise StopRequested if this process was asked to stop, and has waited `PATIENCE_S` for
    ``awaited`` since. Called while it waits, at least every second.

    Args:
        awaited: what it waits for.
        since: start of the wait (``time.monotonic``).
    """
    if _Request.reason is None:
        return
    if time.monotonic() - max(_Request.since, since) >= PATIENCE_S:
        raise StopRequested(
            f"{_Request.reason} came while the job waited for {awaited}; the same command goes on "
            "from the newest snapshot"
        )
