"""Muon for the matrices of the blocks, and AdamW for all other parameters, in one optimizer.

Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) orthogonalizes
the momentum of a matrix, which takes the whole matrix. Ranks take turns: each gathers one of as
many matrices as there are ranks, orthogonalizes it and sends the result to all. So the work is
divided, every rank gets the same bits, and with the same gradients every mesh takes the same step.
Cost of a step: two more gathers of the matrices in bfloat16.
"""

from collections.abc import Callable, Collection, Iterable
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import made_sharded, step_without_hooks
from ...utils.distributed import get_rank, get_world_size
from ...utils.errors import ConfigError
from ..memory.tensors import local_box, local_tensor


class Muon(torch.optim.AdamW):
    """Muon over ``matrices`` and AdamW over the other ``params``, with one rate and weight decay.

    As in Liu et al., "Muon is Scalable for LLM Training", 2025, the update of a matrix is scaled to
    the usual size of AdamW's, so that both can have the same rate. Steps are those of
    `torch.optim.Muon` with ``match_rms_adamw`` and of `torch.optim.AdamW`, to the bit. A matrix has
    one float32 momentum.

    Args:
        params: all parameters.
        matrices: those with two dimensions that Muon updates.
        momentum: decay of the momentum of matrices, which is Nesterov's.
        options: arguments of `torch.optim.AdamW`, ``lr`` and ``weight_decay`` for all parameters.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        matrices: Collection[nn.Parameter] = (),
        momentum: float = 0.95,
        **options: Any,
    ) -> None:
        chosen = {id(param) for param in matrices}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for param in params:
            groups[id(param) in chosen].append(param)
        super().__init__(
            [
                {"params": group, "momentum": momentum, "orthogonal": kind}
                for kind, group in groups.items()
            ],
            **options,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. All ranks call it, with gradients of the same
        parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["orthogonal"]]
            step_without_hooks(torch.optim.AdamW)(self)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                self._update_matrices(group)
        return loss

    def _update_matrices(self, group: dict[str, Any]) -> None:
        params, n_ranks = (
            [param for param in group["params"] if param.grad is not None],
            get_world_size(),
        )
        for first in range(0, len(params), n_ranks):
            turn, own = params[first : first + n_ranks], None
            for rank, param in enumerate(turn):
                whole = _gathered(param, self._direction(param, group["momentum"]))
                if rank == get_rank():
                    own = orthogonalized(whole)
            for rank, param in enumerate(turn):
                update = own if rank == get_rank() else None
                self._apply(group, param, _sent(param, update, rank))

    def _direction(self, param: nn.Parameter, momentum: float) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
        gradient, average = local_tensor(param.grad), local_tensor(state["momentum_buffer"])  # type: ignore[arg-type]
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)

    def _apply(self, group: dict[str, Any], param: nn.Parameter, update: torch.Tensor) -> None:
        weight, lr = local_tensor(param), group["lr"]
        weight.mul_(1 - lr * group["weight_decay"])
        part = local_box(param).of(update).to(weight.device)
        weight.add_(part, alpha=-lr * 0.2 * sqrt(max(param.shape)))


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The `trained_matrices` of a model that FSDP2 has sharded. Raises ConfigError if there are
    none.
    """
    found = trained_matrices(
        each for each in model.modules() if isinstance(each, FSDPModule) and each is not model
    )
    if not found:
        raise ConfigError(
            f"config key 'optimizer.type' is 'muon', but {type(model).__name__} has no blocks "
            "with trained matrices; set it to 'adam'"
        )
    return found


def trained_matrices(blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The trained weights with two dimensions in the blocks of a model, except embeddings."""
    found: dict[int, nn.Parameter] = {}
    for module in (module for block in blocks for module in block.modules()):
        weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.requires_grad and weight.dim() == 2:
            found[id(weight)] = weight
    return list(found.values())


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations in bfloat16, which set singular values to about 1 (0.7 to 1.2)."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(
            x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445
        )
    return (x.T if is_tall else x).contiguous()


def _gathered(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The whole of what ranks have a part ``local`` of, sharded like ``param``, in bfloat16."""
    if not isinstance(param, DTensor):
        return local.bfloat16()
    part = local.bfloat16().to(param.device_mesh.device_type)  # parameters may be in host memory
    return made_sharded(
        part, param.device_mesh, param.placements, param.shape, param.stride()
    ).full_tensor()


def _sent(param: torch.Tensor, update: torch.Tensor | None, source: int) -> torch.Tensor:
    """The update of a whole matrix that the rank ``source`` has."""
    if update is None:
        device = param.device_mesh.device_type if isinstance(param, DTensor) else param.device
        update = torch.empty(param.shape, dtype=torch.bfloat16, device=device)
    if get_world_size() > 1:
        dist.broadcast(update, source)
    return update
