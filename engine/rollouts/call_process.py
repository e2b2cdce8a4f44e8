"""What runs in a process of a `CallPool`. It imports nothing heavy: each such process pays for that once more."""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any


def serve(pipe: Connection) -> None:
    """Read a call, say that it begins, make it, answer; until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            call = _unpickled(pipe.recv_bytes())
            pipe.send_bytes(b"begun")
            pipe.send_bytes(_answer(call))


def _unpickled(work: bytes) -> Callable[[], Any]:
    try:
        fn, args, kwargs = pickle.loads(work)
    except Exception as error:
        return partial(_raise, error)
    return partial(fn, *args, **kwargs)


def _raise(error: Exception) -> None:
    raise error


def _answer(call: Callable[[], Any]) -> bytes:
    """``(True, result)`` or ``(False, error)``, pickled."""
    try:
        return pickle.dumps((True, call()))
    except Exception as error:
        error.add_note(traceback.format_exc())
        with suppress(Exception):
            data = pickle.dumps((False, error))
            pickle.loads(data)
            return data
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


def _end_with_parent() -> None:
    """A call may hang when the process that asked for it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
