"""Tensors of which each rank of a group has a part, or the whole with a part of its gradient."""

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
"""The ranks that have a part each. None: this rank has the whole."""


def own_part(whole: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """This rank's part of a tensor that is cut evenly along ``dim``."""
    return (
        whole
        if group is None
        else whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    )


def gather_parts(part: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Gather the parts of a tensor along ``dim``, on every rank of the group. A gradient goes to
    the own part alone.

    Every rank computes the same loss of the whole tensor, so a sum over the ranks would be too
    large.
    """
    return part if group is None else _Gather.apply(part, group, dim)


def sum_gradient(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a tensor that all ranks of the group have. Its gradient is the sum of theirs."""
    return tensor if group is None else _SumGradient.apply(tensor, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        parts = list(part.new_empty((dist.get_world_size(group), *part.shape)))
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_part(grad, ctx.group, ctx.dim), None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
