"""Heartbeat of this process: a record of when it last made progress.

A ping is answered even by a worker in an endless loop, or in a collective that its peers never
join. So code also calls `beat` when it gets ahead: the engine after every micro-batch, readers and
writers of files after every block, a rank of a `WorkerGroup` at the start and end of every call.
User code in long calls may call it as well. A beat costs two function calls.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread


class _Heart:
    """State of the whole process, because observers do not know which thread works."""

    last_beat = time.monotonic()


def beat() -> None:
    """Record progress of this process. Any thread may call it."""
    _Heart.last_beat = time.monotonic()


@contextmanager
def beating(every_s: float) -> Iterator[None]:
    """Call `beat` regularly during the block, which waits for another process and has its own time
    limit.
    """
    ended = Event()

    def beat_on() -> None:
        while not ended.wait(every_s):
            beat()

    Thread(target=beat_on, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def seconds_since_beat() -> float:
    """Return the seconds since the last `beat`, or since the process started."""
    return time.monotonic() - _Heart.last_beat
