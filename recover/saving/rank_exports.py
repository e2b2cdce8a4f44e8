"""What one rank exports: which of its engines, from which tensors, with what beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ...engine.api import HFExportOptions, export_dtype
from ...engine.fsdp_engine import FSDPEngine
from ...engine.hf.adapter_folder import adapter_tensors, write_adapters
from ...engine.hf.save import exportable_tensors, write_hf
from ...engine.lora.layers import adapted_layers, transformers_model
from ...engine.staging.staged_model import check_mesh, staged_model
from ...utils.errors import CheckpointMismatchError, ConfigError
from ..coordinator import RankTarget, rank_target


@dataclass(frozen=True)
class ExportRequest:
    """What to export of a run.

    Attributes:
        engine: name of the engine; None when there is one only.
        dtype: as in `SaveLoadMeta`.
        adapters: one of `ADAPTER_FORMS`.
        tokenizer: saved beside the weights.
        processor: likewise.
    """

    engine: str | None
    dtype: str | None
    adapters: str
    tokenizer: Any
    processor: Any

    def name(self, target: RankTarget) -> str:
        """Of the engine that is exported.

        Raises:
            ConfigError: it is not told which one, there is none of the name, or its model is not of transformers.
        """
        names = list(target.engines)
        if self.engine is None and len(names) > 1:
            raise ConfigError(
                f"config key 'recover.hf_engine' is null, but there are several engines: name one of {names}"
            )
        name = names[0] if self.engine is None else self.engine
        if name not in names:
            raise ConfigError(f"config key 'recover.hf_engine' is {name!r}; expected one of {names}")
        model = target.state(name).model
        if not isinstance(transformers_model(model), PreTrainedModel):
            raise ConfigError(
                f"engine {name!r} has a {type(model).__name__}, which is no transformers model and cannot be exported; "
                "name another as recover.hf_engine, or unset recover.hf_freq_steps"
            )
        return name


@dataclass(frozen=True)
class Export:
    """A rank's weights at one step boundary, ready to be written.

    Attributes:
        model: of transformers, or a ``PeftModel``.
        options: of the export.
        adapters: one of `ADAPTER_FORMS`.
    """

    model: nn.Module
    options: HFExportOptions
    adapters: str

    @classmethod
    def of(
        cls, request: ExportRequest, target: RankTarget, name: str, weights: Mapping[str, torch.Tensor] | None
    ) -> "Export":
        """Of the engine ``name``, with the values of ``weights`` (see `staged_model`); None: with those it has."""
        engine, model = target.engines[name], target.state(name).model
        path, dtype = (engine.model_folder, engine.base_dtype) if isinstance(engine, FSDPEngine) else (None, None)
        base = path if path is not None and path.is_dir() else None
        if request.adapters == "peft":
            dtype = base = None  # adapters keep their own, and the files of the base are beside the base
        options = HFExportOptions(export_dtype(request.dtype, dtype), request.tokenizer, request.processor, base)
        return cls(model if weights is None else staged_model(model, weights), options, request.adapters)

    def write(
        self, folder: Path, group: dist.ProcessGroup | None, gather_group: dist.ProcessGroup | None = None
    ) -> None:
        """See `write_hf` and `write_adapters`."""
        write: Any = write_adapters if self.adapters == "peft" else write_hf
        write(self.model, folder, self.options, group=group, gather_group=gather_group)


def check_export(holder: Any, request: ExportRequest, in_background: bool) -> None:
    """Raise the `ConfigError` that says why ``request`` cannot be met; each rank for itself.

    Args:
        holder: see `rank_target`.
        request: what is asked for.
        in_background: whether it will be written while training goes on.
    """
    target = rank_target(holder)
    name = request.name(target)
    state = target.state(name)
    look: Any = adapter_tensors if request.adapters == "peft" else exportable_tensors
    try:
        look(state.model)
    except CheckpointMismatchError as error:
        other = "; set recover.hf_adapters to 'peft' for a folder of PEFT" if adapted_layers(state.model) else ""
        if request.adapters == "peft":
            other = "; set recover.hf_adapters to 'merged' for all weights"
        raise ConfigError(
            f"engine {name!r} cannot be exported: {error}. Or unset recover.hf_freq_steps{other}"
        ) from error
    if in_background:
        check_mesh(state.model_only().live_tensors(), target.group_of(name))
