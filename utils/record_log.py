"""`RecordLog`: an append-only log of records in a folder, which a kill of the process does not
shorten.

    <folder>/<number>-<id>-<parent>.log    00000007-5f3a90c1-b2207e44.log

A file belongs to the life of one process, or to the part of it between two snapshots. ``<number>``
grows. ``<id>`` is random. ``<parent>`` is the id of the file before. Both are in the name, because
a flipped bit in a file must not change them. A snapshot names the id of a file, and what follows
the snapshot is in this file and its descendants. Files of other lives have other parents.

A record is framed: magic, size of the payload (u32), xxh3_128 of the payload, payload. All numbers
are little-endian. Records do not depend on each other. A reader that meets a bad one searches the
next magic, so that each damage costs itself alone.

A file is only ever appended to. Nothing is truncated, renamed or rewritten. Old files are deleted
as a whole. The caller never waits for the disk: one thread opens, writes and syncs. What a payload
means is the caller's affair. `join_payload` and `split_payload` make and read the usual form.
"""

import contextlib
import errno
import json
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from .errors import CheckpointCorruptError, CheckpointWriteError
from .files import fsync_dir, make_durably, open_regular, remove_or_log
from .logging import get_logger

logger = get_logger(__name__)

NO_PARENT = "00000000"
"""Parent of a log without a snapshot before it. No file has this id."""

MAGIC = b"\xf7rec"
FRAME = struct.Struct("<4sI16s")
"""Magic, size of the payload in bytes, xxh3_128 of the payload."""
_HEAD_SIZE = struct.Struct("<I")
_NAME = re.compile(r"(\d{8,18})-([0-9a-f]{8})-([0-9a-f]{8})\.log")
_ID = re.compile(r"[0-9a-f]{8}")
_MOST_PAYLOAD_BYTES = 1 << 28
_MOST_QUEUED_BYTES = 1 << 28
"""Bytes that wait for the disk. More means that the disk hangs."""
_MOST_WASTED_BYTES = 1 << 30
"""Bytes of bad records that are read from one file. A file made of magics would take for ever."""
_BATCH_BYTES = 1 << 22
_SEARCH_BYTES = 1 << 20


class LogFile(NamedTuple):
    """A file of a log, as its name describes it."""

    path: Path
    number: int
    id: str
    parent: str


@dataclass
class ReadCounts:
    """Outcome of reading files.

    Attributes:
        bytes: bytes of the files.
        records: sound records.
        damaged: bad records before a good one. Their content is lost.
        torn: files that end in a bad record, as a kill or a power cut leaves them.
    """

    bytes: int = 0
    records: int = 0
    damaged: int = 0
    torn: int = 0


def new_id() -> str:
    """Return a random id of a log file."""
    return os.urandom(4).hex()


