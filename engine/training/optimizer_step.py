"""One update from the present gradients: clipped, and left out when they are not finite."""

import math

import torch
import torch.distributed as dist
from torch import nn

from ...utils.logging import get_logger
from .counters import EngineCounters
from .distributed import clip_grad_norm, unreached

logger = get_logger(__name__)


def clip_and_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    counters: EngineCounters,
    loss: torch.Tensor,
    weight: float = 1.0,
    correction: float = 0.0,
) -> dict[str, float]:
    """Clip and update, and count it. See `clip_grad_norm` for the arguments.

    Parameters that no rank reached are not updated, as without sharding.

    Returns:
        ``loss`` (over all ranks), ``grad_norm`` (before clipping), ``lr`` (of this step), and ``update_skipped`` (0 or
        1), also as AReaL's ``update_successful``: 1 when the norm was finite.
    """
    lr = float(optimizer.param_groups[0]["lr"])
    result = clip_grad_norm(model, max_norm, loss, weight, correction)
    loss_sum, grad_norm, *n_without = result.tolist()  # a step's one wait
    for param, n_ranks in zip(unreached(model), n_without, strict=True):
        if n_ranks == dist.get_world_size():
            param.grad = None
    skipped = not math.isfinite(grad_norm)
    if skipped:
        counters.skipped_steps += 1
        logger.warning("gradient norm is %s: update skipped (%d so far)", grad_norm, counters.skipped_steps)
    else:
        optimizer.step()
        counters.optimizer_steps += 1
        counters.steps_since_schedule += 1
    optimizer.zero_grad()
    updated = {"update_skipped": float(skipped), "update_successful": float(not skipped)}
    return {"loss": loss_sum, "grad_norm": grad_norm, "lr": lr, **updated}
