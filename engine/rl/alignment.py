"""Log-probabilities as AReaL aligns them and as Holdfast does, and the way from one to the other.

A per-token tensor of Holdfast's is about the token it stands at: ``logprobs[b, t]`` is the log-probability of
``input_ids[b, t]`` given what stands before it; 0 at the first token, which nothing predicts. What a model gives comes
one place earlier: the logits at t are about token t + 1. AReaL leaves it there: what its ``forward`` and
``compute_logp`` return (``prox_logp``, ``ref_logp``), values, and after its ``compute_advantages`` also ``logprobs``,
``loss_mask``, ``advantages`` and ``returns`` are about token t + 1, and the last place of a row is about nothing. Its
rollouts (``logprobs``, ``loss_mask`` of a trajectory) are about token t, as here.
"""

import torch

from ...utils.errors import BatchError


def from_areal_alignment(values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Move what is about token t + 1 to that token.

    Args:
        values: ``[B, S]`` of any dtype, entry t about token t + 1; what stands at or behind the last token of a row is
            dropped.
        attention_mask: ``[B, S]``, ones, then zeros.

    Returns:
        ``[B, S]``, entry t about token t; 0 at first tokens and at padding.

    Raises:
        BatchError: the shapes differ, or are not ``[B, S]``.
    """
    _check(values, attention_mask)
    moved = torch.roll(values, 1, dims=1)
    moved[:, 0] = 0
    return moved.masked_fill(~attention_mask.bool(), 0)


def to_areal_alignment(values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Move what is about token t to the place before, where the token was predicted.

    Args:
        values: ``[B, S]`` of any dtype, entry t about token t; what stands at first tokens and at padding is dropped.
        attention_mask: ``[B, S]``, ones, then zeros.

    Returns:
        ``[B, S]``, entry t about token t + 1; 0 at and behind the last token of a row.

    Raises:
        BatchError: the shapes differ, or are not ``[B, S]``.
    """
    _check(values, attention_mask)
    moved = torch.roll(values.masked_fill(~attention_mask.bool(), 0), -1, dims=1)
    moved[:, -1] = 0
    return moved


def _check(values: torch.Tensor, attention_mask: torch.Tensor) -> None:
    if values.dim() != 2 or values.shape != attention_mask.shape:
        raise BatchError(
            f"values of shape {list(values.shape)} with an attention mask of {list(attention_mask.shape)}; expected "
            "[batch, seqlen] of both"
        )
