"""Read a target back with the reader of its format, and compare every tensor with what was read
from the source.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import nn

from ...engine.dcp.load import dry_load
from ...engine.dcp.state import GENERATORS, PACKED, DCPState
from ...engine.memory.lazy_tensor import LazyTensor
from ...engine.memory.tensors import bytes_of
from ...utils.compat.torch_private import parameters_of
from ...utils.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from .checkpoint import Checkpoint
from .stored_tensors import read_whole
from .writers import dcp_entries, plain_groups


class Digests:
    """One digest per tensor, from its blocks in order. ``advance`` is called with the bytes of each
    block.
    """

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._digests: dict[str, xxhash.xxh3_128] = {}
        self._advance = advance

    def seen(self, name: str, first: int, values: torch.Tensor) -> None:
        """Add a block, see `writers.Seen`."""
        if not name.startswith(("model.", "optim.state.")):
            return
        digest = self._digests.get(name)
        if first == 0 or digest is None:
            digest = self._digests[name] = (
                xxhash.xxh3_128()
            )  # a tensor that has several names is read for each
        digest.update(memoryview(bytes_of(values).numpy().data))  # type: ignore[arg-type]
        self._advance(values.nbytes)

    def values(self) -> dict[str, str]:
        """Name -> digest of the tensors of model and optimizer."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}


def tensors_of(
    checkpoint: Checkpoint, with_optimizer: bool = True
) -> Iterator[tuple[str, LazyTensor]]:
    """All tensors under the names that `Digests` uses."""
    yield from ((f"model.{name}", tensor) for name, tensor in checkpoint.model.items())
    for name, entries in checkpoint.optimizer.items() if with_optimizer else ():
        for key, value in entries.items():
            if isinstance(value, LazyTensor):
                yield f"optim.state.{name}.{key}", value


def require_loads(what: str, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointMismatchError` if a load into torch's Adam or AdamW would refuse the
    optimizer of ``what``.

    The checks are those of the load, without values. State of other optimizers is not known.
    Holdfast's own folders were checked when they were saved.
    """
    groups = checkpoint.groups or []
    if (
        checkpoint.states_are_complete
        or not groups
        or not all("amsgrad" in group for group in groups)
    ):
        return

    # A model and an optimizer with the names, shapes and dtypes of the source, without memory for
    # values.
    model = nn.Module()
    parameters = parameters_of(model)
    for name, tensor in checkpoint.model.items():
        parameters[name] = nn.Parameter(
            _on_meta(tensor), requires_grad=tensor.dtype.is_floating_point
        )
    params = [
        {**group, "params": [parameters[name] for name in group["params"]]} for group in groups
    ]
    state = DCPState(model, torch.optim.AdamW(params))

    # What would be written. The JSON of groups and schedule is small, and is read.
    values: dict[Any, Any] = {}
    for path, tensor in dcp_entries(checkpoint):
        *parents, last = path[1:]
        place = values
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = read_whole(tensor) if last in PACKED else _on_meta(tensor)
    values.pop(GENERATORS, None)  # they have been checked, and need their values
    try:
        dry_load(state, values)
    except CheckpointError as error:
        raise CheckpointMismatchError(
            f"{what}: its optimizer could not be loaded: {error}. Convert the weights alone: --to "
            "hf"
        ) from error


def _on_meta(tensor: LazyTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def require_all_written(
    what: str, source: Checkpoint, written: dict[str, str], with_optimizer: bool
) -> None:
    """Raise `CheckpointCorruptError` unless every tensor of ``source`` was written. `compare` skips
    others.
    """
    wanted = (name for name, tensor in tensors_of(source, with_optimizer) if tensor.numel)
    if missing := [name for name in wanted if name not in written]:
        raise CheckpointCorruptError(
            f"{what}: {missing[0]} of the source was not written ({len(missing)} such). Nothing "
            "was made"
        )


def compare(
    what: str, source: Checkpoint, written: dict[str, str], target: Checkpoint, digests: Digests
) -> None:
    """Raise `CheckpointCorruptError` unless ``target``, as it was read back, holds the same tensors
    as ``source``.

    ``written`` are the digests by name that were taken from ``source`` while the target was
    written. ``digests`` is an empty `Digests` for the target.
    """
    for name, tensor in tensors_of(target):
        for first, values in tensor.blocks():
            digests.seen(name, first, values)
        if not tensor.numel:
            digests.seen(name, 0, torch.empty(0))
    found, aliases = digests.values(), {f"model.{alias}" for alias in source.aliases}
    written = {
        name: digest for name, digest in written.items() if name not in aliases or name in found
    }
    nothing = xxhash.xxh3_128().hexdigest()
    wrong = [
        name for name in written | found if written.get(name, nothing) != found.get(name, nothing)
    ]
    if wrong:
        raise CheckpointCorruptError(
            f"{what}: {wrong[0]} is not what was read from the source ({len(wrong)} of "
            f"{len(found)} differ). Nothing was made; look at the disk, and try again"
        )


def compare_plain(what: str, source: Checkpoint, target: Checkpoint) -> None:
    """Compare the hyperparameters and, if ``target`` can hold one, the schedule. Raises as
    `compare`.
    """
    for before, after in zip(plain_groups(source), plain_groups(target), strict=True):
        if not before.items() <= after.items():
            raise CheckpointCorruptError(
                f"{what}: a parameter group reads {after}; the source has {before}"
            )
    if target.scheduler is not None and target.scheduler != source.scheduler:
        raise CheckpointCorruptError(
            f"{what}: the schedule reads {target.scheduler}; the source has {source.scheduler}"
        )
