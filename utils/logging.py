"""Log lines that name the rank: ``12:00:01 rank 1 holdfast.engine.dcp.load | ...``.

Libraries must not configure logging. A job calls `configure_logging` once per process, and modules use `get_logger`.
"""

import logging
import sys


class _RankFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        from .distributed import get_rank  # imports torch, which readers of logs do not need

        record.rank = get_rank()
        return True


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module. Pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(level: str = "INFO") -> None:
    """Send this process's ``holdfast`` log to stderr, with the rank on each line. Further calls change nothing."""
    logger = logging.getLogger("holdfast")
    logger.setLevel(level)
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RankFilter())
    handler.setFormatter(logging.Formatter("%(asctime)s rank %(rank)s %(name)s | %(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False
