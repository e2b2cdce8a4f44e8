"""Progress of this process, for whoever asks whether it still makes any.

A ping answers while the interpreter runs at all; a worker in an endless loop, or in a collective that nobody joins,
answers it too. So a worker also says when it got somewhere: the engine for every micro-batch, who reads and writes
files for every piece, a rank of a `WorkerGroup` at the start and the end of every call. Code of a user that works for
long in one call may say it as well.
A beat costs two function calls.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread


class _Heart:
    """One a process: whoever asks cannot know who works in it."""

    last_beat = time.monotonic()


def beat() -> None:
    """Say that this process got somewhere; from any thread."""
    _Heart.last_beat = time.monotonic()


@contextmanager
def beating(every_s: float) -> Iterator[None]:
    """`beat` while the block runs: it waits for something outside of this process, within limits of its own."""
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
    """How long ago this process last got somewhere, or was started."""
    return time.monotonic() - _Heart.last_beat
