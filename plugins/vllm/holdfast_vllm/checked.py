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
    """Base of the engines. It dismantles no layer before every worker has checked the first
    weights.

    A version comes in one or several calls of `receive_weights`. Layers are apart from the first
    call to the last.
    """

    _mixed = False
    # parameters loaded so far. None: no layer is apart
    _loaded: set[str] | None = None
    # whether the model tells which parameters it loads
    _names_known = True

    @abstractmethod
    def checked_weights(
        self,
        update_info: Any,
        rank: int,
        world_size: int,
    ) -> Weights:
        """Check and return the weights of a call, or raise. The workers may share the checks by
        ``rank``.
        """

    def start_weight_update(self) -> None:
        """Restore layers that an unfinished version left apart. `receive_weights` dismantles them
        after the check.
        """
        self._put_back()

    def receive_weights(self, update_info: Any) -> None:
        """Check the weights on all workers, then load them. Without ``last: False`` they complete
        the version.

        Raises:
            RuntimeError: "refused": a worker refused the weights, and no worker changed. "mixed": a
                later part of the version was refused, vLLM could not load a weight, or some were
                missing. Each layer has its old or its new weights, and a sound version repairs it.
        """
        weights = self._agree(update_info)
        try:
            if self._loaded is None:
                self._mixed = True
                self._loaded = set()
                self._names_known = True
                initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(weights)  # type: ignore[operator]
            self._names_known = self._names_known and loaded is not None
            self._loaded |= loaded or set()
            if getattr(update_info, "last", True):
                self._complete()
        except Exception as error:
            self._put_back()
            raise RuntimeError(
                f"old and new weights are mixed, load a sound version: {error}"
            ) from error

    def finish_weight_update(self) -> None:
        """Close a version that has ended early. `receive_weights` has finished a complete one."""
        self._put_back()

    def _complete(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        loaded = self._loaded or set()
        self._loaded = None

        # Parameters of quantized models have other names.
        kept = sorted({name for name, _ in self.model.named_parameters()} - loaded)
        if kept and self.model_config.quantization is None and self._names_known:
            raise RuntimeError(f"{kept[0]} was not in it ({len(kept)} in all)")
        self._mixed = False

    def _put_back(self) -> None:
        """Restore the old weights of layers that are apart and incomplete.

        vLLM keeps the weights loaded for such a layer: the next reload would start with them and
        report success with half of a failed version.
        """
        if self._loaded is None:
            return
        self._loaded = None
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
                info.reset()
        finalize_layerwise_reload(self.model, self.model_config)

    def _agree(self, update_info: Any) -> Weights:
        """Call `checked_weights`, and raise on all workers if one raised."""
        workers = get_world_group()
        weights: Weights = ()
        cause = None
        refusal = None
        try:
            weights = self.checked_weights(update_info, workers.rank_in_group, workers.world_size)
        except Exception as error:
            cause = error
            refusal = f"{type(error).__name__}: {error}"

        # Each worker tells its refusal, and whether its weights are mixed.
        answers: list[tuple[str | None, bool]] = [(None, False)] * workers.world_size
        dist.all_gather_object(answers, (refusal, self._mixed), group=workers.cpu_group)
        refusals = [refusal for refusal, _ in answers if refusal]
        if not refusals:
            return weights
        self._put_back()
        stay = "are still mixed" if any(mixed for _, mixed in answers) else "stay as they are"
        raise RuntimeError(f"refused, the weights {stay}: {refusals[0]}") from cause
