"""The end of a process that did not call `RecoverHandler.close`.

Its last snapshot is finished, or its exit code reports an error.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import NoReturn

from ...utils.logging import get_logger

logger = get_logger(__name__)


class ProcessEnd:
    """Calls ``finish`` when this process ends, from `watch` until `cancel`.

    Before Python 3.13 a process forked by multiprocessing runs no ``atexit`` functions at its end,
    only finalizers of multiprocessing. So there is one of each, and ``finish`` may be called twice.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._finalizer: Finalize | None = None
        self._pid: int | None = None

    def watch(self) -> None:
        """Call ``finish`` at the end of this process."""
        self._pid = os.getpid()
        if self._finalizer is None:
            self._finalizer = Finalize(None, self._run, exitpriority=0)
            atexit.register(self._run)

    def cancel(self) -> None:
        """Do not call ``finish`` any more."""
        if self._finalizer is not None:
            atexit.unregister(self._run)
            self._finalizer.cancel()

    def _run(self) -> None:
        # A forked child inherits the registration, and has nothing to finish.
        if os.getpid() == self._pid:
            self._finish()


def end_with_error(message: str) -> NoReturn:
    """End the process with code 1, during its exit, where no exception can change the exit code.

    Functions that are registered to run later are not called.
    """
    try:
        logger.error(message)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
