"""Daemon threads that return a result."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def on_daemon_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Run ``work``, which may never return, on a new daemon thread. The future holds its result or
    its error.

    Unlike with ``ThreadPoolExecutor``, the process does not wait for the thread when it exits.
    """
    outcome: Future[T] = Future()

    def fulfil() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        Thread(target=fulfil, name=name, daemon=True).start()
    except RuntimeError as error:  # the thread could not start; callers may wait for the outcome
        outcome.set_exception(error)
    return outcome
