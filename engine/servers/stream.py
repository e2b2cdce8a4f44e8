"""`WeightStream`: hand buckets of weights from the thread that gathers them to the threads that
send them to servers.

There are two buffers. While one bucket is sent to all servers at once, the next is gathered. A
bucket's buffer is used again when the last reader has released it.

The trainers never wait for a server without a limit. A reader that does not take a bucket while
others wait for it is dropped, and so is everyone at the deadline. A dropped reader's server stays
as it is, and the others go on.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Condition

import torch
from torch import Tensor

from ...utils.files import bytes_digest
from ..hf.buckets import Bucket
from ..memory.tensors import memory_of

_PATIENCE_S = 30.0
_SHORT_PATIENCE_S = 5.0
"""Patience with a server that missed the update before, and may be gone."""


class StreamEndedError(Exception):
    """A server gets no more weights. The message says why."""


@dataclass(frozen=True)
class FilledBucket:
    """A gathered bucket. ``data`` is valid until the reader releases it."""

    bucket: Bucket
    data: Tensor  # ``[nbytes]`` uint8
    last: bool  # whether it is the last one of the version

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in order."""
        return [tensor.key for tensor in self.bucket.tensors]

    @property
    def dtype_names(self) -> list[str]:
        """Their dtypes, such as ``bfloat16``."""
        return [str(tensor.dtype).removeprefix("torch.") for tensor in self.bucket.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        """Their shapes."""
        return [list(tensor.shape) for tensor in self.bucket.tensors]

    @cached_property
    def digest(self) -> str:
        """Digest of all bytes."""
        return bytes_digest(memory_of(self.data))  # type: ignore[arg-type]


class WeightStream:
    """The buckets of one version. One thread fills them, and each `BucketReader` sends them to a
    server.

    Args:
        buckets: all buckets, in order.
        timeout_s: time limit of the whole update.
        pinned: whether the buffers are for copies from and to GPUs.

    Attributes:
        patience_s: time limit for a server to take a bucket while others wait, and for sending a
            bucket.
        largest_bytes: size of the largest bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], timeout_s: float, pinned: bool = False) -> None:
        self.patience_s = min(_PATIENCE_S, timeout_s / 4)
        self.largest_bytes = max((bucket.nbytes for bucket in buckets), default=0)
        self.changed = Condition()
        self.filled: list[FilledBucket] = []
        self.problem: str | None = None  # why no more buckets are filled
        self._count = len(buckets)
        self._deadline = time.monotonic() + timeout_s
        self._buffers: list[Tensor | None] = [None, None]
        self._pinned = pinned
        self._readers: list[BucketReader] | None = None

    def open(self, awaited: Iterable[bool]) -> "list[BucketReader]":
        """Create a reader for each server. It has less time to take a bucket if its server is not
        ``awaited``.
        """
        short_s = min(_SHORT_PATIENCE_S, self.patience_s)
        with self.changed:
            self._readers = []
            for is_awaited in awaited:
                take_s = self.patience_s if is_awaited else short_s
                self._readers.append(BucketReader(self, self._count, take_s))
            self.changed.notify_all()
            return self._readers

    def make_room(self) -> bool:
        """Wait until there is a buffer for the next bucket. False: no reader is left."""
        waiting_since: float | None = None
        interval_s = min(0.1, self.patience_s / 10)
        with self.changed:
            number = len(self.filled)
            while self._is_read():
                # The next bucket takes the buffer of the last but one.
                readers = [one for one in self._readers or () if one.problem is None]
                behind = [one for one in readers if one.released < number - 1]
                if number < len(self._buffers) or (readers and not behind):
                    return True

                # If all are behind, nobody waits for another.
                if len(behind) < len(readers):
                    now = time.monotonic()
                    if waiting_since is None:
                        waiting_since = now
                    for one in behind:
                        one.hurry(now - waiting_since)

                # The deadline is looked at also without a notice.
                self.changed.wait(interval_s)
        return False

    def _is_read(self) -> bool:
        if time.monotonic() >= self._deadline:
            self.end("the time limit of the update has passed")
        if self.problem is not None:
            return False
        # Before `open` the readers are still to come.
        return self._readers is None or any(one.problem is None for one in self._readers)

    def target(self, bucket: Bucket) -> Tensor:
        """The memory for a bucket. It is free after `make_room`."""
        turn = bucket.number % len(self._buffers)
        buffer = self._buffers[turn]
        if buffer is None:
            buffer = torch.empty(
                self.largest_bytes,
                dtype=torch.uint8,
                device="cpu",
                pin_memory=self._pinned,
            )
            self._buffers[turn] = buffer
        return buffer[: bucket.nbytes]

    def put(self, bucket: Bucket) -> None:
        """Give a bucket, whose `target` is complete, to the readers."""
        last = bucket.number == self._count - 1
        with self.changed:
            self.filled.append(FilledBucket(bucket, self.target(bucket), last))
            self.changed.notify_all()

    def end(self, problem: str) -> None:
        """Fill no more buckets. A reader that misses one raises ``problem``."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()


class BucketReader:
    """The buckets of a stream for one server. Iterate over it once, and release each bucket after
    it was sent.

    Attributes:
        patience_s: time limit for sending a bucket.
        largest_bytes: size of the largest bucket.
        released: number of buckets that were sent.
        problem: why the others do not wait for it. None: they do.
    """

    def __init__(self, stream: WeightStream, count: int, take_s: float) -> None:
        self.patience_s = stream.patience_s
        self.largest_bytes = stream.largest_bytes
        self.released = 0
        self.problem: str | None = None
        self._stream = stream
        self._count = count
        self._take_s = take_s  # time limit to take a bucket while others wait
        self._holds = False  # whether a bucket was taken and is not released yet

    def __iter__(self) -> Iterator[FilledBucket]:
        for number in range(self._count):
            self._wait_for(number, hold=True)
            yield self._stream.filled[number]

    def wait(self) -> None:
        """Wait until the first bucket is complete, or raise StreamEndedError if it never is."""
        self._wait_for(0)

    def release(self) -> None:
        """Let the buffer of the last bucket be used again."""
        with self._stream.changed:
            self.released += self._holds
            self._holds = False
            self._stream.changed.notify_all()

    def hurry(self, others_waited_s: float) -> None:
        """Drop this reader if others have waited too long for it to take a bucket. Sends have
        limits of their own.
        """
        if not self._holds and others_waited_s >= self._take_s:
            self.close(
                f"bucket {self.released} was not taken in {self._take_s:g} s, while other servers "
                "waited"
            )

    def close(self, problem: str = "the update of this server is over") -> None:
        """Read no more. The other readers do not wait for this one any longer."""
        with self._stream.changed:
            self.problem = self.problem or problem
            self._stream.changed.notify_all()

    def _wait_for(self, number: int, hold: bool = False) -> None:
        stream = self._stream

        def is_filled() -> bool:
            return len(stream.filled) > number

        with stream.changed:
            stream.changed.wait_for(lambda: self.problem or is_filled() or stream.problem)
            # A complete bucket is still sent when the stream has ended, unless this reader has.
            problem = self.problem
            if problem is None and not is_filled():
                problem = stream.problem
            if problem:
                raise StreamEndedError(problem)
            self._holds = hold
