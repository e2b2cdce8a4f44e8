"""A small local Ray for tests, and workers to try groups on."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from holdfast.engine.workers.group import RemoteServer
from holdfast.utils.distributed import rank_zero_decides
from holdfast.utils.errors import PeerError
from holdfast.utils.heartbeat import beat

ROOT = str(Path(__file__).parents[1])
SMALLEST_STORE_BYTES = 78643200


def worker_environment() -> dict[str, Any]:
    """Ray's ``runtime_env`` whose workers can import ``tests``, and start as `tests.conftest` wants."""
    return {"env_vars": {"PYTHONPATH": os.pathsep.join((ROOT, os.environ["PYTHONPATH"]))}}


def start_ray(num_cpus: int = 4, num_gpus: int = 2) -> None:
    """Start a local Ray, its GPUs just numbers, whose workers can import ``tests``.

    Its files stay under Ray's own short temporary folder.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=SMALLEST_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=worker_environment(),
    )


@pytest.fixture(scope="module")
def local_ray() -> None:
    """The Ray of four logical CPUs that all modules share; it ends with pytest, or when a test wants another one."""
    if not ray.is_initialized():
        start_ray()


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_after(delay_s: float, pid: int, signum: int = signal.SIGKILL) -> list[float]:
    """Signal ``pid`` after a while; the list holds the moment (monotonic seconds) once it is done."""
    moment: list[float] = []

    def strike() -> None:
        os.kill(pid, signum)
        moment.append(time.monotonic())

    threading.Timer(delay_s, strike).start()
    return moment


class UserBugError(Exception):
    """An exception of user code, with an argument to carry."""


class Worker:
    """What the tests do to a worker."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.constructed_on = threading.get_ident()
        self.stubborn = False

    def describe(self) -> dict[str, object]:
        """How the process was set up."""
        return {
            "env": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
            "dist": (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None,
            "threads": torch.get_num_threads(),
            "same_thread": self.constructed_on == threading.get_ident(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "extra": os.environ.get("HOLDFAST_TEST_EXTRA"),
        }

    def add(self, *values: int, times: int = 1) -> int:
        """Arguments arrive."""
        return (self.base + sum(values)) * times

    def reduce(self) -> float:
        """One collective of all ranks."""
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    def reduce_forever(self) -> None:
        """Collectives without end."""
        while True:
            self.reduce()

    def reduce_except(self, absent: int) -> float | None:
        """A collective that one rank never joins."""
        return self.idle() if dist.get_rank() == absent else self.reduce()

    def refuse_to_end(self) -> None:
        """From now on ``destroy`` takes longer than anybody waits."""
        self.stubborn = True

    def destroy(self) -> None:
        """What `WorkerGroup.shutdown` calls."""
        if self.stubborn:
            self.idle()

    def nap(self, seconds: float) -> None:
        """Slow, but well."""
        time.sleep(seconds)

    def compute(self, seconds: float) -> float:
        """Busy, and well, without a beat."""
        end, total = time.monotonic() + seconds, torch.zeros(100, 100)
        while time.monotonic() < end:
            total = (total + 1) @ torch.eye(100)
        return float(total[0, 0])

    def nap_and_reduce(self, slow_rank: int, seconds: float, beating: bool) -> float:
        """A collective that one rank comes to late."""
        end = time.monotonic() + seconds
        while dist.get_rank() == slow_rank and time.monotonic() < end:
            if beating:
                beat()
            time.sleep(0.05)
        return self.reduce()

    def spin(self, rank: int, others_reduce: bool = False) -> None:
        """One rank gets lost in a loop that never calls anything."""
        while dist.get_rank() == rank:
            pass
        if others_reduce:
            self.reduce()

    def receive_from_peer(self) -> None:
        """Each of two ranks waits for the other to send."""
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    def fail_late(self, rank: int, seconds: float) -> None:
        """One rank raises after the others' collective has timed out."""
        if dist.get_rank() == rank:
            time.sleep(seconds)
            raise UserBugError("seven", rank)
        self.reduce()

    def idle(self) -> None:
        """Much longer than any test."""
        time.sleep(600)

    def fail(self, *ranks: int, others_reduce: bool = False, peers: bool = False) -> None:
        """Some ranks raise; the others return, wait in a collective, or raise PeerError."""
        if dist.get_rank() in ranks:
            raise UserBugError("seven", dist.get_rank())
        if others_reduce:
            self.reduce()
        if peers:
            raise PeerError("a step", dict.fromkeys(ranks, "UserBugError"))

    def publish(self, server: RemoteServer, path: str, version: int) -> int | None:
        """What a trainer's rank 0 does after a step, while the others wait."""
        served = server.update_weights_from_disk(path, version) if dist.get_rank() == 0 else None
        dist.barrier()
        return served

    def publish_together(self, server: RemoteServer, version: int) -> int:
        """As the engine publishes: rank 0 tells the server, and all ranks get its answer, or its error."""
        return rank_zero_decides(lambda: server.update_weights_from_disk("weights", version))


class MortalServer:
    """A server that a number of its starts do not survive; ``lives`` is a file with one line for each start."""

    def __init__(self, lives: str, deaths: tuple[int, ...]) -> None:
        with open(lives, "a") as file:
            file.write(f"{os.getpid()}\n")
        if len(Path(lives).read_text().splitlines()) - 1 in deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Serve ``version``."""
        return version


class SlowToBuild:
    """A constructor that says who it is, then takes longer than any test."""

    def __init__(self, pid_file: str) -> None:
        Path(pid_file).write_text(str(os.getpid()))
        time.sleep(600)


class Server:
    """A rollout worker that says what it serves, unless told to misbehave."""

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Serve ``version``."""
        if path == "hang":
            time.sleep(600)
        if path == "raise":
            raise UserBugError("no such folder")
        return version
