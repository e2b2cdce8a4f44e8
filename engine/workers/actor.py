"""The process of one rank in a `WorkerGroup`: joining the others, and running the worker."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from ...utils.devices import CUDA_BACKEND
from ...utils.errors import ConfigError
from ...utils.heartbeat import beat, seconds_since_beat
from ...utils.processes import Lease, ProcessId, die_with_parent, thread_cpu_s

COMPUTES = 0.01
"""Share of its time that a thread must spend computing to count as busy. A thread that waits and
polls uses less.
"""


@dataclass(frozen=True)
class Rendezvous:
    """Meeting point of the ranks in a group. Rank 0 serves the store at ``host:port``."""

    host: str
    port: int
    generation: str
    timeout_s: float


@dataclass(frozen=True)
class RankProcess:
    """Process of a rank: its id, the address and Ray's name of its node, and torch's index of its
    GPU.
    """

    id: ProcessId
    host: str
    node_id: str
    device: int | None


def device_index(gpus: Sequence[int | str], visible: str | None) -> int:
    """Torch's index for the first of ``gpus`` (Ray's names), where ``visible`` is
    CUDA_VISIBLE_DEVICES or AMD's HIP_...

    0 if Ray narrowed that variable to them (unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is
    set).
    """
    names = [str(gpu) for gpu in gpus]
    if visible is None:
        return min(map(int, names))
    return min(map(visible.split(",").index, names))


def _make_current(device: torch.device) -> None:
    # Without a context the first one is current. Setting it would open one of some hundred
    # megabytes also in the process that only watches an inference server.
    if device.index != 0 or torch.cuda.is_initialized():
        torch.cuda.set_device(device)


class RankActor:
    """One rank. Training runs on one thread, where the thread-local state of torch is. `ping` and
    background work have their own threads.
    """

    def __init__(self) -> None:
        # The raylet, our parent, dies with a killed driver. Without this a worker would notice
        # after 2-3 s, and meanwhile write files while the restarted job does the same.
        die_with_parent()
        self._worker: Any = None
        self._store: dist.TCPStore | None = None
        self._device: torch.device | None = None
        self._alone = False
        self._calls: set[_Call] = set()
        self._lease: Lease | None = None

    def start(self, serve_store: bool) -> tuple[RankProcess, int]:
        """Describe this process, and return the port of its store (0 if it serves none)."""
        host = ray.util.get_node_ip_address()
        node_id = ray.get_runtime_context().get_node_id()
        gpus = ray.get_gpu_ids()
        device = None
        if gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
            device = device_index(gpus, visible)
        process = RankProcess(ProcessId.current(), host, node_id, device)
        if not serve_store:
            return process, 0

        # The kernel chooses the port: to search for one and bind it later would be a race.
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return process, self._store.port

    def join(
        self, env: dict[str, str], threads: int, gpus: float, rendezvous: Rendezvous | None
    ) -> None:
        """Become rank ``env["RANK"]``, in a process group if there is a rendezvous. ConfigError if
        torch sees no GPU.

        CUDA has not been used yet, so a CUDA_VISIBLE_DEVICES in ``env`` still takes effect.
        """
        os.environ.update(env)
        torch.set_num_threads(threads)
        # The device of this thread. `run` sets it again, because it is thread-local.
        if gpus and torch.cuda.is_available():
            self._device = torch.device("cuda", int(env["LOCAL_RANK"]))
            _make_current(self._device)

        # Without a process group, computing counts as progress: see `ping`.
        if rendezvous is None:
            self._alone = True
            return
        if gpus and self._device is None:
            raise ConfigError(
                f"rank {env['RANK']} was given {gpus:g} GPU(s) on {socket.gethostname()}, where "
                f"torch {torch.__version__} sees no CUDA device; check the driver and "
                "torch.version.cuda, or ask for gpus=0"
            )

        # Rank 0 serves the store itself, the others connect to it.
        timeout = timedelta(seconds=rendezvous.timeout_s)
        store = self._store
        if store is None:
            store = dist.TCPStore(
                rendezvous.host, rendezvous.port, is_master=False, timeout=timeout
            )
        # Ranks that share a GPU use gloo, because NCCL refuses them.
        own_device = self._device if gpus >= 1 else None
        dist.init_process_group(
            CUDA_BACKEND if gpus else "gloo",
            store=dist.PrefixStore(rendezvous.generation, store),
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            timeout=timeout,
            device_id=own_device,
        )

    def build(self, worker_cls: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        """Construct the worker."""
        with self._beating():
            self._worker = worker_cls(*args, **kwargs)

    def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the worker's method."""
        with self._beating():
            return getattr(self._worker, method)(*args, **kwargs)

    def run(self, fn: Callable[..., Any], args: tuple) -> Any:
        """Call ``fn(worker, *args)`` on any thread. CUDA's current device is thread-local, so it is
        set first.
        """
        if self._device is not None:
            _make_current(self._device)
        with self._beating():
            return fn(self._worker, *args)

    def destroy(self) -> None:
        """Call the worker's ``destroy`` if it has one."""
        with self._beating():
            if hasattr(self._worker, "destroy"):
                self._worker.destroy()

    def ping(self) -> float:
        """Seconds since the last `beat`. Answers as long as the process can run Python, even if the
        worker is busy.

        Computing counts as progress only without a process group: in one, a rank that computes
        forever, or waits for NCCL (which uses processor time), blocks the others.
        """
        if self._alone:
            # A copy, because the other threads begin and end calls meanwhile.
            calls = list(self._calls)
            if any(call.computes() for call in calls):
                beat()
        return seconds_since_beat()

    def renew_lease(self, stamp: float | None, lease_s: float) -> float:
        """Live for ``lease_s`` after ``stamp``, a return value of this method. Return the stamp for
        the next call.
        """
        if self._lease is None:
            self._lease = Lease()
        if stamp is not None:
            self._lease.put_off(stamp + lease_s)
        return self._lease.now()

    @contextmanager
    def _beating(self) -> Iterator[None]:
        beat()
        call = _Call(threading.get_native_id())
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.remove(call)
            beat()


class _Call:
    def __init__(self, native_id: int) -> None:
        self._native_id = native_id
        self._looked_s = time.monotonic()
        self._used_s = thread_cpu_s(native_id)

    def computes(self) -> bool:
        """Whether the thread has used the share `COMPUTES` of the time since the last look."""
        last_looked_s = self._looked_s
        last_used_s = self._used_s
        self._looked_s = time.monotonic()
        self._used_s = thread_cpu_s(self._native_id)
        if last_used_s is None or self._used_s is None:
            return False

        used_s = self._used_s - last_used_s
        passed_s = self._looked_s - last_looked_s
        return used_s >= COMPUTES * passed_s
