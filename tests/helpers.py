"""Real ranks for tests: processes with a gloo group that run a function and return results and
errors.
"""

import faulthandler
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holdfast.utils.devices import CUDA_BACKEND
from holdfast.utils.metrics import SPEED_STATS
from tests.limits import stretched

PRELOAD = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchdata.stateful_dataloader",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "aiohttp.web",
    "httpx2",
    "pytest",
    "rich.console",
    "holdfast.engine.fsdp_engine",
    "holdfast.engine.rl",
    "holdfast.recover.handler",
    "tests.preloaded",
)
"""Modules that almost every rank needs, imported once in the process from which ranks are forked.
"""


SIMULATED_DEVICES = bool(os.environ.get("HOLDFAST_SIMULATED_CUDA"))
"""Whether this process and all that it starts have simulated CUDA devices (see
`tests.simulated_cuda`).
"""
ON_DEVICES = SIMULATED_DEVICES or bool(os.environ.get("HOLDFAST_SHARED_GPU"))
"""Whether ranks of `run_ranks` have these devices, or share a real one (see
`tests.gpu.shared_gpu`).
"""


def untimed(stats: Mapping[str, float]) -> dict[str, float]:
    """Statistics of a step without its speed: what is equal in two equal steps."""
    return {name: value for name, value in stats.items() if name not in SPEED_STATS}


def _rank_main(
    rank: int, world_size: int, store: str, fn: Callable[..., Any], args: tuple, pipe: Connection
) -> None:
    faulthandler.enable()  # a crash in C++ prints where its Python was
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        if ON_DEVICES:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            CUDA_BACKEND if ON_DEVICES else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=stretched(60)),
        )
        # a rank that ends at once must not cut connections that another rank is still making
        dist.barrier()
        result = fn(rank, world_size, *args)
        _check_devices()
        pipe.send_bytes(pickle.dumps(("ok", result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_devices() -> None:
    if SIMULATED_DEVICES:
        from tests.simulated_cuda import device  # only where torch has no real ones

        assert device.races() == [], "\n".join(device.races()[:10])
        assert device.counts()["unregistered_in_use"] == 0


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120
) -> list[Any]:
    """Call the top-level function ``fn(rank, world_size, *args)`` on gloo ranks. Returns the
    results in rank order.

    Raises:
        AssertionError: a rank failed (with all tracebacks, the first failure first), or ranks did
            not answer within ``timeout_s``.
    """
    context = mp.get_context("forkserver")  # fresh processes that do not import everything again
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, f"{folder}/store", fn, args, theirs)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, processes, stretched(timeout_s))
        finally:
            for process in processes:
                process.join(timeout=stretched(5))
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], processes: list[Any], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    errors, silent = [], []
    for rank, pipe in enumerate(pipes):
        try:
            if not pipe.poll(stretched(5) if errors else timeout_s):
                silent.append(rank)
                continue
            status, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            processes[rank].join(stretched(5))
            status, value = (
                "error",
                f"the process died without a word (exit code {processes[rank].exitcode})",
            )
        if status == "ok":
            results[rank] = value
        else:
            errors.append(f"--- rank {rank}\n{value}")
    assert not errors and not silent, "\n".join(errors) + (
        f"\nranks {silent} did not answer" if silent else ""
    )
    return results


def shared_memory() -> set[str]:
    """Files in shared memory. Ray's stores, semaphores of processes and folders belong to tests
    that run meanwhile.
    """
    files = (entry.name for entry in os.scandir("/dev/shm") if entry.is_file())
    return {name for name in files if not name.startswith(("plasma", "sem."))}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """New entries of `shared_memory` since ``before``, after a wait for temporary files of other
    tests.
    """
    deadline = time.monotonic() + stretched(20)
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def free_port() -> int:
    """A port that was free a moment ago, for programs that need a port number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def unique_name(tmp_path: Path) -> str:
    """Name in a store that no other test has, nor the same test in another run at the same time.
    Exports to one URL have one staging folder in /tmp.
    """
    return "-".join(tmp_path.parts[-3:])
