"""Cuts a rank's share of a batch into packed micro-batches of about equal token counts, and puts results back.

Sequences are ragged, so padded rows waste compute (2.3 times measured on a ragged batch of 8) and equal row counts
waste memory. Here the rows of a micro-batch are concatenated without padding, `partition` balances the tokens,
and every rank gets the same number of micro-batches, because each forward is a collective under FSDP. All of it is
deterministic: ties go to the lower index. Cost: one copy of the batch, and two tiny collectives.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

from ...utils.distributed import all_ranks_succeed, gather_objects
from ...utils.errors import BatchError
from ...utils.logging import get_logger
from ..api import Batch, LossWeightFn
from ..config import MicroBatchSpec

logger = get_logger(__name__)

LONG_ROW_TOKENS = 16384
"""A row of several sequences that is longer, and that nothing limits, is warned about."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, packed.

    Attributes:
        data: what loss functions see. Tensors that were ``[B, S, ...]`` are ``[T, ...]``: the rows one after another
            without padding; those that were ``[B]`` are ``[n]``. Always holds ``input_ids``, ``attention_mask``,
            ``loss_mask`` (0 at the first token of every sequence, which nothing predicts), ``position_ids`` ``[T]``
            int64 (restarts at 0 with every sequence) and ``cu_seqlens`` ``[n + 1]`` int32 (sequence ``i`` is
            ``[cu_seqlens[i]:cu_seqlens[i + 1]]``).
        indices: ``[n]`` int64, the rows of the original batch; empty for a dummy.
        longest: tokens of the longest sequence.
        is_dummy: one token with loss mask 0, there only so that this rank joins its peers' collectives.
    """

    data: Batch
    indices: torch.Tensor
    longest: int
    is_dummy: bool = False

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """``[n + 1]`` int32 boundaries of the sequences."""
        return self.data["cu_seqlens"]

    @property
    def position_ids(self) -> torch.Tensor:
        """``[T]`` int64 position of every token in its sequence."""
        return self.data["position_ids"]

    @property
    def n_tokens(self) -> int:
        """T."""
        return self.position_ids.shape[0]

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch on ``device``."""
        ahead = torch.device(device).type == "cuda"  # the host would read what has not arrived yet
        data = {key: tensor.to(device, non_blocking=ahead) for key, tensor in self.data.items()}
        return replace(self, data=data, indices=self.indices.to(device, non_blocking=ahead))

    def first_token(self) -> "MicroBatch":
        """A dummy: the first token, with every other number 0."""
        data = {key: torch.zeros_like(tensor[:1]) for key, tensor in self.data.items()}
        data |= {key: self.data[key][:1] for key in ("input_ids", "attention_mask")}
        data["cu_seqlens"] = torch.arange(2, dtype=torch.int32, device=self.cu_seqlens.device)
        return MicroBatch(data, self.indices[:0], longest=1, is_dummy=True)

    @property
    def rows(self) -> torch.Tensor:
        """``[T]`` int64, which of its sequences each token is of."""
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(numbers, lengths, output_size=self.n_tokens)

    def padded(self) -> Batch:
        """``input_ids`` and ``attention_mask``, ``[n, longest]`` int64, for a model that cannot be packed.

        ``output[mb.rows, mb.position_ids]`` brings the model's ``[n, longest, ...]`` output to ``[T, ...]``.
        """
        input_ids = self.position_ids.new_zeros((len(self.cu_seqlens) - 1, self.longest))
        mask, places = input_ids.clone(), (self.rows, self.position_ids)
        input_ids[places], mask[places] = self.data["input_ids"].long(), 1
        return {"input_ids": input_ids, "attention_mask": mask}


