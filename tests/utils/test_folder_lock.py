"""Two jobs in one folder: the second is refused or waits. The end of the holder, by any cause,
frees the lock.
"""

import errno
import fcntl
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.utils.errors import CheckpointWriteError, FolderInUseError, JobRefusedError
from holdfast.utils.folder_lock import FolderLock, probe_lock
from tests.limits import stretched
from tests.utils.locking import Job, acquire, become_nobody, churn, fork, release

pytestmark = pytest.mark.timeout(60)


def test_a_second_job_is_refused_and_told_who_holds_the_folder(
    start_job: Callable[[], Job], path: Path
) -> None:
    holder, second = start_job(), start_job()
    assert holder.do(acquire, 0) == ("ok", None)
    began = time.monotonic()
    kind, message = second.do(acquire, 0.5)
    assert kind == "FolderInUseError" and 0.5 <= time.monotonic() - began < stretched(2)
    found = re.match(
        rf"{path.parent} is in use by pid {holder.pid} on host (\S+), started (\S+); waited 0.5 s",
        message,
    )
    assert found and found[1] == socket.gethostname()
    started = datetime.fromisoformat(found[2])
    assert (
        started.tzinfo and abs(started.timestamp() - psutil.Process(holder.pid).create_time()) < 2
    )
    assert "Wait for that job or end it" in message and "recover.trial_name" in message
    assert "recover.lock_timeout_s" in message


