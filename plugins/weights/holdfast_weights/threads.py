"""Work on many items with a few threads and little memory."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREADS = min(8, os.cpu_count() or 1)
_END = object()


def in_parallel(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``work`` with every item. After an error no thread begins another item, and the first
    error is raised.
    """
    pending = iter(items)
    lock = threading.Lock()
    failed = threading.Event()

    def drain() -> None:
        while not failed.is_set():
            # A generator of items must not run in two threads at once.
            with lock:
                item = next(pending, _END)
            if item is _END:
                return
            try:
                work(item)  # type: ignore[arg-type]
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(drain) for _ in range(THREADS)]
    for each in running:
        each.result()
