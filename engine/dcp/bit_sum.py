"""An exact sum over the bits of a tensor, the same at every world size. Nothing is cached or copied to the host.

Each element, as an integer, is multiplied by one odd pseudo-random weight per dimension, chosen by its index there. The
products are added modulo 2**64, so the sums of shards add up, whichever dimensions are sharded. One changed element
always changes the sum, because odd numbers have inverses. Several cancel out by chance alone, about once in 2**64.
"""

from collections.abc import Sequence

import torch
import xxhash

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(name: str, block: torch.Tensor, offsets: Sequence[int]) -> int:
    """Sum over a block of the tensor ``name`` (an int64), whose first index per dimension is ``offsets``."""
    values = block.detach().resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values.reshape(values.shape or (1,))
    total, weights = torch.zeros((), dtype=torch.int64, device=values.device), []
    for dim, size in enumerate(values.shape):
        first, seed = offsets[dim] if dim < len(offsets) else 0, xxhash.xxh3_64_intdigest(f"{dim}.{name}".encode())
        weights.append(_odd(torch.arange(first, first + size, device=values.device), seed >> 1))
    n_rows = max(1, (1 << 26 if values.is_cuda else 1 << 19) // max(1, values[:1].numel()))  # widened at a time
    for rows, weight in zip(values.split(n_rows), weights[0].split(n_rows), strict=True):
        words = rows.contiguous().view(_WORDS[rows.itemsize]).to(torch.int64)
        for each in reversed(weights[1:]):
            words = (words * each).sum(-1)
        total += (words * weight).sum()
    return int(total)


def _odd(index: torch.Tensor, seed: int) -> torch.Tensor:
    mixed = (index ^ seed) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1
