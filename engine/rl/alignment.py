"""Conversion between AReaL's alignment of per-token tensors and Holdfast's.

Holdfast: a tensor describes the token at its position. ``logprobs[b, t]`` is the log-probability of
``input_ids[b, t]`` given the earlier tokens, and 0 at the first token, which nothing predicts.

AReaL: model outputs stay one position earlier, because the logits at t describe token t + 1. So the
results of its ``forward`` and ``compute_logp`` (``prox_logp``, ``ref_logp``), values, and after its
``compute_advantages`` also ``logprobs``, ``loss_mask``, ``advantages`` and ``returns`` describe
token t + 1, and the last position is unused. Its rollouts (``logprobs``, ``loss_mask`` of a
trajectory) describe token t, as here.
"""

import torch
from torch import Tensor

from ...utils.errors import BatchError


def from_areal_alignment(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Move ``[B, S]`` values of any dtype that describe token t + 1 to that token.

    The result is 0 at first tokens and at padding. ``attention_mask`` ``[B, S]`` is ones, then
    zeros.

    Raises:
        BatchError: the shapes differ, or are not ``[B, S]``.
    """
    _check(values, attention_mask)
    is_padding = ~attention_mask.bool()
    moved = torch.roll(values, 1, dims=1)
    moved[:, 0] = 0
    return moved.masked_fill(is_padding, 0)


def to_areal_alignment(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Move ``[B, S]`` values of any dtype that describe token t to the position before, where the
    token was predicted.

    The result is 0 at and after the last token of a row. ``attention_mask`` ``[B, S]`` is ones,
    then zeros.

    Raises:
        BatchError: the shapes differ, or are not ``[B, S]``.
    """
    _check(values, attention_mask)
    is_padding = ~attention_mask.bool()
    values = values.masked_fill(is_padding, 0)
    moved = torch.roll(values, -1, dims=1)
    moved[:, -1] = 0
    return moved


def _check(values: Tensor, attention_mask: Tensor) -> None:
    if values.dim() != 2 or values.shape != attention_mask.shape:
        raise BatchError(
            f"values of shape {list(values.shape)} with an attention mask of "
            f"{list(attention_mask.shape)}; expected [batch, seqlen] of both"
        )
