"""Choice of the device of each rank, agreed among the ranks before any of them uses it.

Ranks that chose alone might train on the CPU while others use GPUs, or share a GPU. Both end in a
hang, or in training that is a hundred times too slow. So the ranks exchange their choices, and a
bad combination is one error on all ranks.
"""

import gc
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import ConfigError, PeerError
from .launch import launch_environment
from .logging import get_logger

logger = get_logger(__name__)

CUDA_BACKEND = "cpu:gloo,cuda:nccl"
"""Backend of a default group that trains on GPUs. The group is bound to the rank's device
(``device_id``), so that NCCL connects at once, where errors are reported, and never guesses a
device.
"""


@dataclass(frozen=True)
class DeviceReport:
    """Device that a rank has chosen, as the other ranks see it."""

    host: str
    device: str = ""  # torch's name of the device, or "" if the rank found none
    gpu: str = ""  # UUID of the GPU, or "" on the CPU
    error: str = ""  # reason why the rank found no device


def choose_device(
    wanted: str,
    *,
    visible: int,
    local_rank: int,
    bound: torch.device | None = None,
    has_nccl: bool = True,
) -> torch.device:
    """Choose the device of a rank.

    Args:
        wanted: ``auto``, ``cpu`` or ``cuda``. See `TrainEngineConfig.device`.
        visible: number of CUDA devices that torch sees. A single one belongs to this rank, because
            the launcher shows each rank its own.
        local_rank: the rank's place on its host.
        bound: device that the default process group is bound to, or None.
        has_nccl: whether the default process group can carry GPU tensors.

    Raises:
        ConfigError: CUDA is wanted or visible, and cannot be used.
    """
    if wanted == "cpu" or (wanted == "auto" and not visible):
        return torch.device("cpu")
    if not visible:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "not set" if shown is None else repr(shown)
        raise ConfigError(
            "config key 'device' is 'cuda', but torch sees no CUDA device here "
            f"(CUDA_VISIBLE_DEVICES is {setting}); check the driver and torch.version.cuda, or "
            "use 'cpu'"
        )
    # A group without NCCL cannot carry GPU tensors.
    if not has_nccl:
        advice = "make the group with backend 'cpu:gloo,cuda:nccl'"
        if wanted == "cuda":
            raise ConfigError(
                "config key 'device' is 'cuda', but the default process group has no nccl; "
                f"{advice}"
            )
        logger.warning(
            "training on the CPU, although there are %d CUDA device(s): the default process group "
            "has no nccl; %s, or set config key 'device' to 'cpu'",
            visible, advice,
        )  # fmt: skip
        return torch.device("cpu")
    # The group's device comes first, then the only visible one, then the rank's place on its host.
    if bound is not None:
        return bound
    index = 0 if visible == 1 else local_rank
    if index >= visible:
        raise ConfigError(
            f"config key 'device' is {wanted!r}, but LOCAL_RANK is {local_rank} and torch sees "
            f"{visible} CUDA devices: show each rank one device, or as many as there are ranks on "
            "the host; or set 'device' to 'cpu'"
        )
    return torch.device("cuda", index)


def device_here(wanted: str) -> torch.device:
    """Call `choose_device` with the environment and the default process group of this process."""
    world = dist.group.WORLD if dist.is_initialized() else None
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return choose_device(
        wanted,
        visible=visible,
        local_rank=int(launch_environment().get("LOCAL_RANK", "0")),
        bound=None if world is None else world.bound_device_id,
        has_nccl=world is None or "nccl" in dist.get_backend_config(world),
    )


def agree_on_device(
    choose: Callable[[], torch.device], gather: Callable[[DeviceReport], Sequence[DeviceReport]]
) -> torch.device:
    """Return the device that ``choose`` returns, after checking that the devices of all ranks fit
    together.

    Collective: ``gather`` gathers the reports of all ranks in rank order.

    Raises:
        ConfigError: this rank has no device, or ranks differ in device type or share a GPU.
        PeerError: other ranks have no device.
    """
    host = socket.gethostname()
    device: torch.device | None = None
    error: Exception | None = None
    try:
        device = choose()
        gpu = ""
        if device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(device).uuid)
        report = DeviceReport(host, str(device), gpu)
    # Also CUDA's own errors, so that the other ranks do not wait for this one.
    except Exception as caught:
        error = caught
        report = DeviceReport(host, error=f"{type(caught).__name__}: {caught}")

    # This rank's own error says more than the report of another rank.
    reports = gather(report)
    if error is not None:
        raise error
    failed = {rank: report.error for rank, report in enumerate(reports) if report.error}
    if failed:
        raise PeerError("choosing a device", failed)
    require_devices_of_their_own(reports)
    assert device is not None
    return device


def require_devices_of_their_own(reports: Sequence[DeviceReport]) -> None:
    """Raise ConfigError unless all ranks use the CPU, or each rank uses another GPU."""
    on_cpu = [rank for rank, report in enumerate(reports) if not report.gpu]
    if 0 < len(on_cpu) < len(reports):
        hosts = sorted({reports[rank].host for rank in on_cpu})
        raise ConfigError(
            f"rank(s) {on_cpu} on {', '.join(hosts)} see no GPU, the other "
            f"{len(reports) - len(on_cpu)} do; give each rank one, or set config key 'device' to "
            "'cpu'"
        )
    users = defaultdict(list)
    for rank, report in enumerate(reports):
        users[report.gpu].append(rank)
    for gpu, ranks in users.items():
        if gpu and len(ranks) > 1:
            raise ConfigError(
                f"ranks {ranks} on {reports[ranks[0]].host} have chosen the same GPU, {gpu}: "
                "start no more ranks than there are GPUs, and set LOCAL_RANK to each rank's place "
                "on its host; or set config key 'device' to 'cpu'"
            )


def free_cached_memory(device: torch.device) -> None:
    """Free unused memory, and return cached GPU memory to other processes and engines on the
    device.

    The collection (0.2 s) is needed because the modules of a sharded model and their hooks form
    reference cycles.
    """
    gc.collect()
    if device.type == "cuda":
        # It imports FSDP, which takes a second, and a worker that does not train needs no FSDP.
        from .compat.torch_private import free_matrix_workspaces

        free_matrix_workspaces()
        torch.cuda.empty_cache()
