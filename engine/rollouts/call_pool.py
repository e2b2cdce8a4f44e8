"""`CallPool`: call a user's functions in other processes, with a time limit per call.

A reward may hang (a regular expression, a proof checker) or end its process (memory, a C
extension). Then the call is repeated once in a fresh process, and the training is not affected.
Programs that a hanging call has started end with its process.
``concurrent.futures.ProcessPoolExecutor`` cannot end a call, and a process that ends breaks it for
good.
"""

import asyncio
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from ...utils.config import require_range
from ...utils.errors import CallLost, ConfigError, RolloutError
from ...utils.logging import get_logger
from ...utils.processes import descendants
from .call_process import serve

logger = get_logger(__name__)

# a fork would copy locks held by other threads
_CONTEXT = multiprocessing.get_context("forkserver")
# libraries whose import takes seconds
_LARGE = ("torch", "torch.distributed.fsdp", "transformers.modeling_utils")
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
"""Errors of pickle for functions and types that cannot be pickled at all."""
_ATTEMPTS = 2
# time limit for a process to start and to import the function
_START_S = 120.0
# errors of a host that cannot start a process, or whose fork server has ended
_NOT_STARTED = (OSError, EOFError)
_STARTS = 4
# pause before the second attempt to start a process, and twice as long before each further one
_START_AGAIN_S = 1.0


class CallPool:
    """Processes that call functions. They start on first use and end with this process. The fork
    server of multiprocessing starts them, with torch and transformers if this process has imported
    them (this replaces an earlier ``set_forkserver_preload``).

        reward = await CallPool(n_processes=8, timeout_s=5.0).call(check_proof, text)

    ``n_processes`` calls run at a time. The limit ``timeout_s`` of a call excludes the start of its
    process. Attribute ``n_lost`` counts attempts that hung or ended their process.
    """

    def __init__(self, n_processes: int = 4, timeout_s: float = 15.0) -> None:
        require_range("n_processes", n_processes, low=1)
        require_range("timeout_s", timeout_s, low=0.01)
        self.timeout_s = timeout_s
        self.n_lost = 0
        self._threads = ThreadPoolExecutor(n_processes, "call-pool")
        _CONTEXT.set_forkserver_preload(_preloaded())

        # The lock guards the following. A process is idle or busy.
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()

    async def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``fn(*args, **kwargs)``. Function, arguments and result are pickled.

        Raises:
            CallLost: the call hung or ended its process twice.
            RolloutError: no process could be started.
            ConfigError: function or arguments are of a type that cannot be pickled, or the pool is
                closed.
            Exception: any error of ``fn``, and of an argument while it is pickled.
        """
        return await self._start(_ATTEMPTS, fn, args, kwargs)

    async def call_once(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`call` with one attempt, for a function with an outside effect. CallLost: whether it took
        effect is not known.
        """
        return await self._start(1, fn, args, kwargs)

    async def _start(
        self, attempts: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._require_open()
        try:
            work = pickle.dumps((fn, args, kwargs))
        except UNPICKLABLE as error:
            raise ConfigError(
                f"{fn} or its arguments cannot be sent to another process: {error}; give a "
                "function of a module or of the script, and plain arguments"
            ) from error
        inner = getattr(fn, "func", fn)  # of a partial
        name = getattr(inner, "__qualname__", repr(fn))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, work, name, attempts)

    def close(self) -> None:
        """End all processes, and their calls with them."""
        with self._lock:
            self._closed = True
            idle = self._idle
            self._idle = []
            # The thread that waits for a busy process also closes its pipe.
            for process in (*idle, *self._busy):
                process.kill()
        for process in idle:
            process.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: bytes, name: str, attempts: int) -> Any:
        reason = ""
        for number in range(attempts):
            process = self._take(fresh=number > 0)
            kept = False
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
        times = "once" if attempts == 1 else f"{attempts} times"
        raise CallLost(f"{name} {reason}, {times}")

    def _take(self, *, fresh: bool) -> "_Process":
        # Whatever ended one idle process, such as a signal to the job, may have ended others.
        with self._lock:
            self._require_open()
            while self._idle and not fresh:
                process = self._idle.pop()
                if process.has_ended():
                    process.end()
                    continue
                self._busy.add(process)
                return process

        # The fork server takes seconds to start.
        process = _started()
        with self._lock:
            self._busy.add(process)
            closed = self._closed
        if closed:
            self._put_back(process, kept=False)
            self._require_open()
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


def _preloaded() -> list[str]:
    """What the fork server imports, for all processes: what this process uses of Holdfast and of
    large libraries.

    Each process imports the script, because a function may be in it. Python before 3.12.8 cannot
    do that in the server (python/cpython#126631), nor find modules next to the script.
    """
    large = [name for name in _LARGE if name in sys.modules]
    of_holdfast = [name for name in list(sys.modules) if name.startswith("holdfast.")]
    return ["__main__", *large, *of_holdfast]


def _started() -> "_Process":
    """A new process. RolloutError if none could be started after several attempts."""
    starting = Retrying(
        retry=retry_if_exception_type(_NOT_STARTED),
        stop=stop_after_attempt(_STARTS),
        wait=wait_exponential(_START_AGAIN_S),
        reraise=True,
    )
    try:
        return starting(_Process)
    except _NOT_STARTED as error:
        raise RolloutError(
            f"no process could be started for a call, {_STARTS} times: {type(error).__name__}: "
            f"{error}; look at free memory, and at the limits of processes (ulimit -u) and of open "
            "files (ulimit -n), or lower n_processes of the CallPool"
        ) from error


class _Lost(Exception):
    """A call without an answer."""


class _Process:
    def __init__(self) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=serve, args=(theirs,), name="call-pool", daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, work: bytes, timeout_s: float) -> bytes:
        """Send a pickled call and return the pickled answer. Raises `_Lost` if there is none."""
        try:
            self._pipe.send_bytes(work)
            # First comes the note that the call began, then the result.
            for limit_s in (_START_S, timeout_s):
                if not self._pipe.poll(limit_s):
                    raise _Lost(f"has not returned within {limit_s:g} s")
                answer = self._pipe.recv_bytes()
            return answer
        except (EOFError, OSError):
            self._process.join(1.0)
            raise _Lost(f"has ended its process (exit code {self._process.exitcode})") from None

    def has_ended(self) -> bool:
        """Whether the process is gone, although nobody asked it to end."""
        return not self._process.is_alive()

    def kill(self) -> None:
        """End the process, so that `ask` raises in another thread, and the programs that its call
        has started.
        """
        # Found before it ends, because orphans get another parent.
        programs = descendants(self._process.pid or 0) if self._process.is_alive() else []
        self._process.kill()
        for program in programs:
            program.kill()

    def end(self) -> None:
        """`kill` the process and close its pipe."""
        self.kill()
        self._process.join(1.0)
        self._pipe.close()
