"""Tensors of which each rank of a group has a part, or the whole with a part of its gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""The ranks that have a part each. None: this rank has the whole."""


def own_part(whole: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's part of a tensor that is cut evenly along ``dim``."""
    if group is None:
        return whole
    parts = whole.chunk(dist.get_world_size(group), dim)
    return parts[dist.get_rank(group)]


def gather_parts(part: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Gather the parts of a tensor along ``dim``, on every rank of the group. A gradient goes to
    the own part alone.

    Every rank computes the same loss of the whole tensor, so a sum over the ranks would be too
    large.
    """
    if group is None:
        return part
    return _Gather.apply(part, group, dim)


def sum_gradient(tensor: Tensor, group: Group) -> Tensor:
    """Return a tensor that all ranks of the group have. Its gradient is the sum of theirs."""
    if group is None:
        return tensor
    return _SumGradient.apply(tensor, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        group: dist.ProcessGroup,
        dim: int,
    ) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        n_parts = dist.get_world_size(group)
        parts = list(part.new_empty((n_parts, *part.shape)))
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # None for the arguments that are not tensors
        own = own_part(grad, ctx.group, ctx.dim)
        return own, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.group = group
        # A view, because autograd needs an output that is another tensor than the input.
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Others may hold the same gradient, so the sum goes to a copy.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