@pytest.mark.parametrize("restarts", ["1", "12"])
def test_a_job_that_slurm_has_started_again_waits_longer(
    start_job: Callable[[], Job], path: Path, restarts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.utils.folder_lock.REQUEUED_S", 0.5)
    start_job().do(acquire, 0)
    began = time.monotonic()
    with pytest.raises(JobRefusedError, match=r"waited 0\.1 s"):
        FolderLock(path).acquire_for_job(0.1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    with pytest.raises(JobRefusedError, match=r"waited 0\.5 s"):
        FolderLock(path).acquire_for_job(0.1)
    assert 0.6 <= time.monotonic() - began < stretched(5)
    with pytest.raises(JobRefusedError, match=r"waited 0\.7 s"):
        FolderLock(path).acquire_for_job(0.7)


def test_a_timeout_of_zero_asks_once(start_job: Callable[[], Job], path: Path) -> None:
    start_job().do(acquire, 0)
    began = time.monotonic()
    with pytest.raises(FolderInUseError):
        FolderLock(path).acquire(0)
    assert time.monotonic() - began < stretched(0.2)


@pytest.mark.parametrize("how", ["release", "exit"])
def test_a_job_that_waits_gets_the_folder_when_the_holder_is_done(
    start_job: Callable[[], Job], how: str
) -> None:
    holder, second, third = start_job(), start_job(), start_job()
    holder.do(acquire, 0)
    second.start(acquire, 30)
    assert not second.pipe.poll(0.3)
    holder.do(release) if how == "release" else holder.process.terminate()
    assert second.result(timeout_s=2) == ("ok", None)
    kind, message = third.do(acquire, 0)
    assert kind == "FolderInUseError" and f"pid {second.pid} " in message


def test_a_killed_holder_frees_the_folder_at_once(start_job: Callable[[], Job], path: Path) -> None:
    holder, second = start_job(), start_job()
    holder.do(acquire, 0)
    holder.kill()
    assert second.do(acquire, 0) == ("ok", None)


def test_a_stopped_holder_keeps_the_folder(start_job: Callable[[], Job]) -> None:
    holder, second = start_job(), start_job()
    holder.do(acquire, 0)
    os.kill(holder.pid, signal.SIGSTOP)
    kind, message = second.do(acquire, 0.3)
    assert kind == "FolderInUseError" and f"pid {holder.pid} " in message
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.do(release) == ("ok", None)
    assert second.do(acquire, 0) == ("ok", None)


def test_a_forked_child_neither_holds_keeps_nor_drops_its_parents_lock(
    start_job: Callable[[], Job],
) -> None:
    holder, second = start_job(), start_job()
    holder.do(acquire, 0)
    _, child = holder.do(fork)
    try:
        assert (
            child["said"].startswith("held: False; ")
            and f"in use by pid {holder.pid} " in child["said"]
        )
        assert (
            second.do(acquire, 0)[0] == "FolderInUseError"
        )  # although the child has released its copy
        holder.kill()
        assert psutil.pid_exists(child["pid"])
        assert second.do(acquire, 0) == ("ok", None)
    finally:
        os.kill(child["pid"], signal.SIGKILL)


def test_locks_of_one_process_share_the_folder_until_the_last_is_released(
    start_job: Callable[[], Job], path: Path
) -> None:
    other = start_job()
    first, second = FolderLock(path), FolderLock(path.parent / ".." / "run" / path.name)
    first.acquire(0)
    second.acquire(0)
    first.release()
    assert (first.held, second.held) == (False, True)
    assert other.do(acquire, 0)[0] == "FolderInUseError"
    second.release()
    assert other.do(acquire, 0) == ("ok", None)
    with pytest.raises(FolderInUseError):
        first.acquire(0)


def test_threads_that_come_and_go_do_not_drop_the_lock_of_another(
    start_job: Callable[[], Job], path: Path
) -> None:
    other, lock = start_job(), FolderLock(path)
    lock.acquire(0)
    threads = [threading.Thread(target=churn, args=(FolderLock(path), 1.0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert other.do(acquire, 0)[0] == "FolderInUseError"
    for thread in threads:
        thread.join()
    assert other.do(acquire, 0)[0] == "FolderInUseError"
    lock.release()
    assert other.do(acquire, 0) == ("ok", None)


def test_a_lock_can_be_taken_again_and_its_file_stays(
    start_job: Callable[[], Job], path: Path
) -> None:
    other, lock = start_job(), FolderLock(path)
    lock.release()
    inode = None
    for _ in range(2):
        lock.acquire(0)
        lock.acquire(0)
        assert lock.held and other.do(acquire, 0)[0] == "FolderInUseError"
        lock.release()
        lock.release()
        assert not lock.held and other.do(acquire, 0) == ("ok", None)
        other.do(release)
        inode = inode or path.stat().st_ino
        assert path.stat().st_ino == inode


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\x00", b'{"pid": "x", "host": 1}', b"1"]
)
def test_a_holder_that_cannot_be_read_is_unknown(
    start_job: Callable[[], Job], path: Path, content: bytes
) -> None:
    start_job().do(acquire, 0)
    path.write_bytes(content)  # closing it here drops no lock, because this process has none
    with pytest.raises(FolderInUseError, match="in use by an unknown holder; waited"):
        FolderLock(path).acquire(0)


def test_no_text_of_an_earlier_holder_remains(start_job: Callable[[], Job], path: Path) -> None:
    path.parent.mkdir()
    path.write_text(
        (
            '{"host": "a.host.with.a.long.name", "pid": 1234567, "started": '
            '"2026-01-01T00:00:00+00:00"}'
        )
        * 3
    )
    holder = start_job()
    holder.do(acquire, 0)
    with pytest.raises(
        FolderInUseError,
        match=f"in use by pid {holder.pid} on host {socket.gethostname()}, started",
    ):
        FolderLock(path).acquire(0)


def test_refusals_while_holders_change_name_a_real_holder(
    start_job: Callable[[], Job], path: Path
) -> None:
    jobs = [start_job(), start_job()]
    for job in jobs:
        job.start(churn, 2.0)
    known = {str(job.pid) for job in jobs} | {str(os.getpid())}
    lock, refusals, end = FolderLock(path), 0, time.monotonic() + 1.5
    while time.monotonic() < end:
        try:
            lock.acquire(0)
            lock.release()
        except FolderInUseError as error:
            refusals += 1
            found = re.search(
                r"in use by (?:an unknown holder|pid (\d+) on host \S+, started \d{4}-\S+);",
                str(error),
            )
            assert found and (found[1] is None or found[1] in known), error
    assert refusals > 10
    assert [job.result() for job in jobs] == [("ok", None)] * 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_where_there_are_no_locks_the_job_is_warned_and_goes_on(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)  # no file system without locks can be mounted here
    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock = FolderLock(path)
    lock.acquire(0)
    assert lock.held
    assert f"file system without locks ({os.strerror(number)})" in caplog.text
    lock.release()


def test_a_lock_that_fails_for_another_reason_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(CheckpointWriteError, match=rf"cannot lock {path}: Input/output error"):
        FolderLock(path).acquire(0)


def test_a_folder_that_cannot_be_written_is_an_error(
    start_job: Callable[[], Job], path: Path
) -> None:
    job = start_job()
    job.do(become_nobody)
    path.parent.mkdir()
    path.parent.chmod(0o555)
    kind, message = job.do(acquire, 0)
    assert kind == "CheckpointWriteError" and f"cannot lock {path}: Permission denied" in message


def test_something_else_in_place_of_the_file_or_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / ".lock").mkdir(parents=True)
    for path in (tmp_path / "file" / ".lock", tmp_path / "folder" / ".lock"):
        lock = FolderLock(path)
        with pytest.raises(CheckpointWriteError, match=f"cannot lock {path}"):
            lock.acquire(0)
        assert not lock.held


def test_a_holder_on_a_full_disk_holds_all_the_same(
    start_job: Callable[[], Job],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = FolderLock(path)
    lock.acquire(0)
    kind, message = start_job().do(acquire, 0)
    assert kind == "FolderInUseError" and "an unknown holder" in message
    assert "cannot write the holder" in caplog.text
    lock.release()


def test_asking_whether_a_lock_is_held_neither_takes_nor_drops_it(
    start_job: Callable[[], Job], path: Path
) -> None:
    assert not probe_lock(path) and not path.exists()
    job, lock = start_job(), FolderLock(path)
    job.do(acquire, 0)
    assert probe_lock(path) and path.exists()
    job.do(release)
    assert not probe_lock(path)
    lock.acquire(0)
    assert probe_lock(path)
    assert job.do(acquire, 0)[0] == "FolderInUseError"  # the query has not dropped it
    lock.release()
