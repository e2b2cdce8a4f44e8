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
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

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
        params: Iterable[Parameter],
        matrices: Collection[Parameter] = (),
        momentum: float = 0.95,
        **options: Any,
    ) -> None:
        chosen = {id(param) for param in matrices}
        orthogonal = []
        others = []
        for param in params:
            if id(param) in chosen:
                orthogonal.append(param)
            else:
                others.append(param)
        groups = [
            {"params": orthogonal, "momentum": momentum, "orthogonal": True},
            {"params": others, "momentum": momentum, "orthogonal": False},
        ]
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. All ranks call it, with gradients of the same
        parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # The step of AdamW sees its own group alone.
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
        n_ranks = get_world_size()
        own_rank = get_rank()
        params = [param for param in group["params"] if param.grad is not None]
        for first in range(0, len(params), n_ranks):
            turn = params[first : first + n_ranks]

            # All ranks gather every matrix of the turn. Each orthogonalizes one of them.
            own = None
            for rank, param in enumerate(turn):
                whole = _gathered(param, self._direction(param, group["momentum"]))
                if rank == own_rank:
                    own = orthogonalized(whole)

            # Then each sends its result to the others.
            for rank, param in enumerate(turn):
                update = own if rank == own_rank else None
                update = _sent(param, update, rank)
                self._apply(group, param, update)

    def _direction(self, param: Parameter, momentum: float) -> Tensor:
        """Nesterov's momentum of this rank's part."""
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
        gradient = local_tensor(param.grad)  # type: ignore[arg-type]
        average = local_tensor(state["momentum_buffer"])
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)

    def _apply(
        self,
        group: dict[str, Any],
        param: Parameter,
        update: Tensor,
    ) -> None:
        lr = group["lr"]
        weight = local_tensor(param)
        weight.mul_(1 - lr * group["weight_decay"])

        # Elements of an orthogonal matrix are about 1 / sqrt(largest dimension), those of an
        # update of AdamW about 0.2.
        alpha = -lr * 0.2 * sqrt(max(param.shape))
        part = local_box(param).of(update)
        weight.add_(part.to(weight.device), alpha=alpha)


def hidden_matrices(model: nn.Module) -> list[Parameter]:
    """The `trained_matrices` of a model that FSDP2 has sharded. Raises ConfigError if there are
    none.
    """
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule)]
    found = trained_matrices(block for block in blocks if block is not model)
    if not found:
        raise ConfigError(
            f"config key 'optimizer.type' is 'muon', but {type(model).__name__} has no blocks "
            "with trained matrices; set it to 'adam'"
        )
    return found


def trained_matrices(blocks: Iterable[nn.Module]) -> list[Parameter]:
    """The trained weights with two dimensions in the blocks of a model, except embeddings."""
    found: dict[int, Parameter] = {}
    for block in blocks:
        for module in block.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Embedding) or not isinstance(weight, Parameter):
                continue
            if weight.requires_grad and weight.dim() == 2:
                found[id(weight)] = weight
    return list(found.values())


def orthogonalized(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz iterations in bfloat16, which set singular values to about 1 (0.7 to
    1.2).
    """
    # The products are smaller if rows are fewer than columns.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)

    # x = 3.4445 x + (2.0315 A^2 - 4.7750 A) x, where A = x x^T
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)

    if is_tall:
        x = x.T
    return x.contiguous()


def _gathered(param: Tensor, local: Tensor) -> Tensor:
    """The whole of what ranks have a part ``local`` of, sharded like ``param``, in bfloat16."""
    if not isinstance(param, DTensor):
        return local.bfloat16()
    mesh = param.device_mesh
    part = local.bfloat16().to(mesh.device_type)  # parameters may be in host memory
    sharded = made_sharded(
        part,
        mesh,
        param.placements,
        param.shape,
        param.stride(),
    )
    return sharded.full_tensor()


def _sent(param: Tensor, update: Tensor | None, source: int) -> Tensor:
    """The update of a whole matrix that the rank ``source`` has."""
    if update is None:
        device: Any = param.device
        if isinstance(param, DTensor):
            device = param.device_mesh.device_type
        update = torch.empty(param.shape, dtype=torch.bfloat16, device=device)
    if get_world_size() > 1:
        dist.broadcast(update, source)
    return update