def validate_batch(batch: Batch) -> None:
    """Check that a batch can be packed.

    Raises:
        BatchError: ``input_ids`` or ``attention_mask`` is missing, not ``[B, S]`` or of a wrong dtype; there are no
            sequences; a mask row is not ones followed by zeros, or has no token; another entry is no tensor, or
            neither ``[B, S, ...]`` nor ``[B]``. The message names the key and the rows.
    """
    for key in ("input_ids", "attention_mask"):
        if key not in batch:
            raise BatchError(f"the batch has no {key!r}; it has {sorted(batch)}")
    for key, tensor in batch.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(f"batch[{key!r}] is a {type(tensor).__name__}; expected a torch.Tensor")
    input_ids, mask = batch["input_ids"], batch["attention_mask"]
    if input_ids.dim() != 2:
        raise BatchError(f"batch['input_ids'] has shape {list(input_ids.shape)}; expected [batch, seqlen]")
    if input_ids.dtype not in _INTEGERS:
        raise BatchError(f"batch['input_ids'] has dtype {input_ids.dtype}; expected token ids of an integer dtype")
    if input_ids.numel() == 0:
        raise BatchError(f"the batch is empty: batch['input_ids'] has shape {list(input_ids.shape)}")
    if mask.shape != input_ids.shape:
        raise BatchError(f"batch['attention_mask'] has shape {list(mask.shape)}, input_ids {list(input_ids.shape)}")
    for key, tensor in batch.items():
        if tensor.shape != input_ids.shape[:1] and tensor.shape[:2] != input_ids.shape:
            expected = f"{list(input_ids.shape)} (per token) or {list(input_ids.shape[:1])} (per sequence)"
            raise BatchError(f"batch[{key!r}] has shape {list(tensor.shape)}; expected {expected}")
    _validate_mask(mask)


def _validate_mask(mask: torch.Tensor) -> None:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BatchError("batch['attention_mask'] holds values other than 0 and 1")
    mask = mask.bool()
    if bool((empty := ~mask.any(dim=1)).any()):
        raise BatchError(f"row(s) {_rows(empty)} have no token: batch['attention_mask'] is all zeros there")
    if bool((ragged := (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)).any()):
        raise BatchError(
            f"row(s) {_rows(ragged)} are not right-padded: each row of batch['attention_mask'] must be ones, then zeros"
        )


def _rows(flags: torch.Tensor) -> str:
    rows = flags.nonzero().flatten().tolist()
    return ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")


def split_batch(batch: Batch, spec: MicroBatchSpec, group: dist.ProcessGroup | None = None) -> list[MicroBatch]:
    """Cut this rank's ``batch`` into packed micro-batches, as many on every rank of ``group``.

    There are at least ``spec.n_mbs`` of them, and as many more as keep each within ``spec.max_tokens_per_mb`` (only
    a single longer sequence exceeds it). The largest comes first, so that what runs at the same time on
    different ranks is of like size. A rank with fewer sequences than micro-batches fills up with dummies.

    Args:
        batch: padded; without ``loss_mask``, every token but the first of a sequence counts.
        spec: limits and algorithm.
        group: ranks that must agree on the number; None is the default group (or no other rank at all).

    Raises:
        BatchError: see `validate_batch`; the other ranks raise `PeerError`.
    """
    with all_ranks_succeed("cutting the batch into micro-batches", group):
        validate_batch(batch)
        lengths = sequence_lengths(batch)
        bins = _partition_within(lengths, spec)
    n_mbs = max(spec.n_mbs, *gather_objects(len(bins), group))
    bins = _split_until(bins, min(n_mbs, len(lengths)), lengths)
    if spec.max_tokens_per_mb is None:
        _warn_of_long_rows(bins, lengths)
    bins.sort(key=lambda rows: (-sum(lengths[row] for row in rows), rows[0]))
    micro_batches = [_pack(batch, rows, lengths) for rows in bins]
    return micro_batches + [micro_batches[0].first_token()] * (n_mbs - len(bins))