def log_files(folder: Path) -> list[LogFile]:
    """List the files of a log by number. Other names are ignored. Empty if there is no folder."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    files = []
    for name in names:
        found = _NAME.fullmatch(name)
        if found is not None:
            number, log_id, parent = found.groups()
            files.append(LogFile(folder / name, int(number), log_id, parent))
    return sorted(files, key=lambda file: (file.number, file.id))


def descendants(files: list[LogFile], log_id: str) -> list[LogFile]:
    """Choose the file ``log_id`` and all that descend from it, by number. The file itself may be
    missing.
    """
    ids = {log_id}
    chosen = []
    for file in files:
        if file.id in ids or file.parent in ids:
            ids.add(file.id)
            chosen.append(file)
    return chosen


def read_records(path: Path, counts: ReadCounts) -> Iterator[bytes]:
    """Yield the payload of each sound record of one file, in order. ``counts`` is added to.

    Sizes are checked against the file before anything is allocated. Raises OSError if the file
    cannot be read or is no regular file.
    """
    fd = open_regular(path)
    try:
        yield from _read_records(fd, os.fstat(fd).st_size, counts)
    finally:
        os.close(fd)


def _read_records(fd: int, end: int, counts: ReadCounts) -> Iterator[bytes]:
    counts.bytes += end
    at = 0
    bad = 0  # bad records since the last good one
    wasted = 0
    while at < end:
        frame = os.pread(fd, FRAME.size, at)
        payload = None
        if frame.startswith(MAGIC):
            payload = _read_payload(fd, frame, at, end)

        # A good record: those before it are damaged, not torn.
        if isinstance(payload, bytes):
            counts.damaged += bad
            bad = 0
            counts.records += 1
            at += FRAME.size + len(payload)
            yield payload
            continue

        # A bad record: search the next magic. A hole of zeros has none.
        if payload is not None or bad == 0:
            bad += 1
        wasted += payload or 0
        if payload is not None:
            wasted += _SEARCH_BYTES  # the search begins again after each magic
        if wasted > _MOST_WASTED_BYTES:
            counts.damaged += bad
            return
        at = _find_magic(fd, at + 1, end)
    counts.torn += bad > 0


def _read_payload(fd: int, frame: bytes, at: int, end: int) -> bytes | int:
    # Returns the number of bytes read in vain if the record is bad.
    if len(frame) < FRAME.size:
        return 0
    _, size, digest = FRAME.unpack(frame)
    if size > min(_MOST_PAYLOAD_BYTES, end - at - FRAME.size):
        return 0
    payload = os.pread(fd, size, at + FRAME.size)
    if len(payload) == size and xxhash.xxh3_128_digest(payload) == digest:
        return payload
    return len(payload)


def _find_magic(fd: int, at: int, end: int) -> int:
    # Parts overlap, because a magic may lie across two of them.
    while at < end:
        at = _skip_hole(fd, at, end)
        part = os.pread(fd, _SEARCH_BYTES, at)
        found = part.find(MAGIC)
        if found >= 0:
            return at + found
        if len(part) < len(MAGIC):
            break
        at += len(part) - len(MAGIC) + 1
    return end


def _skip_hole(fd: int, at: int, end: int) -> int:
    # A sparse file may claim any size.
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        return end if error.errno == errno.ENXIO else at


def join_payload(head: Mapping[str, Any], body: bytes) -> bytes:
    """Return the payload of a record: size of the head (u32), head as JSON, body.

    Example::

        log.append(join_payload({"ticket": 7, "kind": "call"}, b"42"))
    """
    encoded = json.dumps(head, separators=(",", ":")).encode()
    return _HEAD_SIZE.pack(len(encoded)) + encoded + body


def split_payload(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the head and the body that `join_payload` joined.

    Raises ValueError if the payload is something else. Values in the head are not checked.
    """
    if len(payload) < _HEAD_SIZE.size:
        raise ValueError(f"a payload of {len(payload)} bytes has no head")
    begin = _HEAD_SIZE.size
    (size,) = _HEAD_SIZE.unpack_from(payload)
    if size > len(payload) - begin:
        raise ValueError(f"a head of {size} bytes in a payload of {len(payload)} bytes")
    try:
        head = json.loads(payload[begin : begin + size].decode())
    except RecursionError as error:
        raise ValueError("the head is nested too deeply") from error
    if not isinstance(head, dict):
        raise ValueError(f"the head is a {type(head).__name__}, not an object")
    return head, payload[begin + size :]


class _Queued(NamedTuple):
    """A record to write, or the name of the file to open."""

    time: float
    number: int  # of the file
    place: int = 0
    frame: bytes = b""
    name: str = ""


