"""Daemon threads that return a result."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def on_daemon_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Run ``work`` on a new daemon thread. The future holds its result or its error, including a failure to start the
    thread.

    Unlike with ``ThreadPoolExecutor``, the process does not wait for the thread when it exits. This is for calls that
    may never return.
    """
    outcome: Future[T] = Future()
    try:
        Thread(target=_fulfil, args=(outcome, work), name=name, daemon=True).start()
    except RuntimeError as error:  # the thread could not start; callers may wait for the outcome
        outcome.set_exception(error)
    return outcome


def _fulfil(outcome: "Future[T]", work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)
