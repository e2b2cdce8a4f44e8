"""JSON Lines that are appended to while others read: one object a line, torn lines left out."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .logging import get_logger

logger = get_logger(__name__)


def to_line(entry: Any) -> bytes:
    """``entry`` as one line."""
    return json.dumps(entry).encode() + b"\n"


def read_lines(
    path: str | os.PathLike[str], key: str, *, like: re.Pattern[bytes] | None = None, last_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """The objects of a file that have ``key``, in the order of the file.

    A line torn by a crash is left out, with a warning unless it is the last one.

    Args:
        path: the file.
        key: what every object has.
        like: how the lines begin that are wanted; the others are not parsed. None: all are wanted.
        last_bytes: look only at so many bytes at the end of the file; None: at all of them.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = 0 if last_bytes is None else max(0, size - last_bytes)
        file.seek(start)
        lines = file.read().split(b"\n")
    for number, line in enumerate(lines[start > 0 :], start=1):
        if like is not None and not like.match(line):
            continue
        try:
            entry = json.loads(line) if line else None
        except ValueError:
            entry = None
        if isinstance(entry, dict) and key in entry:
            yield entry
        elif line and number < len(lines):
            logger.warning("%s: line %d is torn and left out", Path(path), number)
