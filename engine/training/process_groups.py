"""Open and close the process groups of an engine.

There are two groups because they fail differently. The default group (gloo on CPU, NCCL on CUDA)
carries tensors. A separate gloo group carries control messages, so that they never wait behind a
tensor collective or deadlock with one.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...utils.compat.torch_private import abort_process_group
from ...utils.devices import CUDA_BACKEND, DeviceReport, agree_on_device, device_here
from ...utils.distributed import gather_objects
from ...utils.errors import ConfigError
from ...utils.launch import launch_environment
from ...utils.logging import get_logger
from ...utils.processes import die_with_torchrun, refuse_import_of_script
from ..parallel_strategy import ParallelStrategy
from .meshes import Meshes, open_meshes

logger = get_logger(__name__)

LEAVE_TOGETHER_S = 5.0
"""With NCCL: seconds that a rank waits for the others before it destroys its groups."""
ABORT_S = 10.0
"""Seconds that NCCL may take to abort."""
GLOO_PATIENCE_S = 1.0
"""Seconds to wait until gloo's threads release their tensors."""


@dataclass
class ProcessGroups:
    """The engine's gloo group for agreement, whether the engine owns the default group, the device
    of this rank, and the meshes.
    """

    control: ProcessGroup
    owns_default: bool
    device: torch.device
    meshes: Meshes


def open_process_groups(
    strategy: ParallelStrategy, device_type: str, timeout_s: float
) -> ProcessGroups:
    """Join the default group, or create it from the environment of torchrun or srun (a world of one
    without it: see `launch_environment`). A rank of torchrun ends with it from now on.

    ``device_type`` is `TrainEngineConfig.device`. ``timeout_s`` limits the collectives of groups
    created here.

    Raises:
        ConfigError: the world has another size than ``strategy`` says (see
            `ParallelStrategy.for_world`), the devices of the ranks do not match (see
            `agree_on_device`), the port of rank 0 is in use, srun does not tell the rank, or a
            helper process imports the script (see `refuse_import_of_script`).
        PeerError: other ranks have no usable device.
    """
    refuse_import_of_script()
    die_with_torchrun()
    timeout = timedelta(seconds=timeout_s)
    owns_default = not dist.is_initialized()
    if owns_default:
        device = _make_default_group(device_type, strategy, timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    else:
        strategy.for_world(dist.get_world_size())
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, ProcessGroup)
        device = agree_on_device(
            partial(device_here, device_type),
            partial(gather_objects, group=control),
        )
        _use(device)
    assert isinstance(control, ProcessGroup)

    # After the default group, because meshes consist of groups of its ranks.
    of_world = strategy.for_world(dist.get_world_size())
    meshes = open_meshes(of_world, device, timeout)
    return ProcessGroups(control, owns_default, device, meshes)


def _make_default_group(
    device_type: str, strategy: ParallelStrategy, timeout: timedelta
) -> torch.device:
    """Agree on devices through the store first, because the backend depends on them."""
    environment = launch_environment()
    if "RANK" in environment:
        store, rank, world_size = _meet(environment, timeout)
    else:
        store = dist.HashStore()
        rank = 0
        world_size = 1
    strategy.for_world(world_size)  # raises on all ranks before any waits for another

    # Under torchrun the store outlives a group, so each group of a process uses separate keys.
    number = (store.add("holdfast/groups", 1) - 1) // world_size
    store = dist.PrefixStore(f"holdfast/{number}", store)

    device = agree_on_device(
        partial(device_here, device_type),
        partial(_gather_through, store, rank=rank, world_size=world_size),
    )
    backend = "gloo"
    cuda = None
    if device.type == "cuda":
        backend = CUDA_BACKEND
        cuda = device
    _use(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=cuda,
    )
    return device


