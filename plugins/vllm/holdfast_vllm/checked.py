"""`CheckedEngine`: one verdict of all workers, then a load that can be repeated after a failure."""

# pyright: reportMissingImports=false

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

Weights = Iterable[tuple[str, torch.Tensor]]
"""Pairs of a name in a Hugging Face folder and its tensor."""


class CheckedEngine(WeightTransferEngine):
    """Base of the engines. It dismantles no layer before every worker has all weights and has checked them."""

    _mixed = False

    @abstractmethod
    def checked_weights(self, update_info: Any, rank: int, world_size: int) -> Weights:
        """Check and return all weights of an update, or raise. The workers may share the checks by ``rank``."""

    def start_weight_update(self) -> None:
        """Do nothing. `receive_weights` dismantles the model after the check."""

    def receive_weights(self, update_info: Any) -> None:
        """Check the weights on all workers, then load them.

        Raises:
            RuntimeError: "refused": a worker refused the weights, and no worker changed. "mixed": vLLM could not load a
                weight, or some were missing. Each layer has its old or its new weights, and a sound version repairs it.
        """
        weights = self._agree(update_info)
        self._mixed = True
        _load_weights(self.model, self.model_config, weights)
        self._mixed = False

    def finish_weight_update(self) -> None:
        """Do nothing. `receive_weights` has loaded everything."""

    def _agree(self, update_info: Any) -> Weights:
        """Call `checked_weights`, and raise on all workers if one raised."""
        workers, weights, cause, refusal = get_world_group(), (), None, None
        try:
            weights = self.checked_weights(update_info, workers.rank_in_group, workers.world_size)
        except Exception as error:
            cause, refusal = error, f"{type(error).__name__}: {error}"
        answers: list[tuple[str | None, bool]] = [(None, False)] * workers.world_size
        dist.all_gather_object(answers, (refusal, self._mixed), group=workers.cpu_group)
        if refusals := [refusal for refusal, _ in answers if refusal]:
            stay = "are still mixed" if any(mixed for _, mixed in answers) else "stay as they are"
            raise RuntimeError(f"refused, the weights {stay}: {refusals[0]}") from cause
        return weights


def _load_weights(model: torch.nn.Module, model_config: Any, weights: Weights) -> None:
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(weights)  # type: ignore[operator]
        finalize_layerwise_reload(model, model_config)
    except Exception as error:
        _put_back(model, model_config)
        raise RuntimeError(f"old and new weights are mixed, load a sound version: {error}") from error
    if model_config.quantization is None and loaded is not None:  # quantized parameters have names of their own
        kept = sorted({name for name, _ in model.named_parameters()} - loaded)
        if kept:
            raise RuntimeError(
                f"old and new weights are mixed, load a sound version: {kept[0]} was not in it ({len(kept)} in all)"
            )


def _put_back(model: torch.nn.Module, model_config: Any) -> None:
    """Restore the old weights of dismantled layers, and drop the weights loaded for them.

    vLLM keeps the loaded ones: the next reload would start with them and report success with half of a failed version.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
    finalize_layerwise_reload(model, model_config)
