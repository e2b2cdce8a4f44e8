"""The record log: what is read after every kind of damage, and what a failing disk costs."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.utils import record_log
from holdfast.utils.errors import CheckpointCorruptError, CheckpointWriteError
from holdfast.utils.record_log import (
    FRAME,
    MAGIC,
    NO_PARENT,
    ReadCounts,
    RecordLog,
    join_payload,
    log_files,
    read_records,
    split_payload,
)
from tests.faults.shim import Call, Shim
from tests.limits import stretched, wait_until

pytestmark = pytest.mark.timeout(60)

WAIT_S = stretched(20.0)
NEVER_S = 1e6


def payloads(n: int, start: int = 0) -> list[bytes]:
    """Different payloads of different sizes, among them one without a body."""
    draw = random.Random(start)
    return [join_payload({"n": start + i}, draw.randbytes(7 * i)) for i in range(n)]


@contextmanager
def opened(folder: Path, sync_s: float = NEVER_S, parent: str | None = NO_PARENT) -> Iterator:
    """A log that was started, and is closed after the block."""
    log = RecordLog(folder, sync_s)
    log.start(parent)
    try:
        yield log
    finally:
        log.close(WAIT_S)


def write(folder: Path, *groups: list[bytes]) -> list[Path]:
    """Write each group of payloads into a file of its own."""
    with opened(folder) as log:
        for at, group in enumerate(groups):
            if at:
                log.rotate()
            for payload in group:
                log.append(payload)
    return [file.path for file in log_files(folder)]


def read(folder: Path, log_id: str | None = NO_PARENT) -> list[bytes]:
    return list(RecordLog(folder, NEVER_S).read(log_id))


def read_file(path: Path) -> tuple[list[bytes], ReadCounts]:
    counts = ReadCounts()
    return list(read_records(path, counts)), counts


# Reading


def test_records_come_back_in_order_over_all_files_of_a_life(tmp_path: Path) -> None:
    first, second = payloads(20), payloads(5, 100)
    write(tmp_path / "log", first, second)
    assert read(tmp_path / "log") == first + second


def test_a_payload_is_a_head_and_a_body() -> None:
    head = {"ticket": 3, "versions": [[1, 2]], "text": "ä"}
    assert split_payload(join_payload(head, b"\0body")) == (head, b"\0body")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\1\0\0",
        b"\xff\xff\xff\xff{}",
        b"\2\0\0\0[]",
        b"\1\0\0\0{",
        b"\2\0\0\0\xff\xff",
        (100_000).to_bytes(4, "little") + b"[" * 100_000,
    ],
)
def test_a_payload_without_a_head_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        split_payload(payload)


def test_only_descendants_of_an_id_are_read(tmp_path: Path) -> None:
    trunk, branch, other, fresh = (payloads(3, 10 * at) for at in range(1, 5))
    with opened(tmp_path) as log:
        for payload in trunk:
            log.append(payload)
        fork = log.rotate()
        for payload in branch:
            log.append(payload)
    with opened(tmp_path, parent="12345678") as log:
        for payload in other:
            log.append(payload)
    with opened(tmp_path, parent=fork) as log:
        for payload in fresh:
            log.append(payload)

    assert read(tmp_path) == trunk + branch + fresh
    assert read(tmp_path, fork) == branch + fresh
    assert read(tmp_path, "12345678") == other, "the file of the parent itself is not needed"
    assert read(tmp_path, "ffffffff") == []
    assert read(tmp_path, None) == []


def test_files_of_a_snapshot_that_names_no_log_are_never_read_again(tmp_path: Path) -> None:
    with opened(tmp_path, parent=None) as log:
        log.append(b"first")
    assert read(tmp_path, None) == read(tmp_path, NO_PARENT) == []
    assert read(tmp_path, log.parent) == [b"first"]


@pytest.mark.parametrize("parent", ["", "../../etc", "1234567", "123456789", "ABCDEF01"])
def test_a_parent_that_is_no_id_is_refused(parent: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorruptError, match="expected 8 hexadecimal digits"):
        RecordLog(tmp_path, 1.0).start(parent)
    assert os.listdir(tmp_path) == []


def test_every_cut_costs_the_records_that_it_cuts_and_no_other(tmp_path: Path) -> None:
    written = payloads(6)
    (path,) = write(tmp_path / "log", written)
    whole = path.read_bytes()
    ends = [0]
    for payload in written:
        ends.append(ends[-1] + FRAME.size + len(payload))
    assert ends[-1] == len(whole)

    cut = tmp_path / "cut"
    for length in range(len(whole) + 1):
        cut.write_bytes(whole[:length])
        found, counts = read_file(cut)
        n_whole = sum(end <= length for end in ends[1:])
        assert found == written[:n_whole], length
        is_torn = length not in ends
        assert (counts.torn, counts.damaged) == (is_torn, 0), length
        assert (counts.records, counts.bytes) == (n_whole, length)


def test_a_flip_of_any_bit_costs_its_own_record_alone(tmp_path: Path) -> None:
    written = payloads(3)
    (path,) = write(tmp_path / "log", written)
    whole = path.read_bytes()
    flipped = tmp_path / "flipped"
    begin = 0
    for n, payload in enumerate(written):
        end = begin + FRAME.size + len(payload)
        others = written[:n] + written[n + 1 :]
        is_last = n == len(written) - 1
        for at in range(begin, end):
            for bit in range(8):
                data = bytearray(whole)
                data[at] ^= 1 << bit
                flipped.write_bytes(data)
                found, counts = read_file(flipped)
                assert found == others, (n, at - begin, bit)
                assert (counts.damaged, counts.torn) == (not is_last, is_last), (at - begin, bit)
        begin = end


def test_a_hole_of_zeros_costs_the_records_that_it_touches(tmp_path: Path) -> None:
    written = payloads(30)
    (path,) = write(tmp_path / "log", written)
    whole = path.read_bytes()
    spans = []
    begin = 0
    for payload in written:
        end = begin + FRAME.size + len(payload)
        spans.append((begin, end))
        begin = end
    draw = random.Random(3)
    holed = tmp_path / "holed"
    for _ in range(300):
        first, last = sorted(draw.sample(range(len(whole)), 2))
        data = whole[:first] + bytes(last - first) + whole[last:]
        holed.write_bytes(data)
        found, counts = read_file(holed)

        # A record that ends in zeros may lose nothing.
        untouched = []
        for payload, (begin, end) in zip(written, spans, strict=True):
            if data[begin:end] == whole[begin:end]:
                untouched.append(payload)
        assert found == untouched, (first, last)
        assert counts.damaged + counts.torn >= (len(found) < len(written))


def test_a_magic_inside_of_a_payload_is_part_of_it(tmp_path: Path) -> None:
    inner = FRAME.pack(MAGIC, 3, bytes(16)) + b"abc"
    written = [MAGIC, inner * 3, b"x" + MAGIC * 100]
    (path,) = write(tmp_path / "log", written)
    assert read_file(path) == (written, ReadCounts(path.stat().st_size, 3))

    # A damaged record is searched, and a false magic in it is no record.
    data = bytearray(path.read_bytes())
    data[FRAME.size + len(MAGIC) + FRAME.size] ^= 1
    path.write_bytes(data)
    found, counts = read_file(path)
    assert found == [written[0], written[2]]
    assert (counts.torn, counts.damaged > 0) == (0, True)


def test_a_file_full_of_magics_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "00000001-0000aaaa-00000000.log"
    path.write_bytes(MAGIC * (1 << 20))
    n_read = 0
    pread = os.pread

    def counting(fd: int, size: int, at: int) -> bytes:
        nonlocal n_read
        data = pread(fd, size, at)
        n_read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    found, counts = read_file(path)
    assert found == [] and counts.damaged > 0
    assert n_read < 2 << 30


def test_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    """A sparse file of a terabyte, with records that claim gigabytes."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from holdfast.utils.record_log import ReadCounts, read_records\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "counts = ReadCounts()\n"
        "print(len(list(read_records(Path(sys.argv[1]), counts))), counts.damaged, counts.torn)\n"
    )
    huge = FRAME.pack(MAGIC, (1 << 32) - 1, bytes(16))
    sound = MAGIC + b"\0\0\0\0" + record_log.xxhash.xxh3_128_digest(b"")
    path = tmp_path / "claims"
    path.write_bytes(huge * 1000 + sound)
    os.truncate(path, 1 << 40)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stdout.split() == ["1", "1000", "1"], done.stderr


