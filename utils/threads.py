"""Work on threads that do not keep a process from ending."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def on_daemon_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Start ``work`` on a thread of its own; the result, or what it raises, is the future's; also
    that no thread can be started.

    A process does not wait for it at its end, as it would for one of a ``ThreadPoolExecutor``: for calls that may never
    return.
    """
    outcome: Future[T] = Future()
    try:
        Thread(target=_fulfil, args=(outcome, work), name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads: others may wait for the outcome
        outcome.set_exception(error)
    return outcome


def _fulfil(outcome: "Future[T]", work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)
