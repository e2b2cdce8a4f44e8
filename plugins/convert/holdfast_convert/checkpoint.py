"""`Checkpoint`: the training state between a reader and a writer, without the tensor values in
memory.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.engine.memory.lazy_tensor import LazyTensor
from holdfast.recover.export.architecture import Architecture
from holdfast.recover.export.stored_tensors import Tensors
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError
from holdfast.utils.rng import RngState

Entries = dict[str, dict[str, Any]]
"""Parameter -> entry -> `LazyTensor`, or a plain value."""
Groups = list[dict[str, Any]]
"""Hyperparameters of each parameter group, with names as ``params``."""


@dataclass
class Checkpoint:
    """The training state of one model."""

    format: str  # format of the source, for messages
    model: Tensors  # parameter or buffer -> values. A tied tensor appears once
    # State by parameter. Empty without an optimizer.
    optimizer: Entries = field(default_factory=dict)
    groups: Groups | None = None  # None without an optimizer
    # Alias of a tied tensor -> its name in ``model``.
    aliases: dict[str, str] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None  # ``state_dict()`` of the schedule, or None
    step: int | None = None  # last trained step, counted from 0. None if unknown
    epoch_steps: int | None = None  # steps per epoch. None if unknown
    rng: list[RngState] = field(default_factory=list)  # generators of each rank. Empty if unknown
    ranks: int = 1  # number of ranks that wrote the source
    architecture: Architecture | None = None  # the model without memory. None without a config
    # A parameter without state is known to be frozen, as in Holdfast's own folders.
    states_are_complete: bool = False
    # Names of other contents of the folder, which are not converted.
    ignored: list[str] = field(default_factory=list)

    def set_optimizer(
        self,
        what: str,
        state: Entries,
        groups: Groups,
    ) -> None:
        """Add the optimizer of ``what``: its state by parameter, and its groups."""
        for number, group in enumerate(groups):
            rate = group.get("lr", 0.0)
            if not isinstance(rate, int | float):
                raise CheckpointCorruptError(
                    f"{what}: the rate (lr) of group {number} is {rate!r}; expected a number"
                )

        grouped = {name for group in groups for name in group["params"]}
        for name in state:
            if name not in self.model or name not in grouped:
                raise CheckpointMismatchError(
                    f"{what} has state for {name!r}, which is not a parameter of the model in "
                    "one of its groups"
                )

        for name, entries in state.items():
            _require_step(what, name, entries.get("step", 0))
            shape = self.model[name].shape
            for key, value in entries.items():
                _require_shape(f"{what}: {key} of {name}", key, value, shape)
        self.optimizer = state
        self.groups = groups

    def require_states(self) -> None:
        """Raise `CheckpointMismatchError` if a parameter in a group has no state, which a load
        would look for.

        The files of other trainers do not show whether the state was lost, the parameter is frozen,
        or it never had a gradient.
        """
        if self.states_are_complete:
            return
        groups = self.groups or []
        # Plain SGD keeps no state.
        has_moments = any("betas" in group for group in groups)
        if not self.optimizer and not has_moments:
            return

        names = [name for group in groups for name in group["params"]]
        without = [name for name in names if not self.optimizer.get(name)]
        if without:
            raise CheckpointMismatchError(
                f"the optimizer of {self.format} has no state for {len(without)} of its "
                f"{len(names)} parameters ({without[0]} ...): lost, frozen, or never updated. A "
                "load would look for it. Convert the weights alone: --to hf"
            )

    def tensors(self, with_optimizer: bool = True) -> Iterator[tuple[str, LazyTensor]]:
        """All tensors, as ``model.<name>`` and ``optim.state.<parameter>.<entry>``."""
        for name, tensor in self.model.items():
            yield f"model.{name}", tensor
        if not with_optimizer:
            return
        for name, entries in self.optimizer.items():
            for key, value in entries.items():
                if isinstance(value, LazyTensor):
                    yield f"optim.state.{name}.{key}", value


def _require_step(what: str, name: str, step: Any) -> None:
    """Check that the count of a parameter's updates is a number, or a tensor with one."""
    if isinstance(step, int | float):
        return
    found = repr(step)
    if isinstance(step, LazyTensor):
        if step.numel == 1:
            return
        found = f"a tensor {list(step.shape)}"
    raise CheckpointCorruptError(f"{what}: step of {name} is {found}; expected a number")


_LIKE_PARAMETER = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "exp_inf",
    "grad_avg",
)
"""State of torch's optimizers that has the shape of the parameter."""


def _require_shape(what: str, key: str, value: Any, shape: tuple[int, ...]) -> None:
    if key not in _LIKE_PARAMETER or not isinstance(value, LazyTensor):
        return
    if value.shape != shape:
        raise CheckpointMismatchError(
            f"{what} has shape {list(value.shape)}, the parameter "
            f"{list(shape)}: the optimizer was made of other parameters, or in "
            "another order than model.parameters()"
        )


@dataclass(frozen=True)
class ReadOptions:
    """Arguments of a reader besides the folder."""

    # Root of DCP data (see `holdfast.engine.dcp.root_names`). None takes the only one.
    root: str | None
    # Folder with the model's ``config.json``. None takes that in the source, if there is one.
    config: Path | None
    files: ExitStack  # closes the files that a reader opens
    merge: bool = False  # merge adapters into their base, and leave out optimizer state
    base: Path | None = None  # folder of that base. None takes the folder that the source names
    engine: str | None = None  # the only engine to read. None, or an unknown name, reads all
    # False reads the weights alone, also if the optimizer could not be converted.
    with_optimizer: bool = True
