"""`Checkpoint`: the training state between a reader and a writer, without the tensor values in
memory.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from ...engine.memory.lazy_tensor import LazyTensor
from ...engine.memory.tensors import first_names
from ...engine.model.model_folder import read_raw_config
from ...engine.training.model import UNUSABLE, describe_unusable
from ...utils.compat.transformers_private import build_from_config
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ...utils.rng import RngState

OptimizerEntries = Mapping[str, Mapping[str, Any]]
"""Parameter -> entry -> `LazyTensor`, or a plain value."""


@dataclass(frozen=True)
class Architecture:
    """Names, order and ties of the tensors of a model, from its ``config.json``, without memory for
    the values.
    """

    model: PreTrainedModel  # the model of the config's class, on the meta device in float32
    folder: Path  # folder of the config

    @classmethod
    def read(cls, folder: Path) -> "Architecture":
        """Build the model of ``folder/config.json``. Code in the folder is not run."""
        names = read_raw_config(folder).get("architectures") or []
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} has no config.json; name a folder of the model in Hugging Face format"
            )
        known: Any = getattr(transformers, names[0], None) if len(names) == 1 else None
        if known is None:
            raise ConfigError(
                f"{folder}/config.json names architectures {names}; expected one that "
                "transformers has (code that comes with a model is not run)"
            )
        try:
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False
            )  # unset, it asks on the terminal
            with torch.device("meta"):
                return cls(build_from_config(known, config, torch.float32), folder)
        except UNUSABLE as error:
            raise ConfigError(
                f"{folder}/config.json cannot be used: {describe_unusable(error)}"
            ) from error

    @classmethod
    def find(cls, *folders: Path | None) -> "Architecture | None":
        """Read the first folder that has a ``config.json``. None if no folder has one."""
        found = (
            folder
            for folder in folders
            if folder is not None and (folder / "config.json").is_file()
        )
        return next((cls.read(folder) for folder in found), None)

    @cached_property
    def parameters(self) -> list[str]:
        """Names in the order of ``model.parameters()``, which is also the order of an optimizer of
        all parameters.
        """
        return [name for name, _ in self.model.named_parameters()]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Alias of a tied parameter -> its first name."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in first_names(named).items()}
        return {name: first[id(param)] for name, param in named.items() if first[id(param)] != name}


@dataclass
class Checkpoint:
    """The training state of one model."""

    format: str  # format of the source, for messages
    model: dict[str, LazyTensor]  # parameter or buffer -> values. A tied tensor appears once
    optimizer: OptimizerEntries = field(
        default_factory=dict
    )  # state by parameter. Empty without an optimizer
    # hyperparameters of each parameter group, with names as ``params``. None without an optimizer
    groups: list[dict[str, Any]] | None = None
    aliases: dict[str, str] = field(
        default_factory=dict
    )  # alias of a tied tensor -> its name in ``model``
    scheduler: dict[str, Any] | None = None  # ``state_dict()`` of the schedule, or None
    step: int | None = None  # last trained step, counted from 0. None if unknown
    epoch_steps: int | None = None  # steps per epoch. None if unknown
    rng: list[RngState] = field(default_factory=list)  # generators of each rank. Empty if unknown
    ranks: int = 1  # number of ranks that wrote the source
    architecture: Architecture | None = None  # the model without memory. None without a config
    states_are_complete: bool = (
        False  # a parameter without state is known to be frozen, as in Holdfast's own folders
    )
    ignored: list[str] = field(
        default_factory=list
    )  # names of other contents of the folder, which are not converted

    def set_optimizer(
        self, what: str, state: OptimizerEntries, groups: list[dict[str, Any]]
    ) -> None:
        """Add the optimizer of ``what``: state by parameter, and groups with names as ``params``."""
        for number, group in enumerate(groups):
            rate = group.get("lr", 0.0)
            if not isinstance(rate, int | float):
                raise CheckpointCorruptError(
                    f"{what}: the rate (lr) of group {number} is {rate!r}; expected a number"
                )
        grouped = {name for group in groups for name in group["params"]}
        if strangers := [name for name in state if name not in self.model or name not in grouped]:
            raise CheckpointMismatchError(
                f"{what} has state for {strangers[0]!r}, which is not a parameter of the model in "
                "one of its groups"
            )
        for name, entries in state.items():
            step = entries.get("step", 0)
            if not isinstance(step, int | float) and not (
                isinstance(step, LazyTensor) and step.numel == 1
            ):
                found = (
                    f"a tensor {list(step.shape)}" if isinstance(step, LazyTensor) else repr(step)
                )
                raise CheckpointCorruptError(
                    f"{what}: step of {name} is {found}; expected a number"
                )
            for key, value in entries.items():
                shape = self.model[name].shape
                if (
                    isinstance(value, LazyTensor)
                    and key in _LIKE_PARAMETER
                    and value.shape != shape
                ):
                    raise CheckpointMismatchError(
                        f"{what}: {key} of {name} has shape {list(value.shape)}, the parameter "
                        f"{list(shape)}: the optimizer was made of other parameters, or in "
                        "another order than model.parameters()"
                    )
        self.optimizer, self.groups = state, groups

    def require_states(self) -> None:
        """Raise `CheckpointMismatchError` if a parameter in a group has no state, which a load
        would look for.

        The files of other trainers do not show whether the state was lost, the parameter is frozen,
        or it never had a gradient.
        """
        names = [name for group in self.groups or () for name in group["params"]]
        without = [name for name in names if not self.optimizer.get(name)]
        keeps_state = self.optimizer or any(
            "betas" in group for group in self.groups or ()
        )  # plain SGD keeps none
        if without and keeps_state and not self.states_are_complete:
            raise CheckpointMismatchError(
                f"the optimizer of {self.format} has no state for {len(without)} of its "
                f"{len(names)} parameters ({without[0]} ...): lost, frozen, or never updated. A "
                "load would look for it. Convert the weights alone: --to hf"
            )


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


@dataclass(frozen=True)
class ReadOptions:
    """Arguments of a reader besides the folder."""

    root: (
        str | None
    )  # root of DCP data (see `holdfast.engine.dcp.root_names`). None takes the only one
    config: (
        Path | None
        # folder with the model's ``config.json``. None takes the config in the source, if there is one
    )
    files: ExitStack  # closes the files that a reader opens
    merge: bool = False  # merge adapters into their base, and leave out optimizer state
    base: Path | None = None  # folder of that base. None takes the folder that the source names
    engine: str | None = None  # the only engine to read. None, or an unknown name, reads all
    with_optimizer: bool = (
        True  # False reads the weights alone, also if the optimizer could not be converted
    )
