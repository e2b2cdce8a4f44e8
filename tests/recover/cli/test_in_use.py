"""Commands that must not run next to a job that no lock can reveal, and the checks of ``rm``."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover.cli.in_use import FRESH_S, use_of
from holdfast.recover.storage.generations import GenerationStore
from holdfast.utils.folder_lock import FolderLock
from tests.recover.cli.commands import answer, flip_byte, holdfast

pytestmark = pytest.mark.timeout(120)


def note(run: Path, **event: Any) -> None:
    """Append an event to the journal, like a job."""
    with open(run / "journal.jsonl", "a") as file:
        file.write(
            json.dumps(
                {**{"event": "attempt", "time": time.time(), "pid": 1, "host": "node-7"}, **event}
            )
            + "\n"
        )


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, which cannot be mounted here."""
    control = fcntl.fcntl

    def refuse(fd: int, command: int, *args: Any) -> Any:
        if command in (fcntl.F_GETLK, fcntl.F_SETLK, 36, 37):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return control(fd, command, *args)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(fcntl, "lockf", lambda fd, *_: refuse(fd, fcntl.F_SETLK))


@pytest.mark.parametrize("reach", ["none", "this node"])
def test_a_job_on_another_node_that_the_lock_does_not_show_keeps_the_generations_it_needs(
    run: Path, store: GenerationStore, reach: str, request: pytest.FixtureRequest
) -> None:
    if reach == "none":
        request.getfixturevalue("no_locks")
    note(run)
    refused = (("rm", "-y", "--force", f"{run}@7"), ("mirror", "push", run))
    for command in refused:
        code, _, err = holdfast(*command)
        assert (
            code == 2
            and "a job on node-7 (pid 1) has written to journal.jsonl" in err
            and "--no-job" in err
        )
    assert holdfast("rm", "-y", f"{run}@3")[0] == 0, "what no restart needs"
    assert (
        answer("resume-from", f"{run}@5")["in_use"] is None and answer("top", run)["in_use"] is None
    )
    assert "cannot be known here" in holdfast("resume-from", f"{run}@5")[1]
    assert answer("why", run)["attempts"][-1]["verdict"].endswith(
        "or was killed: the lock of the run cannot tell"
    )
    for command in reversed(refused):
        assert holdfast(*command, "--no-job")[0] == 0
    assert [generation.step for generation in store.generations()] == [5, 1]


@pytest.mark.parametrize("reach", ["none", "this node"])
def test_rm_leaves_the_lock_to_a_job_that_it_does_not_show(
    run: Path, reach: str, request: pytest.FixtureRequest
) -> None:
    if reach == "none":
        request.getfixturevalue("no_locks")
    note(run)
    # another holder in the file is what makes the job commit nothing more (`FolderLock.confirm`)
    lock = run / "recover.lock"
    holder = b'{"host": "node-7", "pid": 1, "started": "2026-11-20T18:00:00+00:00"}\n'
    lock.write_bytes(holder)
    assert holdfast("rm", "-y", f"{run}@3")[0] == 0
    assert lock.read_bytes() == holder
    assert holdfast("rm", "-y", "--no-job", f"{run}@1")[0] == 0
    assert lock.read_bytes() != holder, "as nobody uses the run, a job may not begin meanwhile"


def test_a_job_that_began_long_ago_is_found_behind_its_many_steps(run: Path) -> None:
    note(run, event="start", step=7)
    with open(run / "journal.jsonl", "a") as file:
        file.writelines(
            json.dumps({"event": "step", "time": time.time(), "step": step}) + "\n"
            for step in range(10_000)
        )
    assert use_of(run).known is None


def test_a_job_that_has_ended_or_been_silent_for_long_or_is_gone_from_this_node_is_in_nobodys_way(
    run: Path,
) -> None:
    assert use_of(run).known is False, "its journal tells of the end"
    note(run)
    assert use_of(run).known is None
    long_ago = time.time() - FRESH_S - 60
    os.utime(run / "journal.jsonl", (long_ago, long_ago))
    assert use_of(run).known is False and answer("top", run)["ended"] is None
    note(run, event="failed", error="ConfigError: x")
    assert use_of(run).known is False
    note(run, host=socket.gethostname(), pid=2**22 + 1)
    assert use_of(run).known is False
    lock = FolderLock(run / "recover.lock")
    lock.acquire(0.0)
    assert use_of(run).known is True
    lock.release()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_process_of_this_node_is_asked_for(run: Path) -> None:
    assert use_of(run).known is False
    note(run, host=socket.gethostname(), pid=os.getpid())
    assert use_of(run).known is True
    for command in (("rm", "-y", "--force", f"{run}@7"), ("mirror", "push", run)):
        code, _, err = holdfast(*command)
        assert code == 2 and f"pid {os.getpid()}, that of the last job, runs on this node" in err
    note(run, host=socket.gethostname(), pid=2**22 + 1, event="start", step=7)
    assert use_of(run).known is False
    (run / "journal.jsonl").unlink()
    assert use_of(run).known is None


def test_rm_reads_what_it_would_leave_as_the_newest_before_it_deletes_any(
    run: Path, store: GenerationStore
) -> None:
    shard = max(store.path_of(7).glob("*/*.distcp"), key=lambda path: path.stat().st_size)
    flip_byte(shard)  # names and sizes stay the same
    for gone in ((f"{run}@5",), (f"{run}@1", f"{run}@3", f"{run}@5")):
        code, _, err = holdfast("rm", "-y", *gone)
        assert code == 2 and "step 5 is the newest sound generation" in err
        assert f"step 7 is damaged: {shard.parent.name}/{shard.name} has digest" in err
    assert [generation.step for generation in store.generations()] == [7, 5, 3, 1]
    assert holdfast("rm", "-y", f"{run}@7", f"{run}@1")[0] == 0, "5 stays, which is sound"
    flip_byte(max(store.path_of(5).glob("*/*.distcp"), key=lambda path: path.stat().st_size))
    assert holdfast("rm", "-y", f"{run}@3")[0] == 2
    assert holdfast("rm", "-y", "--quick", f"{run}@3")[0] == 0
