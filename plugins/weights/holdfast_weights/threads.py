"""Work on many items with a few threads and little memory."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREADS = min(8, os.cpu_count() or 1)
_END = object()


def in_parallel(work: Callable[[T], object], items: Iterable[T], threads: int = THREADS) -> None:
    """Call ``work`` with every item. After an error no thread begins another item, and the first
    error is raised.
    """
    pending, lock = iter(items), threading.Lock()
    failed = threading.Event()

    def drain() -> None:
        while not failed.is_set():
            with lock:
                item = next(pending, _END)
            if item is _END:
                return
            try:
                work(item)  # type: ignore[arg-type]
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(drain) for _ in range(threads)]
    for each in running:
        each.result()
