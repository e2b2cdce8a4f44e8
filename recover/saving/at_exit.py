"""Something to be done when this process ends by itself: at the end of its script, or by ``sys.exit`` or an error."""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import NoReturn

from ...utils.logging import get_logger

logger = get_logger(__name__)


class AtExit:
    """Calls a function once at the end of the process that registered it, before what is registered already.

    Python runs no ``atexit`` functions at the end of a process that multiprocessing has forked (before 3.13), only its
    own finalizers; so the function is registered as both.

    Args:
        function: must be able to be called twice.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._pid = -1
        self._finalizer: Finalize | None = None

    def register(self) -> None:
        """Have it called; a second time does nothing."""
        if self._finalizer is None:
            self._pid = os.getpid()
            self._finalizer = Finalize(None, self._call, exitpriority=0)
            atexit.register(self._call)

    def unregister(self) -> None:
        """Do not have it called any more."""
        if self._finalizer is not None:
            atexit.unregister(self._call)
            self._finalizer.cancel()
            self._finalizer = None

    def _call(self) -> None:
        if os.getpid() == self._pid:  # and not in a child that it has forked with its functions
            self._function()


def end_with_error(message: str) -> NoReturn:
    """Log an error and end the process with exit code 1, in a function that is called at its end.

    The code of a process that is ending cannot be changed in another way. What is registered to be called after this is
    not called any more.
    """
    try:
        logger.error(message)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
