"""Check that packing is safe for a model.

A transformers model sees sequence starts only in ``position_ids``, and only without a cache. Our
attention (`attention`) gets the boundaries. A model that ignores both lets sequences see each other
without an error. One that cuts windows by positions in the row (chunks, top-k of all tokens) is
wrong although nothing leaks. So `check_packing` tests the architecture: a sequence behind another
one must give the same output as alone.

The test runs on a twin (`Twins`) with windows of a few tokens, because the weights of the run may
hide a leak. Measured on 160 architectures: packed ones differ by at most 3e-7 (relative), all
others by 3e-3 and more.
"""

import copy
import re
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.compat.transformers_private import attention_of, set_attention
from ...utils.distributed import RankGroup, all_agree, get_rank
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..config import PACKED_ATTENTION, TrainEngineConfig
from .attention import packed_row
from .model_output import model_output
from .packed_batch import MicroBatch, pack_rows
from .probe_model import (
    NOT_UNDERSTOOD,
    Twins,
    probe_tokens,
    reason_of,
    smaller_config,
    twin_dtype,
)
from .rank_parts import Group, gather_parts, own_part
from .rotary import length_boundaries, move_boundary
from .shared_prompts import find_prompts
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
Inputs = dict[str, Any]
"""Arguments of a model."""
_LENGTHS = (11, 24, 6)
"""Tokens of the sequences in a row: the first is no multiple of a window, the second has several
windows, the last less than one. The last two are compared with themselves alone.
"""


def prepare_packing(
    twins: Twins,
    config: TrainEngineConfig,
    sequence: Group = None,
    group: RankGroup = None,
) -> None:
    """Replace ``sdpa`` by our attention if the twins' model supports it and ``attn_impl`` is None,
    then `check_packing`.

    This changes the attention in the model's configs, which is not part of ``config.json``. If the
    ranks of ``sequence`` share rows, the model must support our attention, and compute a row in
    parts as it computes it whole. With ``train_vision`` the sequences of the check have 1, 0 and 2
    images. With ``enable_tree_training`` the model must support our attention, and compute
    sequences behind a shared prompt as it computes them alone.

    Raises:
        ConfigError: see `check_packing`. Or ranks share rows, or sequences prompts, and the model
            does not support it.
    """
    trial = _Trial(twins, group, sees=config.train_vision)
    reason = _why_not_ours(trial, config.attn_impl)
    if sequence is not None:
        trial = replace(trial, sequence=sequence, sees=False)
        _require(
            trial,
            reason,
            "the parts of a row come out otherwise than the whole row",
            f"context_parallel_size {_size(sequence)}",
            "leave 'c' out of config key 'backend'",
        )
    elif reason is not None or config.attn_impl is not None:
        check_packing(twins, group, config.mb_spec.max_tokens_per_mb, config.train_vision)
    if config.enable_tree_training:
        _require(
            replace(trial, shares_prompts=True),
            reason,
            "sequences with a shared prompt come out otherwise than alone",
            "enable_tree_training",
            "set config key 'enable_tree_training' to false",
        )


