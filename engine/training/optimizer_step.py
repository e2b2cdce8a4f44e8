"""One update from the current gradients: clip them, then step unless they are not finite.

A step waits for the device once, when the host reads its numbers. The wait could not be left out
for every optimizer. Only torch's fused kernels take a flag on the device that skips an update and
its count (``found_inf``). The others have none, and adam_bf16 reads its counts on the host. The
host also has to know which parameters no rank reached, whether the norm must be computed again in
float64, and whether the schedule advances.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import foreach_mul_, foreach_norm
from ...utils.errors import BatchError
from ...utils.logging import get_logger
from ..memory.tensors import counts_here
from .counters import EngineCounters
from .sharding import zero_filled
from .tensor_parallel import sum_partial_gradients

logger = get_logger(__name__)

NO_GRADIENT = (
    "no loss of any rank depends on the model, so that there is no gradient for a step; compute "
    "the loss from the output of the model, and do not detach it"
)
"""Message of a step without a gradient."""


def clip_and_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    counters: EngineCounters,
    loss: Tensor,
    weight: float = 1.0,
    correction: float = 0.0,
    more: Mapping[str, Tensor] | None = None,
    n_losses: int = 1,
) -> dict[str, float]:
    """Clip the gradients, update, and count it. See `clip_grad_norm` for the arguments.

    ``more`` are scalars on the device, the same on all ranks, which are read together with the norm
    and returned.

    Parameters that no rank reached are not updated, as without sharding. Returns ``loss`` (over all
    ranks), ``grad_norm`` (before clipping), ``lr`` (for this step), ``update_skipped`` (0 or 1) and
    its complement ``update_successful``.

    Raises:
        BatchError: on all ranks. No loss of any rank depends on the model. Nothing was changed.
    """
    lr = float(optimizer.param_groups[0]["lr"])
    sum_partial_gradients(model)
    clip = partial(
        clip_grad_norm,
        model,
        max_norm,
        loss,
        weight,
        correction,
        n_losses,
    )

    # All numbers of the step are read at once, which is its only wait for the device.
    more = more or {}
    result = clip()
    others = [value.double()[None] for value in more.values()]
    numbers = torch.cat([result, *others]).tolist()
    loss_sum, grad_norm, n_reached, *n_without = numbers[: len(result)]
    more_numbers = numbers[len(result) :]

    if n_reached == 0:
        optimizer.zero_grad()
        raise BatchError(NO_GRADIENT)

    # All ranks see the same norm, so all come here or none.
    if math.isinf(grad_norm):
        grad_norm = clip(dtype=torch.float64).tolist()[1]

    # What no rank reached is not updated, and nothing is if the gradient is not finite.
    unreached = parameters_without_gradient(model)
    for param, n_ranks in zip(unreached, n_without, strict=True):
        if n_ranks == dist.get_world_size():
            param.grad = None
    skipped = not math.isfinite(grad_norm)
    if skipped:
        counters.skipped_steps += 1
        logger.warning(
            "gradient norm is %s: update skipped (%d so far)",
            grad_norm,
            counters.skipped_steps,
        )
    else:
        optimizer.step()
        counters.optimizer_steps += 1
        counters.steps_since_schedule += 1
    optimizer.zero_grad()

    return {
        "loss": loss_sum,
        "grad_norm": grad_norm,
        "lr": lr,
        "update_skipped": float(skipped),
        "update_successful": float(not skipped),
        **dict(zip(more, more_numbers, strict=True)),
    }


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    loss: Tensor,
    weight: float = 1.0,
    correction: float = 0.0,
    n_losses: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Scale the gradient down if its L2 norm over all ranks exceeds ``max_norm``. Nothing here
    waits for the device.

    ``loss`` is this rank's part of the loss, a scalar on the device. ``weight`` is the divisor of
    loss and gradient, the same on every rank, and ``correction`` its excess on this rank (see
    `WeighedBatch`). ``n_losses`` is the number of losses on this rank that depend on the model. One
    all-reduce carries everything. Norms are combined as in torch's ``clip_grad_norm_``. With
    ``fsdp.offload_params`` gradients are in host memory, and this waits for the device.

    In the dtype of the gradients the squares of a norm above 1.8e19 are infinite. The gradients
    then stay as they are. ``dtype`` float64 clips them, in several times the time.

    Returns:
        ``[3 + n]`` float64 on the device. They are the loss over all ranks, the gradient norm
        before clipping, the number of losses on all ranks, and for each of the n parameters that
        are `parameters_without_gradient` here the number of ranks that did not reach it.

    Raises:
        BatchError: no parameter has a gradient. Without a backward there is none on any rank.
    """
    params = [param for param in model.parameters() if param.grad is not None]
    if not params:
        raise BatchError(NO_GRADIENT)
    grads = [param.grad for param in params]
    assert all(map(_is_reduced, grads)), (
        "a gradient was not reduced; after an error in a backward, call initialize again"
    )
    local = [grad.to_local() for grad in grads]  # type: ignore[union-attr]

    # The norm of each gradient, or 0 where another rank has the same part and counts it.
    zero = local[0].new_zeros((), dtype=dtype)
    own_norms = foreach_norm(local, 2.0, dtype=dtype)
    counted = []
    for grad, norm in zip(grads, own_norms, strict=True):
        is_counted = counts_here(grad)  # type: ignore[arg-type]
        counted.append(norm if is_counted else zero)
    norms = torch.stack(counted).to(loss.device)

    # 1 for each gradient that no backward reached here. One write each, because a copy from the
    # host would wait.
    n_grads = len(grads)
    filled = zero_filled.of(model) or set()
    missing = [index for index, param in enumerate(params) if param in filled]
    n_without = norms.new_zeros(n_grads, dtype=torch.float64)
    for index in missing:
        n_without[index] = 1.0

    # One all-reduce carries everything.
    sums = torch.cat(
        [
            norms.square().double(),
            n_without,
            loss.double()[None],
            loss.new_full((1,), n_losses).double(),
            loss.new_full((1,), correction).double(),
        ]
    )
    dist.all_reduce(sums)
    loss_sum, n_reached, correction_sum = sums[-3:]
    squares = sums[:n_grads].to(norms.dtype)

    # The factor corrects the weight that the losses were divided by. It is exactly 1 without a
    # correction.
    factor = weight / (weight + correction_sum)
    norm = torch.linalg.vector_norm(squares.sqrt())
    norm = norm * factor.to(norms.dtype)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale = scale * factor.to(norms.dtype)
    scale = torch.where(norm.isfinite(), scale, 1.0)
    foreach_mul_(local, scale.to(local[0].device))

    n_ranks_without = [sums[n_grads + index] for index in missing]
    return torch.stack([loss_sum * factor, norm.double(), n_reached, *n_ranks_without])


def _is_reduced(grad: Any) -> bool:
    if not isinstance(grad, DTensor):
        return False
    return not any(placement.is_partial() for placement in grad.placements)


def parameters_without_gradient(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with a gradient that no backward since the last step reached on this rank."""
    filled = zero_filled.of(model) or set()
    params = [param for param in model.parameters() if param.grad is not None]
    return [param for param in params if param in filled]
