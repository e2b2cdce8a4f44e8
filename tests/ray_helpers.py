"""A small local Ray for tests, and workers for tests of groups."""

import logging
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from holdfast.engine.workers.group import RemoteServer, WorkerGroup
from holdfast.utils.distributed import rank_zero_decides
from holdfast.utils.errors import PeerError
from holdfast.utils.heartbeat import beat
from tests.limits import stretched

ROOT = str(Path(__file__).parents[1])
SMALLEST_STORE_BYTES = 78643200


def worker_environment() -> dict[str, Any]:
    """Ray's ``runtime_env`` for workers that can import ``tests`` and use `tests/startup`."""
    return {"env_vars": {"PYTHONPATH": os.pathsep.join((ROOT, os.environ["PYTHONPATH"]))}}


def start_ray(num_cpus: int = 4, num_gpus: int = 2, **options: Any) -> None:
    """Start a local Ray with imaginary GPUs whose workers can import ``tests``.

    Its files are in Ray's own short temporary folder.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    start = partial(
        ray.init,
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=SMALLEST_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=worker_environment(),
        **options,
    )
    # Workers import torch at their start, which takes minutes on a busy machine.
    defaults = WorkerGroup.__init__.__kwdefaults__
    assert defaults is not None
    defaults["start_timeout_s"] = stretched(120)

    # Ray waits 30 s for its node, which a busy machine may exceed, and has no option for it.
    for attempts_left in (3, 2, 1, 0):
        try:
            start()
            return
        except Exception as error:
            if not attempts_left or "timed out during startup" not in str(error):
                raise


@pytest.fixture(scope="module")
def local_ray() -> None:
    """Ray with four logical CPUs, shared by all modules. It ends with pytest, or when a test needs
    another one.
    """
    if not ray.is_initialized():
        start_ray()


def running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_after(delay_s: float, pid: int, signum: int = signal.SIGKILL) -> list[float]:
    """Send a signal to ``pid`` after a delay. The returned list then gets the time (monotonic
    seconds).
    """
    moment: list[float] = []

    def strike() -> None:
        os.kill(pid, signum)
        moment.append(time.monotonic())

    threading.Timer(delay_s, strike).start()
    return moment


class UserBugError(Exception):
    """An exception of user code, with an argument to carry."""


class Worker:
    """Methods that the tests call on a worker."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.constructed_on = threading.get_ident()
        self.stubborn = False

    def describe(self) -> dict[str, object]:
        """Environment of the process."""
        return {
            "env": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
            "dist": (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None,
            "threads": torch.get_num_threads(),
            "same_thread": self.constructed_on == threading.get_ident(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "extra": os.environ.get("HOLDFAST_TEST_EXTRA"),
        }

    def add(self, *values: int, times: int = 1) -> int:
        return (self.base + sum(values)) * times

    def reduce(self) -> float:
        """Run one collective on all ranks."""
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    def reduce_forever(self) -> None:
        """Run collectives without end."""
        while True:
            self.reduce()

    def reduce_except(self, absent: int) -> float | None:
        """Run a collective that one rank never joins."""
        return self.idle() if dist.get_rank() == absent else self.reduce()

    def refuse_to_end(self) -> None:
        """Make ``destroy`` take longer than any timeout."""
        self.stubborn = True

    def destroy(self) -> None:
        """Called by `WorkerGroup.shutdown`."""
        if self.stubborn:
            self.idle()

    def nap(self, seconds: float) -> None:
        """Sleep, alive but slow."""
        time.sleep(seconds)

    def compute(self, seconds: float) -> float:
        """Compute without a heartbeat."""
        end, total = time.monotonic() + seconds, torch.zeros(100, 100)
        while time.monotonic() < end:
            total = (total + 1) @ torch.eye(100)
        return float(total[0, 0])

    def nap_and_reduce(self, slow_rank: int, seconds: float, beating: bool) -> float:
        """Run a collective that one rank joins late."""
        end = time.monotonic() + seconds
        while dist.get_rank() == slow_rank and time.monotonic() < end:
            if beating:
                beat()
            time.sleep(0.05)
        return self.reduce()

    def spin(self, rank: int, others_reduce: bool = False) -> None:
        """Hang one rank in a loop without any call."""
        while dist.get_rank() == rank:
            pass
        if others_reduce:
            self.reduce()

    def receive_from_peer(self) -> None:
        """Let each of two ranks wait for a message of the other."""
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    def fail_late(self, rank: int, seconds: float) -> None:
        """Raise on one rank after the others' collective has timed out."""
        if dist.get_rank() == rank:
            time.sleep(seconds)
            raise UserBugError("seven", rank)
        self.reduce()

    def idle(self) -> None:
        """Sleep much longer than any test."""
        time.sleep(600)

    def fail(self, *ranks: int, others_reduce: bool = False, peers: bool = False) -> None:
        """Raise on some ranks. The others return, wait in a collective, or raise PeerError."""
        if dist.get_rank() in ranks:
            raise UserBugError("seven", dist.get_rank())
        if others_reduce:
            self.reduce()
        if peers:
            raise PeerError("a step", dict.fromkeys(ranks, "UserBugError"))

    def publish(self, server: RemoteServer, path: str, version: int) -> int | None:
        """Publish like rank 0 of a trainer after a step, while the others wait."""
        served = server.update_weights_from_disk(path, version) if dist.get_rank() == 0 else None
        dist.barrier()
        return served

    def publish_together(self, server: RemoteServer, version: int) -> int:
        """Publish like the engine: rank 0 updates the server, and all ranks get its answer or
        error.
        """
        return rank_zero_decides(lambda: server.update_weights_from_disk("weights", version))


class MortalServer:
    """A server that dies during its first starts. ``lives`` is a file with one line for each
    start.
    """

    def __init__(self, lives: str, deaths: tuple[int, ...]) -> None:
        with open(lives, "a") as file:
            file.write(f"{os.getpid()}\n")
        if len(Path(lives).read_text().splitlines()) - 1 in deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def update_weights_from_disk(self, path: str, version: int) -> int:
        return version


class SlowToBuild:
    """A constructor that records its process, then takes longer than any test."""

    def __init__(self, pid_file: str) -> None:
        Path(pid_file).write_text(str(os.getpid()))
        time.sleep(600)


class Server:
    """A rollout worker that reports its version, with optional faults."""

    def update_weights_from_disk(self, path: str, version: int) -> int:
        if path == "hang":
            time.sleep(600)
        if path == "raise":
            raise UserBugError("no such folder")
        return version
