"""Watch the routers of a mixture-of-experts model: how evenly they load the experts, and a loss
that evens it out.

Hooks see the choices and logits of each layer while `Routers.recording` is active, which is in
forwards alone. So a block that activation checkpointing runs again in the backward counts once.
Nothing waits for the device.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from .meshes import Meshes
from .microbatch import MicroBatch
from .unsharded import unsharded_class

ROUTER_STATS = ("expert_load_max_over_mean", "router_aux_loss")


class Routers:
    """The routers of an engine's model. Does nothing for a model without experts."""

    def __init__(self, model: PreTrainedModel, config: TrainEngineConfig, meshes: Meshes) -> None:
        self._packed, self._coef = config.pack_sequences, config.router_aux_loss_coef
        self._sequence = meshes.sequence
        self._n_experts: list[int] = []  # of each layer
        self._layers: dict[nn.Module, int] = {}  # modules with experts -> number of the layer
        self._places = _routers(model) if self._coef is not None else {}
        self._records = False
        self._top_k = 1
        # One hook for all layers, outside of graphs: torch.compile would make a graph for each
        # hook.
        count: Any = torch.compiler.disable(self._count_choices)
        keep: Any = torch.compiler.disable(self._keep_logits)
        for module in model.modules():
            if n_experts := _number_of_experts(module):
                self._layers[module] = len(self._n_experts)
                self._n_experts.append(n_experts)
                module.register_forward_pre_hook(count)
        for module in self._places:
            module.register_forward_hook(keep)
        self.start_step(torch.device("cpu"))

    def start_step(self, device: torch.device) -> None:
        """Forget what was recorded."""
        self._loads = [
            torch.zeros(n + 1, dtype=torch.int64, device=device) for n in self._n_experts
        ]
        self._sums = torch.zeros(
            2, dtype=torch.float64, device=device
        )  # of loss x share, and of shares
        self._logits: list[torch.Tensor] = []  # of the last forward, a layer each
        self._mask, self._own_share = torch.empty(0), 1.0

    @contextmanager
    def recording(self, mb: MicroBatch, share: float) -> Iterator[None]:
        """Record a forward of the model on ``mb``, unless its share of the loss is 0."""
        if self._n_experts and share:
            (self._mask, self._own_share), self._records = self._real_tokens(mb), True
        try:
            yield
        finally:
            self._records = False

    def loss(self, share: float) -> torch.Tensor | float:
        """The load-balancing loss of the recorded forward, weighted like its other loss. 0 without
        a coefficient.

        This is the ``load_balancing_loss_func`` of transformers over the real tokens of a
        micro-batch: the number of experts, times the sum over experts of choices per token times
        mean probability, both over all layers. With an even load it is the number of experts per
        token. Choices are the largest logits and probabilities their softmax, even if the router
        itself uses a sigmoid, a bias or groups. The loss is no mean over tokens, so it depends a
        little on how the batch was cut.
        """
        logits, self._logits, share = tuple(self._logits), [], share * self._own_share
        if not logits or share == 0:
            return 0.0
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        loss = load_balancing_loss_func(logits, logits[0].shape[-1], self._top_k, self._mask)  # type: ignore[arg-type]
        assert isinstance(loss, torch.Tensor) and self._coef is not None
        self._sums += torch.stack(
            [loss.detach().double() * share, torch.full_like(self._sums[0], share)]
        )
        return loss * (self._coef * share)

    def statistics(self) -> dict[str, torch.Tensor]:
        """`ROUTER_STATS` of the step over all ranks, on the device. Collective."""
        if not self._n_experts:
            return {}
        sums = torch.cat([*self._loads, self._sums])
        dist.all_reduce(sums)
        layers = [load[:-1] for load in sums[:-2].split([n + 1 for n in self._n_experts])]
        stats = {ROUTER_STATS[0]: torch.stack([load.max() / load.mean() for load in layers]).mean()}
        return stats if self._coef is None else stats | {ROUTER_STATS[1]: sums[-2] / sums[-1]}

    def _real_tokens(self, mb: MicroBatch) -> tuple[torch.Tensor, float]:
        """``[rows]`` int64 for the rows that this rank's layers see: 1 for a token of ``mb``, 0 for
        others. And the share of these tokens in ``mb``, which is below 1 if ranks share the row.
        """
        device = mb.position_ids.device
        if not self._packed:
            real = torch.arange(max(mb.lengths), device=device) < mb.cu_seqlens.diff()[:, None]
            return real.reshape(-1).long(), 1.0
        c, part = (
            (1, 0) if self._sequence is None else (self._sequence.size(), self._sequence.rank())
        )
        size = mb.row_size(c) // c
        n_own = min(max(mb.n_tokens - part * size, 0), size)
        return (torch.arange(size, device=device) < n_own).long(), n_own / mb.n_tokens

    def _count_choices(self, module: nn.Module, args: Any) -> None:
        if not self._records:
            return
        chosen: torch.Tensor = args[1]  # [tokens, top k]
        layer, self._top_k = self._layers[module], chosen.shape[-1]
        n_experts = self._n_experts[layer]  # a larger number stands for no expert
        counted = self._mask.repeat_interleave(self._top_k)
        self._loads[layer].scatter_add_(0, chosen.reshape(-1).clamp(max=n_experts), counted)

    def _keep_logits(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._records:
            logits = output[self._places[module]] if isinstance(output, tuple) else output
            self._logits.append(logits.reshape(-1, logits.shape[-1]))


def require_routers(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Raise ConfigError if ``router_aux_loss_coef`` is set, and transformers does not know the
    model's routers.
    """
    if config.router_aux_loss_coef is None or (
        _routers(model) and any(map(_number_of_experts, model.modules()))
    ):
        return
    raise ConfigError(
        f"config key 'router_aux_loss_coef' is {config.router_aux_loss_coef}, but transformers "
        f"knows no routers in {unsharded_class(model).__name__}; set it to null"
    )


def _number_of_experts(module: nn.Module) -> int:
    """Number of experts in a module that is called with (hidden states, choices, weights). 0 for
    other modules.
    """
    takes_choices = (
        len(inspect.signature(unsharded_class(module).forward).parameters) == 4
    )  # with self
    if not takes_choices or not isinstance(getattr(module, "num_experts", None), int):
        return 0
    return next(
        (param.shape[0] for param in module.parameters(recurse=False) if param.dim() == 3), 0
    )


def _routers(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Modules that return the logits of ``output_router_logits`` in transformers -> their place in
    the output.
    """
    found: dict[nn.Module, int] = {}
    for part in model.modules():
        recorders: Any = (
            part.can_record_outputs.get("router_logits", [])
            if isinstance(part, PreTrainedModel)
            else []
        )
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target, layer = (
                getattr(recorder, "target_class", recorder),
                getattr(recorder, "layer_name", None),
            )
            for name, module in part.named_modules():
                if isinstance(module, target) and (layer is None or f".{layer}." in f".{name}."):
                    found[module] = getattr(recorder, "index", 1)
    return found
