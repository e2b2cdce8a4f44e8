"""Cut a rank's share of a batch into packed micro-batches of about equal token counts, and restore
results.

Sequences are ragged, so padded rows waste compute (2.3 times measured on a ragged batch of 8) and
equal row counts waste memory. Rows are therefore concatenated without padding and balanced by
tokens (`partition`). Every rank gets the same number of micro-batches, because each forward is a
collective under FSDP. Ties go to the lower index, so the result is deterministic. Cost: one copy of
the batch and one small collective.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from ...utils.distributed import RankGroup, gather_numbers_of, get_rank
from ...utils.errors import BatchError
from ..api import Batch, LossWeightFn, Trajectories
from ..config import MicroBatchSpec
from ..memory.tensors import bytes_of, memory_of
from .batch import (
    ROUTES,
    join_trajectories,
    refuse_images,
    refuse_unknown_tokens,
    sequence_lengths,
    validate_batch,
)
from .packed_batch import MicroBatch, expand_to_tokens, pack_rows
from .partition import partition_within, split_until, warn_of_long_rows
from .route_replay import RouteRules
from .shared_prompts import Prompts, Unit, find_prompts
from .vision import Vision

_ROUNDING = 1e-3
"""Relative difference between the numbers of ranks with the same data that counts as rounding."""


@dataclass(frozen=True)
class WeighedBatch:
    """This rank's micro-batches (as many on every rank) and their weights in the loss (0 for a
    dummy).

    ``total`` is the sum of the weights over all data, as known when the ranks agreed. So are the
    sums ``n_tokens``, of whole sequences, and ``attention_flops`` (see `CutRules`). ``correction``
    is the excess of this rank's weights over its part of ``total``. It is not 0 only if the batch
    was then cut further and ``loss_weight_fn`` gives the parts of a micro-batch another total
    weight. ``tree_token_ratio`` is the number of tokens in all rows, divided by that of whole
    sequences. ``has_routes``: whether the batch of any rank has `ROUTES`.
    """

    micro_batches: list[MicroBatch]
    weights: list[float]
    total: float
    correction: float
    n_tokens: float
    attention_flops: float
    tree_token_ratio: float
    has_routes: bool

    def statistics(self, shares_prompts: bool) -> dict[str, float]:
        """Numbers of micro-batches and of this rank's tokens, and ``tree_token_ratio`` if rows
        share prompts.
        """
        n_mbs = float(len(self.micro_batches))
        n_tokens = sum(mb.n_tokens for mb in self.micro_batches if not mb.is_dummy)
        stats = {
            "n_mbs": n_mbs,
            "num_micro_batches": n_mbs,
            "n_tokens": float(n_tokens),
        }
        if shares_prompts:
            stats["tree_token_ratio"] = self.tree_token_ratio
        return stats

    def shares(self, device: torch.device) -> list[tuple[MicroBatch, float]]:
        """Micro-batches on the device, each with its share of ``total``."""
        pairs = zip(self.micro_batches, self.weights, strict=True)
        return [(mb.to(device), weight / self.total) for mb, weight in pairs]


def no_flops(lengths: Sequence[int]) -> float:
    """Nothing, for models whose operations are not counted."""
    return 0.0


@dataclass(frozen=True)
class CutRules:
    """What a model and its ranks require of micro-batches.

    Attributes:
        row_tokens: see `MicroBatch`.
        max_model_len: most tokens of a sequence. None: no limit.
        ranks_with_same_data: number of consecutive ranks that are given the same batch.
        vision: how the model takes images. None: it is trained on text.
        n_known_tokens: token ids of the model are below it. None: not known.
        shares_prompts: whether a prompt is once in a row. See `shared_prompts`.
        routes: what the model requires of `ROUTES`. None: it does not replay them.
        needs_routes: whether a batch must have them.
        attention_flops: operations of attention for sequences of these lengths. See `Speed`.
    """

    row_tokens: int = 0
    max_model_len: int | None = None
    ranks_with_same_data: int = 1
    vision: Vision | None = None
    n_known_tokens: int | None = None
    shares_prompts: bool = False
    routes: RouteRules | None = None
    needs_routes: bool = False
    attention_flops: Callable[[Sequence[int]], float] = no_flops


NO_RULES = CutRules()


def split_batch(
    batch: Trajectories,
    spec: MicroBatchSpec,
    group: RankGroup = None,
    rules: CutRules = NO_RULES,
) -> list[MicroBatch]:
    """Cut this rank's ``batch`` into packed micro-batches, the same number on every rank of
    ``group``.

    The number is at least ``spec.n_mbs`` and keeps each micro-batch within
    ``spec.max_tokens_per_mb`` (only a single longer sequence exceeds it). The largest comes first,
    so that ranks work on similar sizes at the same time. A rank with fewer sequences than
    micro-batches adds dummies.

    Args:
        batch: a padded batch, or a list of them to be joined. Without ``loss_mask``, every token
            except the first of a sequence counts.
        spec: limits and algorithm.
        group: ranks that must agree on the number. None: the default group (or no other rank).
        rules: what the model and its ranks require.

    Raises:
        BatchError: see `validate_batch`, `join_trajectories` and `refuse_unknown_tokens`. Or
            ``spec.granularity`` does not divide the number of sequences, or a sequence is longer
            than ``rules.max_model_len``. The other ranks raise `PeerError`. Or ranks with the same
            data were given different batches. All ranks raise this.
    """

    def no_weight(data: Batch) -> Tensor:
        return torch.zeros(())

    cutter = _Cutter(batch, spec, no_weight, rules)
    return _cut_together(cutter, group).micro_batches


def split_and_weigh(
    batch: Trajectories,
    spec: MicroBatchSpec,
    loss_weight_fn: LossWeightFn,
    group: RankGroup = None,
    rules: CutRules = NO_RULES,
) -> WeighedBatch:
    """`split_batch`, and the weight of each micro-batch, in the same collective.

    Raises:
        BatchError: no token counts on any rank. Or see `split_batch`. The other ranks raise
            `PeerError`.
        Exception: ``loss_weight_fn`` raised it. The other ranks raise `PeerError`. If it only fails
            when this rank cuts further because another rank has more micro-batches, the others wait
            for the group's timeout.
    """
    cutter = _Cutter(batch, spec, loss_weight_fn, rules)
    weighed = _cut_together(cutter, group)
    # All ranks know the total, so that all raise.
    if not weighed.total > 0:
        raise BatchError(
            f"no token of the batch counts: the loss weights of all ranks add up to {weighed.total}"
        )
    return weighed


class _Announced(NamedTuple):
    """The first cut of a rank, as the others hear of it."""

    n_mbs: float
    weight: float
    bits: float  # `_Cutter.fingerprint`, 0 if no other rank has the same data
    magnitude: float
    n_tokens: float
    n_row_tokens: float
    attention_flops: float
    has_routes: float


def _cut_together(cutter: "_Cutter", group: RankGroup) -> WeighedBatch:
    n_alike = cutter.rules.ranks_with_same_data

    def cut() -> _Announced:
        n_mbs, weight = cutter.cut()
        bits, magnitude = cutter.fingerprint() if n_alike > 1 else (0.0, 0.0)
        flops = cutter.attention_flops()
        routed = cutter.has_routes()
        return _Announced(n_mbs, weight, bits, magnitude, *cutter.tokens(), flops, routed)

    n_numbers = len(_Announced._fields)
    rows = gather_numbers_of("cutting the batch into micro-batches", cut, n_numbers, group)
    announced = [_Announced(*row) for row in rows]

    # Ranks with the same data must have been given the same, but for rounding.
    for rank, own in enumerate(announced):
        head = rank - rank % n_alike
        expected = announced[head]
        is_close = isclose(own.magnitude, expected.magnitude, rel_tol=_ROUNDING)
        if own.bits != expected.bits or not is_close:
            raise BatchError(
                f"ranks {head} and {rank} share their data ({n_alike} ranks do), but "
                "were given different batches; give both the same, for instance "
                "engine.broadcast_batch(batch)"
            )

    # Every rank needs as many as the one with the most. Data of several ranks counts once.
    n_mbs = max(int(own.n_mbs) for own in announced)
    micro_batches, weights = cutter.cut_further(n_mbs)
    heads = announced[::n_alike]
    total = sum(own.weight for own in heads)
    correction = sum(weights) - announced[get_rank(group)].weight
    n_tokens = sum(own.n_tokens for own in heads)
    flops = sum(own.attention_flops for own in heads)
    ratio = sum(own.n_row_tokens for own in heads) / n_tokens
    return WeighedBatch(
        micro_batches=micro_batches,
        weights=weights,
        total=total,
        correction=correction,
        n_tokens=n_tokens,
        attention_flops=flops,
        tree_token_ratio=ratio,
        has_routes=any(own.has_routes for own in announced),
    )


class PackedBin(NamedTuple):
    """Units of rows, packed into one micro-batch, and its weight in the loss."""

    units: tuple[int, ...]
    micro_batch: MicroBatch
    weight: float


class _Cutter:
    """Cuts a batch, and later cuts it further. Only new parts are packed and weighed.

    Bins contain units: of ``spec.granularity`` adjacent rows, or families that share a prompt.
    """

    def __init__(
        self,
        batch: Trajectories,
        spec: MicroBatchSpec,
        loss_weight_fn: LossWeightFn,
        rules: CutRules,
    ) -> None:
        self.rules = rules
        self._given = batch
        self._spec = spec
        self._loss_weight_fn = loss_weight_fn
        self._batch: Batch = {}
        self._pixels: list[Batch] = []
        self._lengths: list[int] = []
        self._prompts: Prompts | None = None
        self._units: list[Unit] = []
        self._packed: list[PackedBin] = []

    def cut(self) -> tuple[float, float]:
        """Cut into as few micro-batches as the limits allow. Return their number and weight."""
        self._batch = join_trajectories(self._given)
        self._check()

        # A row costs its tokens, and those of its images once more.
        costs = self._lengths
        vision = self.rules.vision
        if vision is None:
            refuse_images(self._batch)
        else:
            most = self._spec.max_tokens_per_mb
            self._batch, self._pixels, costs = vision.prepare(self._batch, self._lengths, most)

        if self.rules.shares_prompts:
            self._prompts = find_prompts(self._batch, self._lengths)
            self._units = self._prompts.families(self._spec)
        else:
            step = self._spec.granularity
            for start in range(0, len(costs), step):
                rows = range(start, start + step)
                self._units.append(Unit(list(rows), sum(costs[row] for row in rows)))
        self._pack(partition_within(self._unit_lengths, self._spec))
        total = sum(packed.weight for packed in self._packed)
        return len(self._packed), total

    @property
    def _unit_lengths(self) -> list[int]:
        return [unit.n_tokens for unit in self._units]

    def tokens(self) -> tuple[float, float]:
        """Tokens of this rank's sequences, and of its rows."""
        n_tokens = sum(self._lengths)
        if self._prompts is None:
            return n_tokens, n_tokens
        return n_tokens, sum(self._unit_lengths)

    def attention_flops(self) -> float:
        """Operations of attention for this rank's sequences."""
        return self.rules.attention_flops(self._lengths)

    def has_routes(self) -> bool:
        """Whether this rank's batch has `ROUTES` that are not empty."""
        return ROUTES in self._batch and self._batch[ROUTES].numel() > 0

    def _check(self) -> None:
        """Check the batch, and note the lengths of its rows."""
        validate_batch(self._batch)
        rules = self.rules
        if rules.n_known_tokens is not None:
            image_token = None if rules.vision is None else rules.vision.image_token
            refuse_unknown_tokens(self._batch, rules.n_known_tokens, image_token)

        if rules.routes is not None:
            self._batch = rules.routes.check(self._batch, rules.needs_routes)

        self._lengths = sequence_lengths(self._batch)
        longest = max(self._lengths)
        limit = rules.max_model_len
        if limit is not None and longest > limit:
            raise BatchError(
                f"row {self._lengths.index(longest)} of the batch has {longest} tokens; expected "
                f"at most {limit}, which is config key 'max_model_len' or, when that is null, the "
                "length of the model's rotary frequencies; set it to the --max-model-len of the "
                "inference servers, or cut sequences"
            )

        step = self._spec.granularity
        if len(self._lengths) % step:
            raise BatchError(
                f"the batch has {len(self._lengths)} sequences, which config key "
                f"'mb_spec.granularity' ({step}) does not divide; give it whole groups of them"
            )

    def fingerprint(self) -> tuple[float, float]:
        """53 bits of a hash of all integers in the batch, and the sum of the magnitudes of all
        other numbers.

        The others may differ by rounding where ranks computed them (log-probabilities, advantages).
        """
        bits = xxhash.xxh3_64()
        magnitude = 0.0
        for key in sorted(self._batch):
            value = self._batch[key].cpu()
            if value.is_floating_point():
                total = value.nan_to_num().abs().sum(dtype=torch.float64)
                magnitude += float(total)
            else:
                bits.update(key.encode())
                bits.update(memory_of(bytes_of(value.contiguous())))
        # A float64 holds integers of 53 bits.
        return float(bits.intdigest() >> 11), magnitude

    def cut_further(self, n_mbs: int) -> tuple[list[MicroBatch], list[float]]:
        """Cut into ``n_mbs``, rounded up as the spec requires. Return the micro-batches, largest
        first, and their weights. Dummies follow if there are too few sequences.
        """
        n_mbs = self._spec.rounded(n_mbs)
        n_bins = min(n_mbs, len(self._units))
        bins = [list(packed.units) for packed in self._packed]
        self._pack(split_until(bins, n_bins, self._unit_lengths))
        if self._spec.max_tokens_per_mb is None:
            rows = [self._rows(packed.units) for packed in self._packed]
            warn_of_long_rows(rows, self._lengths)

        micro_batches = [packed.micro_batch for packed in self._packed]
        weights = [packed.weight for packed in self._packed]
        # Every forward is a collective, so this rank takes part without a loss.
        n_dummies = n_mbs - len(micro_batches)
        micro_batches += [micro_batches[0].first_token()] * n_dummies
        weights += [0.0] * n_dummies
        return micro_batches, weights

    def _pack(self, bins: list[list[int]]) -> None:
        # Packing and weighing are the expensive part, so bins of an earlier, coarser cut are kept.
        by_units = {packed.units: packed for packed in self._packed}

        # The largest bins come first, so that the ranks meet their long micro-batches together.
        ordered = [tuple(units) for units in sorted(bins, key=self._largest_first)]

        # All new bins are weighed together, which waits for the device once.
        new_bins = [units for units in ordered if units not in by_units]
        new_micro_batches = [self._pack_rows(units) for units in new_bins]
        new_weights = weigh(new_micro_batches, self._loss_weight_fn)
        new = zip(new_bins, new_micro_batches, new_weights, strict=True)
        for units, micro_batch, weight in new:
            by_units[units] = PackedBin(units, micro_batch, weight)

        self._packed = [by_units[units] for units in ordered]

    def _largest_first(self, units: Sequence[int]) -> tuple[int, int]:
        n_tokens = sum(self._units[unit].n_tokens for unit in units)
        return -n_tokens, units[0]

    def _pack_rows(self, units: Sequence[int]) -> MicroBatch:
        return pack_rows(
            self._batch,
            self._rows(units),
            self._lengths,
            self.rules.row_tokens,
            self.rules.vision,
            self._pixels,
            self._prompts,
        )

    def _rows(self, units: Sequence[int]) -> list[int]:
        return [row for unit in units for row in self._units[unit].rows]