class _Writer:
    """The file that the thread writes."""

    def __init__(self, folder: Path) -> None:
        self.number = 0
        self._folder = folder
        self._fd: int | None = None
        self._has_folder = False
        self._missing: list[str] = []

    def open(self, number: int, name: str) -> None:
        """Create a file with a durable name."""
        self.close()
        self.number = number
        self._missing.append(name)
        if not self._has_folder:
            make_durably(self._folder)
            self._has_folder = True

        # Files that could not be created before come first: they are the parents of this one.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        while self._missing:
            path = self._folder / self._missing[0]
            fd = os.open(path, flags, 0o666)
            self._missing.pop(0)
            self.close()
            self._fd = fd
        fsync_dir(self._folder)

    def write(self, data: bytes) -> None:
        """Append all of ``data``."""
        assert self._fd is not None, "records of a file that was given up are dropped"
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        """Force what was written to stable storage."""
        assert self._fd is not None, "records of a file that was given up are dropped"
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file. What was not synced may be lost."""
        if self._fd is not None:
            fd = self._fd
            self._fd = None
            with contextlib.suppress(OSError):
                os.close(fd)


class RecordLog:
    """The log in one folder. All methods may be called from any thread. Only one process may write.

    A record survives a kill of the process as soon as it is written, which takes milliseconds, and
    a power cut at most ``sync_s`` later. If the disk refuses (ENOSPC, EIO), or hangs until the
    queue is full, the file is given up with one warning and the program continues: `append` drops
    its records until `rotate` begins the next file. A failed sync is never repeated, because the
    kernel would report success for lost pages.

    Example::

        log = RecordLog(folder, sync_s=2.0)
        payloads = list(log.read(snapshot_id))  # heads and bodies: `split_payload`
        log.start(snapshot_id)
        place = log.append(payload)
        log.sync(place)
        snapshot_id = log.rotate()

    Args:
        folder: created by the first file, with its parents.
        sync_s: longest time until a record is on stable storage, in seconds, if the disk is fast.
    """

    def __init__(self, folder: Path, sync_s: float) -> None:
        self.folder = folder
        self.parent = NO_PARENT
        """Parent of the first file of this life, from `start` on."""
        self.counts = ReadCounts()
        """Outcome of all calls of `read`."""
        self._sync_s = sync_s
        self._id = NO_PARENT
        self._number = 0
        self._thread: threading.Thread | None = None

        # Everything below is shared with the thread. Places of records count from 1.
        self._changed = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._appended = 0
        self._written = 0
        self._synced = 0
        self._wanted = 0  # a caller of `sync` waits for this place
        self._lost: list[range] = []  # one for each file that was given up
        self._unsynced_since: float | None = None  # of the oldest record that was taken
        self._n_bytes = 0
        self._failed = False
        self._closing = False

    @property
    def id(self) -> str:
        """Id of the current file. `NO_PARENT` before `start`."""
        return self._id

    @property
    def failed(self) -> bool:
        """Whether the current file was given up. Records are dropped until `rotate`."""
        return self._failed

    @property
    def n_bytes(self) -> int:
        """Number of bytes that this object has written."""
        return self._n_bytes

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest record that is not on stable storage was appended, or 0.0."""
        with self._changed:
            times = [queued.time for queued in self._queue if queued.frame]
            oldest = self._unsynced_since or min(times, default=None)
        if oldest is None:
            return 0.0
        return time.monotonic() - oldest

    def read(self, log_id: str | None) -> Iterator[bytes]:
        """Yield the payload of each sound record of the file ``log_id`` and of its descendants,
        oldest first. Call it before `start`.

        `NO_PARENT` reads the files of lives that had no snapshot. None reads nothing: the snapshot
        names no log. Bad records are skipped and counted in ``counts``. If a file cannot be read,
        the rest of it is skipped with a warning.
        """
        if log_id is None:
            return
        earlier = self.counts.damaged
        for file in descendants(log_files(self.folder), log_id):
            try:
                yield from read_records(file.path, self.counts)
            except OSError as error:
                logger.warning("cannot read %s, its records are not used: %s", file.path, error)
        damaged = self.counts.damaged - earlier
        if damaged:
            logger.warning("%s: %d damaged records are not used", self.folder, damaged)

    def start(self, parent: str | None) -> str:
        """Begin the first file of this life. ``parent`` is what `read` was called with. Returns the
        id of the file.

        Raises:
            OSError: the folder exists and cannot be listed.
            CheckpointCorruptError: ``parent`` is no id.
        """
        # A snapshot without a log is no file's parent, so an unused id stands for it.
        if parent is None:
            parent = new_id()
        if not _ID.fullmatch(parent):
            raise CheckpointCorruptError(
                f"a snapshot names {parent!r} as its log; expected 8 hexadecimal digits"
            )
        self.parent = parent
        numbers = [file.number for file in log_files(self.folder)]
        self._number = max(numbers, default=0)
        self._id = parent
        self._thread = threading.Thread(target=self._run, name="record log", daemon=True)
        self._thread.start()
        return self.rotate()

    def append(self, payload: bytes) -> int:
        """Append a record of up to 256 MiB. Never waits for the disk.

        Returns its place for `sync`, or 0 if the record is dropped: while ``failed``, before
        `start`, and after `close`.
        """
        digest = xxhash.xxh3_128_digest(payload)
        frame = FRAME.pack(MAGIC, len(payload), digest) + payload
        with self._changed:
            if self._failed or self._closing or self._thread is None:
                return 0
            # A disk that hangs costs the file, not the memory of the program.
            if self._queued_bytes + len(frame) > _MOST_QUEUED_BYTES:
                self._give_up(self._number, self._appended + 1, "the disk does not keep up")
                return 0
            self._appended += 1
            self._queue.append(_Queued(time.monotonic(), self._number, self._appended, frame))
            self._queued_bytes += len(frame)
            self._changed.notify_all()
            return self._appended

    def rotate(self) -> str:
        """Begin the next file, whose parent is the current one. Returns its id at once.

        The file is opened when all earlier records are on stable storage. If that fails, it is
        given up like a file that cannot be written, and created empty before the next one, whose
        parent it is.
        """
        with self._changed:
            parent = self._id
            self._id = new_id()
            self._number += 1
            name = f"{self._number:08}-{self._id}-{parent}.log"
            self._queue.append(_Queued(time.monotonic(), self._number, name=name))
            self._failed = False
            self._changed.notify_all()
            return self._id

    def sync(self, place: int, timeout_s: float = 60.0) -> None:
        """Wait until the record that `append` gave this ``place`` is on stable storage, with all
        earlier ones of its file.

        Raises CheckpointWriteError if the record was dropped, its file was given up, or after
        ``timeout_s``.
        """
        with self._changed:
            self._wanted = max(self._wanted, place)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._synced >= place or self._is_lost(place), timeout_s)
            if self._is_lost(place):
                reason = "could not be written"
                if self._closing and place == 0:
                    reason = "is closed: the run has ended"
                raise CheckpointWriteError(
                    f"a record is not on stable storage, because {self.folder} {reason}"
                )
            if self._synced < place:
                raise CheckpointWriteError(
                    f"a record is not on stable storage: {self.folder} hangs for {timeout_s} s"
                )

    def delete_before(self, log_id: str) -> None:
        """Delete the files with lower numbers than the file ``log_id``. If it is not there, nothing
        is deleted. A file that cannot be deleted is logged and stays.
        """
        try:
            files = log_files(self.folder)
        except OSError as error:
            logger.warning("cannot list %s to delete old files: %s", self.folder, error)
            return
        numbers = [file.number for file in files if file.id == log_id]
        for file in files:
            if numbers and file.number < numbers[0]:
                remove_or_log(file.path)

    def close(self, timeout_s: float = 60.0) -> None:
        """Write and sync what was appended, and end the thread. If it hangs longer than
        ``timeout_s``, it is left alone with a warning. Further calls do nothing.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("%s hangs, its last records may be lost", self.folder)

    def _is_lost(self, place: int) -> bool:
        return place == 0 or any(place in lost for lost in self._lost)

    def _give_up(self, number: int, first_lost: int, reason: object) -> None:
        """Give up the file with this number, under the lock. Its records leave the queue."""
        logger.warning(
            "the log in %s cannot be written, and goes on after the next snapshot: %s",
            self.folder,
            reason,
        )
        # Records of an earlier file and names of later files stay.
        kept: deque[_Queued] = deque()
        last_lost = self._written
        for queued in self._queue:
            if queued.frame and queued.number == number:
                self._queued_bytes -= len(queued.frame)
                first_lost = min(first_lost, queued.place)
                last_lost = queued.place
            else:
                kept.append(queued)
        self._queue = kept
        self._lost.append(range(first_lost, last_lost + 1))
        if number == self._number:
            self._failed = True
        self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        writer = _Writer(self.folder)
        while self._step(writer):
            pass
        writer.close()

    def _step(self, writer: _Writer) -> bool:
        """Wait until something is due, and do it. Returns False at the end."""
        with self._changed:
            self._changed.wait_for(self._due, self._until_sync_s())
            due = self._due()
            batch = b""
            queued = None
            if due == "write":
                batch = self._take_batch()
            elif due == "open":
                queued = self._queue.popleft()

        # The disk may hang here, so the lock is free.
        try:
            if due == "write":
                writer.write(batch)
                self._n_bytes += len(batch)
            elif due == "sync":
                writer.sync()
            elif queued is not None:
                writer.open(queued.number, queued.name)
        except OSError as error:
            # The same file is never tried again.
            writer.close()
            with self._changed:
                self._unsynced_since = None
                self._give_up(writer.number, self._synced + 1, error)
            return True

        if due == "sync":
            with self._changed:
                self._unsynced_since = None
                self._synced = self._written
                self._changed.notify_all()
        return due != "end"

    def _due(self) -> Literal["write", "sync", "open", "end"] | None:
        # A file is synced after ``sync_s``, for a caller of `sync`, and before it is left.
        is_record_next = bool(self._queue) and bool(self._queue[0].frame)
        if self._unsynced_since is not None:
            is_left = bool(self._queue) or self._closing
            is_wanted = is_left or self._wanted > self._synced
            if self._until_sync_s() == 0 or (is_wanted and not is_record_next):
                return "sync"
        if is_record_next:
            return "write"
        if self._queue:
            return "open"
        return "end" if self._closing else None

    def _until_sync_s(self) -> float | None:
        if self._unsynced_since is None:
            return None
        return max(0.0, self._unsynced_since + self._sync_s - time.monotonic())

    def _take_batch(self) -> bytes:
        """Take records of one file from the queue, up to `_BATCH_BYTES` and one more."""
        if self._unsynced_since is None:
            self._unsynced_since = self._queue[0].time
        frames = []
        n_bytes = 0
        while self._queue and self._queue[0].frame and n_bytes < _BATCH_BYTES:
            queued = self._queue.popleft()
            frames.append(queued.frame)
            n_bytes += len(queued.frame)
            self._written = queued.place
        self._queued_bytes -= n_bytes
        return b"".join(frames)
