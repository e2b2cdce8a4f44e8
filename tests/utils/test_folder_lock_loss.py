"""A lock survives all use of the file by the rest of its process, and a lost lock is noticed before
a commit.
"""

import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.utils import folder_lock as lock_module
from holdfast.utils.errors import FolderInUseError
from holdfast.utils.folder_lock import FolderLock
from tests.utils.locking import Job, acquire, release

pytestmark = pytest.mark.timeout(60)

_RECORD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.read()
"""
"""A version of Holdfast that knows only record locks."""


def _confirm(lock: FolderLock) -> list[str]:
    """Call `FolderLock.confirm` and return its log lines."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    lock_module.logger.addHandler(handler)
    try:
        lock.confirm()
    finally:
        lock_module.logger.removeHandler(handler)
    return messages


def _copy_folder(lock: FolderLock, target: Path) -> None:
    shutil.copytree(lock.path.parent, target)


def _as_on_fuse(lock: FolderLock) -> None:
    """Let this process believe that on its file systems only record locks end with their
    process.
    """
    lock_module._is_fuse = lambda fd: True


def _acquire_slowly_and_fork_meanwhile(lock: FolderLock, seconds: float) -> int:
    """Fork while a thread has opened the file without having reported so. Returns the child's
    pid.
    """
    really_open, opened = os.open, threading.Event()

    def open_slowly(path: Any, *args: Any) -> int:
        fd = really_open(path, *args)
        if os.fspath(path) == str(lock.path):
            opened.set()
            time.sleep(seconds)
        return fd

    os.open = open_slowly
    thread = threading.Thread(target=lock.acquire, args=(0,))
    thread.start()
    opened.wait()
    if (pid := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    thread.join()
    return pid


def _hand_down(lock: FolderLock) -> int:
    """Start a process that inherits the open file, like a fork by C code. Returns its pid."""
    assert lock._file is not None
    return subprocess.Popen(["sleep", "60"], pass_fds=[lock._file.fd]).pid


def test_a_job_that_copies_its_folder_keeps_the_lock(
    start_job: Callable[[], Job], tmp_path: Path
) -> None:
    holder, second = start_job(), start_job()
    assert holder.do(acquire, 0) == ("ok", None)
    assert holder.do(_copy_folder, tmp_path / "copy") == ("ok", None)
    assert second.do(acquire, 0)[0] == "FolderInUseError"
    assert holder.do(_confirm) == ("ok", [])


def test_the_lock_excludes_versions_with_record_locks_and_is_excluded_by_them(
    start_job: Callable[[], Job], path: Path
) -> None:
    holder = start_job()
    holder.do(acquire, 0)
    old = subprocess.run(
        [sys.executable, "-c", _RECORD_LOCK, path], capture_output=True, text=True, input=""
    )
    assert "BlockingIOError" in old.stderr
    holder.do(release)
    with subprocess.Popen(
        [sys.executable, "-c", _RECORD_LOCK, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as old:
        assert old.stdin and old.stdout and old.stdout.readline() == "locked\n"
        assert holder.do(acquire, 0)[0] == "FolderInUseError"
        old.stdin.close()
    assert holder.do(acquire, 0) == ("ok", None)


def test_a_child_sharing_the_open_file_does_not_keep_a_released_lock(
    start_job: Callable[[], Job],
) -> None:
    holder, second = start_job(), start_job()
    holder.do(acquire, 0)
    _, child = holder.do(_hand_down)
    try:
        assert holder.do(release) == ("ok", None)
        assert psutil.pid_exists(child) and second.do(acquire, 10) == (
            "ok",
            None,
        )  # once the child runs
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_forked_while_the_lock_is_taken_does_not_keep_it(
    start_job: Callable[[], Job],
) -> None:
    holder, second = start_job(), start_job()
    _, child = holder.do(_acquire_slowly_and_fork_meanwhile, 0.5)
    try:
        assert second.do(acquire, 0)[0] == "FolderInUseError"
        holder.kill()
        assert psutil.pid_exists(child) and second.do(acquire, 10) == (
            "ok",
            None,
        )  # once the child runs
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["removed", "replaced", "folder moved"])
def test_a_lock_whose_file_was_taken_away_is_taken_again(
    start_job: Callable[[], Job], path: Path, how: str
) -> None:
    holder, second = start_job(), start_job()
    holder.do(acquire, 0)
    if how == "removed":
        path.unlink()
    elif how == "replaced":
        shutil.copy(path, path.with_name("copy"))
        path.with_name("copy").rename(path)
    else:
        path.parent.rename(path.parent.with_name("elsewhere"))
    status, messages = holder.do(_confirm)
    assert status == "ok" and len(messages) == 1 and "was removed or replaced" in messages[0]
    kind, refusal = second.do(acquire, 0)
    assert kind == "FolderInUseError" and f"pid {holder.pid} " in refusal
    assert holder.do(_confirm) == ("ok", []), "it is told once"
    holder.do(release)
    assert second.do(acquire, 0) == ("ok", None)


@pytest.mark.parametrize("ended", [False, True], ids=["uses it", "has used it"])
def test_a_job_whose_file_was_removed_is_refused_when_another_runs(
    start_job: Callable[[], Job], path: Path, ended: bool
) -> None:
    holder, second = start_job(), start_job()
    holder.do(acquire, 0)
    path.unlink()
    assert second.do(acquire, 0) == ("ok", None), "nobody can see that the folder is in use"
    if ended:
        second.do(release)
    for _ in range(2):
        kind, message = holder.do(_confirm)
        assert kind == "FolderInUseError" and f"pid {second.pid} " in message
        assert ("has been in use by" in message) == ended and "nothing more is committed" in message
    assert ended or second.do(_confirm) == ("ok", [])


@pytest.mark.parametrize("taken", [False, True], ids=["nobody", "another"])
def test_a_record_lock_that_the_process_itself_has_dropped_is_noticed(
    start_job: Callable[[], Job], tmp_path: Path, taken: bool
) -> None:
    holder, second = start_job(), start_job()
    for job in (holder, second):
        job.do(_as_on_fuse)
    assert holder.do(acquire, 0) == ("ok", None) and second.do(acquire, 0)[0] == "FolderInUseError"
    assert holder.do(_confirm) == ("ok", [])
    holder.do(_copy_folder, tmp_path / "copy")
    if taken:
        assert second.do(acquire, 0) == ("ok", None), (
            "a record lock ends with any close: that is why it is a fallback"
        )
        kind, message = holder.do(_confirm)
        assert kind == "FolderInUseError" and f"is in use by pid {second.pid} " in message
    else:
        status, messages = holder.do(_confirm)
        assert status == "ok" and len(messages) == 1 and "was unlocked by somebody" in messages[0]
        assert second.do(acquire, 0)[0] == "FolderInUseError"


def test_without_locks_another_job_that_came_is_noticed_by_what_it_wrote(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    lock = FolderLock(path)
    lock.acquire(0)
    caplog.clear()
    lock.confirm()
    assert not caplog.records, "that there are no locks is told once"
    path.write_text('{"host": "elsewhere", "pid": 12, "started": "2026-01-01T00:00:00+00:00"}')
    with pytest.raises(FolderInUseError, match="pid 12 on host elsewhere"):
        lock.confirm()
    lock.release()


def test_text_that_is_no_holder_is_no_reason_to_end_a_run(path: Path) -> None:
    lock = FolderLock(path)
    lock.acquire(0)
    for content in (b"", b"{", b'{"pid": 1}', b"\xff\x00"):
        path.write_bytes(content)
        lock.confirm()
    lock.release()


def test_locks_of_one_process_around_a_replaced_file_come_together(
    start_job: Callable[[], Job], path: Path
) -> None:
    held_by_other_tests = dict(lock_module._files)
    first, second = FolderLock(path), FolderLock(path)
    first.acquire(0)
    path.unlink()
    second.acquire(0)
    for lock in (first, second, first):
        assert _confirm(lock) == []
    first.release()
    _confirm(second)
    job = start_job()
    assert job.do(acquire, 0)[0] == "FolderInUseError"
    second.release()
    assert lock_module._files == held_by_other_tests and job.do(acquire, 0) == ("ok", None)
