"""Distribute sequences over bins of about equal token counts. Deterministic: ties go to the lower
index.
"""

import heapq
from collections.abc import Sequence
from functools import cache

from ...utils.logging import get_logger
from ..config import MicroBatchSpec

logger = get_logger(__name__)

LONG_ROW_TOKENS = 16384
"""Length above which an unlimited row with several sequences causes a warning."""


def partition(lengths: Sequence[int], n_bins: int, algorithm: str = "ffd") -> list[list[int]]:
    """Distribute indices over ``n_bins <= len(lengths)`` non-empty bins with nearly equal sums of
    ``lengths``.

    ``ffd`` puts the longest first into the lightest bin (Graham, "Bounds on multiprocessing timing
    anomalies", 1969: at most 4/3 of the optimum). ``kk`` is Karmarkar and Karp's largest
    differencing method (1982). Indices ascend in each bin.
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
    """Merge the two partitions of largest spread, heaviest bin with lightest, until one partition
    is left.
    """
    empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(n_bins - 1)]
    heap = [(-length, index, [(length, [index]), *empty]) for index, length in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (a + b, rows + more)
            for (a, rows), (b, more) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    return [rows for _, rows in heap[0][2]]


def _descending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _first_fit_count(lengths: Sequence[int], capacity: int) -> int:
    """Bins of ``capacity`` that first fit decreasing opens (Johnson, 1973: at most 11/9 of the
    optimum + 1).
    """
    rooms: list[int] = []
    for index in _descending(lengths):
        fitting = next(
            (bin_id for bin_id, room in enumerate(rooms) if room >= lengths[index]), None
        )
        if fitting is None:
            rooms.append(capacity - lengths[index])
        else:
            rooms[fitting] -= lengths[index]
    return len(rooms)


def partition_within(lengths: Sequence[int], spec: MicroBatchSpec) -> list[list[int]]:
    """The smallest balanced partition into at least ``spec.n_mbs`` bins within
    ``spec.max_tokens_per_mb``.

    The number of bins is a multiple of ``spec.n_mbs_divisor``, or one per entry of ``lengths``.
    """
    capacity = spec.max_tokens_per_mb or sum(lengths)
    needed = (
        _first_fit_count(lengths, capacity)
        if spec.packing_algorithm == "ffd"
        else -(-sum(lengths) // capacity)
    )
    n_bins = min(spec.rounded(needed), len(lengths))
    while True:  # ends at the latest with one sequence a bin
        bins = partition(lengths, n_bins, spec.packing_algorithm)
        if all(len(rows) == 1 or sum(lengths[row] for row in rows) <= capacity for rows in bins):
            return bins
        n_bins = min(spec.rounded(n_bins + 1), len(lengths))


def split_until(bins: list[list[int]], n_bins: int, lengths: Sequence[int]) -> list[list[int]]:
    """Halve the heaviest divisible bin until there are ``n_bins``. No bin grows."""
    bins = list(bins)
    while len(bins) < n_bins:
        divisible = [rows for rows in bins if len(rows) > 1]
        heaviest = max(divisible, key=lambda rows: (sum(lengths[row] for row in rows), -rows[0]))
        bins.remove(heaviest)
        halves = partition([lengths[row] for row in heaviest], 2)
        bins += [[heaviest[i] for i in half] for half in halves]
    return bins


def warn_of_long_rows(bins: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    """Warn if a bin of several sequences has more than `LONG_ROW_TOKENS` tokens."""
    longest = max((sum(lengths[row] for row in rows) for rows in bins if len(rows) > 1), default=0)
    if longest > LONG_ROW_TOKENS:
        _warn_of_row_longer_than(1 << (longest.bit_length() - 1))


@cache
def _warn_of_row_longer_than(n_tokens: int) -> None:
    """Once per process for each power of two."""
    logger.warning(
        "several sequences are packed into a row of more than %d tokens, because config key "
        "'mb_spec.max_tokens_per_mb' is null: with attn_impl sdpa or eager, attention takes %.2g "
        "GiB or more for the mask alone; set the key (its default is %d)",
        n_tokens, n_tokens**2 / 2**30, MicroBatchSpec().max_tokens_per_mb,
    )  # fmt: skip
