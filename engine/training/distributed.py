"""Where ranks meet: process groups, the device mesh, sharding with FSDP2, and the norm of a sharded gradient.

Two groups, because they fail differently: the default group (gloo on CPU, nccl on CUDA) carries tensors, and a gloo
group of its own carries control (agreement, decisions), so that a control message never waits behind, or deadlocks
with, a tensor collective.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...utils.compat.torch_private import abort_process_group, fill_missing_gradients, foreach_mul_, foreach_norm
from ...utils.devices import CUDA_BACKEND, DeviceReport, agree_on_device, device_here
from ...utils.distributed import gather_objects
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..api import ParallelStrategy
from ..config import TrainEngineConfig
from .model import COMPUTE_DTYPES

logger = get_logger(__name__)

LEAVE_TOGETHER_S = 5.0
"""How long a rank that destroys its groups waits for the others to come and do the same, with NCCL."""
ABORT_S = 10.0
"""How long NCCL may take to abort."""
GLOO_PATIENCE_S = 1.0
"""How long to wait for gloo's threads to let go of tensors."""

_filled: WeakKeyDictionary[nn.Module, set[nn.Parameter]] = WeakKeyDictionary()
"""Parameters of each sharded model whose gradient on this rank is zeros alone; see `fill_missing_gradients`."""


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
        ConfigError: the world is not of the size that ``strategy`` asks for, or the ranks' devices do not go together;
            see `agree_on_device`.
        PeerError: other ranks have no device that they may use.
    """
    timeout = timedelta(seconds=timeout_s)
    expected = None if strategy is None else strategy.data_parallel_size
    owns_default = not dist.is_initialized()
    if owns_default:
        device = _make_default_group(device_type, expected, timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    else:
        _require_size(expected, dist.get_world_size())
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        device = agree_on_device(partial(device_here, device_type), partial(gather_objects, group=control))
        _use(device)
    assert isinstance(control, dist.ProcessGroup)
    return ProcessGroups(control, owns_default, device)


def _make_default_group(device_type: str, expected: int | None, timeout: timedelta) -> torch.device:
    """The ranks agree on their devices through the store, before there is a group: which one depends on them."""
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    _require_size(expected, world_size)
    # Under torchrun the store outlives a group: each group of a process has keys of its own.
    number = (store.add("holdfast/groups", 1) - 1) // world_size
    store = dist.PrefixStore(f"holdfast/{number}", store)
    device = agree_on_device(
        partial(device_here, device_type), partial(_gather_through, store, rank=rank, world_size=world_size)
    )
    cuda = device if device.type == "cuda" else None
    _use(device)
    dist.init_process_group(
        "gloo" if cuda is None else CUDA_BACKEND,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=cuda,
    )
    return device


def _gather_through(store: dist.Store, report: DeviceReport, *, rank: int, world_size: int) -> list[DeviceReport]:
    """Every rank's report, by way of the store; each rank reads what all have written."""
    store.set(f"device/{rank}", json.dumps(asdict(report)))
    reports = [DeviceReport(**json.loads(store.get(f"device/{other}"))) for other in range(world_size)]
    if store.add("device/readers", 1) == world_size:
        store.set("device/read", "")
    if rank == 0:
        store.get("device/read")  # its process may serve the store, and end because of what it has read
    return reports


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    logger.info("computing on %s%s of %s", device, name, socket.gethostname())


def _require_size(expected: int | None, found: int) -> None:
    if expected is not None and expected != found:
        raise ConfigError(f"data_parallel_size is {expected}, but {found} rank(s) have joined; start {expected} ranks")


def close_process_groups(groups: ProcessGroups) -> None:
    """Leave the groups without waiting for a peer that may be dead; with NCCL for `LEAVE_TOGETHER_S` at most."""
    if not dist.is_initialized():
        return
    together = not groups.owns_default or groups.device.type == "cpu" or _all_leave(groups.control)
    _let_gloo_finish()
    if not groups.owns_default:
        dist.destroy_process_group(groups.control)
    elif together:
        dist.destroy_process_group()  # every group of this process
    else:
        _abort()


