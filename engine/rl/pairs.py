"""What reward models and DPO share: pairs of an answer that was chosen and one that was rejected, side by side.

Rows 2i and 2i + 1 of a batch are a pair, chosen first. With ``mb_spec.granularity: 2`` no micro-batch tears one apart;
a loss that finds a torn one says so. A pair in which a row has no loss token counts for nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...utils.errors import BatchError, ConfigError
from ..api import Batch, LossFn, TrainEngine
from ..config import MicroBatchSpec
from ..training.batch import validate_batch
from .advantages import check_groups
from .losses import Stats, by_sequence
from .update import TokenStats, all_ranks_accept, loss_mask_of, require_per_token


def spec_of_pairs(spec: MicroBatchSpec) -> MicroBatchSpec:
    """The spec with a ``granularity`` that keeps pairs together: 2, unless it is a multiple of it.

    Raises:
        ConfigError: it is odd and not 1.
    """
    if spec.granularity == 1:
        return replace(spec, granularity=2)
    if spec.granularity % 2:
        raise ConfigError(
            f"config key 'mb_spec.granularity' is {spec.granularity}, which tears pairs apart; expected a multiple of 2"
        )
    return spec


def require_pairs(engine: TrainEngine, batch: Batch, per_token: Sequence[tuple[str, str]] = ()) -> Batch:
    """The batch with ``pairs``, ``[B]`` int64, which pair each row is of, and ``pair_counts``, ``[B]`` float32, 1 for
    both rows of a pair that counts and else 0; and with the effective ``loss_mask``. Collective.

    Args:
        engine: whose ranks each have a share.
        batch: padded.
        per_token: entries that it must have, and what is said where one is missing.

    Raises:
        BatchError: it cannot be packed, an entry is missing or not finite at a loss token, its rows are not whole
            pairs, or the batch of another rank was refused.
    """
    with all_ranks_accept(engine):
        validate_batch(batch)
        check_groups(len(batch["input_ids"]), 2)
        mask = loss_mask_of(batch)
        for key, hint in per_token:
            require_per_token(batch, key, mask, hint)
    counts = mask.any(1).reshape(-1, 2).all(1).repeat_interleave(2).float()
    pairs = torch.arange(len(counts), device=counts.device) // 2
    return {**batch, "loss_mask": mask, "pairs": pairs, "pair_counts": counts}


def count_pairs(micro_batch: Batch) -> torch.Tensor:
    """The weight of a micro-batch's mean: its pairs that count, a float32 scalar (a `LossWeightFn`)."""
    return micro_batch["pair_counts"][::2].sum()


def mean_over_pairs(losses: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
    """Mean of ``[n]`` losses over the pairs that count; 0, with a graph, without any."""
    counts = micro_batch["pair_counts"][::2]
    return torch.where(counts > 0, losses, 0.0).sum() / counts.sum().clamp(min=1)


def of_pairs(values: torch.Tensor, micro_batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """``[2n]`` numbers of sequences as those of the chosen and of the rejected ones, both ``[n]``.

    Raises:
        BatchError: the micro-batch holds half of a pair.
    """
    pairs = micro_batch["pairs"]
    if len(pairs) % 2 or not torch.equal(pairs[::2], pairs[1::2]):
        raise BatchError(
            "a micro-batch holds half of a pair; the engine's config key 'mb_spec.granularity' must be 2, as "
            "RewardModelConfig and DPOConfig set it"
        )
    return values[::2], values[1::2]


def at_last_token(values: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
    """``[T]`` -> ``[sequences]``, what stands at the last token of each."""
    return values[micro_batch["cu_seqlens"][1:].long() - 1]


def sum_of_tokens(values: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
    """``[T]`` -> ``[sequences]``, the sum over the loss tokens of each; elsewhere anything may stand."""
    mask = micro_batch["loss_mask"].bool()
    return at_last_token(by_sequence(values, mask, micro_batch["cu_seqlens"], "sum"), micro_batch)


class PairStats(TokenStats):
    """Statistics of pairs, averaged over those that count, of all ranks."""

    def add_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor, micro_batch: Batch) -> None:
        """Add the ``[n]`` scores of a micro-batch: ``chosen`` and ``rejected``, ``margin``, and ``accuracy``, the share
        of pairs whose chosen answer has the higher score."""
        seen: Stats = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}
        seen["accuracy"] = (chosen > rejected).float()
        self.add(seen, micro_batch["pair_counts"][::2])

    def of_ranks(self, engine: TrainEngine) -> dict[str, float]:
        """The means; a collective."""
        return self.reduce(engine, ("chosen", "rejected", "margin", "accuracy"))


def train_pairs(engine: TrainEngine, batch: Batch, loss_fn: LossFn, stats: PairStats) -> dict[str, float]:
    """One optimizer step on a batch of `require_pairs`, and the statistics."""
    result = engine.train_batch(batch, loss_fn, count_pairs)
    return {**result, **stats.of_ranks(engine)}


def evaluate_pairs(engine: TrainEngine, batch: Batch, loss_fn: LossFn, stats: PairStats) -> dict[str, float]:
    """``loss`` without a step, and the statistics."""
    loss = float(engine.eval_batch(batch, loss_fn, count_pairs))
    return {"loss": loss, **stats.of_ranks(engine)}
