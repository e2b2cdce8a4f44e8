"""AdamW with moments of 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
2022).

A block is 128 neighbouring numbers of a row. It stores its largest magnitude in float32, and each
number as the index of one of 256 levels between -1 and 1, or 0 and 1, whose distances grow with the
magnitude (`levels`). As blocks end with their row, the scales are a tensor with one row for each
row of the parameter. So they are sharded like the parameter, and checkpoints load into other meshes
bit for bit.

Three things differ from the paper and from bitsandbytes, because the errors of moments add up over
steps:

- Numbers are rounded at random to one of the two neighbouring levels, see `AdamBF16`.
- The root of the second moment is stored, which squares the range of the levels. It is never
  rounded to 0, which would make an update as large as the first moment divided by ``eps``.
- The signed levels are symmetric. Without the level -1, the largest number of a block would shrink
  if it is negative.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import foreach_copy_, made_sharded
from ...utils.errors import ConfigError
from ..memory.tensors import local_tensor, row_major
from .adam_bf16 import MOMENTS, AdamBF16, State, parts_of

BLOCK = 128
"""Numbers with a common scale, at most: the last block of a row may be shorter."""
SCALES = tuple(f"{name}_scale" for name in MOMENTS)
"""Names of the scales in a state. The codes have the names of the moments."""
PIECE = 1 << 22
"""Most numbers that are quantized at a time. Each takes 26 bytes meanwhile."""


class Adam8bit(AdamBF16):
    """AdamW over float32 parameters with moments in 8 bits, for matrices and experts: 2.06 bytes
    per parameter.

    Parameters with one dimension, whose rows FSDP2 cuts anywhere, keep moments in bfloat16. The
    arithmetic is in float32, and an update uses the moments before they are rounded.
    """

    def initial_state(self, param: Tensor) -> State:
        """State before the first step of a parameter. Codes and scales are sharded like the
        parameter.
        """
        state = super().initial_state(param)
        if _has_blocks(param):
            for name in SCALES:
                state[name] = _zero_scales(param)
        return state

    def _update(
        self,
        group: dict,
        params: list[nn.Parameter],
        numbers: list[int],
    ) -> None:
        # Parameters of a bucket are stored in the same way, as their states are read together.
        for has_blocks in (True, False):
            chosen = []
            for index, param in enumerate(params):
                if _has_blocks(param) == has_blocks:
                    chosen.append(index)
            if chosen:
                super()._update(
                    group,
                    [params[index] for index in chosen],
                    [numbers[index] for index in chosen],
                )

    def _dtype_for(self, param: Tensor) -> torch.dtype:
        if _has_blocks(param):
            return torch.uint8
        return super()._dtype_for(param)

    def _width(self, weight: Tensor) -> int:
        if _has_blocks(weight):
            return prod(_padded(weight))
        return super()._width(weight)

    def _views(self, row: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        if not _has_blocks(weights[0]):
            return super()._views(row, weights)
        parts = row.split([self._width(weight) for weight in weights])
        views = []
        for part, weight in zip(parts, weights, strict=True):
            padded = part.view(_padded(weight))
            columns = weight.shape[-1]
            views.append(padded[..., :columns])
        return views

    def _read(
        self,
        states: Sequence[State],
        buffer: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        if not _has_blocks(weights[0]):
            return super()._read(states, buffer, weights)

        for moment, row in zip(_STORED, buffer, strict=True):
            # 0.0 where a row is filled up to a whole block
            codes = torch.full_like(row, moment.code_of_zero, dtype=torch.uint8)
            views = self._views(codes, weights)
            foreach_copy_(views, parts_of(states, moment.codes))

            parts = parts_of(states, moment.scales)
            scales = torch.cat([part.flatten() for part in parts])
            dequantize(
                codes.view(-1, BLOCK),
                scales,
                moment.signed,
                out=row.view(-1, BLOCK),
            )

        # The root of the second moment is stored.
        buffer[1].square_()

    def _write(
        self,
        states: Sequence[State],
        buffer: Tensor,
        noise: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        if not _has_blocks(weights[0]):
            return super()._write(states, buffer, noise, weights)

        for moment, row, random in zip(_STORED, buffer, noise, strict=True):
            values = row if moment.signed else row.sqrt()
            codes, scales = quantize(
                values.view(-1, BLOCK),
                moment.signed,
                random.view(-1, BLOCK),
            )
            views = self._views(codes.view(-1), weights)
            foreach_copy_(parts_of(states, moment.codes), views)

            stored = parts_of(states, moment.scales)
            parts = scales.split([part.numel() for part in stored])
            shaped = []
            for part, like in zip(parts, stored, strict=True):
                shaped.append(part.view_as(like))
            foreach_copy_(stored, shaped)


class _StoredMoment(NamedTuple):
    codes: str  # name in the state
    scales: str  # name in the state
    signed: bool
    code_of_zero: int


_STORED = (
    _StoredMoment(MOMENTS[0], SCALES[0], signed=True, code_of_zero=127),
    _StoredMoment(MOMENTS[1], SCALES[1], signed=False, code_of_zero=0),
)
"""First and second moment, which are the rows of a buffer."""


def _has_blocks(param: Tensor) -> bool:
    return param.dim() > 1


def _scales_shape(weight: Tensor) -> torch.Size:
    """Shape of a parameter with a number for each block."""
    *rows, columns = weight.shape
    n_blocks = -(-columns // BLOCK)  # rounded up
    return torch.Size((*rows, n_blocks))


def _padded(weight: Tensor) -> tuple[int, ...]:
    """Shape of a parameter with its rows filled up to whole blocks."""
    *rows, n_blocks = _scales_shape(weight)
    return *rows, n_blocks * BLOCK


def _zero_scales(param: Tensor) -> Tensor:
    local = local_tensor(param)
    zeros = torch.zeros(
        _scales_shape(local),
        dtype=torch.float32,
        device=local.device,
    )
    if not isinstance(param, DTensor):
        return zeros
    shape = _scales_shape(param)
    return made_sharded(
        zeros,
        param.device_mesh,
        param.placements,
        shape,
        row_major(shape),
    )


def require_whole_blocks(model: nn.Module) -> None:
    """Raise ConfigError if ranks share the rows of a matrix of ``model`` in parts that are not
    whole blocks.
    """
    for name, param in model.named_parameters():
        is_quantized = param.requires_grad and _has_blocks(param)
        if not is_quantized or not isinstance(param, DTensor):
            continue

        # Ranks among which the mesh divides the columns.
        n_ranks = 1
        last = param.dim() - 1
        for dim, placement in enumerate(param.placements):
            if placement.is_shard(last):
                n_ranks *= param.device_mesh.size(dim)

        columns = param.shape[-1]
        if n_ranks > 1 and columns % (n_ranks * BLOCK):
            raise ConfigError(
                f"config key 'optimizer.type' is 'adam8bit', which quantizes blocks of {BLOCK} "
                f"columns, but {n_ranks} ranks share the {columns} columns of {name}; "
                f"expected a multiple of {n_ranks * BLOCK}. Set 'optimizer.type' to 'adam_bf16', "
                "or t in config key 'backend' to fewer ranks"
            )


@cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """The numbers that a code stands for, ascending: 255 from -1 to 1, or 256 from 0 to 1.

    Each power of ten down to 1e-7 is divided evenly, a smaller one into half as many parts. The
    middles of the parts are levels, and so are 0 and 1.
    """
    positive: list[float] = []
    n_parts = 1 if signed else 2
    for exponent in range(-6, 1):
        for part in range(n_parts):
            middle = 0.1 + 0.9 * (part + 0.5) / n_parts
            positive.append(10.0**exponent * middle)
        n_parts *= 2

    if not signed:
        return torch.tensor([0.0, *positive, 1.0], device=device)
    # The last level is 1, so that there are 255.
    positive[-1] = 1.0
    negative = [-level for level in reversed(positive)]
    return torch.tensor([*negative, 0.0, *positive], device=device)


def quantize(
    values: Tensor,
    signed: bool,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Codes, ``[n, BLOCK]`` uint8, and scales, ``[n]``, of float32 numbers ``[n, BLOCK]``.

    A number becomes one of its two neighbours among the `levels`, with the nearer one more likely.
    If these are not signed, it never becomes 0. ``noise`` are random int32 numbers below 2 ** 16.
    """
    known = levels(signed, values.device)
    smallest_code = 0 if signed else 1
    scales = values.abs().amax(1)
    codes = torch.empty_like(values, dtype=torch.uint8)

    for part, scale, random, out in _pieces(values, scales, noise, codes):
        # Between -1 and 1. A block of zeros is divided by the smallest normal number instead of 0.
        divisor = scale.clamp(min=torch.finfo(scale.dtype).tiny)
        scaled = (part / divisor[:, None]).view(-1)

        # The two neighbours
        below = _codes_below(scaled, signed)
        low = known.index_select(0, below)
        high = known.index_select(0, below + 1)

        # The upper one is taken with the probability (scaled - low) / (high - low).
        probability = scaled.sub_(low).div_(high.sub_(low))
        goes_up = probability.mul_(1 << 16) > random.reshape(-1)
        chosen = below.add_(goes_up).clamp_(min=smallest_code)
        out.copy_(chosen.view_as(out))
    return codes, scales


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors by rows into pieces of `PIECE` numbers, which limits the memory for them."""
    n_rows = PIECE // BLOCK
    return zip(*(tensor.split(n_rows) for tensor in tensors), strict=True)


def _codes_below(scaled: Tensor, signed: bool) -> Tensor:
    """Codes of the largest levels that do not exceed the numbers. At most the last but one, so that
    each has a neighbour above.
    """
    known = levels(signed, scaled.device)
    first = _first_levels(signed, scaled.device)

    # The table is right for the upper 16 bits of a number, or one too low.
    upper_bits = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    codes = first.index_select(0, upper_bits)
    del upper_bits  # as large as the numbers
    next_levels = known.index_select(0, codes + 1)
    codes.add_(scaled >= next_levels)
    return codes.clamp_(max=len(known) - 2)


@cache
def _first_levels(signed: bool, device: torch.device) -> Tensor:
    """Code of the level at or below all float32 numbers with the same upper 16 bits, for each value
    of these bits.

    No two levels have the same upper bits, so the code of a number is this or the next one. On a
    CPU this takes a tenth of the time of a binary search.
    """
    known = levels(signed, torch.device("cpu"))

    # The lowest number with these bits has zeros below them, or ones if it is negative.
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    bits = torch.where(bits < 0, bits | 0xFFFF, bits)
    lowest = bits.view(torch.float32)

    codes = torch.bucketize(
        lowest,
        known,
        right=True,
        out_int32=True,
    )
    codes.sub_(1).clamp_(0, len(known) - 2)
    return codes.to(device)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    signed: bool,
    out: Tensor,
) -> None:
    """Write the numbers that codes and scales stand for to ``out``. Shapes are as in `quantize`."""
    known = levels(signed, codes.device)
    for part, scale, result in _pieces(codes, scales, out):
        level = known.index_select(0, part.int().view(-1))
        level = level.view_as(result)
        torch.mul(level, scale[:, None], out=result)
        del level  # before the next piece
