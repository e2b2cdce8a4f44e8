"""Lists of trajectories, as AReaL's workflows return them, joined into one padded batch, and results split again."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...utils.errors import BatchError
from ..api import Batch, Trajectories


def join_trajectories(batch: Trajectories) -> Batch:
    """One padded batch of a list of them, in order; a batch itself is returned as it is.

    Each has tensors of ``[b, s]`` or ``[b, s, ...]`` (per token) and ``[b]`` (per sequence), b and s of its own: what
    is per token is padded with zeros to the longest s.

    Raises:
        BatchError: the list is empty, an entry is no dict of tensors, or they do not have the same keys, dtypes or
            numbers of dimensions; the message names the first that differs.
    """
    if isinstance(batch, dict):
        return batch
    _check_alike(batch)
    return {key: _join([trajectory[key] for trajectory in batch]) for key in batch[0]}


def split_like(result: torch.Tensor, batch: Sequence[Batch]) -> list[torch.Tensor]:
    """``[B, S]`` results of a joined batch, one ``[b, s]`` for each trajectory."""
    parts = result.split([len(trajectory["input_ids"]) for trajectory in batch])
    return [part[:, : trajectory["input_ids"].shape[1]] for part, trajectory in zip(parts, batch, strict=True)]


def _check_alike(batch: Sequence[Batch]) -> None:
    if not batch:
        raise BatchError("the list of trajectories is empty")
    for i, trajectory in enumerate(batch):
        if not isinstance(trajectory, dict):
            raise BatchError(f"trajectory {i} is a {type(trajectory).__name__}; expected a dict of tensors")
        if (found := trajectory.keys()) != batch[0].keys():
            raise BatchError(f"trajectory {i} has the keys {sorted(found)}, the first one {sorted(batch[0])}")
        for key, value in trajectory.items():
            if not isinstance(value, torch.Tensor):
                raise BatchError(f"trajectory {i}: {key!r} is a {type(value).__name__}; expected a torch.Tensor")
            first = batch[0][key]
            if value.dim() == 0 or (value.dim(), value.dtype) != (first.dim(), first.dtype):
                raise BatchError(
                    f"trajectory {i}: {key!r} is {value.dtype} of shape {list(value.shape)}, that of the first one "
                    f"{first.dtype} of {list(first.shape)}; expected [b], or [b, s] and more, and one dtype"
                )
            if value.shape[2:] != first.shape[2:]:
                raise BatchError(f"trajectory {i}: {key!r} is of shape {list(value.shape)}, not {list(first.shape)}")


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dim() == 1:
        return torch.cat(list(tensors))
    longest = max(tensor.shape[1] for tensor in tensors)
    behind = (0, 0) * (tensors[0].dim() - 2)
    return torch.cat([F.pad(tensor, (*behind, 0, longest - tensor.shape[1])) for tensor in tensors])