def check_packing(
    twins: Twins,
    group: RankGroup = None,
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
    model = twins.model
    trial = _Trial(twins, group, sees=sees)
    windows = _windows(model.config)
    if trial.passes(windows):
        return

    # Without shorter windows: do sequences see each other?
    name = unsharded_class(model).__name__
    switch = "train_vision" if sees else "pack_sequences"
    if not windows or not trial.passes():
        raise ConfigError(
            f"{name} lets packed sequences see each other; set config key {switch!r} to false"
        )

    # They do not, so some windows are cut by positions in the row. The smallest is the limit.
    cut_the_row = [key for key in windows if not trial.passes([key])]
    key = min(cut_the_row or windows, key=windows.__getitem__)
    if max_row_tokens is None or max_row_tokens > windows[key]:
        other_way = "" if key in length_boundaries(model.config) else f", or {switch!r} to false"
        raise ConfigError(
            f"{name} computes packed sequences wrongly in rows of more than {windows[key]} tokens "
            f"(its {key!r}); set config key 'mb_spec.max_tokens_per_mb' to {windows[key]} or "
            f"less{other_way}"
        )


def _why_not_ours(trial: "_Trial", attn_impl: str | None) -> str | None:
    """Replace ``sdpa`` by our attention if possible. Return why another one is used, or None."""
    model = trial.twins.model
    used = attention_of(_text(model.config))
    if used == PACKED_ATTENTION:
        return None
    if attn_impl is not None:
        return (
            f"config key 'attn_impl' is {attn_impl!r}, and null or {PACKED_ATTENTION!r} would be "
            "needed"
        )
    if used != "sdpa" or not model.is_backend_compatible():
        return f"transformers computes its attention in another way ({used!r})"

    # Try it, and go back if it does not work.
    set_attention(model, PACKED_ATTENTION, instead_of="sdpa")
    try:
        if trial.passes(_windows(model.config)):
            return None
        reason = "its sequences come out otherwise than alone"
    except ConfigError as error:
        reason = str(error).partition(";")[0]
    set_attention(model, "sdpa", instead_of=PACKED_ATTENTION)
    if get_rank(trial.group) == 0:
        logger.info(
            "attention %r is not for this model, which keeps 'sdpa': %s", PACKED_ATTENTION, reason
        )
    return reason


def _require(
    trial: "_Trial",
    reason: str | None,
    otherwise: str,
    setting: str,
    other_way: str,
) -> None:
    """Raise ConfigError unless our attention is used (no ``reason``), and a twin passes the trial.
    The error says what does not work with the ``setting``, and the ``other_way``.
    """
    model = trial.twins.model
    if reason is None:
        try:
            if trial.passes(_windows(model.config)):
                return
            reason = otherwise
        except ConfigError as error:
            reason = str(error.__cause__ or error)
    raise ConfigError(
        f"{unsharded_class(model).__name__} cannot be trained with {setting}: {reason}; {other_way}"
    )


def _windows(config: PretrainedConfig) -> dict[str, int]:
    """Windows, and lengths beyond which rotary frequencies change, by config key. Only those larger
    than in a twin.
    """
    lengths = {}
    for key, value in vars(_text(config)).items():
        if _WINDOW.search(key) and type(value) is int:
            lengths[key] = value
    lengths |= length_boundaries(config)
    return {key: value for key, value in lengths.items() if value > _WINDOW_TOKENS}


def _text(config: PretrainedConfig) -> PretrainedConfig:
    return config.get_text_config(decoder=True)


def _size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


@dataclass(frozen=True)
class _Trial:
    """Whether one of ``twins`` computes a sequence behind another one as it does alone.

    The ranks of ``group`` agree on the result, and those of ``sequence`` share the row. If the
    model ``sees``, the sequences have images. With ``shares_prompts`` two of them have one prompt,
    which is once in the row.
    """

    twins: Twins
    group: RankGroup
    sequence: Group = None
    sees: bool = False
    shares_prompts: bool = False

    def passes(self, small: Collection[str] = ()) -> bool:
        """Try it with the windows ``small`` shortened."""
        model = self.twins.model
        few_layers = smaller_config(model)
        if few_layers is not None:
            # If a few layers cannot be built or run, all layers decide.
            with suppress(ConfigError):
                if self._passes_with(few_layers, small):
                    return True
        return self._passes_with(copy.deepcopy(model.config), small)

    def _passes_with(self, config: PretrainedConfig, small: Collection[str]) -> bool:
        # Short enough to show in a row of a few tokens.
        for key in small:
            if key in length_boundaries(config):
                move_boundary(config, key, _WINDOW_TOKENS)
            else:
                setattr(_text(config), key, _WINDOW_TOKENS)
        attention = attention_of(_text(config))
        dtypes = [twin_dtype(config)]

        # On CUDA our attention has another kernel for bfloat16. The twin in float32 comes last, so
        # that other probes find it.
        if attention == PACKED_ATTENTION and self.twins.device.type == "cuda":
            dtypes.insert(0, torch.bfloat16)
        return all(self._difference_is_small(config, dtype) for dtype in dtypes)

    @torch.no_grad()
    def _difference_is_small(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
    ) -> bool:
        # Sequences within the model's limit, and single tokens that make the row divisible.
        most = getattr(_text(self.twins.model.config), "max_position_embeddings", None) or 0
        lengths = list(_LENGTHS)
        if most > 0:
            lengths = [min(length, most) for length in lengths]
        lengths += [1] * (-sum(lengths) % _size(self.sequence))
        text = probe_tokens(config, sum(lengths)).split(lengths)
        if self.shares_prompts:
            text = _with_one_prompt(text)

        with self.twins.of(config, dtype) as twin:
            vision = Vision(twin) if self.sees else None
            row, alone, lengths = _probe_rows(text, self.twins.device, vision)
            try:
                if self.shares_prompts:
                    logits = self._of_shared_row(twin, text)
                else:
                    logits = self._of_row(twin, row, lengths)
                differences = self._differences(twin, dtype, logits, alone)
            except NOT_UNDERSTOOD as error:
                key = "train_vision" if self.sees else "pack_sequences"
                raise ConfigError(
                    f"{unsharded_class(twin).__name__} fails at a packed row "
                    f"({reason_of(error)}); set config key {key!r} to false"
                ) from error
        is_small = all(difference <= _LIMITS[dtype] for difference in differences)
        return all_agree(is_small, self.group)

    def _of_row(self, twin: PreTrainedModel, row: Inputs, lengths: Sequence[int]) -> list[Tensor]:
        own = {**row}
        for name in ("input_ids", "position_ids"):
            own[name] = own_part(row[name], self.sequence, 1)
        with _row_of(*lengths, device=self.twins.device, group=self.sequence):
            # This rank's part of the row. The attention exchanges it.
            own_logits = _logits(twin, own)
        return list(gather_parts(own_logits, self.sequence).split(lengths))

    def _of_shared_row(self, twin: PreTrainedModel, text: Sequence[Tensor]) -> list[Tensor]:
        """Logits of each sequence from a row in which the prompt of the last two is once."""
        lengths = [len(ids) for ids in text]
        ids = pad_sequence(list(text), batch_first=True)
        attention_mask = pad_sequence([torch.ones_like(own) for own in text], batch_first=True)
        loss_mask = attention_mask.clone()
        loss_mask[:, : max(lengths[1] - _NOT_IN_PROMPT, 1)] = 0
        batch = {"input_ids": ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
        prompts = find_prompts(batch, lengths)
        mb = pack_rows(batch, range(len(text)), lengths, prompts=prompts).to(self.twins.device)
        logits = model_output(twin, mb, packed=True, sequence=self.sequence).float()
        return list(logits.reshape(mb.n_tokens, -1).split(lengths))

    def _differences(
        self,
        twin: PreTrainedModel,
        dtype: torch.dtype,
        logits: Sequence[Tensor],
        alone: list[Inputs],
    ) -> list[float]:
        """Relative difference (root mean square) of each sequence but the first."""
        differences = []
        for inputs, behind in zip(alone[1:], logits[1:], strict=True):
            # In float32 ours is compared with transformers', in bfloat16 with itself, because
            # rounding differs.
            attention: AbstractContextManager[None] = nullcontext()
            if dtype != torch.float32:
                attention = _row_of(len(behind), device=self.twins.device)
            with attention:
                expected = _logits(twin, inputs)  # at positions from 0
            difference = _root_mean_square(behind - expected)
            differences.append(float(difference / _root_mean_square(expected)))
        return differences


def _logits(twin: PreTrainedModel, inputs: Inputs) -> Tensor:
    return twin(**inputs, use_cache=False).logits[0].float()


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _probe_rows(
    text: Sequence[Tensor],
    device: torch.device,
    vision: Vision | None,
) -> tuple[Inputs, list[Inputs], list[int]]:
    """Inputs of a model for sequences in one row, and for each alone without positions, and the
    lengths.
    """
    lengths = [len(ids) for ids in text]
    if vision is None:
        positions = torch.cat([torch.arange(length) for length in lengths])
        row = {
            "input_ids": torch.cat(list(text))[None].to(device),
            "position_ids": positions[None].to(device),
        }
        return row, [{"input_ids": ids[None].to(device)} for ids in text], lengths

    batch, lengths = vision.probe(text)
    batch, pixels, _ = vision.prepare(batch, lengths)

    def pack(rows: Sequence[int]) -> MicroBatch:
        return pack_rows(batch, rows, lengths, vision=vision, pixels=pixels).to(device)

    numbers = range(len(lengths))
    # All sequences in one row, then each in a row of its own.
    packed = pack(numbers)
    row = {
        "input_ids": packed.data["input_ids"][None],
        "position_ids": packed.position_ids[None],
        **vision.inputs(packed),
    }
    alone = []
    for number in numbers:
        mb = pack([number])
        alone.append({"input_ids": mb.data["input_ids"][None], **vision.images(mb)})
    return row, alone, lengths


_NOT_IN_PROMPT = 6
"""Tokens of the second sequence that are no part of its prompt, which is longer than windows."""


def _with_one_prompt(text: Sequence[Tensor]) -> list[Tensor]:
    """The same, but the third sequence begins with the prompt of the second."""
    first, second, third, *_ = text
    prompt = second[: max(len(second) - _NOT_IN_PROMPT, 1)]
    sibling = torch.cat([prompt, third])[: len(second)]
    return [first, second, sibling]


def _row_of(
    *lengths: int,
    device: torch.device,
    group: Group = None,
) -> AbstractContextManager[None]:
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed_row(lengths, boundaries.to(device), group)
