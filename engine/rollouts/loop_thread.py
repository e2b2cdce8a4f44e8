"""An asyncio loop on a thread, for callers that block."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ...utils.errors import RolloutError

_BLOCKED_S = 60.0


class LoopThread:
    """A running loop on a daemon thread with this ``name``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, fn: Callable[..., object], *args: Any) -> None:
        """Run ``fn(*args)`` on the thread of the loop and wait for it. Raises RolloutError if the loop is blocked."""

        async def called() -> None:
            fn(*args)

        try:
            asyncio.run_coroutine_threadsafe(called(), self._loop).result(_BLOCKED_S)
        except TimeoutError as error:
            raise RolloutError(
                f"the loop of {self._thread.name!r} has done nothing for {_BLOCKED_S:g} s: a workflow blocks it. Await "
                "what takes long, or call it in a CallPool"
            ) from error

    def close(self, timeout_s: float) -> None:
        """Cancel all tasks and end the thread. After ``timeout_s`` the thread is abandoned."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._stop()))
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()
