"""A handler that is asked to stop takes a snapshot and exits with the documented code. A second job
is refused.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.engine import FSDPEngine, TrainEngineConfig
from holdfast.recover.triggers import StopNotice
from holdfast.utils.errors import CheckpointNotFoundError, FolderInUseError, Preempted
from holdfast.utils.folder_lock import probe_lock
from holdfast.utils.processes import ProcessId
from tests.helpers import run_ranks
from tests.limits import stretched, wait_until
from tests.recover.runs import SPEC, Tiny, hidden, make_handler, names, run_until, step_info
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).parents[2]

_JOB = """
import json, os, sys, time
from tests.recover.runs import Tiny, make_handler, step_info
from holdfast.utils.logging import configure_logging
configure_logging("WARNING")
root, options = sys.argv[1], json.loads(sys.argv[2])
handler, tiny = make_handler(root, freq_steps=1000, **options), Tiny()
info = handler.load(tiny.state)
step = info.last_step_info.global_step + 1 if info else 0
while True:
    tiny.step()
    if os.path.exists(f"{root}/slow"):
        open(f"{root}/in_a_slow_step", "w").close()
        time.sleep(60)
    time.sleep(0.01)
    handler.dump(tiny.state, step_info(step))
    open(f"{root}/step_{step}", "w").close()
    step += 1
