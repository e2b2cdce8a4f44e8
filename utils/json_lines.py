"""JSON Lines files that are read while others append to them. Torn lines are left out.

Files are read line by line, or from the end, so memory does not grow with their length.
"""

import json
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .files import StrPath, open_regular
from .logging import get_logger

logger = get_logger(__name__)

_LONGEST_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_SPARE_LINES = 8


def read_lines(
    path: StrPath,
    key: str,
    *,
    like: re.Pattern[bytes] | None = None,
    ends_of: re.Pattern[bytes] | None = None,
    last_bytes: int | None = None,
    since: int = 0,
    until: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that have ``key``, in file order.

    Lines that were torn by a crash or are longer than 1 MiB are left out, with a warning unless it
    is the last line.

    Args:
        path: the file.
        key: required key of every object.
        like: pattern of the start of wanted lines. Other lines are not parsed. None means all
            lines.
        ends_of: of consecutive wanted lines that start with this pattern, only the first and last
            are yielded.
        last_bytes: number of bytes at the end of the file to read. None means the whole file.
        since: byte offset to start from, as `find_back` returns it.
        until: byte offset of the first line that is left out. None means the end of the file.
    """
    row: deque[tuple[int, bytes]] | None = None
    with open(open_regular(path), "rb", buffering=_BLOCK_BYTES) as file:
        # Begin with a whole line: skip the rest of the one that the last bytes start in.
        if last_bytes is not None:
            since = max(since, os.fstat(file.fileno()).st_size - last_bytes)
        file.seek(since)
        if last_bytes is not None and since > 0:
            file.seek(since - 1)
            next(_lines(file), None)

        # `row` has the last lines of a row after its first, which was yielded.
        for number, line in enumerate(_lines(file, until), start=1):
            in_row = ends_of is not None and ends_of.match(line)
            if row is not None and in_row:
                row.append((number, line))
                continue
            if not in_row and like is not None and not like.match(line):
                continue
            if row:
                yield from _last_of(row, path, key)
            row = None
            entry = _parse(path, number, line, key)
            if entry is None:
                continue
            if in_row:
                row = deque(maxlen=_SPARE_LINES)
            yield entry
        if row:
            yield from _last_of(row, path, key)


def find_back(path: StrPath, begins: bytes) -> Iterator[int]:
    """Yield the offsets of the lines that start with ``begins``, last line first. Raises as
    `read_lines`.
    """
    needle = b"\n" + begins
    with open(open_regular(path), "rb", buffering=0) as file:
        # Blocks overlap, so that a needle across their border is found.
        before = file.seek(0, os.SEEK_END)
        while before > 0:
            start = max(0, before - _BLOCK_BYTES)
            block = os.pread(file.fileno(), before - start + len(needle) - 1, start)
            at = block.rfind(needle)
            while at >= 0:
                yield start + at + 1
                at = block.rfind(needle, 0, at + len(needle) - 1)
            before = start
        if os.pread(file.fileno(), len(begins), 0) == begins:
            yield 0


def _lines(file: IO[bytes], until: int | None = None) -> Iterator[bytes]:
    line = file.readline(_LONGEST_BYTES)
    while line:
        if until is not None and file.tell() > until:
            return
        yield line

        # Only the beginning of a line that is too long is yielded.
        while len(line) == _LONGEST_BYTES and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_BYTES)
        line = file.readline(_LONGEST_BYTES)


def _last_of(row: deque[tuple[int, bytes]], path: StrPath, key: str) -> Iterator[dict[str, Any]]:
    for number, line in reversed(row):
        entry = _parse(path, number, line, key)
        if entry is not None:
            yield entry
            return


def _parse(path: StrPath, number: int, line: bytes, key: str) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if isinstance(entry, dict) and key in entry:
        return entry
    # The last line may be one that its writer has not finished.
    if line.endswith(b"\n") or len(line) == _LONGEST_BYTES:
        logger.warning("%s: line %d is torn and left out", Path(path), number)
    return None
