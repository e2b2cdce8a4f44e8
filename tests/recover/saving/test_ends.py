"""Processes that end without `close` during a write: the snapshot is there, or the exit code
reports an error.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover.saving import saver
from holdfast.recover.saving.snapshot import RankSession
from tests.helpers import free_port
from tests.limits import stretched
from tests.recover.runs import Tiny, hidden, names, step_info
from tests.recover.saving.test_background_saves import Gate, make

pytestmark = pytest.mark.timeout(100)

JOB = """
import multiprocessing, os, shutil, sys, threading, time, torch, torch.distributed as dist
from torch import nn
from holdfast.engine.api import FinetuneSpec, StepInfo
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.saving.snapshot import RankSession

def main():
    root, write_s, end = sys.argv[1:]
    write = RankSession.write_snapshot
    RankSession.write_snapshot = lambda *args: (time.sleep(float(write_s)), write(*args))[1]
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    state = DCPState(model, torch.optim.AdamW(model.parameters()))
    handler = RecoverHandler(RecoverConfig("e", "t", root, freq_steps=1), FinetuneSpec(1, 24, 4))
    handler.load(state)
    handler.dump(state, StepInfo(0, 0, 0, 6))
    exec(end)

if __name__ == "__main__":
    if "FORKED" in os.environ:
        process = multiprocessing.get_context("fork").Process(target=main)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    main()
"""


IN_THE_WAY = (
    "shutil.rmtree(f'{root}/e/t/recover', ignore_errors=True); open(f'{root}/e/t/recover', "
    "'w').close()"
)
"""Replaces the folder of generations by a file. The writing thread may have created the folder
already.
"""


def end(root: Path, end: str, write_s: float = 1.0, n_ranks: int = 1) -> tuple[int, str]:
    """Run a job that ends as ``end`` says, under torchrun if it has several ranks. Returns exit
    code and output.
    """
    (root / "job.py").write_text(JOB)
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={n_ranks}",
        f"--master-port={free_port()}",
    ]
    command = [
        sys.executable,
        *(torchrun if n_ranks > 1 else []),
        "job.py",
        str(root),
        str(write_s),
        end,
    ]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=80)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit(3)", 3),
        ("handler.close(); dist.destroy_process_group()", 0),
    ],
)
def test_ranks_that_end_finish_their_snapshot_and_keep_their_exit_code(
    tmp_path: Path, how: str, code: int
) -> None:
    n_ranks = 2 if code == 0 else 1  # torchrun has its own exit codes
    found, said = end(tmp_path, how, n_ranks=n_ranks)
    assert found == code, said
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


@pytest.mark.slow
def test_ranks_that_leave_their_group_before_the_snapshot_end_badly(tmp_path: Path) -> None:
    code, said = end(tmp_path, "dist.destroy_process_group()", n_ranks=2)
    assert code == 1 and names(tmp_path) == []
    assert said.count("step 0: the process ends without its snapshot (") == 2
    assert (
        "(ValueError: Default process group has not" in said
    )  # or its peer, which noticed this, has closed the connection
    assert "before torch.distributed or the engine is destroyed" in said


@pytest.mark.slow
def test_a_process_whose_last_snapshot_cannot_be_written_does_not_end_well(tmp_path: Path) -> None:
    code, said = end(tmp_path, f"{IN_THE_WAY}; print('the end')")
    assert code == 1 and "the end" in said
    assert (
        "step 0: the process ends without its snapshot (CheckpointWriteError: cannot write" in said
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "found"), [("pass", 0, ["global_step_0"]), (IN_THE_WAY, 1, [])]
)
def test_a_process_that_multiprocessing_has_forked_ends_no_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int, found: list[str]
) -> None:
    """Before Python 3.13 such a process does not call functions registered with ``atexit``."""
    monkeypatch.setenv("FORKED", "1")
    assert end(tmp_path, how, write_s=2.0)[0] == code and names(tmp_path) == found


@pytest.mark.slow
def test_a_child_of_the_process_that_trains_has_no_snapshot_to_finish(tmp_path: Path) -> None:
    how = (
        "child, at = os.fork(), time.monotonic(); child and (os.wait(), print('for', "
        "time.monotonic() - at))"
    )
    code, said = end(tmp_path, how)
    assert code == 0 and names(tmp_path) == ["global_step_0"]
    assert float(said.rpartition("for ")[2]) < saver.LINGER_S / 2


SLOW_TO_END = """
handler.wait()
from holdfast.engine.staging import background_job
class SlowToEnd(background_job.Thread):
    def run(self):
        super().run()
        for _ in range(100_000):
            torch.ones(1)
