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
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from .meshes import Meshes
from .packed_batch import MicroBatch
from .unsharded import unsharded_class

ROUTER_STATS = ("expert_load_max_over_mean", "router_aux_loss")


class Routers:
    """The routers of an engine's model. Does nothing for a model without experts.

    Attributes:
        top_k: experts that a token chose in each layer of the last forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainEngineConfig,
        meshes: Meshes,
    ) -> None:
        self._packed = config.pack_sequences
        self._coef = config.router_aux_loss_coef
        self._sequence = meshes.sequence
        # Modules with experts -> number of the layer, and the number of experts of each layer.
        self._layers: dict[nn.Module, int] = {}
        self._n_experts: list[int] = []
        self._places = {} if self._coef is None else find_routers(model)
        self._records = False
        self.top_k = 1

        # One hook for all layers, outside of graphs: torch.compile would make a graph for each.
        count: Any = torch.compiler.disable(self._count_choices)
        keep: Any = torch.compiler.disable(self._keep_logits)
        for module in model.modules():
            n_experts = number_of_experts(module)
            if n_experts:
                self._layers[module] = len(self._n_experts)
                self._n_experts.append(n_experts)
                module.register_forward_pre_hook(count)
        for module in self._places:
            module.register_forward_hook(keep)
        self.start_step(torch.device("cpu"))

    def start_step(self, device: torch.device) -> None:
        """Forget what was recorded."""
        # Choices of each expert, by layer. The last place counts choices of no expert.
        self._loads = []
        for n_experts in self._n_experts:
            self._loads.append(torch.zeros(n_experts + 1, dtype=torch.int64, device=device))
        # Sums of loss x share, and of shares.
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

        # Of the last forward: logits of each layer, its real tokens, and this rank's share of them.
        self._logits: list[Tensor] = []
        self._mask = torch.empty(0)
        self._own_share = 1.0

    @contextmanager
    def recording(self, mb: MicroBatch, share: float) -> Iterator[None]:
        """Record a forward of the model on ``mb``, unless its share of the loss is 0."""
        if self._n_experts and share:
            self._mask, self._own_share = self._real_tokens(mb)
            self._records = True
        try:
            yield
        finally:
            self._records = False

    def loss(self, share: float) -> Tensor | float:
        """The load-balancing loss of the recorded forward, weighted like its other loss. 0 without
        a coefficient.

        This is the ``load_balancing_loss_func`` of transformers over the real tokens of a
        micro-batch: the number of experts, times the sum over experts of choices per token times
        mean probability, both over all layers. With an even load it is the number of experts per
        token. Choices are the largest logits and probabilities their softmax, even if the router
        itself uses a sigmoid, a bias or groups. The loss is no mean over tokens, so it depends a
        little on how the batch was cut.
        """
        logits = tuple(self._logits)
        self._logits = []
        share *= self._own_share
        if not logits or share == 0:
            return 0.0
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        n_experts = logits[0].shape[-1]
        loss = load_balancing_loss_func(logits, n_experts, self.top_k, self._mask)  # type: ignore[arg-type]
        assert isinstance(loss, Tensor)
        assert self._coef is not None
        weighted = loss.detach().double() * share
        self._sums += torch.stack([weighted, torch.full_like(weighted, share)])
        return loss * (self._coef * share)

    def statistics(self) -> dict[str, Tensor]:
        """`ROUTER_STATS` of the step over all ranks, on the device. Collective."""
        if not self._n_experts:
            return {}
        # All numbers travel together, in float64, which holds counts exactly.
        sums = torch.cat([*self._loads, self._sums])
        dist.all_reduce(sums)
        *loads, loss, share = sums.split([*(len(load) for load in self._loads), 1, 1])

        imbalances = []
        for load in loads:
            # without the choices of no expert
            of_experts = load[:-1]
            imbalances.append(of_experts.max() / of_experts.mean())
        stats = {"expert_load_max_over_mean": torch.stack(imbalances).mean()}
        if self._coef is not None:
            stats["router_aux_loss"] = (loss / share)[0]
        return stats

    def _real_tokens(self, mb: MicroBatch) -> tuple[Tensor, float]:
        """``[rows]`` int64 for the rows that this rank's layers see: the number of sequences of
        ``mb`` that the token is part of, which is 0 for filling. And the share of their tokens that
        this rank has, which is below 1 if ranks share the row.
        """
        device = mb.position_ids.device
        if not self._packed:
            # [sequences, longest], as in `MicroBatch.padded`
            columns = torch.arange(max(mb.lengths), device=device)
            real = columns < mb.cu_seqlens.diff()[:, None]
            return real.reshape(-1).long(), 1.0

        # The part of the filled row of this rank. Real tokens come before the filling.
        n_parts = 1
        part = 0
        if self._sequence is not None:
            n_parts = self._sequence.size()
            part = self._sequence.rank()
        size = mb.row_size(n_parts) // n_parts
        start = part * size
        end = start + size
        end = min(end, mb.n_row_tokens)
        n_own = max(end - start, 0)
        if mb.shared is None:
            real = torch.arange(size, device=device) < n_own
            share = n_own / mb.n_tokens
            return real.long(), share
        uses = mb.shared.uses[start : start + n_own]
        filled = F.pad(uses, (0, size - n_own))
        n_uses = mb.shared.uses_between(start, end)
        share = n_uses / mb.n_tokens
        return filled, share

    def _count_choices(self, module: nn.Module, args: Any) -> None:
        # Ranks without a share of the loss need it, too, for the same figures on all.
        chosen: Tensor = args[1]  # [tokens, top k]
        self.top_k = chosen.shape[-1]
        if not self._records:
            return
        layer = self._layers[module]
        # A number above those of the experts stands for no expert.
        experts = chosen.reshape(-1).clamp(max=self._n_experts[layer])
        counted = self._mask.repeat_interleave(self.top_k)
        self._loads[layer].scatter_add_(0, experts, counted)

    def _keep_logits(
        self,
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        if not self._records:
            return
        logits = output[self._places[module]] if isinstance(output, tuple) else output
        self._logits.append(logits.reshape(-1, logits.shape[-1]))


def require_routers(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Raise ConfigError if ``router_aux_loss_coef`` is set, and transformers does not know the
    model's routers.
    """
    if config.router_aux_loss_coef is None:
        return
    has_experts = any(number_of_experts(module) for module in model.modules())
    if has_experts and find_routers(model):
        return
    raise ConfigError(
        f"config key 'router_aux_loss_coef' is {config.router_aux_loss_coef}, but transformers "
        f"knows no routers in {unsharded_class(model).__name__}; set it to null"
    )


def number_of_experts(module: nn.Module) -> int:
    """Number of experts in a module that is called with (hidden states, choices, weights). 0 for
    other modules.
    """
    parameters = inspect.signature(unsharded_class(module).forward).parameters
    takes_choices = len(parameters) == 4  # with self
    if not takes_choices or not isinstance(getattr(module, "num_experts", None), int):
        return 0
    # The weights of all experts are one tensor.
    for param in module.parameters(recurse=False):
        if param.dim() == 3:
            return param.shape[0]
    return 0


def find_routers(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Modules that return the logits of ``output_router_logits`` in transformers -> their place in
    the output.
    """
    found: dict[nn.Module, int] = {}
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        recorders: Any = part.can_record_outputs.get("router_logits", [])
        if not isinstance(recorders, list):
            recorders = [recorders]

        # A recorder is a class of modules, or describes one.
        for recorder in recorders:
            target = getattr(recorder, "target_class", recorder)
            layer = getattr(recorder, "layer_name", None)
            for name, module in part.named_modules():
                is_layer = layer is None or f".{layer}." in f".{name}."
                if is_layer and isinstance(module, target):
                    found[module] = getattr(recorder, "index", 1)
    return found
