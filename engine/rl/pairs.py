"""Shared by reward models and DPO: pairs of a chosen and a rejected answer.

Rows 2i and 2i + 1 of a batch are a pair, chosen first. With ``mb_spec.granularity: 2`` no
micro-batch separates them, and the loss raises an error if one does. A pair with a row without loss
tokens does not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...utils.errors import BatchError, ConfigError
from ..api import Batch, LossFn, TrainEngine
from ..config import MicroBatchSpec
from ..training.batch import validate_batch
from .advantages import check_groups
from .losses import by_sequence
from .update import TokenStats, all_ranks_accept, loss_mask_of, require_per_token


def spec_of_pairs(spec: MicroBatchSpec) -> MicroBatchSpec:
    """Return the spec with a ``granularity`` of 2 instead of 1. `ConfigError` if it is another odd
    number.
    """
    if spec.granularity == 1:
        return replace(spec, granularity=2)
    # Rows 2i and 2i + 1 stay together in any even number of rows.
    if spec.granularity % 2:
        raise ConfigError(
            f"config key 'mb_spec.granularity' is {spec.granularity}, which tears pairs apart; "
            "expected a multiple of 2"
        )
    return spec


def require_pairs(
    engine: TrainEngine,
    batch: Batch,
    per_token: Sequence[tuple[str, str]] = (),
) -> Batch:
    """Check a batch of pairs, and add the entries that the losses need. Collective.

    Adds ``pairs`` ``[B]`` int64 (pair index of each row), ``pair_counts`` ``[B]`` float32 (1 for
    both rows of a pair that counts, else 0), and the effective ``loss_mask``. ``per_token`` lists
    required per-token entries, each with the hint in its error message.

    Raises:
        BatchError: the batch cannot be packed, an entry is missing or not finite at a loss token,
            the rows are not whole pairs, or another rank refused its share.
    """
    with all_ranks_accept(engine):
        validate_batch(batch)
        check_groups(len(batch["input_ids"]), 2)
        mask = loss_mask_of(batch)
        for key, hint in per_token:
            require_per_token(batch, key, mask, hint)

    # A pair counts if both of its rows have a loss token.
    has_loss = mask.any(1)
    pair_counts = has_loss.reshape(-1, 2).all(1)
    counts = pair_counts.repeat_interleave(2).float()
    pairs = torch.arange(len(counts), device=counts.device) // 2
    return {
        **batch,
        "loss_mask": mask,
        "pairs": pairs,
        "pair_counts": counts,
    }


def count_pairs(micro_batch: Batch) -> Tensor:
    """Weight of a micro-batch's mean: its number of pairs that count, a float32 scalar (a
    `LossWeightFn`).
    """
    return micro_batch["pair_counts"][::2].sum()


def mean_over_pairs(losses: Tensor, micro_batch: Batch) -> Tensor:
    """Mean of ``[n]`` losses over the pairs that count. If none counts: 0, with a graph."""
    counts = micro_batch["pair_counts"][::2]
    # Losses of pairs that do not count may be NaN.
    total = torch.where(counts > 0, losses, 0.0).sum()
    return total / counts.sum().clamp(min=1)


def of_pairs(values: Tensor, micro_batch: Batch) -> tuple[Tensor, Tensor]:
    """Split ``[2n]`` numbers of sequences into chosen and rejected, both ``[n]``. `BatchError` if
    half a pair is in.
    """
    pairs = micro_batch["pairs"]
    is_whole = len(pairs) % 2 == 0 and torch.equal(pairs[::2], pairs[1::2])
    if not is_whole:
        raise BatchError(
            "a micro-batch holds half of a pair; the engine's config key 'mb_spec.granularity' "
            "must be 2, as RewardModelConfig and DPOConfig set it"
        )
    return values[::2], values[1::2]


def at_last_token(values: Tensor, micro_batch: Batch) -> Tensor:
    """``[T]`` -> ``[sequences]``, the value at the last token of each."""
    ends = micro_batch["cu_seqlens"][1:].long()
    return values[ends - 1]


def sum_of_tokens(values: Tensor, micro_batch: Batch) -> Tensor:
    """``[T]`` -> ``[sequences]``, the sum over the loss tokens of each. Ignores other values."""
    mask = micro_batch["loss_mask"].bool()
    sums = by_sequence(values, mask, micro_batch["cu_seqlens"], "sum")
    return at_last_token(sums, micro_batch)


class PairStats(TokenStats):
    """Statistics averaged over the pairs that count, on all ranks."""

    def add_pairs(
        self,
        chosen: Tensor,
        rejected: Tensor,
        micro_batch: Batch,
    ) -> None:
        """Add the ``[n]`` scores of a micro-batch. ``accuracy`` is the share of pairs with a
        positive ``margin``.
        """
        # [n], of pairs that do not count, too
        margin = chosen - rejected
        seen = {
            "chosen": chosen,
            "rejected": rejected,
            "margin": margin,
            "accuracy": (chosen > rejected).float(),
        }
        self.add(seen, micro_batch["pair_counts"][::2])

    def of_ranks(self, engine: TrainEngine) -> dict[str, float]:
        """Means over all ranks. Collective."""
        return self.reduce(engine, ("chosen", "rejected", "margin", "accuracy"))


def train_pairs(
    engine: TrainEngine,
    batch: Batch,
    loss_fn_of: Callable[[PairStats], LossFn],
) -> dict[str, float]:
    """Take one optimizer step on a batch of `require_pairs`. Return its result and statistics."""
    stats = PairStats()
    result = engine.train_batch(batch, loss_fn_of(stats), count_pairs)
    return {**result, **stats.of_ranks(engine)}


def evaluate_pairs(
    engine: TrainEngine,
    batch: Batch,
    loss_fn_of: Callable[[PairStats], LossFn],
) -> dict[str, float]:
    """``loss`` without a step, and the statistics."""
    stats = PairStats()
    loss = float(engine.eval_batch(batch, loss_fn_of(stats), count_pairs))
    return {"loss": loss, **stats.of_ranks(engine)}
