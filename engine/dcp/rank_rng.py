"""The generators of each rank in a checkpoint, under the rank's name."""

from collections.abc import Mapping

import torch

from ...utils.distributed import get_rank
from ...utils.rng import check_rng, derive_rng, restore_rng


def rank_key(rank: int) -> str:
    """The key of what is a rank's own: ``rank_00001``."""
    return f"rank_{rank:05d}"


def restore_rank_rng(given: Mapping[str, torch.Tensor]) -> None:
    """Restore this rank's generators from dotted names ``rng.rank_<r>.<generator>``, if there are any.

    A rank that the saved run did not have derives its generators from those of rank 0 (see `derive_rng`).
    """
    rank = get_rank()
    own, first = _rng_of(given, rank), _rng_of(given, 0)
    if own or first:
        restore_rng(own or derive_rng(first, rank))


def check_rank_rng(given: Mapping[str, torch.Tensor]) -> None:
    """Raise the `CheckpointMismatchError` that `restore_rank_rng` would raise; no generator is touched."""
    if state := _rng_of(given, get_rank()) or _rng_of(given, 0):
        check_rng(state)


def _rng_of(given: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {n.split(".", 2)[2]: t for n, t in given.items() if n.startswith(f"rng.{rank_key(rank)}.")}
