"""Where ranks meet: process groups, the device mesh, sharding with FSDP2, and the norm of a sharded gradient.

Two groups, because they fail differently: the default group (gloo on CPU, nccl on CUDA) carries tensors, and a gloo
group of its own carries control (agreement, decisions), so that a control message never waits behind, or deadlocks
with, a tensor collective.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..utils.errors import ConfigError
from .api import ParallelStrategy
from .config import TrainEngineConfig
from .model import COMPUTE_DTYPES


@dataclass
class ProcessGroups:
    """The groups an engine talks through.

    Attributes:
        control: gloo group of all ranks, for agreement.
        owns_default: the engine made the default group, so it also destroys it.
        device: where this rank computes.
    """

    control: dist.ProcessGroup
    owns_default: bool
    device: torch.device


def open_process_groups(strategy: ParallelStrategy | None, device_type: str, timeout_s: float) -> ProcessGroups:
    """Join the default group, or make it from the environment that torchrun sets (a world of one without it).

    Args:
        strategy: what the world should look like.
        device_type: ``auto``, ``cpu`` or ``cuda``; see `TrainEngineConfig.device`.
        timeout_s: longest wait in a collective of a group made here.

    Raises:
        ConfigError: the world is not of the size that ``strategy`` asks for, or there is no CUDA device where one was
            asked for.
    """
    timeout = timedelta(seconds=timeout_s)
    device = _choose_device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    owns_default = not dist.is_initialized()
    if owns_default:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    expected = strategy.data_parallel_size if strategy is not None else None
    if expected is not None and expected != dist.get_world_size():
        size = dist.get_world_size()
        if owns_default:
            dist.destroy_process_group()
        raise ConfigError(f"data_parallel_size is {expected}, but {size} rank(s) have joined; start {expected} ranks")
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return ProcessGroups(control, owns_default, device)


def _choose_device(device_type: str) -> torch.device:
    """The same type on every rank: a host has a device for each of its ranks, or none of them gets one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    needed = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_nccl = not dist.is_initialized() or "nccl" in str(dist.get_backend_config())
    usable = found >= needed and has_nccl
    if device_type == "cuda" and not usable:
        raise ConfigError(
            f"config key 'device' is 'cuda', but this host has {found} CUDA device(s) for {needed} rank(s), and the "
            f"default process group {'has' if has_nccl else 'lacks'} nccl"
        )
    return torch.device("cuda", local_rank) if usable and device_type != "cpu" else torch.device("cpu")


def close_process_groups(groups: ProcessGroups) -> None:
    """Leave the groups without waiting for anybody: a peer may be dead."""
    if not dist.is_initialized():
        return
    _let_gloo_finish()
    if groups.owns_default:
        dist.destroy_process_group()  # every group of this process
    else:
        dist.destroy_process_group(groups.control)


def _let_gloo_finish(patience_s: float = 1.0) -> None:
    """Wait until no thread of gloo still lets go of the tensors of a collective that has already returned.

    It needs the interpreter for that, and one that gets its turn after the interpreter has begun to end calls
    `std::terminate`: a job that has done all its work exits with SIGABRT (5 of 128 jobs did, with four ranks a core;
    pytorch#179291). Destroying a group joins its threads only if nobody else holds it, and DTensor's caches hold the
    mesh, which holds its group. A thread that slept all the while this one slept, and the interpreter was free, does
    not wait for it.
    """
    deadline = time.monotonic() + patience_s
    before = _gloo_threads()
    while time.monotonic() < deadline:
        time.sleep(0.01)  # longer than a thread waits before it asks for the interpreter again
        after = _gloo_threads()
        if after == before and all("State:\tS (sleeping)" in thread for thread in after):
            return
        before = after


def _gloo_threads() -> list[list[str]]:
    """State and number of sleeps of each, from the kernel; empty where there is no /proc."""
    threads = []
    for task in Path("/proc/self/task").glob("*/status"):
        try:
            status = task.read_text()
        except OSError:
            continue  # it has just ended
        if "pt_gloo_runloop" in status:
            threads.append([line for line in status.splitlines() if line.startswith(("State", "Pid", "voluntary"))])
    return threads


def shard_model(
    model: PreTrainedModel, config: TrainEngineConfig, blocks: tuple[type[nn.Module], ...], device: torch.device
) -> DeviceMesh:
    """Shard in place with FSDP2: one group of parameters a block, and one for the rest (embedding, norm, head).

    Parameters stay float32; each group is gathered and computed with in ``config.dtype`` and its gradient summed in
    ``config.grad_reduce_dtype``.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPES[config.dtype],
        reduce_dtype=COMPUTE_DTYPES[config.grad_reduce_dtype],
        cast_forward_inputs=False,  # some blocks are meant to be given float32: rotary angles, a residual stream
    )
    reshard = config.fsdp.reshard_after_forward
    for module in reversed(list(model.modules())):  # blocks inside blocks first, as fully_shard wants it
        if isinstance(module, blocks):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return mesh


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradient down to ``max_norm`` if it is longer; returns the global L2 norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
