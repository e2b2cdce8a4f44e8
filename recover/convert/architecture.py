"""`Architecture`: the model of a ``config.json`` without memory, to be asked for names, order and ties."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ...engine.compat.transformers_private import build_from_config
from ...engine.model_folder import read_raw_config
from ...engine.tensors import first_names
from ...engine.training.model import UNUSABLE, describe_unusable
from ...utils.errors import ConfigError

_NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Names of parameters that transformers' Trainer does not decay (`Trainer.get_decay_parameter_names`)."""


@dataclass(frozen=True)
class Architecture:
    """A model on the meta device.

    Attributes:
        model: built from the config, in float32, of the class that the config names.
        folder: where the config is.
    """

    model: PreTrainedModel
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> "Architecture":
        """The model of ``folder/config.json``; no code of the folder is run.

        Raises:
            ConfigError: there is none, it cannot be used, or transformers has no such class.
        """
        names = read_raw_config(folder).get("architectures") or []
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} has no config.json; name a folder of the model in Hugging Face format")
        known: Any = getattr(transformers, names[0], None) if len(names) == 1 else None
        if known is None:
            raise ConfigError(
                f"{folder}/config.json names architectures {names}; expected one that transformers has (code that "
                "comes with a model is not run)"
            )
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)  # unset, it asks on the terminal
            with torch.device("meta"):
                return cls(build_from_config(known, config, torch.float32), folder)
        except UNUSABLE as error:
            raise ConfigError(f"{folder}/config.json cannot be used: {describe_unusable(error)}") from error

    @cached_property
    def parameters(self) -> list[str]:
        """Names in the order of ``model.parameters()``, a tied one once: the order of an optimizer of all of them."""
        return [name for name, _ in self.model.named_parameters()]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Other name of a tied parameter -> its first name."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in first_names(named).items()}
        return {name: first[id(param)] for name, param in named.items() if first[id(param)] != name}

    def trainer_groups(self) -> list[list[str]]:
        """The two groups that transformers' Trainer makes: with weight decay, and without."""
        plain = {f"{at}." for at, module in self.model.named_modules() if isinstance(module, nn.LayerNorm)}
        decayed = {
            name
            for name in self.parameters
            if not any(re.search(pattern, name.lower()) for pattern in _NO_DECAY)
            and not any(name.startswith(at) for at in plain)
        }
        groups = [name for name in self.parameters if name in decayed]
        return [groups, [name for name in self.parameters if name not in decayed]]


def find_architecture(*folders: Path | None) -> Architecture | None:
    """Of the first folder that is given and has a ``config.json``; None if none has."""
    for folder in folders:
        if folder is not None and (folder / "config.json").is_file():
            return Architecture.read(folder)
    return None
