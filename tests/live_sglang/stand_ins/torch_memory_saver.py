"""A stand-in for ``torch_memory_saver``, which moves allocations of CUDA out of a GPU's memory.

It remembers what sleeps and frees nothing. So it shows that the order of calls is right, and
neither that memory is freed nor that weights survive in host memory. A second pause of the same
part raises, as the real one may end the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Saver:
    enabled = True
    hook_mode = None

    def __init__(self) -> None:
        self._paused: set[str | None] = set()

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """Memory of a CPU is allocated as usual."""
        yield

    @contextmanager
    def cuda_graph(self, *args: Any, **options: Any) -> Iterator[None]:
        """There are no graphs of CUDA."""
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """There is nothing to disable."""
        yield

    def pause(self, tag: str | None = None) -> None:
        """Let a part sleep. Raises RuntimeError if it does so already."""
        if tag in self._paused:
            raise RuntimeError(f"{tag} is paused already")
        self._paused.add(tag)

    def resume(self, tag: str | None = None) -> None:
        """Wake a part up. Raises RuntimeError if it is awake."""
        if tag not in self._paused:
            raise RuntimeError(f"{tag} is not paused")
        self._paused.remove(tag)


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """A child process needs no library preloaded."""
    yield


torch_memory_saver = _Saver()
