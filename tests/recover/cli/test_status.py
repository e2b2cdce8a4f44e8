"""``holdfast status``: the exit code that a job script decides by."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover.cli.attempts import list_attempts
from holdfast.recover.cli.status import judge
from tests.helpers import PRELOAD
from tests.limits import stretched
from tests.recover.cli.commands import answer, finish, holdfast, start
from tests.recover.runs import SPEC, Tiny, make_handler, step_info

pytestmark = pytest.mark.timeout(120)


def _train_on(root: str, n_steps: int, end: str) -> None:
    """Train some steps, and end with a ``kill``, a ``stop``, an ``error``, by ``close``, or without
    it (``exit``). ``wait`` waits to be killed.
    """
    handler, tiny = make_handler(root, freq_steps=2), Tiny()
    first = handler.first_step(handler.load(tiny.state)).global_step
    for step in range(first, first + n_steps):
        if end == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        tiny.step()
        handler.dump(tiny.state, step_info(step))
    handler.wait()
    Path(root, "trained").touch()
    if end == "wait":
        time.sleep(stretched(60))
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "exit":
        handler._folder.journal._end_of_process()  # a forked child runs no atexit functions
        os._exit(0)
    with handler:
        if end == "error":
            raise ValueError("the reward model is gone")


def _begin(root: Path, n_steps: int, end: str) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_train_on, args=(str(root), n_steps, end))
    process.start()
    return process


def _status(root: Path, n_steps: int, end: str) -> tuple[int, str]:
    """Exit code and output after one more attempt."""
    process = _begin(root, n_steps, end)
    process.join(stretched(60))
    assert process.exitcode is not None
    code, out, _ = holdfast("status", root / "e" / "t")
    assert out.count("\n") == 2 and f"(exit code {code})" in out
    return code, out


def test_each_end_of_an_attempt_has_its_code(tmp_path: Path) -> None:
    code, out = _status(tmp_path, 2, "kill")
    assert code == 75 and out.startswith("to be continued: killed, or its machine was lost")
    assert "newest generation: step 1; start the same command again" in out
    code, out = _status(tmp_path, 1, "stop")
    assert code == 75 and "to be continued: stopped as asked: SIGTERM (20" in out
    code, out = _status(tmp_path, 1, "error")
    assert code == 1 and "failed: ValueError: the reward model is gone (20" in out
    code, out = _status(tmp_path, 1, "exit")
    assert code == 1 and "failed: the process ended without closing the handler" in out
    code, out = _status(tmp_path, 1, "close")
    assert code == 0 and "finished: the handler was closed" in out and "nothing is left" in out
    found = answer("status", tmp_path / "e" / "t")
    assert found["state"] == "finished" and found["exit_code"] == 0
    assert (found["last_step"], found["newest_generation"]) == (4, 3)


def test_a_run_that_has_trained_all_its_steps_needs_no_close(tmp_path: Path) -> None:
    code, out = _status(tmp_path, SPEC.total_train_steps, "exit")
    assert code == 0 and f"after its last step {SPEC.total_train_steps - 1}" in out


def test_a_run_that_a_job_uses_is_to_be_continued(tmp_path: Path) -> None:
    job = _begin(tmp_path, 2, "wait")
    try:
        end = time.monotonic() + stretched(60)
        while not (tmp_path / "trained").exists():
            assert time.monotonic() < end and job.exitcode is None
            time.sleep(0.05)
        code, out, _ = holdfast("status", tmp_path / "e" / "t")
        assert code == 75 and "a job uses it now" in out
    finally:
        job.kill()
        job.join()


def test_a_script_tells_no_run_from_wrong_arguments(tmp_path: Path) -> None:
    code, out, err = finish(start("status", tmp_path / "nothing"))
    assert (code, out) == (66, "") and err == f"error: there is no folder {tmp_path / 'nothing'}\n"
    (tmp_path / "e" / "t" / "recover").mkdir(parents=True)
    code, _, err = holdfast("status", tmp_path / "e" / "t")
    assert code == 66 and "nothing is known of the attempts" in err
    assert finish(start("status"))[0] == 2
    assert finish(start("status", tmp_path, "--nothing"))[0] == 2
    assert holdfast("status", "memory://runs/e/t")[0] == 2


def _of(*events: dict[str, Any], in_use: bool = False) -> tuple[str, str]:
    last = list_attempts(events)[-1]
    return judge(last, in_use)


BEGAN = {"event": "attempt", "time": 0.0, "pid": 7}
SUPERVISED = {"event": "attempt", "time": 0.0, "pid": 7, "supervised": True}
START = {"event": "start", "time": 1.0, "pid": 7, "step": None, "total_steps": 9}
LAST_STEP = {"event": "step", "time": 2.0, "step": 8}
CLOSED = {"event": "end", "time": 3.0, "how": "closed", "error": None}
RETURNED = {"event": "returned", "time": 4.0}


def test_a_supervised_run_is_finished_when_its_job_returned() -> None:
    run = (SUPERVISED, BEGAN, START, LAST_STEP, CLOSED)
    assert _of(*run)[0] == "to be continued"  # the driver was lost, perhaps in a last export
    assert _of(*run, RETURNED) == ("finished", "the job returned")
    assert _of(*run, RETURNED, in_use=True)[0] == "to be continued"
    failed = {"event": "failed", "time": 4.0, "error": "OSError: the disk is full"}
    assert _of(*run, failed) == ("failed", "OSError: the disk is full")
    # Started again, it finds nothing to do, and loads nothing.
    assert _of(*run, SUPERVISED, RETURNED)[0] == "finished"


def test_an_older_journal_that_does_not_say_who_began_an_attempt_has_a_status() -> None:
    assert _of(START, LAST_STEP, CLOSED)[0] == "finished"
    assert _of(BEGAN, START, CLOSED)[0] == "finished"
    assert _of(START | {"pid": None}, LAST_STEP, CLOSED)[0] == "finished"
    stop = {"event": "stop", "time": 2.5, "reason": "SIGUSR1"}
    assert _of(BEGAN, START, stop, CLOSED)[0] == "to be continued"


def test_an_error_after_a_request_to_stop_is_a_failure() -> None:
    stop = {"event": "stop", "time": 2.5, "reason": "SIGUSR1"}
    end = CLOSED | {"error": "CheckpointWriteError: the disk is full"}
    assert _of(BEGAN, START, stop, end)[0] == "failed"


def test_an_attempt_that_could_not_load_is_a_failure() -> None:
    failed = {"event": "failed", "time": 4.0, "error": "ConfigError: no such model"}
    assert _of(BEGAN, failed) == ("failed", "ConfigError: no such model")
