"""What an engine with adapters does beside training: the base's answers, and folders of PEFT."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.errors import ConfigError
from ..api import SaveLoadMeta
from ..config import TrainEngineConfig
from ..hf.adapter_folder import load_adapters, save_adapters
from .layers import adapters_off


class LoraMethods(ABC):
    """Methods of `FSDPEngine` that are about adapters."""

    config: TrainEngineConfig

    @property
    @abstractmethod
    def control_group(self) -> dist.ProcessGroup:
        """Gloo group of all ranks, for agreement."""

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The sharded module."""

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Within the block the engine answers as its base: ``forward_batch`` gives reference log-probabilities.

        Raises:
            ConfigError: the engine trains all weights, so that its base is gone.
        """
        if not self.config.use_lora:
            raise ConfigError("config key 'use_lora' is false: without adapters the base is not there any more")
        with adapters_off(self.model):
            yield

    def _save_to_peft(self, meta: SaveLoadMeta) -> None:
        save_adapters(self.model, meta.path, meta.hf_options(None), group=self.control_group)

    def _load_from_peft(self, meta: SaveLoadMeta) -> None:
        load_adapters(self.model, meta.path, group=self.control_group)

    def _require_adapters_for(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "peft" and (self.config.is_critic or not self.config.use_lora):
            unmet = (
                "'is_critic' is true: its value head is no adapter" if self.config.use_lora else "'use_lora' is false"
            )
            raise ConfigError(f"weight_format is 'peft', but config key {unmet}; use 'hf' or 'dcp'")

    def _refuse_other_base(self) -> None:
        """Of a load with ``weight_format`` ``hf``."""
        if self.config.use_lora:
            raise ConfigError(
                "weight_format 'hf' would put another base under the adapters, which a checkpoint of this run could "
                "not be resumed on; name that folder as config key 'path', or load adapters with 'peft' or 'dcp'"
            )
