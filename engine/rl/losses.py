"""Aggregation of per-token losses, and the loss of supervised fine-tuning.

Per-token arguments have one common shape (``[T]`` packed, or ``[B, S]``), are computed in float32,
and are aligned with their token. Entries where ``loss_mask`` is 0 may be anything, even NaN: they
affect neither result nor gradient.

A step's loss is ``sum(weight * loss) / sum(count)`` over all loss tokens of all ranks and
micro-batches. Weights and counts enter the batch before it is cut, so the result does not depend on
the cut. The engine weighs a micro-batch by its sum of counts (`LossWeightFn`). With n_i loss tokens
in sequence i:

| mode | weight | count | the loss is |
|---|---|---|---|
| ``token-mean`` | 1 | 1 | the mean over tokens |
| ``seq-mean-token-mean`` | 1 / n_i | 1 / n_i | the mean over sequences of their means |
| ``seq-mean-token-sum`` | 1 | 1 / n_i | the mean over sequences of their sums |
| ``seq-mean-token-sum-norm`` | 1 / L | 1 / n_i | the same, divided by a constant L |

Sequences without a loss token do not count.
"""

from typing import Any

import torch

from ..api import Batch
from ..training.logprobs import token_logprobs
from ..training.microbatch import expand_to_tokens

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios. A ratio beyond e^20 carries no information, and an infinite one would make
the gradient NaN.
"""

Stats = dict[str, torch.Tensor]
"""Detached per-token tensors, averaged over the loss mask."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``values`` where ``mask`` is not 0. If it is 0 everywhere: 0, still connected to the
    graph.
    """
    mask = mask.bool()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def count_loss_tokens(micro_batch: Batch) -> torch.Tensor:
    """Weight of a micro-batch's mean: its number of loss tokens, a float32 scalar (a
    `LossWeightFn`).
    """
    return micro_batch["loss_mask"].bool().sum().float()


def sft_loss(logprobs: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Cross entropy: mean of ``-log p(token)`` over the loss tokens, a scalar."""
    return masked_mean(-logprobs, loss_mask)


def sft_loss_fn(output: Any, micro_batch: Batch) -> torch.Tensor:
    """Loss of supervised fine-tuning (a `LossFn`): mean cross entropy over the loss tokens, a
    scalar.

    Example::

        engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    """
    logprobs, _ = token_logprobs(output, micro_batch["input_ids"], micro_batch["cu_seqlens"])
    return sft_loss(logprobs, micro_batch["loss_mask"])


LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
"""verl's names. The last one is the constant length of Liu et al., "Understanding R1-Zero-Like
Training", 2025.
"""


def with_loss_weights(batch: Batch, mode: str, loss_scale_factor: float | None = None) -> Batch:
    """Return the batch with ``loss_weights`` and ``loss_counts``, ``[B, S]`` float32, 0 outside its
    ``loss_mask``.

    ``mode`` is one of `LOSS_AGG_MODES`, and ``loss_scale_factor`` the L of
    ``seq-mean-token-sum-norm``.
    """
    mask = batch["loss_mask"].float()
    by_sequence = mask / mask.sum(1, keepdim=True).clamp(min=1)
    weights, counts = {
        "token-mean": (mask, mask),
        "seq-mean-token-mean": (by_sequence, by_sequence),
        "seq-mean-token-sum": (mask, by_sequence),
        "seq-mean-token-sum-norm": (mask / (loss_scale_factor or 1.0), by_sequence),
    }[mode]
    return {**batch, "loss_weights": weights, "loss_counts": counts}


def aggregate(losses: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
    """Loss of a micro-batch with weight `count_losses`: a scalar, 0 (with a graph) without a loss
    token.

    ``losses`` are ``[T]`` or ``[B, S]``, the micro-batch is part of a batch of `with_loss_weights`.
    """
    mask = micro_batch["loss_mask"].bool()
    total = (torch.where(mask, losses, 0.0) * micro_batch["loss_weights"]).sum()
    counts = micro_batch["loss_counts"].sum()
    return total / torch.where(counts > 0, counts, 1.0)


def count_losses(micro_batch: Batch) -> torch.Tensor:
    """Weight of the `aggregate` of this micro-batch, a float32 scalar (a `LossWeightFn`)."""
    return micro_batch["loss_counts"].sum()


def by_sequence(
    values: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, agg: str = "mean"
) -> torch.Tensor:
    """Give every token the ``agg`` (``mean``, ``sum`` or ``max``) of ``values`` ``[T]`` over its
    sequence's tokens in ``mask``.

    The result is 0 for sequences without such a token.
    """
    zeros = values.new_zeros(len(cu_seqlens) - 1)
    sequence = expand_to_tokens(torch.arange(len(zeros), device=values.device), cu_seqlens)
    counts = zeros.index_add(0, sequence, mask.to(values.dtype))
    if agg == "max":
        largest = zeros.scatter_reduce(
            0, sequence, values.masked_fill(~mask, -torch.inf), "amax", include_self=False
        )
        return torch.where(counts > 0, largest, 0.0)[sequence]
    sums = zeros.index_add(0, sequence, torch.where(mask, values, 0.0))
    return (sums / counts.clamp(min=1) if agg == "mean" else sums)[sequence]
