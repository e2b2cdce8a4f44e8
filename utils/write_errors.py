"""Conversion of file system errors into `CheckpointWriteError`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import CheckpointError, CheckpointWriteError


@contextmanager
def as_write_error(final: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError of the block into a `CheckpointWriteError` that names ``final``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        outcome = "" if os.path.lexists(final) else "; nothing became visible"
        raise CheckpointWriteError(f"cannot write {final}: {error.strerror or error}{outcome}") from error
