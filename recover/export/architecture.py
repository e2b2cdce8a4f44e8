"""`Architecture`: the tensors of a model as its ``config.json`` has them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from ...engine.memory.tensors import first_names
from ...engine.model_folder import read_raw_config
from ...engine.training.model import UNUSABLE, describe_unusable
from ...utils.compat.transformers_private import build_from_config
from ...utils.errors import ConfigError


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

        # Only classes of transformers itself are made.
        known: Any = None
        if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
            known = getattr(transformers, names[0], None)
        if known is None:
            raise ConfigError(
                f"{folder}/config.json names architectures {names}; expected one that "
                "transformers has (code that comes with a model is not run)"
            )

        try:
            # Without trust_remote_code, transformers asks on the terminal.
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with torch.device("meta"):
                model = build_from_config(known, config, torch.float32)
        except UNUSABLE as error:
            raise ConfigError(
                f"{folder}/config.json cannot be used: {describe_unusable(error)}"
            ) from error
        return cls(model, folder)

    @classmethod
    def find(cls, *folders: Path | None) -> "Architecture | None":
        """Read the first folder that has a ``config.json``. None if no folder has one."""
        for folder in folders:
            if folder is not None and (folder / "config.json").is_file():
                return cls.read(folder)
        return None

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
        # Tied parameters are the same object under several names.
        first = {id(param): name for name, param in first_names(named).items()}

        found: dict[str, str] = {}
        for name, param in named.items():
            if first[id(param)] != name:
                found[name] = first[id(param)]
        return found
