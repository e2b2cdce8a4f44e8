"""Processes that run a function of a test, and tell the test what happens in them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from tests.helpers import PRELOAD
from tests.limits import stretched


class Job:
    """A process that runs a function with a pipe to the test. Its standard error goes to a file."""

    def __init__(self, run: Callable[[Connection], None], stderr: Path) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.stderr = stderr
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(run, theirs, stderr))
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float = 90) -> Any:
        """Return what the job sends next. A job that starts processes may import for a while."""
        assert self.pipe.poll(stretched(timeout_s)), "the job says nothing"
        return self.pipe.recv()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to all processes of its group, as launchers and terminals do. The function
        calls `setsid`.
        """
        assert self.process.pid is not None
        os.killpg(self.process.pid, number)

    def exit_code(self, timeout_s: float = 20) -> int | None:
        self.process.join(stretched(timeout_s))
        return self.process.exitcode


def _run(run: Callable[[Connection], None], pipe: Connection, stderr: Path) -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # independent of the parent of the tests
    file = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    run(pipe)


@contextmanager
def job(run: Callable[[Connection], None], folder: Path) -> Iterator[Job]:
    started = Job(run, folder / "stderr")
    try:
        yield started
    finally:
        started.process.join(timeout=0.5)
        started.process.kill()
        started.process.join()