"""


class Job:
    """A training process with a handler, after its first step."""

    def __init__(self, root: Path, *, wait: bool = True, **options: Any) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-c", _JOB, str(root), json.dumps(options)],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if wait:
            self.wait_for("step_*")

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + stretched(40)
        while not list(self.root.glob(pattern)):
            assert self.process.poll() is None and time.monotonic() < end, self.process.communicate(
                timeout=5
            )
            time.sleep(0.01)

    def finish(self) -> tuple[int, str]:
        """Exit code, and standard error."""
        _, err = self.process.communicate(timeout=stretched(40))
        return self.process.returncode, err


@pytest.mark.parametrize("name", slow_but(["SIGTERM"], ["SIGTERM", "SIGUSR1", "SIGINT"]))
def test_a_signal_leads_to_a_snapshot_next_step_and_exit_75(tmp_path: Path, name: str) -> None:
    job = Job(tmp_path)
    assert names(tmp_path) == []
    job.process.send_signal(getattr(signal, name))
    code, err = job.finish()
    assert code == Preempted.EXIT_CODE == 75 and f"stopping after a snapshot: {name}" in err
    (generation,) = names(tmp_path)
    assert hidden(tmp_path) == []
    info = make_handler(tmp_path).load(Tiny().state)
    assert info and generation == f"global_step_{info.last_step_info.global_step}"
    assert (tmp_path / f"step_{info.last_step_info.global_step - 1}").exists(), (
        "the last step is in it"
    )


@pytest.mark.slow
def test_control_c_twice_stops_at_once_and_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    run_until(tmp_path, 2)
    (tmp_path / "slow").touch()
    job = Job(tmp_path, wait=False)
    job.wait_for("in_a_slow_step")
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    code, err = job.finish()
    assert code in (-signal.SIGINT, 1, 130) and "KeyboardInterrupt" in err and "Ctrl-C" in err
    assert names(tmp_path) == ["global_step_0", "global_step_1"]
    info = make_handler(tmp_path).load(Tiny().state)
    assert info and info.last_step_info.global_step == 1


@pytest.mark.slow
def test_a_deadline_leads_to_a_snapshot_before_it(tmp_path: Path) -> None:
    started = time.time()
    # A third of the time is kept for the first save.
    job = Job(tmp_path, wait=False, must_save_by="30s")
    code, err = job.finish()
    assert code == 75 and "must_save_by '30s'" in err and time.time() - started < stretched(30)
    assert len(names(tmp_path)) == 1


def test_a_notice_from_outside_stops_the_run(tmp_path: Path) -> None:
    notices = [None, None, StopNotice("the node is drained")]
    handler = make_handler(
        tmp_path,
        freq_steps=100,
        notices=[lambda: notices.pop(0) if len(notices) > 1 else notices[0]],
    )
    tiny = Tiny()
    handler.load(tiny.state)
    with pytest.raises(Preempted, match="the node is drained") as caught:
        for step in range(1000):
            tiny.step()
            handler.dump(tiny.state, step_info(step))
            time.sleep(0.05)
    assert caught.value.code == 75 and len(names(tmp_path)) == 1
    assert handler.failed_saves == 0


def _one_rank_is_told(rank: int, world_size: int, root: str) -> tuple[str, str]:
    handler, tiny = make_handler(root, freq_steps=100), Tiny()
    handler.load(tiny.state)
    try:
        for step in range(SPEC.total_train_steps):
            if rank == 1 and step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            tiny.step()
            handler.dump(tiny.state, step_info(step))
    except Preempted as stop:
        dist.barrier()
        return str(stop), " ".join(names(Path(root)))
    return "never", ""


def test_a_signal_to_one_rank_is_one_agreed_snapshot_of_all(tmp_path: Path) -> None:
    outcomes = run_ranks(_one_rank_is_told, 2, str(tmp_path))
    assert outcomes == [("stopped after a snapshot: SIGTERM", "global_step_4")] * 2


def test_a_stop_right_after_a_due_snapshot_makes_no_second_one(tmp_path: Path) -> None:
    handler, tiny, before = (
        make_handler(tmp_path, freq_steps=1),
        Tiny(),
        signal.getsignal(signal.SIGTERM),
    )
    handler.load(tiny.state)
    assert handler.dump(tiny.state, step_info(0))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted):
        handler.dump(tiny.state, step_info(0))
    assert names(tmp_path) == ["global_step_0"]
    assert signal.getsignal(signal.SIGTERM) == before, "the handler has given the signals back"


def _hold(root: str, pipe: Connection) -> None:
    make_handler(root).load(Tiny().state)
    pipe.send("holds")
    time.sleep(60)


def test_a_second_job_in_the_folder_is_refused_with_the_name_of_the_holder(tmp_path: Path) -> None:
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    job = context.Process(target=_hold, args=(str(tmp_path), theirs))
    job.start()
    assert ours.poll(stretched(40)) and ours.recv() == "holds"
    with pytest.raises(FolderInUseError, match=rf"in use by pid {job.pid} on host .*, started 20"):
        make_handler(tmp_path, lock_timeout_s=0.2).load(Tiny().state)
    assert hidden(tmp_path) == []
    job.kill()
    job.join()
    assert make_handler(tmp_path, lock_timeout_s=5.0).load(Tiny().state) is None


@pytest.mark.slow
def test_a_run_that_copies_its_own_folder_goes_on_alone_in_it(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path / "runs", freq_steps=1), Tiny()
    handler.load(tiny.state)
    shutil.copytree(tmp_path / "runs", tmp_path / "upload")
    second = Job(tmp_path / "runs", wait=False, lock_timeout_s=0.2)
    try:
        code, err = second.finish()
    finally:
        second.process.kill()
    assert code == 75 and f"in use by pid {os.getpid()} on host" in err
    assert "Traceback" not in err and err.count("ends with code 75") == 1
    assert handler.dump(tiny.state, step_info(0)) and names(tmp_path / "runs") == ["global_step_0"]
    handler.close()


def _robbed_between_steps(rank: int, world_size: int, root: str) -> tuple[str, str]:
    handler, tiny = make_handler(root, freq_steps=1), Tiny()
    handler.load(tiny.state)
    handler.dump(tiny.state, step_info(0))
    if rank == 0:
        handler.config.lock_path.unlink()
        # a separate process, because all locks of one process on a path are the same
        other = subprocess.Popen(
            [sys.executable, "-c", _THIEF, handler.config.lock_path],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert other.stdout and other.stdout.readline() == b"locked\n"
    try:
        handler.dump(tiny.state, step_info(1))
    except FolderInUseError as error:
        handler.close()
        return type(error).__name__, str(error)
    finally:
        if rank == 0:
            other.kill()
    return "dumped", ""


_THIEF = """
import sys, time
from holdfast.utils.folder_lock import FolderLock
FolderLock(sys.argv[1]).acquire(0)
print("locked", flush=True)
time.sleep(60)
"""


def test_a_run_that_lost_its_folder_to_another_commits_nothing_more(tmp_path: Path) -> None:
    outcomes = run_ranks(_robbed_between_steps, 2, str(tmp_path))
    assert [kind for kind, _ in outcomes] == ["FolderInUseError"] * 2
    assert "is in use by pid" in outcomes[0][1] and outcomes[0] == outcomes[1]
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


@pytest.mark.slow
def test_a_second_job_waits_for_the_first_when_told_to(tmp_path: Path) -> None:
    first = Job(tmp_path)
    second = Job(tmp_path, wait=False, lock_timeout_s=30.0)
    time.sleep(1.0)
    assert second.process.poll() is None
    first.process.terminate()
    assert first.finish()[0] == 75
    (generation,) = names(tmp_path)
    second.wait_for(f"step_{int(generation.rpartition('_')[2]) + 2}")
    second.process.kill()
    second.finish()


def test_a_signal_that_no_step_answers_any_more_is_passed_on(tmp_path: Path) -> None:
    """A worker is lost right after SIGTERM: the handler is closed, and another attempt would just
    train on.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        handler = make_handler(tmp_path, freq_steps=1)
        handler.load(Tiny().state)
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == []
        handler.close()
        assert came == [signal.SIGTERM]
        handler.close()
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_first_load_that_fails_gives_up_lock_journal_and_signals_and_may_be_tried_again(
    tmp_path: Path,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_until(tmp_path / "other", 2)
    handler = make_handler(
        tmp_path / "runs", mode="must", freq_steps=1, mirror_url=f"file://{tmp_path}/mirror"
    )
    trial, tiny = handler.config.trial_root, Tiny()
    with pytest.raises(CheckpointNotFoundError):
        handler.load(tiny.state)
    assert (
        probe_lock(handler.config.lock_path) is False and signal.getsignal(signal.SIGTERM) == before
    )
    assert not [
        link
        for link in Path("/proc/self/fd").iterdir()
        if os.path.realpath(link).startswith(f"{trial}/")
    ]

    shutil.copytree(
        tmp_path / "other" / "e" / "t" / "recover", trial / "recover", dirs_exist_ok=True
    )
    info = handler.load(tiny.state)
    assert info and info.last_step_info.global_step == 1 and probe_lock(handler.config.lock_path)
    tiny.step()
    assert handler.dump(tiny.state, step_info(2))
    handler.close()
    assert (tmp_path / "mirror" / "e" / "t" / "global_step_2" / "manifest.json").is_file()


def test_a_handler_closed_by_another_thread_leaves_no_signal_unanswered(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        handler = make_handler(tmp_path, freq_steps=1)
        handler.load(Tiny().state)
        thread = threading.Thread(target=handler.close)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_after_the_stop_was_agreed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and torchrun may both send a signal, so that the second arrives during the last
    snapshot.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        handler, tiny = make_handler(tmp_path, freq_steps=100), Tiny()
        handler.load(tiny.state)
        write = handler._snapshots.write

        def signalled(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return write(*args, **options)

        monkeypatch.setattr(handler._snapshots, "write", signalled)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            handler.dump(tiny.state, step_info(0))
        assert came == [] and names(tmp_path) == ["global_step_0"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("grace_s", "options", "warned"),
    [("0", {}, 1), ("30", {}, 0), ("0", {"must_save_by": "2d"}, 0), (None, {}, 0)],
)
def test_a_job_that_torchrun_would_kill_in_its_last_snapshot_is_warned_once(
    grace_s: str | None,
    options: dict[str, str],
    warned: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if grace_s is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace_s)
    tiny = Tiny()
    with make_handler(tmp_path, freq_steps=1, **options) as handler:
        handler.load(tiny.state)
        for step in range(4):
            tiny.step()
            handler.dump(tiny.state, step_info(step))
            handler.wait()
    told = [record.message for record in caplog.records if "torchrun kills" in record.message]
    assert len(told) == warned
    for message in told:
        assert message.startswith("torchrun kills its ranks 0 s after it got a signal")
        assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in message and "must_save_by" in message


@pytest.mark.parametrize("part", ["engine", "handler"])
def test_a_rank_ends_with_a_torchrun_that_was_killed(part: str, tmp_path: Path) -> None:
    def rank() -> None:
        if part == "engine":
            FSDPEngine(TrainEngineConfig(path="unused")).create_process_group()
        else:
            make_handler(tmp_path / "run").load(Tiny().state)
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    def torchrun() -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = "one"
        forking.Process(target=rank).start()
        time.sleep(600)

    forking = multiprocessing.get_context("fork")
    parent = forking.Process(target=torchrun)
    parent.start()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = ProcessId.of(int((tmp_path / "pid").read_text()))
    try:
        parent.kill()
        wait_until(lambda: not child.alive(), 5)
    finally:
        child.kill()


def test_a_deadline_that_passes_during_recovery_stops_at_the_next_step(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=100, must_save_by="1s"), Tiny()
    handler.load(tiny.state)
    with pytest.raises(Preempted, match="must_save_by"):
        handler.dump(tiny.state, step_info(0))
    assert names(tmp_path) == ["global_step_0"]
