"""Attention of packed sequences, each within itself: no mask of tokens x tokens, no pair of tokens that is masked out.

transformers hides the sequences of a packed row from each other by a mask of ``[T, T]``, which ``sdpa`` then computes
with: memory and time of all T x T pairs. This attention costs what its sequences cost, the sum of their squared
lengths (of length x window, where windows slide). It is registered under `PACKED_ATTENTION` in the two public
interfaces of transformers, and needs nothing of a model but that it uses them:

- where the model would build a mask, transformers asks the mask function registered for its attention. Inside of
  `packed_row` ours answers with a `PackedRow`: boundaries and window, which the model hands to its layers in the
  mask's place. Blocks get it as an argument, so gradient checkpointing, FSDP and the model's keyword arguments have no
  part in it. Masks for anything else than causal attention within sequences or windows (chunks, bidirectional layers,
  blocks of an image) are built as for ``sdpa``.
- where a layer attends, our attention function gets the `PackedRow`. With any other mask it does what ``sdpa`` does, so
  a model called outside of `packed_row` (padded rows, ``generate``) computes as ever.

Whether an architecture is content with that, `packing.check_packing` finds out.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from ..config import PACKED_ATTENTION

_LEAST_CHUNK = 256
"""Queries that attend together under a sliding window that is smaller."""


@dataclass(frozen=True)
class PackedRow:
    """Which tokens of a row attend to which: causally, within their sequence, as far back as the window.

    Attributes:
        lengths: tokens of each sequence, which follow each other and fill the row.
        cu_seqlens: ``[n + 1]`` int32 boundaries of the sequences, on the device of the row.
        window: how many tokens a token sees, itself included; None: all before it.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    window: int | None = None


_row: ContextVar[PackedRow | None] = ContextVar("packed_row", default=None)


@contextmanager
def packed_row(lengths: Sequence[int], cu_seqlens: torch.Tensor) -> Iterator[None]:
    """A model with `PACKED_ATTENTION` that is called inside gets one row of packed sequences, of these ``lengths``.

    Only the call itself belongs inside, not its backward. To other models it makes no difference.
    """
    token = _row.set(PackedRow(tuple(lengths), cu_seqlens))
    try:
        yield
    finally:
        _row.reset(token)


def _mask(*, config: Any, **asked: Any) -> Any:
    """What a model hands to its layers as mask: a `PackedRow`, or what it is with ``sdpa``.

    ``local_size`` is the length of windows or of chunks, ``use_vmap`` says that the mask is a combination of several.
    """
    row, window = _row.get(), asked.get("local_size")
    slides = window is None or window == getattr(config, "sliding_window", None)
    causal = "allow_is_bidirectional_skip" not in asked
    if row is None or not (causal and slides) or asked.get("use_vmap") or asked.get("attention_mask") is not None:
        return AttentionMaskInterface()["sdpa"](config=config, **asked)
    return replace(row, window=window)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers.

    Args:
        module: the layer.
        query: ``[1, heads, T, dim]``.
        key: ``[1, key heads, T, dim]``; the heads of queries are a multiple of these.
        value: ``[1, key heads, T, value dim]``.
        attention_mask: what `_mask` returned.
        dropout: probability.
        scaling: of the scores; None: ``dim ** -0.5``.
        other: for other attention functions.

    Returns:
        ``[1, T, heads, value dim]``, and no weights.

    Raises:
        ValueError: the layer wants attention sinks, capped scores, or within packed sequences anything else that is not
            causal attention of the row to itself.
    """
    if unknown := [name for name in ("softcap", "s_aux") if other.get(name) is not None]:
        raise ValueError(f"{PACKED_ATTENTION!r} attention has no {unknown[0]!r}")  # sdpa may ignore it without a word
    if not isinstance(attention_mask, PackedRow):
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **other)
    row = attention_mask
    if not query.shape[0] == key.shape[0] == 1 or not query.shape[2] == key.shape[2] == sum(row.lengths):
        raise ValueError(
            f"queries {list(query.shape)} and keys {list(key.shape)} are not one row of {sum(row.lengths)} tokens"
        )
    if other.get("position_bias") is not None:
        raise ValueError(f"{PACKED_ATTENTION!r} attention has no 'position_bias' within packed sequences")
    if dropout == 0 and _kernel_takes(query, value):
        return _in_one_kernel(query, key, value, row, scaling), None
    return _one_by_one(query, key, value, row, dropout, scaling), None


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _mask)


# One kernel for all sequences: torch's variable-length flash attention, on CUDA.


def _kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and dim == value.shape[-1]
        and dim <= 256
        and dim % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@cache
def _kernel_takes_groups() -> bool:
    """Whether this torch's `varlen_attn` takes fewer heads of keys than of queries."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _in_one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow, scale: float | None
) -> torch.Tensor:
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _kernel_takes_groups():
            options["enable_gqa"] = True
        else:
            key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    longest = max(row.lengths)
    before = -1 if row.window is None else row.window - 1
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    out: Any = varlen_attn(
        query,
        key,
        value,
        row.cu_seqlens,
        row.cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(before, 0),
        **options,
    )
    return out[None]


# Sequence by sequence, everywhere else.


def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow, dropout: float, scale: float | None
) -> torch.Tensor:
    groups = query.shape[1] != key.shape[1]
    attend = partial(scaled_dot_product_attention, dropout_p=dropout, scale=scale, enable_gqa=groups)
    sequences = zip(*(each.split(row.lengths, dim=2) for each in (query, key, value)), strict=True)
    outs = []
    for q, k, v in sequences:
        if row.window is None or q.shape[2] <= row.window:
            outs.append(attend(q, k, v, is_causal=True))
        else:
            outs += _within_window(attend, q, k, v, row.window)
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1)


def _within_window(
    attend: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> Iterator[torch.Tensor]:
    """``[1, heads, n, dim]`` of some queries after the other, each with the keys that one of them sees, no others."""
    chunk = max(window, _LEAST_CHUNK)
    # Row i is query i of a chunk, column j the key that is window - 1 - j tokens before the chunk's first query.
    age = torch.arange(chunk, device=query.device)[:, None] - torch.arange(1 - window, chunk, device=query.device)
    seen = (age >= 0) & (age < window)
    for start in range(0, query.shape[2], chunk):
        end, first = min(start + chunk, query.shape[2]), max(start - window + 1, 0)
        skipped = first - (start - window + 1)
        mask = seen[: end - start, skipped : skipped + end - first]
        yield attend(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], attn_mask=mask)
