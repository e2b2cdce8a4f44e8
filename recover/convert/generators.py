"""Random generators as other trainers save them, in the form that a generation has."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...utils.errors import CheckpointCorruptError
from ...utils.rng import RngState, check_rng

_CUDA_STATE_BYTES = 16


def read_generators(python: Any, numpy: Any, cpu: Any, cuda: Any, rank: int, source: str) -> RngState:
    """The generators of one rank.

    Args:
        python: ``random.getstate()``.
        numpy: ``np.random.get_state()``.
        cpu: ``torch.get_rng_state()``.
        cuda: the state of the rank's device, or a list of those of all devices; None where there was none.
        rank: whose; with a list, the number of its device is the rank's on its node.
        source: for messages.

    Raises:
        CheckpointCorruptError: they are not what these functions return.
    """
    try:
        _, words, gauss = python
        kind, key, position, has_gauss, cached = numpy
        state = {
            "python": torch.tensor(words, dtype=torch.int64),
            "python_gauss": torch.tensor([0.0, 0.0] if gauss is None else [1.0, gauss], dtype=torch.float64),
            "numpy": torch.from_numpy(np.append(np.asarray(key).astype(np.int64), int(position))),
            "numpy_gauss": torch.tensor([1.0, float(cached)] if has_gauss else [0.0, 0.0], dtype=torch.float64),
            "torch": cpu.clone(),
        }
        if kind != "MT19937":
            raise ValueError(f"numpy's generator is {kind}")
        devices = _devices(cuda, rank)
        if devices:
            state["cuda"] = torch.stack(devices)
        check_rng(state)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointCorruptError(f"{source} does not hold the state of random generators: {error}") from error
    return state


def _devices(cuda: Any, rank: int) -> list[torch.Tensor]:
    """One row a device, the rank's own first."""
    rows = [cuda] if isinstance(cuda, torch.Tensor) else list(cuda or ())
    rows = [row.clone() for row in rows if row.numel() == _CUDA_STATE_BYTES]
    own = rank % len(rows) if rows else 0
    return [*rows[own:], *rows[:own]]


def of_keys(state: Any, keys: Mapping[str, str], rank: int, source: str) -> RngState:
    """`read_generators` of a dict; ``keys`` says what ``python``, ``numpy``, ``cpu`` and ``cuda`` are called in it."""
    found = {part: state.get(key) if isinstance(state, Mapping) else None for part, key in keys.items()}
    return read_generators(rank=rank, source=source, **found)
