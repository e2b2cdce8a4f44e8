"""One update from the current gradients: clip them, then step unless they are not finite."""

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
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
    loss: torch.Tensor,
    weight: float = 1.0,
    correction: float = 0.0,
    more: Mapping[str, torch.Tensor] | None = None,
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
    clip = partial(clip_grad_norm, model, max_norm, loss, weight, correction, n_losses)
    result = clip()
    more = more or {}
    tensors = [result, *(value.double()[None] for value in more.values())]
    numbers = torch.cat(tensors).tolist()  # the only wait of a step
    loss_sum, grad_norm, n_reached, *n_without = numbers[: len(result)]
    if n_reached == 0:
        optimizer.zero_grad()
        raise BatchError(NO_GRADIENT)

    # All ranks see the same norm, so all come here or none.
    if math.isinf(grad_norm):
        grad_norm = clip(dtype=torch.float64).tolist()[1]

    # What no rank reached is not updated, and nothing is if the gradient is not finite.
    for param, n_ranks in zip(parameters_without_gradient(model), n_without, strict=True):
        if n_ranks == dist.get_world_size():
            param.grad = None
    skipped = not math.isfinite(grad_norm)
    if skipped:
        counters.skipped_steps += 1
        logger.warning(
            "gradient norm is %s: update skipped (%d so far)", grad_norm, counters.skipped_steps
        )
    else:
        optimizer.step()
        counters.optimizer_steps += 1
        counters.steps_since_schedule += 1
    optimizer.zero_grad()
    updated = {"update_skipped": float(skipped), "update_successful": float(not skipped)}
    others = dict(zip(more, numbers[len(result) :], strict=True))
    return {"loss": loss_sum, "grad_norm": grad_norm, "lr": lr, **updated, **others}


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    loss: torch.Tensor,
    weight: float = 1.0,
    correction: float = 0.0,
    n_losses: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
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
    assert all(
        isinstance(grad, DTensor) and not any(cut.is_partial() for cut in grad.placements)
        for grad in grads
    ), "a gradient was not reduced; after an error in a backward, call initialize again"
    local = [grad.to_local() for grad in grads]  # type: ignore[union-attr]
    zero = local[0].new_zeros((), dtype=dtype)
    counted = [counts_here(grad) for grad in grads]  # type: ignore[arg-type]
    own = foreach_norm(local, 2.0, dtype=dtype)
    norms = torch.stack([norm if here else zero for norm, here in zip(own, counted, strict=True)])
    norms = norms.to(loss.device)
    n_grads, filled = len(grads), zero_filled.get(model, set())
    missing = [index for index, param in enumerate(params) if param in filled]
    n_without = norms.new_zeros(n_grads, dtype=torch.float64)
    for index in missing:  # one write each, because a copy from the host would wait
        n_without[index] = 1.0
    numbers = [
        loss.double()[None],
        *(loss.new_full((1,), each).double() for each in (n_losses, correction)),
    ]
    sums = torch.cat([norms.square().double(), n_without, *numbers])
    dist.all_reduce(sums)
    factor = weight / (weight + sums[-1])  # exactly 1 without a correction
    norm = torch.linalg.vector_norm(sums[:n_grads].to(norms.dtype).sqrt()) * factor.to(norms.dtype)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0) * factor.to(norms.dtype)
    scale = torch.where(norm.isfinite(), scale, 1.0).to(local[0].device)
    foreach_mul_(local, scale)
    return torch.stack(
        [sums[-3] * factor, norm.double(), sums[-2], *(sums[n_grads + index] for index in missing)]
    )


def parameters_without_gradient(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with a gradient that no backward since the last step reached on this rank."""
    filled = zero_filled.get(model, set())
    return [param for param in model.parameters() if param.grad is not None and param in filled]