def test_a_file_of_false_records_takes_no_quadratic_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_log, "_MOST_WASTED_BYTES", 1 << 22)
    size = 1 << 20
    path = tmp_path / "false"
    path.write_bytes(FRAME.pack(MAGIC, size // 2, bytes(16)) * (size // FRAME.size))
    began = time.process_time()
    found, counts = read_file(path)
    assert found == [] and 0 < counts.damaged < 100
    assert time.process_time() - began < 2.0


def test_names_of_something_else_and_unreadable_files_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [b"one"])
    for name in ("x.log", "00000009-abcdefgh-00000000.log", ".00000009-aaaaaaaa-00000000.log"):
        (tmp_path / name).write_bytes(b"?")
    os.mkfifo(tmp_path / "00000002-aaaaaaaa-00000000.log")
    (tmp_path / "00000003-bbbbbbbb-00000000.log").mkdir()
    assert read(tmp_path) == [b"one"]
    assert caplog.text.count("its records are not used") == 2


# Writing


def test_a_record_is_in_the_file_at_once_and_synced_after_sync_s(tmp_path: Path) -> None:
    with Shim(tmp_path) as shim, opened(tmp_path / "log", sync_s=0.3) as log:
        assert log.lag_s == 0.0
        log.append(b"record")
        wait_until(lambda: read(tmp_path / "log") == [b"record"])
        assert "fdatasync" not in [call.name for call in shim.calls]
        assert log.lag_s > 0
        wait_until(lambda: log.lag_s == 0.0)
        assert [call.name for call in shim.calls][-1] == "fdatasync"
        assert log.n_bytes == FRAME.size + 6


def test_names_are_durable_before_the_first_record_is(tmp_path: Path) -> None:
    with Shim(tmp_path) as shim, opened(tmp_path / "a" / "log") as log:
        log.sync(log.append(b"record"), WAIT_S)
        calls = [(call.name, os.path.relpath(call.path, tmp_path)) for call in shim.calls]
    name = f"a/log/00000001-{log.id}-{NO_PARENT}.log"
    created = [call for call in calls if call[0] != "open" or call[1] == name]
    assert created == [
        ("mkdir", "a"),
        ("fsync", "."),
        ("mkdir", "a/log"),
        ("fsync", "a"),
        ("open", name),
        ("fsync", "a/log"),
        ("write", name),
        ("fdatasync", name),
    ]


def test_files_are_never_overwritten_truncated_or_renamed(tmp_path: Path) -> None:
    with Shim(tmp_path) as shim:
        for _ in range(3):
            with opened(tmp_path / "log") as log:
                for payload in payloads(5):
                    log.append(payload)
                log.rotate()
                log.append(b"more")
    assert {call.name for call in shim.calls} == {"mkdir", "open", "write", "fsync", "fdatasync"}
    created = [call for call in shim.calls if call.name == "open" and call.path.endswith(".log")]
    assert len(created) == 6
    for call in created:
        assert call.flags is not None and call.flags & os.O_EXCL and call.flags & os.O_APPEND


def test_a_file_is_synced_before_the_next_one_is_created(tmp_path: Path) -> None:
    with Shim(tmp_path) as shim, opened(tmp_path / "log") as log:
        log.append(b"first")
        log.rotate()
        log.sync(log.append(b"second"), WAIT_S)
    steps = []
    for call in shim.calls:
        name = os.path.basename(call.path)
        if name.endswith(".log"):
            steps.append((call.name, int(name[:8])))
    own = [("open", 1), ("write", 1), ("fdatasync", 1), ("open", 2), ("write", 2), ("fdatasync", 2)]
    assert steps == own


FAILING = ("mkdir", "open", "fsync", "write", "fdatasync")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", FAILING)
def test_a_call_that_fails_gives_up_the_file_until_the_next_one(
    name: str, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = threading.Event()
    failing.set()
    failed: list[Call] = []

    def refuse(call: Call) -> None:
        if call.name == name and failing.is_set():
            failed.append(call)
            raise OSError(code, os.strerror(code), call.path)

    folder = tmp_path / "log"
    with Shim(tmp_path, refuse), opened(folder, sync_s=0.0) as log:
        place = log.append(b"lost or not")
        with pytest.raises(CheckpointWriteError, match="could not be written"):
            log.sync(place, WAIT_S)
        assert log.failed and log.lag_s == 0.0
        assert log.append(b"dropped") == 0
        with pytest.raises(CheckpointWriteError):
            log.sync(0)
        assert len(failed) == 1, "a failed call is not repeated on the same file"
        assert caplog.text.count("goes on after the next snapshot") == 1

        # The next file works, and no link between files is missing.
        failing.clear()
        first = log.id
        log.rotate()
        assert not log.failed
        log.sync(log.append(b"after"), WAIT_S)
    found = read(folder)
    assert found in ([b"after"], [b"lost or not", b"after"])
    assert read(folder, first) == found
    assert read(folder, log.id) == [b"after"]


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
    written = payloads(4)
    write(tmp_path, written)
    assert read(tmp_path) == written


class Hanging:
    """A disk whose calls of one name hang until they are released."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.error: OSError | None = None

    def __call__(self, fd: int) -> None:
        self.reached.set()
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        os.fsync(fd)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    disk = Hanging("fdatasync")
    monkeypatch.setattr(os, "fdatasync", disk)
    yield disk
    disk.go_on.set()


def test_nobody_waits_for_a_sync_that_hangs_but_sync_itself(
    tmp_path: Path, hanging: Hanging
) -> None:
    with opened(tmp_path, sync_s=0.0) as log:
        place = log.append(b"first")
        assert hanging.reached.wait(WAIT_S)
        began = time.monotonic()
        for payload in payloads(100):
            log.append(payload)
        ids = [log.rotate() for _ in range(3)]
        last = log.append(b"last")
        assert time.monotonic() - began < stretched(1.0)
        assert log.id == ids[-1] and log.lag_s > 0
        with pytest.raises(CheckpointWriteError, match="hangs"):
            log.sync(place, 0.05)
        hanging.go_on.set()
        log.sync(last, WAIT_S)
    assert read(tmp_path) == [b"first", *payloads(100), b"last"]
    assert [file.id for file in log_files(tmp_path)][1:] == ids


def test_a_queue_that_is_full_gives_the_file_up(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_log, "_MOST_QUEUED_BYTES", 1000)
    with opened(tmp_path, sync_s=0.0) as log:
        kept = log.append(b"in time")
        assert hanging.reached.wait(WAIT_S)
        places = [log.append(bytes(100)) for _ in range(20)]
        assert places[0] > 0 and places[-1] == 0 and log.failed
        log.rotate()
        after = log.append(b"after")
        hanging.go_on.set()
        log.sync(kept, WAIT_S)
        log.sync(after, WAIT_S)
        with pytest.raises(CheckpointWriteError, match="could not be written"):
            log.sync(places[0], WAIT_S)
    assert read(tmp_path) == [b"in time", b"after"]


def test_a_failure_of_an_earlier_file_leaves_the_next_one_alone(
    tmp_path: Path, hanging: Hanging
) -> None:
    with opened(tmp_path, sync_s=0.0) as log:
        doubtful = log.append(b"doubtful")
        assert hanging.reached.wait(WAIT_S)
        dropped = log.append(b"dropped with its file")
        log.rotate()
        sure = log.append(b"sure")
        hanging.error = OSError(errno.EIO, "gone")
        hanging.go_on.set()
        for place in (doubtful, dropped):
            with pytest.raises(CheckpointWriteError):
                log.sync(place, WAIT_S)
        hanging.error = None
        assert not log.failed
        log.sync(sure, WAIT_S)
    assert read(tmp_path) == [b"doubtful", b"sure"]


def test_many_threads_append_while_files_rotate(tmp_path: Path) -> None:
    def append(at: int) -> None:
        for n in range(300):
            assert log.append(f"{at}:{n}".encode()) > 0

    with opened(tmp_path, sync_s=0.001) as log:
        threads = [threading.Thread(target=append, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        ids = [log.parent]
        while any(thread.is_alive() for thread in threads):
            ids.append(log.rotate())
            time.sleep(0.001)
    found = read(tmp_path)
    assert len(found) == 1200
    for at in range(4):
        own = [payload for payload in found if payload.startswith(f"{at}:".encode())]
        assert own == [f"{at}:{n}".encode() for n in range(300)]
    assert [file.parent for file in log_files(tmp_path)][1:] == [
        file.id for file in log_files(tmp_path)
    ][:-1]


def test_old_files_are_deleted_up_to_the_named_one(tmp_path: Path) -> None:
    write(tmp_path, [b"1"], [b"2"], [b"3"])
    files = log_files(tmp_path)
    log = RecordLog(tmp_path, NEVER_S)
    log.delete_before("ffffffff")
    assert log_files(tmp_path) == files
    log.delete_before(files[1].id)
    assert log_files(tmp_path) == files[1:]


def test_a_log_that_was_closed_or_not_started_drops_records(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log", NEVER_S)
    assert log.append(b"early") == 0
    log.start(NO_PARENT)
    log.close(WAIT_S)
    log.close(WAIT_S)
    assert log.append(b"late") == 0
    with pytest.raises(CheckpointWriteError, match="is closed: the run has ended"):
        log.sync(0, WAIT_S)
    assert read(tmp_path / "log") == []
    idle = RecordLog(tmp_path / "idle", NEVER_S)
    idle.close()
    assert not (tmp_path / "idle").exists()


def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from holdfast.utils.record_log import *\n"
        "log = RecordLog(Path(sys.argv[1]), 1e6)\n"
        "log.start(NO_PARENT)\n"
        "for n in range(500):\n"
        "    log.append(b'%d' % n)\n"
        "while log.n_bytes < sum(24 + len(b'%d' % n) for n in range(500)):\n"
        "    time.sleep(0.001)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], timeout=WAIT_S)
    assert done.returncode == -9
    assert read(folder) == [b"%d" % n for n in range(500)]


def test_the_log_needs_no_torch() -> None:
    code = "import holdfast.utils.record_log, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stdout.split() == ["False"], done.stderr
