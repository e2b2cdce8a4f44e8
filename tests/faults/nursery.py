"""Fast groups of ranks, forked in a tenth of a second from warm processes without threads that have
imported everything.

A fault test needs thousands of short-lived processes: two ranks that are killed, two new ones that
inspect the result. `Nursery.run` forks them, gives them a gloo group over a file, and has each run
a list of stages. Like a supervisor, it kills the others at once if one of them fails.

Each rank has its own parent, because torch's caches for sharded tensors are valid for one rank.
"""

import contextlib
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import PRELOAD
from tests.limits import stretched

Stage = Callable[[int], Any]
"""Function that every rank calls with its number. It is pickled, so it is a top-level function or a
partial of one.
"""

GROUP_TIMEOUT_S = stretched(20.0)
"""Longest time that a rank waits for another. `Nursery.run` usually notices failures long before.
"""


@dataclass
class Outcome:
    """Outcome of a group of ranks.

    Attributes:
        ends: exit code by rank, or the negative number of the signal that killed it.
        results: by rank, the return values of the finished stages.
        errors: by rank, the traceback, or "".
        timed_out: whether the ranks had to be stopped.
        seconds: duration.
    """

    ends: list[int]
    results: list[list[Any]]
    errors: list[str]
    timed_out: bool
    seconds: float

    def require_success(self) -> list[list[Any]]:
        """Return `results` if every rank finished.

        Raises:
            AssertionError: a rank failed. The message has the tracebacks.
        """
        errors = "\n".join(
            f"--- rank {rank}\n{error}" for rank, error in enumerate(self.errors) if error
        )
        assert not any(self.ends), (
            f"ranks ended with {self.ends}{', too late' * self.timed_out}\n{errors}"
        )
        return self.results


class Nursery:
    """One warm parent process for every rank. Use `nursery`."""

    def __init__(self, parents: Sequence[Connection]) -> None:
        self._parents = parents

    def run(self, *stages: Stage, timeout_s: float = 60.0) -> Outcome:
        """Fork ranks that run ``stages`` one after the other, and wait for their end.

        Args:
            stages: functions for every rank. The default process group is set up.
            timeout_s: time after which the ranks are killed.
        """
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            for parent in self._parents:
                parent.send_bytes(pickle.dumps((stages, scratch)))
            running = {os.pidfd_open(_answer(parent)): parent for parent in self._parents}
            ends, in_time = _wait(running, started + stretched(timeout_s))
            reports = [_read(Path(scratch, f"rank_{rank}")) for rank in range(len(self._parents))]
        return Outcome(
            ends=[ends[parent] for parent in self._parents],
            results=[[value for kind, value in report if kind == "result"] for report in reports],
            errors=[
                "".join(value for kind, value in report if kind == "error") for report in reports
            ],
            timed_out=not in_time,
            seconds=time.monotonic() - started,
        )


@contextmanager
def nursery(
    warm_up: Callable[[int], None], *, setup: Callable[[], None] | None = None, world_size: int = 2
) -> Iterator[Nursery]:
    """Start the warm processes, which end after the block.

    Args:
        warm_up: called once in the parent of each rank, with its number. It must leave no threads
            and no process group.
        setup: called once in the process from which the parents are forked.
        world_size: number of ranks.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    pipes = [context.Pipe() for _ in range(world_size)]
    process = context.Process(
        target=_be_grandparent, args=([theirs for _, theirs in pipes], warm_up, setup)
    )
    process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        yield Nursery([ours for ours, _ in pipes])
    finally:
        for ours, _ in pipes:
            ours.close()  # closing the pipe ends them
        process.join(timeout=stretched(60))
        if process.is_alive():
            process.kill()
            process.join()


def _answer(parent: Connection) -> int:
    assert parent.poll(stretched(60)), "a parent of ranks does not answer; is there an error above?"
    return pickle.loads(parent.recv_bytes())


def _wait(running: dict[int, Connection], deadline: float) -> tuple[dict[Connection, int], bool]:
    """Wait until all have ended. After the first failure, or at the deadline, kill the rest.

    Returns:
        The exit code of each, and whether all ended in time.
    """
    ends: dict[Connection, int] = {}
    in_time = True
    while running:
        ready, _, _ = select.select(
            list(running), [], [], max(deadline - time.monotonic(), 0) if in_time else None
        )
        in_time &= bool(ready)
        for pidfd in ready:
            parent = running.pop(pidfd)
            parent.send_bytes(b"")  # reap it
            ends[parent] = _answer(parent)
            os.close(pidfd)
        if not in_time or any(ends.values()):
            for pidfd in running:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return ends, in_time


def _be_grandparent(
    pipes: list[Connection], warm_up: Callable[[int], None], setup: Callable[[], None] | None
) -> None:
    torch.set_num_threads(1)
    if setup is not None:
        setup()
    pids = []
    for rank, pipe in enumerate(pipes):
        pids.append(os.fork())
        if pids[-1] == 0:
            for other in pipes:
                if other is not pipe:
                    other.close()
            os._exit(_guarded(partial(_be_parent, pipe, rank, len(pipes), warm_up), print))
    for pipe in pipes:
        pipe.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _guarded(life: Callable[[], None], complain: Callable[[str], Any]) -> int:
    """Run ``life`` in a forked process and return its exit code."""
    try:
        life()
    except BaseException:
        complain(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _be_parent(
    pipe: Connection, rank: int, world_size: int, warm_up: Callable[[int], None]
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    warm_up(rank)
    with contextlib.suppress(EOFError):  # the other end is closed after the last stage
        while True:
            stages, scratch = pickle.loads(pipe.recv_bytes())
            pid = os.fork()
            if pid == 0:
                with open(Path(scratch, f"rank_{rank}"), "wb", buffering=0) as report:
                    life = partial(_be_rank, rank, world_size, stages, scratch, report)
                    os._exit(
                        _guarded(life, lambda error: report.write(pickle.dumps(("error", error))))
                    )
            pipe.send_bytes(pickle.dumps(pid))
            pipe.recv_bytes()  # it has ended, and its process id is reserved until it is reaped
            pipe.send_bytes(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _be_rank(
    rank: int, world_size: int, stages: Sequence[Stage], scratch: str, report: Any
) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{scratch}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    for stage in stages:
        report.write(pickle.dumps(("result", stage(rank))))
    dist.barrier()  # no rank leaves while another is still in its last collective


def _read(report: Path) -> list[tuple[str, Any]]:
    found = []
    with open(report, "rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # cut short by a kill
                return found
