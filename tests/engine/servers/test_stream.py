"""Buckets between threads: every reader gets every byte, and each wait for a reader has a limit."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from holdfast.engine.hf.buckets import Bucket
from holdfast.engine.hf.tensor_origins import FileTensor
from holdfast.engine.servers.stream import BucketReader, StreamEndedError, WeightStream
from tests.limits import stretched
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

SIZE = 1000
LONG_S = stretched(60)


def buckets(count: int) -> list[Bucket]:
    return [
        Bucket(n, (FileTensor(str(n), (SIZE,), torch.uint8, n, SIZE, (), None),))
        for n in range(count)
    ]


def fill(stream: WeightStream, some: Iterable[Bucket]) -> int:
    """Fill every byte of a bucket with its number. Returns the number of buckets that were
    filled.
    """
    done = 0
    for bucket in some:
        if not stream.make_room():
            break
        target = stream.target(bucket)
        for at in range(0, SIZE, 100):
            target[at : at + 100] = bucket.number
        stream.put(bucket)
        done += 1
    return done


def read(reader: BucketReader, slow_s: float = 0.0) -> list[bool]:
    """For each bucket, whether all its bytes stay its number while it is held."""
    right = []
    for number, bucket in enumerate(reader):
        before = bool((bucket.data == number).all())
        time.sleep(slow_s)
        right.append(
            before and bool((bucket.data == number).all()) and bucket.last == (number == 9)
        )
        reader.release()
    return right


@contextmanager
def filling(stream: WeightStream, some: list[Bucket]) -> Iterator[Future[int]]:
    with ThreadPoolExecutor() as pool:
        filled = pool.submit(fill, stream, some)
        yield filled
        stream.end("the test is over")


def test_readers_of_different_speed_get_all_bytes() -> None:
    some = buckets(10)
    stream = WeightStream(some, LONG_S)
    quick, slow = stream.open([True, True])
    with filling(stream, some) as filled, ThreadPoolExecutor() as pool:
        reads = [pool.submit(read, quick), pool.submit(read, slow, 0.02)]
        assert [one.result() for one in reads] == [[True] * 10] * 2
        assert filled.result() == 10


def test_a_buffer_that_is_released_too_early_is_seen_by_this_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A control of the test above."""
    some = buckets(10)
    stream = WeightStream(some, LONG_S)
    (reader,) = stream.open([True])
    held = BucketReader.__iter__

    def early(self: BucketReader) -> Iterator:
        for bucket in held(self):
            self.release()
            yield bucket

    monkeypatch.setattr(BucketReader, "__iter__", early)
    with filling(stream, some):
        assert not all(read(reader, 0.02))


def test_at_most_one_bucket_is_complete_while_another_is_sent() -> None:
    some = buckets(10)
    stream = WeightStream(some, LONG_S)
    (reader,) = stream.open([True])
    with filling(stream, some):
        for number, _ in enumerate(reader):
            time.sleep(0.02)
            assert len(stream.filled) <= number + 2
            reader.release()


@pytest.mark.parametrize(
    "awaited, timeout_s, waits_s",
    slow_but([(True, 2.0, 0.5)], [(True, 2.0, 0.5), (False, 60.0, 5.0)]),
)
def test_a_reader_that_takes_no_bucket_is_dropped(
    awaited: bool, timeout_s: float, waits_s: float
) -> None:
    some = buckets(10)
    stream = WeightStream(some, timeout_s)
    good, bad = stream.open([True, awaited])
    began = time.monotonic()
    with filling(stream, some) as filled:
        assert read(good) == [True] * 10 and filled.result() == 10
    assert waits_s <= time.monotonic() - began < waits_s + stretched(2)
    with pytest.raises(
        StreamEndedError,
        match=rf"bucket 0 was not taken in {waits_s:g} s, while other servers waited",
    ):
        bad.wait()


def test_a_reader_that_sends_is_not_dropped_and_the_deadline_ends_all() -> None:
    some = buckets(10)
    stream = WeightStream(some, 1.0)
    (reader,) = stream.open([True])
    with filling(stream, some) as filled:
        held = iter(reader)
        next(held)
        assert filled.result(stretched(10)) == 2, "it was waited for until the deadline"
        assert reader.problem is None
        reader.release()
        next(held)  # was complete before
        reader.release()
        with pytest.raises(StreamEndedError, match="the time limit of the update has passed"):
            next(held)


def test_without_readers_no_more_buckets_are_filled() -> None:
    some = buckets(10)
    stream = WeightStream(some, LONG_S)
    one, other = stream.open([True, True])
    with filling(stream, some) as filled:
        one.close()
        other.close("it died")
        assert filled.result(stretched(10)) <= 2
    with pytest.raises(StreamEndedError, match="it died"):
        next(iter(other))


def test_readers_hear_why_there_are_no_more_buckets() -> None:
    stream = WeightStream(buckets(3), LONG_S)
    (reader,) = stream.open([True])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.wait)
        stream.end("rank 1 has no memory")
        with pytest.raises(StreamEndedError, match="rank 1 has no memory"):
            waiting.result()
    assert not stream.make_room()


def test_the_end_after_the_last_bucket_takes_none_away() -> None:
    some = buckets(2)
    stream = WeightStream(some, LONG_S)
    (reader,) = stream.open([True])
    assert fill(stream, some) == 2
    stream.end("the update is over")
    assert [bucket.bucket.number for bucket in reader] == [0, 1]
