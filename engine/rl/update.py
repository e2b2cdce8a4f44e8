"""Shared by the updates of actor and critic: mini-batches that all ranks agree on, and statistics
over all ranks.

A mini-batch is one optimizer step, and every step is a collective. A rank with fewer sequences than
mini-batches joins with a token of weight 0. No sequence is dropped.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import harmonic_mean

import torch
from torch import Tensor

from ...utils.distributed import any_rank
from ...utils.errors import BatchError
from ...utils.metrics import SPEED_STATS
from ..api import Batch, LossFn, LossWeightFn, TrainEngine
from ..config import MicroBatchSpec
from ..training.batch import (
    IMAGES,
    ROUTES,
    TOKEN_TYPES,
    require_shape_per_token,
    select_rows,
    sequence_lengths,
    with_images,
)
from ..training.partition import partition
from ..training.route_replay import ROUTE_STATS
from ..training.routers import ROUTER_STATS
from ..training.shared_prompts import find_prompts
from .losses import Stats


class TokenStats:
    """Sums of per-token statistics, kept on the device until `reduce` (no synchronisation per
    micro-batch).
    """

    def __init__(self) -> None:
        self._totals: defaultdict[str, Tensor | float] = defaultdict(float)

    def add(self, stats: Stats, loss_mask: Tensor) -> None:
        """Add one micro-batch: tensors in the shape of ``loss_mask``. Entries outside the mask are
        ignored.
        """
        mask = loss_mask.bool()
        n_tokens = mask.sum().double()
        for name, values in stats.items():
            counted = torch.where(mask, values.detach(), 0.0)
            self._totals[f"sum {name}"] += counted.sum(dtype=torch.float64)
            self._totals[f"tokens {name}"] += n_tokens

    def reduce(self, engine: TrainEngine, names: tuple[str, ...]) -> dict[str, float]:
        """Means of ``names`` over the loss tokens of all ranks that added them. Others are left
        out. Collective.
        """
        keys = [f"{what} {name}" for what in ("sum", "tokens") for name in names]
        own = {key: float(self._totals[key]) for key in keys}
        reduced = engine.all_reduce_stats(own)

        # A name that no rank added has no tokens.
        means = {}
        for name in names:
            n_tokens = reduced[f"tokens {name}"]
            if n_tokens:
                means[name] = reduced[f"sum {name}"] / n_tokens
        return means


@contextmanager
def all_ranks_accept(engine: TrainEngine) -> Iterator[None]:
    """Run the checks of a batch on every rank. A rank that fails raises its own error, and the
    others a `BatchError`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught

    refused = count_ranks(engine, error is not None)
    if error is not None:
        raise error
    if refused:
        raise BatchError(
            f"{refused:.0f} other rank(s) refused their share of the batch; their errors say why"
        )


def count_ranks(engine: TrainEngine, flag: bool) -> float:
    """Number of ranks with the flag, the same on every rank. Ranks with the same data count as one,
    although they may have been given other batches.
    """
    peers = getattr(engine, "context_and_model_parallel_group", None)
    if peers is not None:
        flag = any_rank(flag, peers)
    return engine.all_reduce_stats({"flag": float(flag)})["flag"]


def require_on_all_or_none(engine: TrainEngine, batch: Batch, key: str) -> None:
    """Raise `BatchError` on all ranks if only some of them have an entry ``key``. Collective."""
    has_entry = key in batch
    n_with = count_ranks(engine, has_entry)
    n_without = count_ranks(engine, not has_entry)
    if n_with and n_without:
        raise BatchError(
            f"{n_with:.0f} rank(s) have {key!r} in their share of the batch, and {n_without:.0f} "
            "do not; give it to all ranks, or to none"
        )


INPUTS = ("input_ids", "attention_mask", IMAGES, TOKEN_TYPES, ROUTES)
"""Entries of a batch that the model reads."""


def loss_mask_of(batch: Batch) -> Tensor:
    """``[B, S]`` bool: the loss mask (else the attention mask) without padding and without first
    tokens.
    """
    attended = batch["attention_mask"].bool()
    mask = batch.get("loss_mask", attended).bool() & attended
    mask[:, 0] = False
    return mask


def require_per_token(
    batch: Batch,
    key: str,
    loss_mask: Tensor,
    hint: str,
) -> None:
    """Raise `BatchError` unless the entry ``key`` is ``[B, S]`` and finite at loss tokens.

    If it is missing, the message ends with ``hint``.
    """
    if key not in batch:
        raise BatchError(f"the batch has no {key!r}; {hint}")
    require_shape_per_token(batch, (key,))
    # Values of other tokens may be anything.
    is_bad = ~torch.isfinite(batch[key].float()) & loss_mask
    rows = is_bad.any(1).nonzero().flatten().tolist()
    if rows:
        raise BatchError(f"batch[{key!r}] is NaN or infinite at loss tokens of row(s) {rows[:8]}")


def split_minibatches(
    batch: Batch, n_minibatches: int, shares_prompts: bool = False
) -> list[Batch]:
    """Cut a padded batch into exactly ``n_minibatches`` with about equal token counts,
    deterministically.

    Rows keep their order. With too few sequences the last ones contain only the first token of row
    0, with loss mask 0. If a micro-batch ``shares_prompts``, rows with the same prompt stay
    together, unless there are fewer prompts than mini-batches.
    """
    lengths = sequence_lengths(batch)
    n_parts = min(n_minibatches, len(lengths))
    if shares_prompts:
        spec = MicroBatchSpec(n_mbs=n_parts, max_tokens_per_mb=None)
        families = find_prompts(batch, lengths).families(spec)
        bins = partition([family.n_tokens for family in families], n_parts, "kk")
        parts = [sorted(row for unit in units for row in families[unit].rows) for units in bins]
    else:
        parts = partition(lengths, n_parts, "kk")
    # Rows keep their order.
    parts.sort(key=lambda rows: rows[0])
    minibatches = [select_rows(batch, rows) for rows in parts]
    return minibatches + [_filler(batch)] * (n_minibatches - n_parts)


