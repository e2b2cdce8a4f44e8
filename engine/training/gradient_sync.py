"""When the gradients of several micro-batches travel between ranks.

Either each backward reduce-scatters its gradients (``every``), or the last one of a step reduces
the sum (``last``). The latter saves traffic, and until then every rank keeps the whole gradient,
however many ranks there are.

With replicas (HSDP) and ``every``, each backward reduces inside of a replica, and FSDP2 keeps the
sharded sum of the micro-batches. The all-reduce between replicas, which crosses nodes, runs in the
last backward alone. This takes no more memory than the gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ...utils.compat.torch_private import (
    drop_partial_gradients,
    has_partial_gradients,
    recover_from_failed_backward,
)
from ...utils.distributed import gather_numbers
from ...utils.logging import get_logger
from ..config import TrainEngineConfig
from ..memory.tensors import fsdp_modules
from .meshes import Meshes
from .model import COMPUTE_DTYPES
from .process_groups import ProcessGroups

logger = get_logger(__name__)

ALWAYS_AFFORDABLE_BYTES = 2 << 30
"""Size of a whole gradient that ``auto`` always accepts."""
AFFORDABLE_SHARE = 0.05
"""Share of the memory of a GPU that ``auto`` accepts."""


def choose_last(config: TrainEngineConfig, n_bytes: int, memory: float) -> bool:
    """Whether gradients are summed over ranks in the last backward of a step alone, as
    ``fsdp.gradient_sync`` says.

    ``auto`` does so if the gradient is summed in float32, and its ``n_bytes`` are few on a GPU with
    ``memory`` bytes (0: a CPU), or of adapters alone. In bfloat16 the sum of the micro-batches
    would lose bits, too.
    """
    choice = config.fsdp.gradient_sync
    if choice != "auto":
        return choice == "last"
    affordable = max(ALWAYS_AFFORDABLE_BYTES, int(AFFORDABLE_SHARE * memory))
    is_small = config.use_lora or n_bytes <= affordable
    return is_small and config.grad_reduce_dtype == "float32"


def syncs_last(model: nn.Module, config: TrainEngineConfig, groups: ProcessGroups) -> bool:
    """`choose_last` for the GPU with the least memory, or False for one rank. Collective."""
    # Memory of a whole gradient
    itemsize = COMPUTE_DTYPES[config.grad_reduce_dtype].itemsize
    n_elements = 0
    for param in model.parameters():
        if param.requires_grad:
            n_elements += param.numel() // groups.meshes.n_parts(param)
    n_bytes = itemsize * n_elements

    # Memory of the smallest GPU
    memory = 0
    if groups.device.type == "cuda":
        memory = torch.cuda.get_device_properties(groups.device).total_memory
    memories = [theirs for (theirs,) in gather_numbers([memory], groups.control)]

    last = choose_last(config, n_bytes, min(memories))
    n_ranks = dist.get_world_size()
    if n_ranks > 1 and dist.get_rank() == 0:
        when = "in every micro-batch; once a step would take"
        if last:
            when = "once a step, which takes"
        logger.info(
            "gradients are summed over ranks %s %d bytes on each (gradient_sync: %s)",
            when,
            n_bytes,
            config.fsdp.gradient_sync,
        )
    return last and n_ranks > 1


@contextmanager
def accumulating(
    model: nn.Module, n_backwards: int, meshes: Meshes, sync_last: bool
) -> Iterator[Callable[[int], None]]:
    """Accumulate the gradients of several micro-batches. Call the yielded function with the number
    of each, from 0, before its backward.

    If the block raises, all gradients are dropped, so that the next step does not add them.

    Raises:
        RuntimeError: the last micro-batch did not run a block that an earlier one did, so that the
            sum over replicas of its gradient is missing.
    """
    modules = fsdp_modules(model)
    last = n_backwards - 1
    defers = sync_last or meshes.strategy.replicate_size > 1

    # Between the first and the last backward nothing is to be switched.
    def before(number: int) -> None:
        if defers and last > 0 and number in (0, last):
            for module in modules:
                switch = module.set_requires_all_reduce
                if sync_last:
                    switch = module.set_requires_gradient_sync
                switch(number == last, recurse=False)

    try:
        yield before
        if any(map(has_partial_gradients, modules)):
            raise RuntimeError(
                "a block that an earlier micro-batch ran was left out of the last one, so its "
                "gradient was not summed over the copies of the model; set fsdp.gradient_sync to "
                "'last', or fsdp.replicate_size to 1"
            )
    except BaseException:
        # The next step starts from the usual settings, without gradients of this one.
        before(last)
        recover_from_failed_backward(model)
        drop_partial(model)
        model.zero_grad()
        raise


def drop_partial(model: nn.Module) -> None:
    """Drop gradients that FSDP2 keeps until a later backward. ``zero_grad`` does not reach them."""
    for module in fsdp_modules(model):
        drop_partial_gradients(module)
