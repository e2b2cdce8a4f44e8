"""Attention over packed sequences, each within itself, without a ``[T, T]`` mask.

transformers separates the sequences of a packed row by a mask, and ``sdpa`` then computes all T x T
pairs. This attention costs the sum of the squared sequence lengths (length x window for sliding
windows). It is registered in the two public interfaces of transformers under `PACKED_ATTENTION`:

- Mask function: inside `packed_row` it returns a `PackedRow` (boundaries and window), which the
  model passes to its layers as their mask. Blocks get it as an argument, so gradient checkpointing
  and FSDP need no change. For chunks, bidirectional layers and image blocks it builds the same mask
  as ``sdpa``.
- Attention function: with a `PackedRow` it attends within each sequence. With any other mask
  (padded rows, ``generate``) it calls ``sdpa``.

`packing.check_packing` finds out whether an architecture computes correctly this way.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from ..config import PACKED_ATTENTION
from .context_parallel import heads_to_tokens, tokens_to_heads

_LEAST_CHUNK = 256
"""Queries that attend together if the sliding window is smaller."""


@dataclass(frozen=True)
class PackedRow:
    """Boundaries of the sequences in a row. A token attends causally, within its sequence and
    window.

    ``lengths`` are the tokens of each sequence and together fill the row. ``cu_seqlens`` ``[n +
    1]`` int32 are their boundaries on the device. ``window`` is the number of tokens that a token
    sees, including itself (None: all earlier ones). The ranks of ``group`` share the row (None:
    this rank has it alone). It is here because checkpointed blocks run again outside of
    `packed_row`. Compiled blocks take ``n_tokens`` (the sum of ``lengths``) and ``longest`` (their
    maximum). If they took ``lengths``, each number of sequences would need a graph of its own.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    window: int | None = None
    group: dist.ProcessGroup | None = None
    n_tokens: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_tokens", sum(self.lengths))
        object.__setattr__(self, "longest", max(self.lengths))


_row: ContextVar[PackedRow | None] = ContextVar("packed_row", default=None)


@contextmanager
def packed_row(
    lengths: Sequence[int], cu_seqlens: torch.Tensor, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Tell a model with `PACKED_ATTENTION` that its input is one row of packed sequences with these
    ``lengths``.

    With a ``group`` the input of each of its ranks is a part of the row, all of the same length, in
    the order of ranks. Wrap only the forward call, not the backward. Other models are not affected.
    """
    token = _row.set(PackedRow(tuple(lengths), cu_seqlens, group=group))
    try:
        yield
    finally:
        _row.reset(token)


def _mask(*, config: Any, **asked: Any) -> Any:
    """Return the mask for the layers: a `PackedRow`, or the mask of ``sdpa``.

    ``local_size`` is the length of windows or chunks. ``use_vmap`` is set for a combination of
    masks.
    """
    row, window = _row.get(), asked.get("local_size")
    slides = window is None or window == getattr(config, "sliding_window", None)
    causal = "allow_is_bidirectional_skip" not in asked
    if (
        row is None
        or not (causal and slides)
        or asked.get("use_vmap")
        or asked.get("attention_mask") is not None
    ):
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
    """Attend, with the signature of transformers' attention functions.

    ``query`` is ``[1, heads, T, dim]``, ``key`` ``[1, key heads, T, dim]`` (heads are a multiple of
    key heads) and ``value`` ``[1, key heads, T, value dim]``. ``attention_mask`` is a result of
    `_mask`, ``dropout`` a probability, and ``scaling`` None means ``dim ** -0.5``. Returns ``[1, T,
    heads, value dim]``, and None in place of attention weights.

    Raises:
        ValueError: the layer needs attention sinks, capped scores, or (within packed sequences)
            something other than causal self-attention. Or ranks share the row, and its mask is no
            `PackedRow`, or they cannot share its heads.
    """
    if unknown := [name for name in ("softcap", "s_aux") if other.get(name) is not None]:
        raise ValueError(
            f"{PACKED_ATTENTION!r} attention has no {unknown[0]!r}"
        )  # sdpa may ignore it without a word
    row = attention_mask
    if (
        isinstance(row, PackedRow)
        and row.group is None
        and dropout == 0
        and _kernel_takes(query, value)
    ):
        _require_one_row(query, key, row.n_tokens, other)
        return _in_one_kernel(query, key, value, row, scaling), None
    return _between_graphs(module, query, key, value, row, dropout, scaling, **other)


def _between_graphs(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: Any,
    dropout: float,
    scaling: float | None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(row, PackedRow):
        if (shared := _row.get()) is not None and shared.group is not None:
            raise ValueError(
                f"a layer of {type(module).__name__} needs a mask of its own, but ranks share the "
                "row"
            )
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, row, dropout=dropout, scaling=scaling, **other)
    _require_one_row(
        query, key, row.n_tokens if row.group is None else row.n_tokens // row.group.size(), other
    )
    if row.group is not None:
        query, key, value = tokens_to_heads(query, key, value, row.group)
    if dropout == 0 and _kernel_takes(query, value):
        out = _in_one_kernel(query, key, value, row, scaling)
    else:
        out = _one_by_one(query, key, value, row, dropout, scaling)
    return out if row.group is None else heads_to_tokens(out, row.group), None


@cache
def keep_lengths_out_of_graphs() -> None:
    """Let compiled blocks, from now on, attend between two graphs if they do not in one kernel.

    Importing torch's compiler takes seconds, so this is no decorator.
    """
    global _between_graphs
    _between_graphs = torch.compiler.disable(_between_graphs)  # type: ignore[assignment]


def _require_one_row(
    query: torch.Tensor, key: torch.Tensor, n_tokens: int, other: dict[str, Any]
) -> None:
    if not query.shape[0] == key.shape[0] == 1 or not query.shape[2] == key.shape[2] == n_tokens:
        raise ValueError(
            f"queries {list(query.shape)} and keys {list(key.shape)} are not one row of "
            f"{n_tokens} tokens"
        )
    if other.get("position_bias") is not None:
        raise ValueError(
            f"{PACKED_ATTENTION!r} attention has no 'position_bias' within packed sequences"
        )


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


_KERNEL_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def _in_one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow, scale: float | None
) -> torch.Tensor:
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _KERNEL_TAKES_GROUPS:
            options["enable_gqa"] = True
        else:
            key, value = (
                each.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
                for each in (key, value)
            )
    before = -1 if row.window is None else row.window - 1
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    options |= {"scale": scale, "window_size": (before, 0)}
    out: Any = varlen_attn(
        query, key, value, row.cu_seqlens, row.cu_seqlens, row.longest, row.longest, **options
    )
    return out[None]


# Sequence by sequence, in all other cases.


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: PackedRow,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    groups = query.shape[1] != key.shape[1]
    attend = partial(
        scaled_dot_product_attention, dropout_p=dropout, scale=scale, enable_gqa=groups
    )
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
    """Yield ``[1, heads, n, dim]`` for each chunk of queries, computed with only the keys that its
    window reaches.
    """
    chunk = max(window, _LEAST_CHUNK)
    # Row i is query i of a chunk, column j the key that is window - 1 - j tokens before the chunk's
    # first query.
    age = torch.arange(chunk, device=query.device)[:, None] - torch.arange(
        1 - window, chunk, device=query.device
    )
    seen = (age >= 0) & (age < window)
    for start in range(0, query.shape[2], chunk):
        end, first = min(start + chunk, query.shape[2]), max(start - window + 1, 0)
        skipped = first - (start - window + 1)
        mask = seen[: end - start, skipped : skipped + end - first]
        yield attend(
            query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], attn_mask=mask
        )
