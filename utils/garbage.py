"""The cyclic garbage collector, kept out of where a great many objects are made that all stay.

Python looks for cycles the more often the more objects there are: unpickling the ``.metadata`` of 1,024 ranks, 160,000
chunks, takes five times as long with it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Make objects without looking for cycles, in all threads of the process; afterwards it is as it was before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
