"""Log lines that name the rank: ``12:00:01 rank 1 holdfast.engine.dcp.load | ...``.

Libraries must not configure logging. A job calls `configure_logging` once per process, and modules
use `get_logger`. The few lines that every user needs go through `announce`, which also reaches
users who have configured nothing.
"""

import contextlib
import logging
import sys

from .errors import ConfigError
from .launch import launch_environment


class _RankFilter(logging.Filter):
    """Adds the rank to each record, and drops records of ranks above 0 below ``other_ranks``.

    The rank is that of torch.distributed, or that of the launcher until there is a process group.
    """

    def __init__(self, other_ranks: str) -> None:
        super().__init__()
        self.level_of_others = logging.Handler(other_ranks).level

    def filter(self, record: logging.LogRecord) -> bool:
        import torch.distributed as dist  # readers of logs do not need it

        rank = dist.get_rank() if dist.is_initialized() else _launched_rank()
        record.__dict__["rank"] = rank  # for the format
        return rank == 0 or record.levelno >= self.level_of_others


def _launched_rank() -> int:
    """Rank before there is a process group. 0 if the launcher tells none: a log line is no place to
    refuse that.
    """
    launched_as = ""
    with contextlib.suppress(ConfigError):
        launched_as = launch_environment().get("RANK", "")
    return int(launched_as) if launched_as.isdecimal() else 0


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module. Pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(level: str = "INFO", other_ranks: str = "WARNING") -> None:
    """Send this process's ``holdfast`` log to stderr, with the rank on each line. Further calls
    change nothing.

    Example::

        configure_logging()  # on every rank: one line for each snapshot, and warnings of all ranks

    Args:
        level: lowest level of the lines of rank 0.
        other_ranks: lowest level of the lines of all other ranks, if it is above ``level``.
    """
    logger = logging.getLogger("holdfast")
    logger.setLevel(level)
    if logger.handlers:
        return
    # The filter sets the rank, which the format needs.
    line = "%(asctime)s rank %(rank)s %(name)s | %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RankFilter(other_ranks))
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False


def announce(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a line that no user should miss: at INFO, or as a warning where INFO would not be seen.

    Python prints warnings to stderr if nothing is configured. Whoever wants less than warnings of
    ``holdfast`` has switched the line off.
    """
    level = logging.WARNING
    if _shows_info(logger):
        level = logging.INFO
    logger.log(level, message, *args)


def _shows_info(logger: logging.Logger) -> bool:
    """Whether a handler of ``logger`` or of a logger above it takes records of INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return False
    # A record goes up to the root, unless a logger on the way does not pass it on.
    source: logging.Logger | None = logger
    while source is not None:
        if any(handler.level <= logging.INFO for handler in source.handlers):
            return True
        source = source.parent if source.propagate else None
    return False
