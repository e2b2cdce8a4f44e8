"""Distribute sequences over bins of about equal token counts. Deterministic: ties go to the lower
index.
"""

import heapq
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ...utils.logging import get_logger
from ..config import MicroBatchSpec

logger = get_logger(__name__)

LONG_ROW_TOKENS = 16384
"""Length above which an unlimited row with several sequences causes a warning."""


Lengths = Sequence[int]
"""Tokens of each sequence."""
Rows = list[int]
"""Indices of the sequences in a bin."""


def partition(
    lengths: Lengths,
    n_bins: int,
    algorithm: str = "ffd",
) -> list[Rows]:
    """Distribute indices over ``n_bins <= len(lengths)`` non-empty bins with nearly equal sums of
    ``lengths``.

    ``ffd`` puts the longest first into the lightest bin (Graham, "Bounds on multiprocessing timing
    anomalies", 1969: at most 4/3 of the optimum). ``kk`` is Karmarkar and Karp's largest
    differencing method (1982). Indices ascend in each bin.
    """
    if algorithm == "kk":
        bins = _differencing(lengths, n_bins)
    else:
        bins = _longest_first(lengths, n_bins)
    return [sorted(rows) for rows in bins]


def _longest_first(lengths: Lengths, n_bins: int) -> list[Rows]:
    bins: list[Rows] = []
    lightest = []
    for bin_id in range(n_bins):
        bins.append([])
        lightest.append((0, bin_id))

    # A stable sort keeps the lower index first among equal lengths.
    indices = range(len(lengths))
    longest_first = sorted(indices, key=lambda index: -lengths[index])

    for index in longest_first:
        tokens, bin_id = heapq.heappop(lightest)
        bins[bin_id].append(index)
        tokens += lengths[index]
        heapq.heappush(lightest, (tokens, bin_id))
    return bins


class _Bin(NamedTuple):
    tokens: int
    rows: Rows


class _Partition(NamedTuple):
    """Entry of a heap, whose first one has the largest spread."""

    minus_spread: int
    order: int  # of equal spreads
    bins: list[_Bin]  # from the heaviest to the lightest


def _differencing(lengths: Lengths, n_bins: int) -> list[Rows]:
    """Merge the two partitions of largest spread, heaviest bin with lightest, until one partition
    is left.
    """
    # At first each sequence has a partition of its own.
    empty_bins = [_Bin(0, [])] * (n_bins - 1)
    heap = []
    for index, length in enumerate(lengths):
        bins = [_Bin(length, [index])]
        bins += empty_bins
        heap.append(_Partition(-length, index, bins))
    heapq.heapify(heap)

    while len(heap) > 1:
        first = heapq.heappop(heap)
        second = heapq.heappop(heap)

        # The heaviest of one meets the lightest of the other.
        bins = []
        for heavy, light in zip(first.bins, reversed(second.bins), strict=True):
            tokens = heavy.tokens + light.tokens
            rows = heavy.rows + light.rows
            bins.append(_Bin(tokens, rows))
        bins.sort(key=lambda each: -each.tokens)

        minus_spread = bins[-1].tokens - bins[0].tokens
        heapq.heappush(heap, _Partition(minus_spread, first.order, bins))

    return [each.rows for each in heap[0].bins]


def _first_fit_count(lengths: Lengths, capacity: int) -> int:
    """Bins of ``capacity`` that first fit decreasing opens (Johnson, 1973: at most 11/9 of the
    optimum + 1).
    """
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        # into the first bin with enough room, or a new one
        for bin_id, room in enumerate(rooms):
            if room >= length:
                rooms[bin_id] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


def _sum_of(rows: Sequence[int], lengths: Lengths) -> int:
    return sum(lengths[row] for row in rows)


def partition_within(lengths: Lengths, spec: MicroBatchSpec) -> list[Rows]:
    """The smallest balanced partition into at least ``spec.n_mbs`` bins within
    ``spec.max_tokens_per_mb``.

    The number of bins is a multiple of ``spec.n_mbs_divisor``, or one per entry of ``lengths``.
    """
    total = sum(lengths)
    capacity = spec.max_tokens_per_mb or total
    if spec.packing_algorithm == "ffd":
        needed = _first_fit_count(lengths, capacity)
    else:
        needed = -(-total // capacity)  # rounded up

    # Balanced bins may be too full where those of first fit were not. The loop ends at the latest
    # with one sequence a bin, which may exceed the capacity.
    while True:
        n_bins = min(spec.rounded(needed), len(lengths))
        bins = partition(lengths, n_bins, spec.packing_algorithm)
        divisible = [rows for rows in bins if len(rows) > 1]
        if all(_sum_of(rows, lengths) <= capacity for rows in divisible):
            return bins
        needed = n_bins + 1


def split_until(
    bins: list[Rows],
    n_bins: int,
    lengths: Lengths,
) -> list[Rows]:
    """Halve the heaviest divisible bin until there are ``n_bins``. No bin grows."""

    def weight(rows: Rows) -> tuple[int, int]:
        return _sum_of(rows, lengths), -rows[0]

    bins = list(bins)
    while len(bins) < n_bins:
        divisible = [rows for rows in bins if len(rows) > 1]
        heaviest = max(divisible, key=weight)
        bins.remove(heaviest)

        # Halves hold indices of `heaviest`.
        own_lengths = [lengths[row] for row in heaviest]
        halves = partition(own_lengths, 2)
        for half in halves:
            rows = [heaviest[index] for index in half]
            bins.append(rows)
    return bins


def warn_of_long_rows(bins: Sequence[Sequence[int]], lengths: Lengths) -> None:
    """Warn if a bin of several sequences has more than `LONG_ROW_TOKENS` tokens."""
    packed = [rows for rows in bins if len(rows) > 1]
    longest = max((_sum_of(rows, lengths) for rows in packed), default=0)
    if longest > LONG_ROW_TOKENS:
        power_of_two = 1 << (longest.bit_length() - 1)
        _warn_of_row_longer_than(power_of_two)


@cache
def _warn_of_row_longer_than(n_tokens: int) -> None:
    """Once per process for each power of two."""
    mask_gib = n_tokens**2 / 2**30
    default = MicroBatchSpec().max_tokens_per_mb
    logger.warning(
        "several sequences are packed into a row of more than %d tokens, because config key "
        "'mb_spec.max_tokens_per_mb' is null: with attn_impl sdpa or eager, attention takes %.2g "
        "GiB or more for the mask alone; set the key (its default is %d)",
        n_tokens,
        mask_gib,
        default,
    )