def _filler(batch: Batch) -> Batch:
    """The first token of row 0, with loss mask 0."""
    filler = {}
    for key, tensor in with_images(batch, None).items():
        first_row = tensor[:1]
        filler[key] = first_row[:, :1] if tensor.dim() >= 2 else first_row
    filler["loss_mask"] = torch.zeros_like(filler["input_ids"])
    if IMAGES not in batch:
        return filler

    # The token may be an image's, which the row does not have.
    for key in ("input_ids", TOKEN_TYPES):
        if key in filler:
            filler[key] = torch.zeros_like(filler[key])
    return with_images(filler, [{}])


def train_minibatches(
    engine: TrainEngine,
    batch: Batch,
    n_minibatches: int,
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    prepare: Callable[[Batch], Batch] | None = None,
    shares_prompts: bool = False,
) -> dict[str, float]:
    """Take one optimizer step for each mini-batch that has a loss token on any rank. The caller
    advances the schedule.

    Args:
        engine: steps once per mini-batch.
        batch: this rank's share, with an explicit ``loss_mask``.
        n_minibatches: the same on every rank.
        loss_fn, loss_weight_fn: see `LossFn`, `LossWeightFn`. The weight of a micro-batch with a
            loss token is not 0.
        prepare: changes each mini-batch right before its step. May be a collective.
        shares_prompts: see `split_minibatches`.

    Returns:
        ``loss`` (weighted by loss tokens), ``grad_norm`` (mean over applied steps), ``lr`` (of the
        last step), ``n_updates``, ``update_skipped`` (steps that the engine refused),
        ``update_successful`` (share of the other steps, as in AReaL), means of the `ROUTER_STATS`
        of a model with experts and of ``tree_token_ratio``, the `ROUTE_STATS` of the first step,
        ``n_tokens``, ``n_loss_tokens`` and ``n_seqs`` (over all ranks). ``tokens_per_second`` and
        ``mfu`` (see `Speed`) of all steps together, as mini-batches have about equal numbers of
        tokens.

    Raises:
        BatchError: no rank has a loss token.
    """
    minibatches = split_minibatches(batch, n_minibatches, shares_prompts)

    # One collective for all counts over ranks: loss tokens of each mini-batch, and of the batch its
    # tokens and sequences.
    weights = {}
    for i, minibatch in enumerate(minibatches):
        weights[str(i)] = float(loss_mask_of(minibatch).sum())
    own = {
        "n_tokens": float(sum(sequence_lengths(batch))),
        "n_seqs": float(len(batch["input_ids"])),
    }
    totals = engine.all_reduce_stats({**weights, **own})
    n_loss_tokens = sum(totals[key] for key in weights)
    if not n_loss_tokens:
        raise BatchError(
            "the batch has no loss token on any rank: loss_mask is 0 everywhere but at first "
            "tokens. With mask_truncated_completions, answers that were cut off have none: allow "
            "them more tokens (max_new_tokens), or set it to false"
        )

    # All ranks skip the same mini-batches, because each step is a collective.
    results = []
    loss = 0.0
    for i, minibatch in enumerate(minibatches):
        weight = totals[str(i)]
        if not weight:
            continue
        if prepare is not None:
            minibatch = prepare(minibatch)
        results.append(engine.train_batch(minibatch, loss_fn, loss_weight_fn))
        loss += weight * results[-1]["loss"]

    # The mean norm of applied steps. If there is none, that of the last step.
    n_updates = len(results)
    applied = [result for result in results if not result["update_skipped"]]
    applied = applied or results[-1:]
    n_skipped = sum(float(result["update_skipped"]) for result in results)
    stats = {
        "loss": loss / n_loss_tokens,
        "grad_norm": sum(result["grad_norm"] for result in applied) / len(applied),
        "lr": results[-1]["lr"],
        "n_updates": float(n_updates),
        "update_skipped": n_skipped,
        "update_successful": 1.0 - n_skipped / n_updates,
    }
    for name in (*ROUTER_STATS, "tree_token_ratio"):
        if name in results[0]:
            stats[name] = sum(step[name] for step in results) / n_updates
    # Later steps have other weights than the servers.
    for name in ROUTE_STATS:
        if name in results[0]:
            stats[name] = results[0][name]
    for name in SPEED_STATS:
        if name in results[0]:
            stats[name] = harmonic_mean(step[name] for step in results)
    for key in own:
        stats[key] = totals[key]
    stats["n_loss_tokens"] = n_loss_tokens
    return stats


def mean_over_ranks(engine: TrainEngine, values: Tensor | None) -> float:
    """Mean of all entries over all ranks, NaN if no rank has any. Collective."""
    if values is None:
        values = torch.empty(0)
    own = {
        "sum": values.double().sum().item(),
        "count": float(values.numel()),
    }
    reduced = engine.all_reduce_stats(own)
    if not reduced["count"]:
        return math.nan
    return reduced["sum"] / reduced["count"]
