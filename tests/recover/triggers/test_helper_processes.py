"""Signals to the whole process group of a job: it finishes its step with the help of its other
processes.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.engine.rollouts import CallPool
from holdfast.integrations.accelerate import recoverable
from holdfast.recover.triggers import StopRequests
from holdfast.utils.errors import Preempted
from tests.limits import stretched, wait_until
from tests.recover.runs import Tiny, make_handler, names, step_info
from tests.recover.triggers.jobs import job
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

SIGNALLED_STEP = 2
STEP_S = 0.3


class Rows(Dataset):
    """Sample i is i. The sample after the batch of `SIGNALLED_STEP` takes as long as ``wait``."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if self._wait is not None and index > SIGNALLED_STEP + 1:
            self._wait()
        return index


def long_call() -> None:
    sum(range(10**11))


def blocking_read() -> None:
    os.read(os.pipe()[0], 1)


def loader_of(kind: str) -> Any:
    """Make a loader with a worker, which reads two batches ahead."""
    # The jobs of these tests come from a fork server, so their own default is another one.
    torchs = partial(DataLoader, num_workers=1, multiprocessing_context="fork")
    match kind:
        case "torchdata":
            return StatefulDataLoader(Rows(), num_workers=1, multiprocessing_context="fork")
        case "persistent":
            return recoverable(torchs(Rows(), persistent_workers=True))
        case "spawn" | "forkserver":
            return recoverable(torchs(Rows(), multiprocessing_context=kind))
        case "long call":
            return recoverable(torchs(Rows(long_call)))
        case "blocking read":
            return recoverable(torchs(Rows(blocking_read)))
    return recoverable(torchs(Rows()))


LOADERS = ["fork", "persistent", "torchdata", "spawn", "forkserver", "long call", "blocking read"]


def train(pipe: Connection, root: Path, kind: str) -> None:
    """Train with a loader. Say when the step begins in which the test sends a signal."""
    os.setsid()
    tiny = Tiny()
    loader = loader_of(kind)
    with make_handler(root, freq_steps=1000) as handler:
        handler.load(tiny.state, dataloader=loader)
        for step, _ in enumerate(loader):
            tiny.step()
            if step == SIGNALLED_STEP:
                pipe.send("in the step")
                wait_in_step()
            handler.dump(tiny.state, step_info(step), dataloader=loader)


def wait_in_step() -> None:
    end = time.monotonic() + STEP_S
    while time.monotonic() < end:
        time.sleep(0.01)


