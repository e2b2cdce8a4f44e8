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
from torch import Tensor

from .logprobs import next_tokens
from .packed_batch import MicroBatch
from .rank_parts import Group, own_part


def own_targets(mb: MicroBatch, group: Group) -> Tensor:
    """The next token at each position of this rank's part of the filled row. Without a group, of
    the row as it is.

    The row is shifted before it is cut, because the last token of a part is followed by the first
    one of the next.
    """
    # The zeros of the filling.
    ids = mb.row_ids
    if group is not None:
        n_filled = mb.row_size(dist.get_world_size(group))
        ids = F.pad(ids, (0, n_filled - mb.n_row_tokens))
    return own_part(next_tokens(ids), group)


def tokens_to_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Exchange ``[1, heads, T/c, dim]`` of this rank's tokens for ``[1, heads/c, T, dim]`` of its
    heads.

    Key heads that are fewer than c are repeated.

    Raises:
        ValueError: the ranks of the group cannot share the heads.
    """
    c = dist.get_world_size(group)
    heads = query.shape[1]
    key_heads = key.shape[1]
    if not _fits(c, heads, key_heads):
        sizes = range(1, heads + 1)
        fitting = [str(size) for size in sizes if _fits(size, heads, key_heads)]
        raise ValueError(
            f"{c} ranks cannot share {heads} heads with {key_heads} key heads; expected a "
            f"context_parallel_size of {', '.join(fitting)}"
        )
    if key_heads < c:
        n_copies = c // key_heads
        key = key.repeat_interleave(n_copies, dim=1)
        value = value.repeat_interleave(n_copies, dim=1)

    # [c, T/c, heads/c * dim] of each: for each rank its heads. All three travel together.
    parts = []
    for each in (query, key, value):
        by_rank = each.unflatten(1, (c, -1))[0]
        parts.append(by_rank.transpose(1, 2).flatten(2))
    widths = [part.shape[2] for part in parts]
    received = _Exchange.apply(torch.cat(parts, dim=2), group)

    # [T, heads/c * dim] -> [1, heads/c, T, dim], where T are the tokens of all ranks, in order.
    whole = received.flatten(0, 1).split(widths, dim=1)
    result = []
    for each, given in zip(whole, (query, key, value), strict=True):
        by_head = each.unflatten(1, (-1, given.shape[3]))
        result.append(by_head.transpose(0, 1)[None])
    return tuple(result)


def heads_to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``[1, T, heads/c, dim]`` of this rank's heads for ``[1, T/c, heads, dim]`` of its
    tokens.
    """
    # [c, T/c, heads/c, dim]: for each rank its tokens.
    c = dist.get_world_size(group)
    parts = out[0].unflatten(0, (c, -1))
    received = _Exchange.apply(parts, group)
    # The heads of all ranks next to each other.
    return received.transpose(0, 1).flatten(1, 2)[None]


def _fits(
    c: int,
    heads: int,
    key_heads: int,
) -> bool:
    cuts_key_heads = key_heads % c == 0
    repeats_key_heads = c % key_heads == 0
    return heads % c == 0 and (cuts_key_heads or repeats_key_heads)


class _Exchange(torch.autograd.Function):
    """``parts [c, ...]``, one for each rank -> ``[c, ...]``, one from each rank."""

    @staticmethod
    def forward(
        ctx: Any,
        parts: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    # `empty_like` keeps strides, and the bytes are sent in the order of the memory.
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