def _meet(environment: Mapping[str, str], timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of the launcher's environment, this rank and the number of ranks."""
    address = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
    try:
        if "RANK" in os.environ:
            return next(dist.rendezvous("env://", timeout=timeout))
        rank = int(environment["RANK"])
        world_size = int(environment["WORLD_SIZE"])
        return next(dist.rendezvous(f"tcp://{address}", rank, world_size, timeout=timeout))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"rank 0 cannot listen at {address} (MASTER_ADDR and MASTER_PORT), because another "
            "process has the port, perhaps another job; choose a free one, or start with torchrun "
            "--standalone, which finds one"
        ) from error


def _gather_through(
    store: dist.Store, report: DeviceReport, *, rank: int, world_size: int
) -> list[DeviceReport]:
    # Every rank says what it has, and waits for what the others say.
    store.set(f"device/{rank}", json.dumps(asdict(report)))
    reports = []
    for other in range(world_size):
        report_of_other = json.loads(store.get(f"device/{other}"))
        reports.append(DeviceReport(**report_of_other))

    # Rank 0 may serve the store, so it must not end before the others have read.
    if store.add("device/readers", 1) == world_size:
        store.set("device/read", "")
    if rank == 0:
        store.get("device/read")
    return reports


def _use(device: torch.device) -> None:
    name = ""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = f" ({torch.cuda.get_device_name(device)})"
    logger.info("computing on %s%s of %s", device, name, socket.gethostname())


def close_process_groups(groups: ProcessGroups) -> None:
    """Leave the groups without waiting for a peer that may be dead. With NCCL this waits up to
    `LEAVE_TOGETHER_S`.
    """
    if not dist.is_initialized():
        return
    # Only groups of NCCL that the engine owns need all ranks.
    needs_all = groups.owns_default and groups.device.type != "cpu"
    together = not needs_all or _all_leave(groups.control)
    _let_gloo_finish()

    # A default group that others made stays open.
    if not groups.owns_default:
        dist.destroy_process_group(groups.control)
    elif together:
        dist.destroy_process_group()  # every group of this process
    else:
        _abort()


def _all_leave(control: ProcessGroup) -> bool:
    """Whether every rank is here. NCCL flushes pending work and waits for the other ranks of the
    host, without limit if one of them is dead.
    """
    try:
        dist.monitored_barrier(control, timeout=timedelta(seconds=LEAVE_TOGETHER_S))
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        logger.warning("not all ranks leave together, so NCCL is aborted: %s", first_line)
        return False
    return True


def _abort() -> None:
    """Abort NCCL's communicators and all groups of this process. Pending collectives fail."""
    thread = Thread(target=abort_process_group, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        logger.error(
            "NCCL has not let go within %g s of the abort; its memory is freed when the process "
            "ends",
            ABORT_S,
        )


def _let_gloo_finish() -> None:
    """Wait until gloo's threads have released the tensors of completed collectives.

    A thread needs the interpreter for that. If it gets its turn after interpreter shutdown has
    begun, it calls `std::terminate`, and a job that has done all its work exits with SIGABRT (5 of
    128 jobs with four ranks a core, pytorch#179291). Destroying a group joins its threads only if
    nothing else holds the group, but DTensor's caches hold the mesh, which holds its group. A
    thread that slept while this one slept, with the interpreter free, is not waiting for it.
    """
    deadline = time.monotonic() + GLOO_PATIENCE_S
    before = _gloo_threads()
    while time.monotonic() < deadline:
        time.sleep(0.01)  # longer than a thread waits before it asks for the interpreter again
        after = _gloo_threads()
        if after == before and all("State:\tS (sleeping)" in thread for thread in after):
            return
        before = after


def _gloo_threads() -> list[list[str]]:
    """State and number of sleeps for each gloo thread, from the kernel. Empty without /proc."""
    threads = []
    for task in Path("/proc/self/task").glob("*/status"):
        try:
            status = task.read_text()
        except OSError:
            continue  # the thread has just ended
        if "pt_gloo_runloop" in status:
            lines = status.splitlines()
            fields = ("State", "Pid", "voluntary")
            threads.append([line for line in lines if line.startswith(fields)])
    return threads