def session(of: int | None) -> list[psutil.Process]:
    """Processes of the session of a job, except itself."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if os.getsid(process.pid) == of and process.pid != of and not ended:
                found.append(process)
    return found


def wait_until_alone(of: int | None) -> None:
    _, left = psutil.wait_procs(session(of), timeout=stretched(15))
    assert left == []


CASES = [(kind, name) for kind in LOADERS for name in ("SIGTERM", "SIGUSR1", "SIGINT")]
FAST = [
    ("fork", "SIGTERM"),
    ("persistent", "SIGUSR1"),
    ("torchdata", "SIGTERM"),
    ("fork", "SIGINT"),
]


@pytest.mark.parametrize(("kind", "name"), slow_but(FAST, CASES))
def test_a_signal_to_the_group_of_a_job_with_a_loader_leads_to_a_snapshot(
    tmp_path: Path, kind: str, name: str
) -> None:
    with job(partial(train, root=tmp_path, kind=kind), tmp_path) as running:
        assert running.receive(40) == "in the step"
        running.signal_group(getattr(signal, name))
        assert running.exit_code() == Preempted.EXIT_CODE, running.stderr.read_text()
        assert names(tmp_path) == [f"global_step_{SIGNALLED_STEP}"]
        assert "Error" not in running.stderr.read_text()
        wait_until_alone(running.process.pid)


def train_with_calls(pipe: Connection, root: Path) -> None:
    """Train with a call in another process in each step."""
    os.setsid()
    tiny = Tiny()
    with make_handler(root, freq_steps=1000) as handler, CallPool(n_processes=1) as pool:
        handler.load(tiny.state)
        for step in range(100):
            tiny.step()
            if step == SIGNALLED_STEP:
                pipe.send("in the step")
            asyncio.run(pool.call(time.sleep, STEP_S))
            pipe.send(pool.n_lost)
            handler.dump(tiny.state, step_info(step))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["SIGUSR1"], ["SIGTERM", "SIGUSR1"]))
def test_a_signal_to_the_group_of_a_job_leaves_its_calls_in_other_processes_alone(
    tmp_path: Path, name: str
) -> None:
    with job(partial(train_with_calls, root=tmp_path), tmp_path) as running:
        assert running.receive() == 0
        assert running.receive() == 0
        assert running.receive() == "in the step"
        time.sleep(STEP_S / 3)
        running.signal_group(getattr(signal, name))
        assert running.receive() == 0
        assert running.exit_code() == Preempted.EXIT_CODE, running.stderr.read_text()
        assert names(tmp_path) == [f"global_step_{SIGNALLED_STEP}"]


def lose_a_worker(pipe: Connection, root: Path) -> None:
    """Train with a loader whose worker gets each signal, too, as those of a whole container do."""
    os.setsid()
    tiny = Tiny()
    loader = loader_of("fork")
    with make_handler(root, freq_steps=1000) as handler:
        handler.load(tiny.state, dataloader=loader)
        next(iter(loader))
        tiny.step()
        (worker,) = psutil.Process().children()
        os.kill(os.getpid(), signal.SIGUSR1)
        worker.send_signal(signal.SIGUSR1)
        pipe.send(worker.wait(20))
        wait_in_step()
        handler.dump(tiny.state, step_info(0), dataloader=loader)


def test_a_worker_that_is_lost_after_a_signal_does_not_end_the_step(tmp_path: Path) -> None:
    with job(partial(lose_a_worker, root=tmp_path), tmp_path) as running:
        assert running.receive() == -signal.SIGUSR1
        assert running.exit_code() == Preempted.EXIT_CODE, running.stderr.read_text()
        assert names(tmp_path) == ["global_step_0"]
        assert (
            "holdfast: finishing the step, although DataLoader worker" in running.stderr.read_text()
        )


def fail_in_a_block(root: Path) -> None:
    with make_handler(root, freq_steps=1000) as handler:
        handler.load(Tiny().state)
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("the first error")


def fail_before_a_close(root: Path) -> None:
    handler = make_handler(root, freq_steps=1000)
    handler.load(Tiny().state)
    try:
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("the first error")
    finally:
        handler.close()


def fail_in_the_close(root: Path) -> None:
    handler = make_handler(root, freq_steps=1000)
    handler.load(Tiny().state)

    def fail(**_: object) -> None:
        raise ValueError("the first error")

    handler._saver.close = fail
    signal.raise_signal(signal.SIGTERM)
    handler.close()


def run_to_the_error(pipe: Connection, fail: Callable[[Path], None], root: Path) -> None:
    fail(root)


@pytest.mark.parametrize("fail", [fail_in_a_block, fail_before_a_close, fail_in_the_close])
def test_an_error_is_printed_before_the_signal_ends_the_process(
    tmp_path: Path, fail: Callable
) -> None:
    with job(partial(run_to_the_error, fail=fail, root=tmp_path), tmp_path) as running:
        assert running.exit_code() == -signal.SIGTERM
        said = running.stderr.read_text()
        assert "Traceback" in said and "ValueError: the first error" in said


def start_helpers(pipe: Connection) -> None:
    """Fork a child that reads for ever, and one that starts a session, with a program of its
    own.
    """
    os.setsid()
    stop = StopRequests(["SIGTERM"], None)
    stop.signals.install()
    reading = os.fork()
    if reading == 0:
        signal.alarm(120)
        blocking_read()
    leaving = os.fork()
    if leaving == 0:
        os.setsid()
        command = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
        program = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: None)
        pipe.send(program.pid)
        program.wait()
        os._exit(0)
    pipe.send((reading, leaving))
    if pipe.recv() == "exit":
        sys.exit(0)


@pytest.mark.parametrize("end", slow_but(["killed"], ["killed", "exit"]))
def test_helpers_end_with_a_job_that_was_killed_unless_they_left_its_session(
    tmp_path: Path, end: str
) -> None:
    with job(start_helpers, tmp_path) as running:
        (program,), pids = sorted([_tuple(running.receive()), _tuple(running.receive())], key=len)
        reading, leaving, program = (psutil.Process(pid) for pid in (*pids, program))
        try:
            wait_until(lambda: os.getpgid(reading.pid) not in (running.process.pid, reading.pid))
            if end == "killed":
                running.process.kill()
                reading.wait(stretched(10))
            else:
                running.pipe.send("exit")
                assert running.exit_code() == 0
                time.sleep(1)
                assert reading.is_running(), "a normal exit ends nothing"
            assert leaving.is_running() and program.is_running()
        finally:
            for process in (reading, leaving, program):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _tuple(pids: int | tuple[int, ...]) -> tuple[int, ...]:
    return pids if isinstance(pids, tuple) else (pids,)
