"""Check that packing is safe for a model.

A transformers model sees sequence starts only in ``position_ids``, and only without a cache. Our
attention (`attention`) gets the boundaries. A model that ignores both lets sequences see each other
without an error. One that cuts windows by positions in the row (chunks, top-k of all tokens) is
wrong although nothing leaks. So `check_packing` tests the architecture: a sequence behind another
one must give the same output as alone.

The test runs on a twin (`twin_of`) with windows of a few tokens, because the weights of the run may
hide a leak. Measured on 160 architectures: packed ones differ by at most 3e-7 (relative), all
others by 3e-3 and more.
"""

import copy
import re
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.compat.transformers_private import attention_of, set_attention
from ...utils.distributed import all_agree, get_rank
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..config import PACKED_ATTENTION
from .attention import packed_row
from .packed_batch import pack_rows
from .probe_model import (
    NOT_UNDERSTOOD,
    probe_tokens,
    reason_of,
    smaller_config,
    twin_dtype,
    twin_of,
)
from .rank_parts import gather_parts, own_part
from .rotary import length_boundaries, move_boundary
from .unsharded import unsharded_class
from .vision import Vision

logger = get_logger(__name__)

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference (root mean square) that counts as rounding, by compute dtype."""

_WINDOW = re.compile(
    r"window(_size)?$|^attention_chunk_size$|^local_attention$|^index_(topk|block_size)"
)
"""Config keys for the number of tokens that an attention sees, or into which it cuts the row."""
_WINDOW_TOKENS = 8
_LENGTHS = (11, 24, 6)
"""Tokens of the sequences in a row: the first is no multiple of a window, the second has several
windows, the last less than one. The last two are compared with themselves alone.
"""


def prepare_packing(
    model: PreTrainedModel,
    attn_impl: str | None,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    max_row_tokens: int | None = None,
    sequence: dist.ProcessGroup | None = None,
    sees: bool = False,
) -> None:
    """Replace ``sdpa`` by our attention if the model supports it and ``attn_impl`` is None, then
    `check_packing`.

    This changes the attention in the model's configs, which is not part of ``config.json``. If the
    ranks of ``sequence`` share rows, the model must support our attention, and compute a row in
    parts as it computes it whole. If the model ``sees``, the sequences of the check have 1, 0 and 2
    images.

    Raises:
        ConfigError: see `check_packing`. Or ranks share rows, and the model does not support it.
    """
    reason = _why_not_ours(model, attn_impl, device, group, sees)
    if sequence is not None:
        _require_parts(model, reason, device, group, sequence)
    elif reason is not None or attn_impl is not None:
        check_packing(model, device, group, max_row_tokens, sees)


def _why_not_ours(
    model: PreTrainedModel,
    attn_impl: str | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    sees: bool,
) -> str | None:
    """Replace ``sdpa`` by our attention if possible. Return why another attention is used, or None."""
    used = attention_of(_text(model.config))
    if used == PACKED_ATTENTION:
        return None
    if attn_impl is not None:
        return f"config key 'attn_impl' is {attn_impl!r}, and null or {PACKED_ATTENTION!r} would be needed"
    if used != "sdpa" or not model.is_backend_compatible():
        return f"transformers computes its attention in another way ({used!r})"
    set_attention(model, PACKED_ATTENTION, instead_of="sdpa")
    try:
        if _comes_out_alike(model, _windows(model.config), device, group, sees=sees):
            return None
        reason = "its sequences come out otherwise than alone"
    except ConfigError as error:
        reason = str(error).partition(";")[0]
    set_attention(model, "sdpa", instead_of=PACKED_ATTENTION)
    if get_rank(group) == 0:
        logger.info(
            "attention %r is not for this model, which keeps 'sdpa': %s", PACKED_ATTENTION, reason
        )
    return reason


def _require_parts(
    model: PreTrainedModel,
    reason: str | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    sequence: dist.ProcessGroup,
) -> None:
    """Raise ConfigError unless the ranks of ``sequence`` can share rows: our attention is used (no
    ``reason``), and a twin computes the parts of a row as it computes each sequence alone.
    """
    if reason is None:
        try:
            if _comes_out_alike(model, _windows(model.config), device, group, sequence):
                return
            reason = "the parts of a row come out otherwise than the whole row"
        except ConfigError as error:
            reason = str(error.__cause__ or error)
    raise ConfigError(
        f"{unsharded_class(model).__name__} cannot be trained with context_parallel_size "
        f"{dist.get_world_size(sequence)}: {reason}; leave 'c' out of config key 'backend'"
    )


def check_packing(
    model: PreTrainedModel,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    max_row_tokens: int | None = None,
    sees: bool = False,
) -> None:
    """Raise ConfigError unless this architecture computes packed sequences as it computes them
    alone.

    Collective over the ranks of the model's mesh. It takes three short forwards and the memory of a
    float32 shard of a model with a layer of each kind. A model that does not pass is tested again
    with all layers. The parameters are not read, and neither the model nor torch's generators
    change. A model that cuts windows by positions in the row works with rows of at most its
    smallest window (``max_row_tokens``).
    """
    windows = _windows(model.config)
    if _comes_out_alike(model, windows, device, group, sees=sees):
        return
    name, switch = unsharded_class(model).__name__, "train_vision" if sees else "pack_sequences"
    if not windows or not _comes_out_alike(model, (), device, group, sees=sees):
        raise ConfigError(
            f"{name} lets packed sequences see each other; set config key {switch!r} to false"
        )
    cut_the_row = [
        key for key in windows if not _comes_out_alike(model, (key,), device, group, sees=sees)
    ]
    key = min(cut_the_row or windows, key=windows.__getitem__)
    if max_row_tokens is None or max_row_tokens > windows[key]:
        other_way = "" if key in length_boundaries(model.config) else f", or {switch!r} to false"
        raise ConfigError(
            f"{name} computes packed sequences wrongly in rows of more than {windows[key]} tokens "
            f"(its {key!r}); set config key 'mb_spec.max_tokens_per_mb' to {windows[key]} or "
            f"less{other_way}"
        )


def _windows(config: PretrainedConfig) -> dict[str, int]:
    """Windows, and lengths beyond which rotary frequencies change, by config key. Only those larger
    than in a twin.
    """
    lengths = {
        key: value
        for key, value in vars(_text(config)).items()
        if _WINDOW.search(key) and type(value) is int
    }
    lengths |= length_boundaries(config)
    return {key: value for key, value in lengths.items() if value > _WINDOW_TOKENS}


def _text(config: PretrainedConfig) -> PretrainedConfig:
    return config.get_text_config(decoder=True)


def _comes_out_alike(
    model: PreTrainedModel,
    small: Collection[str],
    device: torch.device,
    group: dist.ProcessGroup | None,
    sequence: dist.ProcessGroup | None = None,
    sees: bool = False,
) -> bool:
    """Whether a twin with the windows ``small`` shortened computes a sequence behind another one as
    it does alone, in a row that the ranks of ``sequence`` share.
    """
    if (few := smaller_config(model)) is not None:
        with suppress(ConfigError):  # then all layers decide
            if _is_alike(model, few, small, device, group, sequence, sees):
                return True
    return _is_alike(model, copy.deepcopy(model.config), small, device, group, sequence, sees)


def _is_alike(
    model: PreTrainedModel,
    config: PretrainedConfig,
    small: Collection[str],
    device: torch.device,
    group: dist.ProcessGroup | None,
    sequence: dist.ProcessGroup | None,
    sees: bool,
) -> bool:
    for key in small:
        if key in length_boundaries(config):
            move_boundary(config, key, _WINDOW_TOKENS)
        else:
            setattr(_text(config), key, _WINDOW_TOKENS)
    attention = attention_of(_text(config))
    alike = _difference_is_small(model, config, twin_dtype(config), device, group, sequence, sees)
    if alike and attention == PACKED_ATTENTION and device.type == "cuda":  # another kernel
        return _difference_is_small(model, config, torch.bfloat16, device, group, sequence, sees)
    return alike


@torch.no_grad()
def _difference_is_small(
    model: PreTrainedModel,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    sequence: dist.ProcessGroup | None,
    sees: bool,
) -> bool:
    most = getattr(_text(model.config), "max_position_embeddings", None) or 0
    lengths = [min(length, most) if most > 0 else length for length in _LENGTHS]
    lengths += [1] * (-sum(lengths) % (1 if sequence is None else dist.get_world_size(sequence)))
    text = probe_tokens(config, sum(lengths)).split(lengths)
    differences = []
    with twin_of(model, config, dtype, device) as twin:
        row, alone, lengths = _probe_rows(text, device, Vision(twin) if sees else None)
        try:
            own = {name: own_part(row[name], sequence, 1) for name in ("input_ids", "position_ids")}
            with _row_of(*lengths, device=device, group=sequence):
                logits = gather_parts(
                    twin(**row | own, use_cache=False).logits[0].float(), sequence
                )
            for inputs, behind in list(zip(alone, logits.split(lengths), strict=True))[1:]:
                # In float32 ours is compared with transformers', in bfloat16 with itself, because
                # rounding differs.
                with (
                    nullcontext() if dtype == torch.float32 else _row_of(len(behind), device=device)
                ):
                    expected = (
                        twin(**inputs, use_cache=False).logits[0].float()
                    )  # at positions from 0
                differences.append(
                    float(
                        (behind - expected).square().mean().sqrt() / expected.square().mean().sqrt()
                    )
                )
        except NOT_UNDERSTOOD as error:
            raise ConfigError(
                f"{unsharded_class(model).__name__} fails at a packed row ({reason_of(error)}); "
                f"set config key {'train_vision' if sees else 'pack_sequences'!r} to false"
            ) from error
    return all_agree(all(difference <= _LIMITS[dtype] for difference in differences), group)


def _probe_rows(
    text: Sequence[torch.Tensor], device: torch.device, vision: Vision | None
) -> tuple[dict[str, Any], list[dict[str, Any]], list[int]]:
    """Inputs of a model for sequences in one row, and for each alone without positions, and the
    lengths.
    """
    lengths = [len(ids) for ids in text]
    if vision is None:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        row = {
            "input_ids": torch.cat(list(text))[None].to(device),
            "position_ids": positions.to(device),
        }
        return row, [{"input_ids": ids[None].to(device)} for ids in text], lengths
    batch, lengths = vision.probe(text)
    batch, pixels, _ = vision.prepare(batch, lengths)
    numbers = range(len(lengths))
    packed, *alone = (
        pack_rows(batch, rows, lengths, 0, vision, pixels).to(device)
        for rows in (numbers, *([n] for n in numbers))
    )
    row = {"input_ids": packed.data["input_ids"][None], "position_ids": packed.position_ids[None]}
    row |= vision.inputs(packed)
    return (
        row,
        [{"input_ids": mb.data["input_ids"][None]} | vision.images(mb) for mb in alone],
        lengths,
    )


def _row_of(
    *lengths: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> AbstractContextManager[None]:
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed_row(lengths, boundaries.to(device), group)
