"""One update from the gradients that are there: clipped, and left out when they are not finite."""

import math

import torch
from torch import nn

from ...utils.logging import get_logger
from .counters import EngineCounters
from .distributed import clip_grad_norm

logger = get_logger(__name__)


def clip_and_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    counters: EngineCounters,
    loss: torch.Tensor,
    weight: float = 1.0,
    correction: float = 0.0,
) -> tuple[float, float, bool]:
    """Clip and update, and count it; see `clip_grad_norm` for the arguments.

    Returns:
        the loss over all ranks, the norm of the gradient, and whether that was no number, so that nothing was updated.
    """
    loss_sum, grad_norm = clip_grad_norm(model, max_norm, loss, weight, correction).tolist()  # a step's one wait
    skipped = not math.isfinite(grad_norm)
    if skipped:
        counters.skipped_steps += 1
        logger.warning("gradient norm is %s: update skipped (%d so far)", grad_norm, counters.skipped_steps)
    else:
        optimizer.step()
        counters.optimizer_steps += 1
        counters.steps_since_schedule += 1
    optimizer.zero_grad()
    return loss_sum, grad_norm, skipped
