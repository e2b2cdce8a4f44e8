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
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from ..config import PACKED_ATTENTION
from .context_parallel import heads_to_tokens, tokens_to_heads
from .rank_parts import Group
from .shared_prompts import SeenKeys

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
    `packed_row`. If sequences share prompts, ``lengths`` are of their segments, and ``seen`` are
    the keys that each of them sees (None: its own). Compiled blocks take ``n_tokens`` (the sum of
    ``lengths``) and ``longest`` (their maximum). If they took ``lengths``, each number of sequences
    would need a graph of its own.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    window: int | None = None
    group: Group = None
    seen: SeenKeys | None = None
    n_tokens: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_tokens", sum(self.lengths))
        object.__setattr__(self, "longest", max(self.lengths))


_row: ContextVar[PackedRow | None] = ContextVar("packed_row", default=None)


@contextmanager
def packed_row(
    lengths: Sequence[int],
    cu_seqlens: Tensor,
    group: Group = None,
    seen: SeenKeys | None = None,
) -> Iterator[None]:
    """Tell a model with `PACKED_ATTENTION` that its input is one row of packed sequences with these
    ``lengths``.

    With a ``group`` the input of each of its ranks is a part of the row, all of the same length, in
    the order of ranks. For ``seen`` see `PackedRow`. Wrap only the forward call, not the backward.
    Other models are not affected.
    """
    token = _row.set(PackedRow(tuple(lengths), cu_seqlens, group=group, seen=seen))
    try:
        yield
    finally:
        _row.reset(token)


def _mask(*, config: Any, **asked: Any) -> Any:
    """Return the mask for the layers: a `PackedRow`, or the mask of ``sdpa``.

    ``local_size`` is the length of windows or chunks. ``use_vmap`` is set for a combination of
    masks.
    """
    row = _row.get()
    window = asked.get("local_size")
    slides = window is None or window == getattr(config, "sliding_window", None)
    is_causal = "allow_is_bidirectional_skip" not in asked
    is_plain = not asked.get("use_vmap") and asked.get("attention_mask") is None
    if row is None or not (is_causal and slides and is_plain):
        return AttentionMaskInterface()["sdpa"](config=config, **asked)
    return replace(row, window=window)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
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
    # sdpa may ignore these without a word.
    for name in ("softcap", "s_aux"):
        if other.get(name) is not None:
            raise ValueError(f"{PACKED_ATTENTION!r} attention has no {name!r}")

    # The kernel runs within the graph of a compiled block, all else between two graphs.
    row = attention_mask
    is_alone = isinstance(row, PackedRow) and row.group is None and row.seen is None
    if is_alone and dropout == 0 and _kernel_takes(query, value):
        _require_one_row(query, key, row.n_tokens, other)
        return _in_one_kernel(query, key, value, row, scaling), None
    return _between_graphs(module, query, key, value, row, dropout, scaling, **other)


def _between_graphs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Any,
    dropout: float,
    scaling: float | None,
    **other: Any,
) -> tuple[Tensor, None]:
    if not isinstance(row, PackedRow):
        shared = _row.get()
        if shared is not None and shared.group is not None:
            raise ValueError(
                f"a layer of {type(module).__name__} needs a mask of its own, but ranks share the "
                "row"
            )
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, row, dropout=dropout, scaling=scaling, **other)

    # Ranks that share the row exchange their tokens for heads, and back.
    group = row.group
    n_tokens = row.n_tokens
    if group is not None:
        n_tokens = n_tokens // group.size()
    _require_one_row(query, key, n_tokens, other)
    if group is not None:
        query, key, value = tokens_to_heads(query, key, value, group)
    if row.seen is not None:
        key = row.seen.of(key)
        value = row.seen.of(value)
    if dropout == 0 and _kernel_takes(query, value):
        out = _in_one_kernel(query, key, value, row, scaling)
    else:
        out = _one_by_one(query, key, value, row, dropout, scaling)
    if group is not None:
        out = heads_to_tokens(out, group)
    return out, None


@cache
def keep_lengths_out_of_graphs() -> None:
    """Let compiled blocks, from now on, attend between two graphs if they do not in one kernel.

    Importing torch's compiler takes seconds, so this is no decorator.
    """
    global _between_graphs
    _between_graphs = torch.compiler.disable(_between_graphs)  # type: ignore[assignment]


def _require_one_row(
    query: Tensor,
    key: Tensor,
    n_tokens: int,
    other: dict[str, Any],
) -> None:
    is_one_row = query.shape[0] == key.shape[0] == 1
    if not is_one_row or not query.shape[2] == key.shape[2] == n_tokens:
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


def _kernel_takes(query: Tensor, value: Tensor) -> bool:
    dim = query.shape[-1]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    fits = dim == value.shape[-1] and dim <= 256 and dim % 8 == 0
    if not (query.is_cuda and is_half and fits):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


_KERNEL_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def _in_one_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    scale: float | None,
) -> Tensor:
    options: dict[str, Any] = {"scale": scale}
    n_queries = query.shape[1] // key.shape[1]
    if n_queries > 1:
        if _KERNEL_TAKES_GROUPS:
            options["enable_gqa"] = True
        else:
            key = key.repeat_interleave(n_queries, dim=1)
            value = value.repeat_interleave(n_queries, dim=1)

    # Tokens before and after a token that it sees. -1: all.
    n_before = -1 if row.window is None else row.window - 1
    options["window_size"] = (n_before, 0)

    # Fewer queries than keys are aligned with the last ones, as is the window.
    cu_keys = row.cu_seqlens
    longest_keys = row.longest
    if row.seen is not None:
        cu_keys = row.seen.cu_seqlens
        longest_keys = max(row.seen.lengths)
    out: Any = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        row.cu_seqlens,
        cu_keys,
        row.longest,
        longest_keys,
        **options,
    )
    return out[None]


# Sequence by sequence, in all other cases.


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    dropout: float,
    scale: float | None,
) -> Tensor:
    attend = partial(
        scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    n_keys = row.lengths if row.seen is None else row.seen.lengths
    queries = query.split(row.lengths, dim=2)
    keys = key.split(n_keys, dim=2)
    values = value.split(n_keys, dim=2)
    outs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        sees_all = row.window is None or k.shape[2] <= row.window
        # torch aligns with the first key, where only a square mask is right.
        if sees_all and q.shape[2] == k.shape[2]:
            outs.append(attend(q, k, v, is_causal=True))
        else:
            outs += _with_masks(attend, q, k, v, row.window)
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1)


def _with_masks(
    attend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
) -> Iterator[Tensor]:
    """Yield ``[1, heads, n, dim]`` for each chunk of queries, computed with only the keys that its
    window reaches. The queries are those of the last keys.
    """
    n_queries = query.shape[2]
    n_before = key.shape[2] - n_queries
    chunk = n_queries
    if window is not None:
        chunk = max(window, _LEAST_CHUNK)
    for start in range(0, n_queries, chunk):
        end = min(start + chunk, n_queries)
        last = n_before + end
        # What the first query of the chunk sees.
        first = 0
        if window is not None:
            first = max(n_before + start - window + 1, 0)
        yield attend(
            query[:, :, start:end],
            key[:, :, first:last],
            value[:, :, first:last],
            attn_mask=_causal_mask(end - start, last - first, window, query.device),
        )


def _causal_mask(
    n_queries: int,
    n_keys: int,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """``[queries, keys]`` bool: which of the keys each query sees. The last query is at the last
    key.
    """
    queries = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    age = queries - torch.arange(n_keys, device=device)
    seen = age >= 0
    if window is not None:
        seen &= age < window
    return seen
