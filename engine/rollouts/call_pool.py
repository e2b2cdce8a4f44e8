"""`CallPool`: functions of a user in processes of their own, each call with a time limit.

A reward may hang (a regular expression, a proof checker) or end its process (memory, a C extension). Here neither
touches the training: a call that takes too long, or whose process ends, is made once more in a fresh process, and then
given up. ``concurrent.futures.ProcessPoolExecutor`` cannot end a call, and is broken for good by a process that ends.
"""

import asyncio
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from ...utils.config import require_range
from ...utils.errors import CallLost, ConfigError
from ...utils.logging import get_logger
from .call_process import serve

logger = get_logger(__name__)

_CONTEXT = multiprocessing.get_context("forkserver")  # a fork would copy locks that other threads hold
_ATTEMPTS = 2
_START_S = 120.0
"""How long a process may take to start and to import what the function needs."""


class CallPool:
    """Processes that call functions; they are started when they are first needed, and end with this process.

    Args:
        n_processes: calls that are made at the same time.
        timeout_s: how long one may take, from its first instruction.

    Attributes:
        n_lost: calls that hung or ended their process so far, every attempt counted.
    """

    def __init__(self, n_processes: int = 4, timeout_s: float = 15.0) -> None:
        require_range("n_processes", n_processes, low=1)
        require_range("timeout_s", timeout_s, low=0.01)
        self.timeout_s, self.n_lost = timeout_s, 0
        self._threads = ThreadPoolExecutor(n_processes, "call-pool")
        self._lock, self._closed = threading.Lock(), False
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()

    async def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``fn(*args, **kwargs)`` returns; function, arguments and result are pickled.

        Raises:
            CallLost: it hung, or ended its process, twice.
            ConfigError: function or arguments cannot be pickled, or the pool is closed.
            Exception: whatever ``fn`` raised.
        """
        self._require_open()
        try:
            work = pickle.dumps((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises, by the kind of object
            raise ConfigError(f"{fn} or its arguments cannot be sent to another process: {error}") from error
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, work, _name(fn))

    def close(self) -> None:
        """End all processes, whatever they do."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in (*idle, *self._busy):  # a busy one is ended by the thread that waits for it
                process.kill()
        for process in idle:
            process.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: bytes, name: str) -> Any:
        for _ in range(_ATTEMPTS):
            process, kept = self._take(), False
            try:
                returned, value = pickle.loads(process.ask(work, self.timeout_s))
                kept = True
            except _Lost as lost:
                self.n_lost += 1
                reason = str(lost)
                logger.warning("%s in a call pool %s", name, reason)
                continue
            finally:
                self._put_back(process, kept)
            if returned:
                return value
            raise value
        raise CallLost(f"{name} {reason}, {_ATTEMPTS} times")

    def _take(self) -> "_Process":
        with self._lock:
            self._require_open()
            process = self._idle.pop() if self._idle else _Process()
            self._busy.add(process)
            return process

    def _put_back(self, process: "_Process", kept: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            kept = kept and not self._closed
            if kept:
                self._idle.append(process)
        if not kept:
            process.end()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the CallPool is closed; make a new one")


class _Lost(Exception):
    """What became of a call without an answer, in words."""


class _Process:
    """A process that makes one call at a time."""

    def __init__(self) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=serve, args=(theirs,), name="call-pool", daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, work: bytes, timeout_s: float) -> bytes:
        """Have it make a call; the pickled answer.

        Raises:
            _Lost: there is none.
        """
        try:
            self._pipe.send_bytes(work)
            for limit_s in (_START_S, timeout_s):
                if not self._pipe.poll(limit_s):
                    raise _Lost(f"has not returned within {limit_s:g} s")
                answer = self._pipe.recv_bytes()  # that it has begun, then the result
            return answer
        except (EOFError, OSError):
            self._process.join(1.0)
            raise _Lost(f"has ended its process (exit code {self._process.exitcode})") from None

    def kill(self) -> None:
        """Have `ask` of another thread raise."""
        self._process.kill()

    def end(self) -> None:
        """Kill it, and free what belongs to it."""
        self._process.kill()
        self._process.join(1.0)
        self._pipe.close()


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
