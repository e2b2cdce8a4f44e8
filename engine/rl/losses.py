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
from torch import Tensor

from ..api import Batch
from ..training.logprobs import token_logprobs
from ..training.packed_batch import expand_to_tokens

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios. A ratio beyond e^20 carries no information, and an infinite one would make
the gradient NaN.
"""

Stats = dict[str, Tensor]
"""Detached per-token tensors, averaged over the loss mask."""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` in float32, 0 outside ``mask``."""
    return torch.where(mask, values.float(), 0.0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is not 0. If it is 0 everywhere: 0, still connected to the
    graph.
    """
    mask = mask.bool()
    values = torch.where(mask, values, 0.0)
    n_tokens = mask.sum().clamp(min=1)
    return values.sum() / n_tokens


def count_loss_tokens(micro_batch: Batch) -> Tensor:
    """Weight of a micro-batch's mean: its number of loss tokens, a float32 scalar (a
    `LossWeightFn`).
    """
    mask = micro_batch["loss_mask"].bool()
    return mask.sum().float()


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Cross entropy: mean of ``-log p(token)`` over the loss tokens, a scalar."""
    return masked_mean(-logprobs, loss_mask)


def sft_loss_fn(output: Any, micro_batch: Batch) -> Tensor:
    """Loss of supervised fine-tuning (a `LossFn`): mean cross entropy over the loss tokens, a
    scalar.

    Example::

        engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    """
    input_ids = micro_batch["input_ids"]
    cu_seqlens = micro_batch["cu_seqlens"]
    logprobs, _ = token_logprobs(output, input_ids, cu_seqlens)
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


def with_loss_weights(
    batch: Batch,
    mode: str,
    loss_scale_factor: float | None,
) -> Batch:
    """Return the batch with ``loss_weights`` and ``loss_counts``, ``[B, S]`` float32, 0 outside its
    ``loss_mask``.

    ``mode`` is one of `LOSS_AGG_MODES`, and ``loss_scale_factor`` the L of
    ``seq-mean-token-sum-norm``.
    """
    mask = batch["loss_mask"].float()
    n_tokens = mask.sum(1, keepdim=True).clamp(min=1)
    # 1 / n_i and 1 / L at loss tokens, else 0.
    one_over_n = mask / n_tokens
    one_over_l = mask / (loss_scale_factor or 1.0)
    # Weights and counts, as in the table above.
    by_mode = {
        "token-mean": (mask, mask),
        "seq-mean-token-mean": (one_over_n, one_over_n),
        "seq-mean-token-sum": (mask, one_over_n),
        "seq-mean-token-sum-norm": (one_over_l, one_over_n),
    }
    weights, counts = by_mode[mode]
    return {
        **batch,
        "loss_weights": weights,
        "loss_counts": counts,
    }


def aggregate(losses: Tensor, micro_batch: Batch) -> Tensor:
    """Loss of a micro-batch with weight `count_losses`: a scalar, 0 (with a graph) without a loss
    token.

    ``losses`` are ``[T]`` or ``[B, S]``, the micro-batch is part of a batch of `with_loss_weights`.
    """
    mask = micro_batch["loss_mask"].bool()
    losses = torch.where(mask, losses, 0.0)
    total = (losses * micro_batch["loss_weights"]).sum()
    count = micro_batch["loss_counts"].sum()
    # Without a loss token the sum is 0, and has a graph.
    return total / torch.where(count > 0, count, 1.0)


def count_losses(micro_batch: Batch) -> Tensor:
    """Weight of the `aggregate` of this micro-batch, a float32 scalar (a `LossWeightFn`)."""
    return micro_batch["loss_counts"].sum()


def by_sequence(
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    agg: str = "mean",
) -> Tensor:
    """Give every token the ``agg`` (``mean``, ``sum`` or ``max``) of ``values`` ``[T]`` over its
    sequence's tokens in ``mask``.

    The result is 0 for sequences without such a token.
    """
    # The index of each token's sequence, [T], and the number of its tokens that count, [n].
    n_sequences = len(cu_seqlens) - 1
    zeros = values.new_zeros(n_sequences)
    numbers = torch.arange(n_sequences, device=values.device)
    sequence = expand_to_tokens(numbers, cu_seqlens, len(values))
    counts = zeros.index_add(0, sequence, mask.to(values.dtype))

    if agg == "max":
        counted = values.masked_fill(~mask, -torch.inf)
        largest = zeros.scatter_reduce(
            0,
            sequence,
            counted,
            "amax",
            include_self=False,
        )
        result = torch.where(counts > 0, largest, 0.0)
    else:
        counted = torch.where(mask, values, 0.0)
        result = zeros.index_add(0, sequence, counted)
        if agg == "mean":
            result = result / counts.clamp(min=1)
    return result[sequence]