def _warn_of_long_rows(bins: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    longest = max((sum(lengths[row] for row in rows) for rows in bins if len(rows) > 1), default=0)
    if longest > LONG_ROW_TOKENS:
        _warn_of_row_longer_than(1 << (longest.bit_length() - 1))


@cache
def _warn_of_row_longer_than(n_tokens: int) -> None:
    """Once a process for each power of two."""
    logger.warning(
        "several sequences are packed into a row of more than %d tokens, because config key "
        "'mb_spec.max_tokens_per_mb' is null: with attn_impl sdpa or eager, attention takes %.2g GiB or more for the "
        "mask alone; set the key (its default is %d)",
        n_tokens, n_tokens**2 / 2**30, MicroBatchSpec().max_tokens_per_mb,
    )  # fmt: skip


def weigh(micro_batches: Sequence[MicroBatch], loss_weight_fn: LossWeightFn) -> list[float]:
    """What ``loss_weight_fn`` gives for each micro-batch, 0 for a dummy; one wait for the device in all."""
    numbers = [loss_weight_fn(mb.data) for mb in micro_batches if not mb.is_dummy]
    given = [torch.as_tensor(number, dtype=torch.float64).reshape(()) for number in numbers]
    device = next((weight.device for weight in given if weight.is_cuda), torch.device("cpu"))  # they may be on both
    weights = torch.stack([weight.to(device, non_blocking=True) for weight in given]).tolist()
    return weights + [0.0] * (len(micro_batches) - len(given))  # dummies come last


def unpack(
    outputs: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], batch_size: int, seqlen: int
) -> torch.Tensor:
    """Put per-token results back where `split_batch` took the tokens from.

    Args:
        outputs: one ``[T_i, ...]`` tensor a micro-batch; what a dummy gave is dropped.
        micro_batches: what `split_batch` returned, in the same order.
        batch_size: B.
        seqlen: S.

    Returns:
        ``[B, S, ...]`` of the outputs' dtype, zeros at padding.

    Raises:
        BatchError: an output has not one row a token.
    """
    result = outputs[0].new_zeros((batch_size, seqlen, *outputs[0].shape[1:]))
    for output, mb in zip(outputs, micro_batches, strict=True):
        if output.shape[0] != mb.n_tokens:
            raise BatchError(f"an output of shape {list(output.shape)} for a micro-batch of {mb.n_tokens} tokens")
        if not mb.is_dummy:
            rows = expand_to_tokens(mb.indices, mb.cu_seqlens)
            result[rows.to(output.device), mb.position_ids.to(output.device)] = output
    return result


