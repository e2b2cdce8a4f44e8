"""What all engines of this plugin share: one verdict of all workers, then a load that can be repeated when it fails."""

# pyright: reportMissingImports=false

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)


def all_workers_agree(check: Callable[[int, int], None]) -> None:
    """Call ``check(rank, world_size)`` on every worker of the model; if it raises on one, raise on all.

    So no worker begins to load what another one refuses.
    """
    workers = get_world_group()
    verdicts: list[str | None] = [None] * workers.world_size
    cause = None
    try:
        check(workers.rank_in_group, workers.world_size)
    except Exception as error:
        cause = error
    dist.all_gather_object(verdicts, cause and f"{type(cause).__name__}: {cause}", group=workers.cpu_group)
    if refused := [verdict for verdict in verdicts if verdict]:
        raise RuntimeError(f"refused, the weights stay as they are: {refused[0]}") from cause


def load_weights(model: torch.nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace all weights of ``model`` by vLLM's layerwise reload.

    Args:
        model: the worker's.
        model_config: vLLM's.
        weights: (name in a Hugging Face folder, tensor) of all of them.

    Raises:
        RuntimeError: vLLM could not take a weight, or some were not replaced. Every layer has its old weights or its
            new ones, so the model must be loaded again before it serves; a sound version repairs it.
    """
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
    """Give the layers that are apart their old weights back, and forget what was loaded for them.

    vLLM keeps it: the next reload would begin with it, and answer that it loaded well when half is of the failed one.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
    finalize_layerwise_reload(model, model_config)