def weigh(
    micro_batches: Sequence[MicroBatch],
    loss_weight_fn: LossWeightFn,
) -> list[float]:
    """Call ``loss_weight_fn`` for each micro-batch. Waits for the device once."""
    weights = []
    for mb in micro_batches:
        weight = torch.as_tensor(loss_weight_fn(mb.data), dtype=torch.float64)
        weights.append(weight.reshape(()))
    if not weights:
        return []

    # Some may be on the host. All go to the device, and back together.
    on_device = [weight.device for weight in weights if weight.is_cuda]
    device = on_device[0] if on_device else torch.device("cpu")
    moved = [weight.to(device, non_blocking=True) for weight in weights]
    return torch.stack(moved).tolist()


def unpack(
    outputs: Sequence[Tensor],
    micro_batches: Sequence[MicroBatch],
    batch_size: int,
    seqlen: int,
) -> Tensor:
    """Put per-token ``outputs``, one ``[T_i, ...]`` per micro-batch of `split_batch`, back into
    ``[B, S, ...]``.

    Padding is zero. Outputs of dummies are dropped.

    Raises:
        BatchError: an output does not have one row per token.
    """
    first = outputs[0]
    result = first.new_zeros((batch_size, seqlen, *first.shape[1:]))
    for output, mb in zip(outputs, micro_batches, strict=True):
        if output.shape[0] != mb.n_tokens:
            raise BatchError(
                f"an output of shape {list(output.shape)} for a micro-batch of {mb.n_tokens} tokens"
            )
        if mb.is_dummy:
            continue
        # The place of each token in the batch.
        rows = expand_to_tokens(mb.indices, mb.cu_seqlens, mb.n_tokens).to(output.device)
        positions = mb.position_ids.to(output.device)
        result[rows, positions] = output
    return result
