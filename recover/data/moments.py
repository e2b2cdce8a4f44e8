"""State of everything that an order is drawn from, at a moment: captured, restored and compared."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ...engine.memory.tensors import bytes_of
from ...utils.rng import capture_rng, restore_rng
from .samplers import draws_of, restore_draws

Moment = dict[str, Any]
"""State of everything that an epoch draws from: ``rng`` (see `capture_rng`) and ``sources``
(`draws_of` of the samplers).
"""


def moment_of(sources: Iterable[Any]) -> Moment:
    """Capture the generators of the process, and the seeds and generators of samplers."""
    draws = []
    for source in sources:
        draws.append(draws_of(source))
    return {"rng": capture_rng(), "sources": draws}


def restore_moment(sources: Iterable[Any], moment: Moment) -> None:
    """Restore the result of `moment_of`. Raises `CheckpointMismatchError` as `restore_draws`."""
    saved = moment["sources"]
    for source, draws in zip(sources, saved, strict=False):
        restore_draws(source, draws)
    restore_rng(moment["rng"])


def samplers_in(source: Any) -> list[Any]:
    """Return a sampler, and the torch samplers among its attributes and among theirs."""
    found = []
    ids = set()
    waiting = [source]
    while waiting:
        sampler = waiting.pop(0)
        # Samplers may refer to each other in a circle.
        if id(sampler) in ids:
            continue
        ids.add(id(sampler))
        found.append(sampler)
        attributes = getattr(sampler, "__dict__", {})
        for value in attributes.values():
            if isinstance(value, Sampler):
                waiting.append(value)
    return found


def same_state(one: Any, other: Any) -> bool:
    """Whether two states have equal values of the same types. NaN equals NaN."""
    # Tensors by their bytes.
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype:
            return False
        if one.shape != other.shape:
            return False
        own_bytes = bytes_of(one.contiguous())
        other_bytes = bytes_of(other.contiguous())
        return torch.equal(own_bytes, other_bytes)

    # Containers by their contents.
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return False
        return all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return False
        return all(map(same_state, one, other))

    if type(one) is not type(other):
        return False
    if one != one:  # only NaN differs from itself
        return bool(other != other)
    return bool(one == other)
