"""Compare the optimizer of a source with what a load would take, and with what was written."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.engine.dcp.load import dry_load
from holdfast.engine.dcp.state import GENERATORS, PACKED, DCPState
from holdfast.engine.memory.lazy_tensor import LazyTensor
from holdfast.recover.export.digests import Seen
from holdfast.recover.export.stored_tensors import read_whole
from holdfast.utils.compat.torch_private import parameters_of
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)

from .checkpoint import Checkpoint
from .writers import dcp_entries, plain_groups


def tensors_only(seen: Seen) -> Seen:
    """Leave out what is no tensor of model or optimizer: groups, schedule, generators."""

    def only(name: str, first: int, values: Tensor) -> None:
        if name.startswith(("model.", "optim.state.")):
            seen(name, first, values)

    return only


def require_loads(what: str, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointMismatchError` if a load into torch's Adam or AdamW would refuse the
    optimizer of ``what``.

    The checks are those of the load, without values. State of other optimizers is not known.
    Holdfast's own folders were checked when they were saved.
    """
    groups = checkpoint.groups or []
    if checkpoint.states_are_complete or not groups:
        return
    # The needs of a load are not known for other optimizers.
    if not all("amsgrad" in group for group in groups):
        return

    # A model and an optimizer with the names, shapes and dtypes of the source, without memory for
    # values.
    model = nn.Module()
    parameters = parameters_of(model)
    for name, tensor in checkpoint.model.items():
        is_float = tensor.dtype.is_floating_point
        parameters[name] = nn.Parameter(_on_meta(tensor), requires_grad=is_float)
    params: list[dict[str, Any]] = []
    for group in groups:
        members = [parameters[name] for name in group["params"]]
        params.append({**group, "params": members})
    state = DCPState(model, torch.optim.AdamW(params))

    given = _nested_entries(checkpoint)
    try:
        dry_load(state, given)
    except CheckpointError as error:
        raise CheckpointMismatchError(
            f"{what}: its optimizer could not be loaded: {error}. Convert the weights alone: --to "
            "hf"
        ) from error


def _nested_entries(checkpoint: Checkpoint) -> dict[Any, Any]:
    """What would be written. The JSON of groups and schedule is small, and is read."""
    values: dict[Any, Any] = {}
    for path, tensor in dcp_entries(checkpoint):
        *parents, last = path[1:]
        place = values
        for key in parents:
            place = place.setdefault(key, {})
        # JSON is parsed by the load, so it needs its values.
        if last in PACKED:
            place[last] = read_whole(tensor)
        else:
            place[last] = _on_meta(tensor)

    # They have been checked, and need their values.
    values.pop(GENERATORS, None)
    return values


def _on_meta(tensor: LazyTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def compare_plain(what: str, source: Checkpoint, target: Checkpoint) -> None:
    """Raise `CheckpointCorruptError` unless ``target`` has the hyperparameters of ``source`` and,
    if it can hold one, the schedule.
    """
    pairs = zip(plain_groups(source), plain_groups(target), strict=True)
    for before, after in pairs:
        if not before.items() <= after.items():
            raise CheckpointCorruptError(
                f"{what}: a parameter group reads {after}; the source has {before}"
            )
    if target.scheduler is not None and target.scheduler != source.scheduler:
        raise CheckpointCorruptError(
            f"{what}: the schedule reads {target.scheduler}; the source has {source.scheduler}"
        )
