"""Groups of ranks in a tenth of a second: forked from warm processes that have imported everything and have no threads.

A fault test needs thousands of processes that live for a moment: two ranks that are killed, two fresh ones that see
what is left. `Nursery.run` has them forked, gives them a gloo group over a file, has each go through a list of stages,
and waits as a supervisor would: when one of them ends badly, the others are killed at once.

Every rank has a parent of its own, because what torch remembers of sharded tensors is remembered for one rank.
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
"""What every rank does, given its number. A top-level function or a `functools.partial` of one: it is pickled."""

GROUP_TIMEOUT_S = stretched(20.0)
"""Longest that a rank waits for another; what is meant to be noticed is noticed by `Nursery.run` long before."""


@dataclass
class Outcome:
    """What became of a group of ranks.

    Attributes:
        ends: exit code by rank; the negative number of the signal that killed it.
        results: by rank, what each stage that it finished has returned.
        errors: by rank, the traceback of the one that failed; "" where none did.
        timed_out: whether they had to be stopped.
        seconds: how long it took.
    """

    ends: list[int]
    results: list[list[Any]]
    errors: list[str]
    timed_out: bool
    seconds: float

    def require_success(self) -> list[list[Any]]:
        """`results`, when every rank has come to its end.

        Raises:
            AssertionError: with the traceback of those that failed.
        """
        errors = "\n".join(f"--- rank {rank}\n{error}" for rank, error in enumerate(self.errors) if error)
        assert not any(self.ends), f"ranks ended with {self.ends}{', too late' * self.timed_out}\n{errors}"
        return self.results


class Nursery:
    """One warm parent for every rank. Use `nursery`."""

    def __init__(self, parents: Sequence[Connection]) -> None:
        self._parents = parents

    def run(self, *stages: Stage, timeout_s: float = 60.0) -> Outcome:
        """Have fresh ranks go through ``stages`` one after the other, and wait for their end.

        Args:
            stages: what every rank does, with the default process group at hand.
            timeout_s: after this they are killed.
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
            errors=["".join(value for kind, value in report if kind == "error") for report in reports],
            timed_out=not in_time,
            seconds=time.monotonic() - started,
        )


@contextmanager
def nursery(
    warm_up: Callable[[int], None], *, setup: Callable[[], None] | None = None, world_size: int = 2
) -> Iterator[Nursery]:
    """Start the warm processes; they end after the block.

    Args:
        warm_up: called once in the parent of each rank, with its number. It may leave no thread and no process group.
        setup: called once, before there are parents, in the process that they are forked from.
        world_size: number of ranks.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    pipes = [context.Pipe() for _ in range(world_size)]
    process = context.Process(target=_be_grandparent, args=([theirs for _, theirs in pipes], warm_up, setup))
    process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        yield Nursery([ours for ours, _ in pipes])
    finally:
        for ours, _ in pipes:
            ours.close()  # ends them
        process.join(timeout=stretched(60))
        if process.is_alive():
            process.kill()
            process.join()


def _answer(parent: Connection) -> int:
    assert parent.poll(stretched(60)), "a parent of ranks does not answer; is there an error above?"
    return pickle.loads(parent.recv_bytes())


def _wait(running: dict[int, Connection], deadline: float) -> tuple[dict[Connection, int], bool]:
    """Until all have ended; after the first bad end, or at the deadline, the rest are killed.

    Returns:
        the exit code of each, and whether all was in time.
    """
    ends: dict[Connection, int] = {}
    in_time = True
    while running:
        ready, _, _ = select.select(list(running), [], [], max(deadline - time.monotonic(), 0) if in_time else None)
        in_time &= bool(ready)
        for pidfd in ready:
            parent = running.pop(pidfd)
            parent.send_bytes(b"")  # bury it
            ends[parent] = _answer(parent)
            os.close(pidfd)
        if not in_time or any(ends.values()):
            for pidfd in running:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return ends, in_time


def _be_grandparent(pipes: list[Connection], warm_up: Callable[[int], None], setup: Callable[[], None] | None) -> None:
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
    """The exit code of a forked process that does nothing but ``life``."""
    try:
        life()
    except BaseException:
        complain(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _be_parent(pipe: Connection, rank: int, world_size: int, warm_up: Callable[[int], None]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    warm_up(rank)
    with contextlib.suppress(EOFError):  # the other end is closed when all is done
        while True:
            stages, scratch = pickle.loads(pipe.recv_bytes())
            pid = os.fork()
            if pid == 0:
                with open(Path(scratch, f"rank_{rank}"), "wb", buffering=0) as report:
                    life = partial(_be_rank, rank, world_size, stages, scratch, report)
                    os._exit(_guarded(life, lambda error: report.write(pickle.dumps(("error", error)))))
            pipe.send_bytes(pickle.dumps(pid))
            pipe.recv_bytes()  # it has ended; until it is buried, its number is nobody else's
            pipe.send_bytes(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _be_rank(rank: int, world_size: int, stages: Sequence[Stage], scratch: str, report: Any) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{scratch}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    for stage in stages:
        report.write(pickle.dumps(("result", stage(rank))))
    dist.barrier()  # nobody goes while another is still in its last collective


def _read(report: Path) -> list[tuple[str, Any]]:
    found = []
    with open(report, "rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # cut short by a kill
                return found