def expand_to_tokens(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Repeat per-sequence ``values`` ``[n, ...]`` for each token: ``[T, ...]``."""
    return torch.repeat_interleave(values, cu_seqlens.diff().to(values.device).long(), dim=0)


def sequence_lengths(batch: Batch) -> list[int]:
    """Tokens of each row of a padded batch."""
    return batch["attention_mask"].bool().sum(dim=1).tolist()


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """The given rows of a padded batch, cut to the longest of them."""
    index = torch.tensor(rows, dtype=torch.int64, device=batch["input_ids"].device)
    longest = max(int(batch["attention_mask"][index].bool().sum(dim=1).max()), 1)
    picked = {key: tensor[index] for key, tensor in batch.items()}
    return {key: tensor[:, :longest] if tensor.dim() >= 2 else tensor for key, tensor in picked.items()}


def partition(lengths: Sequence[int], n_bins: int, algorithm: str = "ffd") -> list[list[int]]:
    """Distribute indices over ``n_bins <= len(lengths)`` non-empty bins with nearly equal sums of ``lengths``.

    ``ffd`` puts the longest first into the lightest bin (Graham, "Bounds on multiprocessing timing anomalies",
    1969: at most 4/3 of the optimum); ``kk`` is Karmarkar and Karp's largest differencing method (1982).

    Returns:
        bins of ascending indices; together they hold every index once.
    """
    bins = _differencing(lengths, n_bins) if algorithm == "kk" else _longest_first(lengths, n_bins)
    return [sorted(rows) for rows in bins]


def _longest_first(lengths: Sequence[int], n_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    lightest = [(0, bin_id) for bin_id in range(n_bins)]
    for index in _descending(lengths):
        tokens, bin_id = heapq.heappop(lightest)
        bins[bin_id].append(index)
        heapq.heappush(lightest, (tokens + lengths[index], bin_id))
    return bins


def _differencing(lengths: Sequence[int], n_bins: int) -> list[list[int]]:
    """Merge the two partitions of largest spread, heaviest bin with lightest, until one partition is left."""
    empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(n_bins - 1)]
    heap = [(-length, index, [(length, [index]), *empty]) for index, length in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, rows + more) for (a, rows), (b, more) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    return [rows for _, rows in heap[0][2]]


def _descending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _first_fit_count(lengths: Sequence[int], capacity: int) -> int:
    """How many bins of ``capacity`` first fit decreasing opens (Johnson, 1973: at most 11/9 of the optimum + 1)."""
    rooms: list[int] = []
    for index in _descending(lengths):
        fitting = next((bin_id for bin_id, room in enumerate(rooms) if room >= lengths[index]), None)
        if fitting is None:
            rooms.append(capacity - lengths[index])
        else:
            rooms[fitting] -= lengths[index]
    return len(rooms)


def _partition_within(lengths: Sequence[int], spec: MicroBatchSpec) -> list[list[int]]:
    """The smallest balanced partition of at least ``spec.n_mbs`` bins that keeps to ``spec.max_tokens_per_mb``."""
    capacity = spec.max_tokens_per_mb or sum(lengths)
    needed = _first_fit_count(lengths, capacity) if spec.packing_algorithm == "ffd" else -(-sum(lengths) // capacity)
    n_bins = min(max(spec.n_mbs, needed), len(lengths))
    while True:  # ends at the latest with one sequence a bin
        bins = partition(lengths, n_bins, spec.packing_algorithm)
        if all(len(rows) == 1 or sum(lengths[row] for row in rows) <= capacity for rows in bins):
            return bins
        n_bins += 1


def _split_until(bins: list[list[int]], n_bins: int, lengths: Sequence[int]) -> list[list[int]]:
    """Halve the heaviest divisible bin until there are ``n_bins``; none of them grows."""
    bins = list(bins)
    while len(bins) < n_bins:
        divisible = [rows for rows in bins if len(rows) > 1]
        heaviest = max(divisible, key=lambda rows: (sum(lengths[row] for row in rows), -rows[0]))
        bins.remove(heaviest)
        halves = partition([lengths[row] for row in heaviest], 2)
        bins += [[heaviest[i] for i in half] for half in halves]
    return bins


def _pack(batch: Batch, rows: Sequence[int], lengths: Sequence[int]) -> MicroBatch:
    """All sizes are known on the host, so nothing here waits for the device of the batch."""
    device = batch["input_ids"].device
    indices = torch.tensor(rows, dtype=torch.int64)
    row_lengths = torch.tensor([lengths[row] for row in rows], dtype=torch.int64)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), row_lengths.cumsum(0)])
    starts = torch.repeat_interleave(cu_seqlens[:-1], row_lengths)
    position_ids = (torch.arange(len(starts)) - starts).to(device, non_blocking=True)
    token_rows = torch.repeat_interleave(indices, row_lengths).to(device, non_blocking=True)
    indices = indices.to(device, non_blocking=True)

    data = {
        key: tensor[token_rows, position_ids] if tensor.dim() >= 2 else tensor[indices] for key, tensor in batch.items()
    }
    loss_mask = data.get("loss_mask", data["attention_mask"])
    data["loss_mask"] = loss_mask.masked_fill(position_ids == 0, 0)
    data["position_ids"], data["cu_seqlens"] = position_ids, cu_seqlens.to(device, torch.int32, non_blocking=True)
    return MicroBatch(data, indices, max(lengths[row] for row in rows))
