"""Ulysses: the ranks of a group share the tokens of a packed row, and exchange them for heads
inside the attention.

Each of the c ranks runs the model on its part of the row. The attention exchanges its tokens for
the whole row of its part of the heads (`tokens_to_heads`), and back (`heads_to_tokens`). Scores and
values are gathered (`gather_parts` of `rank_parts`), so every rank computes the loss of the whole
row, and differentiates its own part.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .logprobs import next_tokens
from .microbatch import MicroBatch
from .rank_parts import Group, own_part


def own_targets(mb: MicroBatch, group: Group) -> torch.Tensor:
    """The next token at each position of this rank's part of the filled row. Without a group, of
    the row as it is.

    The row is shifted before it is cut, because the last token of a part is followed by the first
    one of the next.
    """
    ids = mb.data["input_ids"]
    if group is not None:
        ids = F.pad(ids, (0, mb.row_size(dist.get_world_size(group)) - mb.n_tokens))
    return own_part(next_tokens(ids), group)


def tokens_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Exchange ``[1, heads, T/c, dim]`` of this rank's tokens for ``[1, heads/c, T, dim]`` of its
    heads.

    Key heads that are fewer than c are repeated.

    Raises:
        ValueError: the ranks of the group cannot share the heads.
    """
    c, heads, key_heads = dist.get_world_size(group), query.shape[1], key.shape[1]
    if not _fits(c, heads, key_heads):
        fitting = ", ".join(
            str(size) for size in range(1, heads + 1) if _fits(size, heads, key_heads)
        )
        raise ValueError(
            f"{c} ranks cannot share {heads} heads with {key_heads} key heads; expected a "
            f"context_parallel_size of {fitting}"
        )
    if key_heads < c:
        key, value = (each.repeat_interleave(c // key_heads, dim=1) for each in (key, value))
    # [c, T/c, heads/c * dim], for each rank its heads. All three travel together.
    parts = [
        each.unflatten(1, (c, -1))[0].transpose(1, 2).flatten(2) for each in (query, key, value)
    ]
    widths = [part.shape[2] for part in parts]
    received = _Exchange.apply(torch.cat(parts, dim=2), group).flatten(0, 1).split(widths, dim=1)
    dims = [each.shape[3] for each in (query, key, value)]
    return tuple(
        whole.unflatten(1, (-1, dim)).transpose(0, 1)[None]
        for whole, dim in zip(received, dims, strict=True)
    )


def heads_to_tokens(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange ``[1, T, heads/c, dim]`` of this rank's heads for ``[1, T/c, heads, dim]`` of its
    tokens.
    """
    parts = out[0].unflatten(0, (dist.get_world_size(group), -1))
    return _Exchange.apply(parts, group).transpose(0, 1).flatten(1, 2)[None]


def _fits(c: int, heads: int, key_heads: int) -> bool:
    return heads % c == 0 and (key_heads % c == 0 or c % key_heads == 0)


class _Exchange(torch.autograd.Function):
    """``parts [c, ...]``, one for each rank -> ``[c, ...]``, one from each rank."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = (
        parts.contiguous()
    )  # `empty_like` keeps strides, and the bytes are sent in the order of the memory
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