def _all_leave(control: dist.ProcessGroup) -> bool:
    """Whether every rank is here. NCCL flushes what is under way and waits for the other ranks of the host before it
    lets go: for ever, when one of them is dead or stays."""
    try:
        dist.monitored_barrier(control, timeout=timedelta(seconds=LEAVE_TOGETHER_S))
    except RuntimeError as error:
        logger.warning("not all ranks leave together, so NCCL is aborted: %s", str(error).splitlines()[0])
        return False
    return True


def _abort() -> None:
    """Give up NCCL's communicators and every group of this process; what is under way in them fails."""
    thread = Thread(target=abort_process_group, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        logger.error("NCCL has not let go within %g s of the abort; its memory is freed when the process ends", ABORT_S)


def _let_gloo_finish() -> None:
    """Wait until no thread of gloo still lets go of the tensors of a collective that has already returned.

    It needs the interpreter for that, and one that gets its turn after the interpreter has begun to end calls
    `std::terminate`: a job that has done all its work exits with SIGABRT (5 of 128 jobs did, with four ranks a core;
    pytorch#179291). Destroying a group joins its threads only if nobody else holds it, and DTensor's caches hold the
    mesh, which holds its group. A thread that slept all the while this one slept, and the interpreter was free, does
    not wait for it.
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
    ``config.grad_reduce_dtype``. A parameter that only some ranks reach in a backward (an expert, a tower) gets their
    gradients, as long as all ranks go forward and back through the same blocks.
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
    if mesh.size() > 1:
        filled = _filled[model] = set()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                fill_missing_gradients(module, filled)
    return mesh


def unreached(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that have a gradient, but which no backward since the last step reached on this rank."""
    filled = _filled.get(model, set())
    return [param for param in model.parameters() if param.grad is not None and param in filled]


def clip_grad_norm(
    model: nn.Module, max_norm: float, loss: torch.Tensor, weight: float = 1.0, correction: float = 0.0
) -> torch.Tensor:
    """Scale the gradient down to ``max_norm`` if it is longer; nothing here waits for the device.

    One all-reduce: the loss, what turned out about the weights it was divided by, and which parameters were not
    reached travel with the norms of the parameters' gradients. Those are combined as torch's ``clip_grad_norm_`` does.

    Args:
        model: sharded by `shard_model`.
        max_norm: L2 norm over all parameters of all ranks.
        loss: this rank's part of the loss, a scalar on the device.
        weight: what loss and gradient were divided by; the same on every rank.
        correction: how much more it should have been because of this rank (see `WeighedBatch`).

    Returns:
        ``[2 + n]`` float64 on the device: the loss over all ranks, the norm of the gradient before it was scaled down,
        and for each of the n parameters that are `unreached` here the number of ranks that did not reach it.
    """
    params = [param for param in model.parameters() if param.grad is not None]
    grads = [param.grad for param in params]
    assert all(isinstance(grad, DTensor) and all(cut.is_shard() for cut in grad.placements) for grad in grads)
    local = [grad.to_local() for grad in grads]  # type: ignore[attr-defined]
    norms = torch.stack(foreach_norm(local, 2.0))
    n_grads, filled = len(grads), _filled.get(model, set())
    missing = [index for index, param in enumerate(params) if param in filled]
    n_without = norms.new_zeros(n_grads, dtype=torch.float64)
    for index in missing:  # one write each, but no copy from the host, which would wait
        n_without[index] = 1.0
    squares, numbers = norms.square().double(), (loss.double()[None], loss.new_full((1,), correction).double())
    sums = torch.cat([squares, n_without, *numbers])
    dist.all_reduce(sums, group=grads[0].device_mesh.get_group())  # type: ignore[union-attr]
    factor = weight / (weight + sums[-1])  # exactly 1 without a correction
    norm = torch.linalg.vector_norm(sums[:n_grads].to(norms.dtype).sqrt()) * factor.to(norms.dtype)
    foreach_mul_(local, torch.clamp(max_norm / (norm + 1e-6), max=1.0) * factor.to(norms.dtype))
    return torch.stack([sums[-2] * factor, norm.double(), *(sums[n_grads + index] for index in missing)])
