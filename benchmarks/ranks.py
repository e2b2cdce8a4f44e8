"""Ranks for measurements: separate processes joined by torch.distributed, which end with their
parent.
"""

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from holdfast.utils.distributed import gather_objects
from holdfast.utils.processes import die_with_parent

from .harness import Options

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""Longest time that one benchmark may take."""

_PRELOAD = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "benchmarks.run",
]


class Session:
    """A benchmark, as seen by one rank.

    Attributes:
        options: options of the run.
        rank: rank of this process.
        world_size: number of ranks.
        device: device of this rank's model.
        group: gloo group for traffic that must not mix with the measured traffic.
    """

    def __init__(
        self,
        options: Options,
        rank: int,
        world_size: int,
    ) -> None:
        self.options = options
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        if options.device == "cuda":
            self.device = torch.device("cuda", rank)
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

    def all(self, value: T) -> list[T]:
        """Gather the values of all ranks, on every rank."""
        return gather_objects(value, self.group)

    def barrier(self) -> None:
        """Wait for the other ranks and for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def new_folder(self, name: str) -> Path:
        """Create a folder in the scratch folder for all ranks, unless it exists."""
        folder = self.options.scratch / name
        if self.rank == 0:
            folder.mkdir(exist_ok=True)
        self.barrier()
        return folder

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds that ``call`` takes on the slowest rank, if all start together."""
        return max(self.all(self.own_seconds(call)))

    def timed(self, call: Callable[[], object], **known: float) -> dict[str, float]:
        """The same as a way of `interleave`, next to values that are known already."""
        return {"seconds": self.seconds(call), **known}

    def own_seconds(self, call: Callable[[], object]) -> float:
        """Seconds that ``call`` takes on this rank, if all start together."""
        gc.collect()
        self.barrier()
        started = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started


def on_ranks(
    fn: Callable[..., T],
    options: Options,
    *args: Any,
    ranks: int | None = None,
) -> T:
    """Call the top-level function ``fn(session, *args)`` on fresh ranks and return the result of
    rank 0.

    The ranks get their own scratch folder, which is removed afterwards.

    Raises:
        RuntimeError: a rank failed (with its traceback), died, or took too long.
    """
    world_size = options.ranks if ranks is None else ranks
    # Fresh processes that do not import everything again.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    scratch = Path(tempfile.mkdtemp(prefix=f"{fn.__name__.strip('_')}-", dir=options.scratch))
    own = replace(options, scratch=scratch)
    processes = []
    pipes = []
    try:
        # Each rank has a pipe of its own, so that the death of a rank shows as the end of a pipe.
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, fn, own, args, theirs)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)

        results = _collect(fn.__name__, pipes)
        for process in processes:
            process.join(30)
        return results[0]
    finally:
        # After a failure of one rank, the others wait in a collective and have to be killed.
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(scratch)


def _collect(name: str, pipes: list[Connection]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    end = time.monotonic() + TIMEOUT_S
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            raise RuntimeError(
                f"{name}: rank(s) {sorted(waiting.values())} did not answer within {TIMEOUT_S:g} s"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failed, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failed = True
                results[rank] = "the process died without a word (out of memory?)"
            if failed:
                raise RuntimeError(f"{name}: rank {rank} failed:\n{results[rank]}")
    return results


def _rank_main(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    options: Options,
    args: tuple,
    pipe: Connection,
) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    disable_progress_bar()
    torch.set_num_threads(1)

    # The variables of torchrun, which the engine reads.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    backend = "gloo"
    if options.device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)

    # The parent gets the result, or the traceback of the failure.
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{options.scratch}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=600),
        )
        session = Session(options, rank, world_size)
        result = fn(session, *args)
        session.barrier()  # if one rank leaves early, the others log errors
        pipe.send_bytes(pickle.dumps((False, result)))
    except Exception:
        pipe.send_bytes(pickle.dumps((True, traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
