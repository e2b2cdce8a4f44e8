"""Main function of the processes of a `CallPool`. It imports nothing heavy, because every process
pays for it.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ...utils.processes import descendants


def serve(pipe: Connection) -> None:
    """Read calls and send their results until the other end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the calling process handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A fork seeds the generator of Python, but not that of numpy.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
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
    # Without this thread, a hanging call would outlive a killed parent.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    for program in descendants(os.getpid()):
        program.kill()
    os._exit(1)