background_job.Thread = SlowToEnd
handler.dump(state, StepInfo(0, 1, 1, 6))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "handler.wait()", "handler.close()"])
def test_the_process_does_not_end_under_a_thread_that_still_frees_tensors(
    tmp_path: Path, how: str
) -> None:
    """torch ends the process with SIGABRT if such a thread asks for the interpreter."""
    code, said = end(tmp_path, SLOW_TO_END + how, write_s=0.0)
    assert code == 0, said
    assert names(tmp_path) == ["global_step_0", "global_step_1"]


HANGS = """
from holdfast.recover.saving import saver
from holdfast.recover.storage import generations
saver.LINGER_S = 0.5
reached = threading.Event()
def hang(*args, reached=reached):
    reached.set()
    time.sleep(60)
"""
LAST = "handler.dump(state, StepInfo(0, 1, 1, 6)); reached.wait(); print('the end', flush=True)\n"
"""A dump in which the commit, or the writer and then the check of its progress, never returns."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang",
    [
        "generations.commit_folder = hang",
        "RankSession.write_snapshot = generations.walk_leaves = hang",
    ],
)
@pytest.mark.parametrize("how", ["pass", "1 / 0"])
def test_a_process_whose_storage_hangs_ends_by_itself(tmp_path: Path, hang: str, how: str) -> None:
    script = HANGS + f"handler.wait()\n{hang}\nwith handler:\n    {LAST}    {how}\n"
    started = time.monotonic()
    if how == "pass":
        script = script.replace("with handler:", "if True:")
    code, said = end(tmp_path, script, write_s=0.0)
    assert time.monotonic() - started < stretched(40) and code == 1, said
    assert "the end" in said and names(tmp_path) == ["global_step_0"]
    if how == "pass":
        assert (
            "step 1: the process ends without its snapshot (TimeoutError: it was not finished)"
            in said
        )
    else:
        assert (
            "ZeroDivisionError" in said
            and "step 1: the snapshot that was being written is given up" in said
        )


def _grow(seconds: float) -> Callable[..., Any]:
    """A writer with much to write."""
    write = RankSession.write_snapshot

    def slow(session: RankSession, holder: Any, folder: str, in_background: bool) -> Any:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(0.1)
            with open(Path(folder) / "large", "ab") as file:
                file.write(bytes(100))
        (Path(folder) / "large").unlink()
        return write(session, holder, folder, in_background)

    return slow


def test_a_first_snapshot_is_waited_for_while_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LINGER_S", 0.8)
    monkeypatch.setattr(RankSession, "write_snapshot", _grow(2.0))
    tiny = Tiny()
    with pytest.raises(ZeroDivisionError), make(tmp_path) as handler:
        handler.load(tiny.state)
        handler.dump(tiny.state, step_info(0))
        raise ZeroDivisionError
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


def test_a_snapshot_that_does_not_get_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LINGER_S", 0.3)
    gate, tiny = Gate(monkeypatch), Tiny()
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError), make(tmp_path) as handler:
        handler.load(tiny.state)
        handler.dump(tiny.state, step_info(0))
        raise ZeroDivisionError
    assert time.monotonic() - started < stretched(10) and names(tmp_path) == []
    gate.open()
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(20)
    assert names(tmp_path) == [] and hidden(tmp_path) == []
