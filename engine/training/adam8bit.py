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

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import foreach_copy_, made_sharded
from ...utils.errors import ConfigError
from ..memory.tensors import local_tensor, row_major
from .adam_bf16 import MOMENTS, AdamBF16, State

BLOCK = 128
"""Numbers with a common scale, at most: the last block of a row may be shorter."""
SCALES = tuple(f"{name}_scale" for name in MOMENTS)
PIECE = 1 << 22
"""Most numbers that are quantized at a time. Each takes 26 bytes meanwhile."""


class Adam8bit(AdamBF16):
    """AdamW over float32 parameters with moments in 8 bits, for matrices and experts: 2.06 bytes
    per parameter.

    Parameters with one dimension, whose rows FSDP2 cuts anywhere, keep moments in bfloat16. The
    arithmetic is in float32, and an update uses the moments before they are rounded.
    """

    def initial_state(self, param: torch.Tensor) -> State:
        """State before the first step of a parameter. Codes and scales are sharded like the
        parameter.
        """
        state = super().initial_state(param)
        return (
            state | {name: _zero_scales(param) for name in SCALES} if _has_blocks(param) else state
        )

    def _update(self, group: dict, params: list[nn.Parameter], numbers: list[int]) -> None:
        for blocks in (True, False):
            some = [
                (p, number)
                for p, number in zip(params, numbers, strict=True)
                if _has_blocks(p) == blocks
            ]
            if some:
                super()._update(group, [param for param, _ in some], [number for _, number in some])

    def _dtype_for(self, param: torch.Tensor) -> torch.dtype:
        return torch.uint8 if _has_blocks(param) else super()._dtype_for(param)

    def _width(self, weight: torch.Tensor) -> int:
        return prod(_padded(weight)) if _has_blocks(weight) else super()._width(weight)

    def _views(self, row: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not _has_blocks(weights[0]):
            return super()._views(row, weights)
        parts = row.split([self._width(weight) for weight in weights])
        return [p.view(_padded(w))[..., : w.shape[-1]] for p, w in zip(parts, weights, strict=True)]

    def _read(
        self, states: Sequence[State], buffer: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> None:
        if not _has_blocks(weights[0]):
            return super()._read(states, buffer, weights)
        for moment, scale, row, signed in _moments(buffer):
            codes = torch.full_like(
                row, 127 if signed else 0, dtype=torch.uint8
            )  # 0.0 where a row is filled up
            foreach_copy_(
                self._views(codes, weights), [local_tensor(state[moment]) for state in states]
            )
            scales = torch.cat([local_tensor(state[scale]).flatten() for state in states])
            dequantize(codes.view(-1, BLOCK), scales, signed, out=row.view(-1, BLOCK))
        buffer[1].square_()

    def _write(
        self,
        states: Sequence[State],
        buffer: torch.Tensor,
        noise: torch.Tensor,
        weights: Sequence[torch.Tensor],
    ) -> None:
        if not _has_blocks(weights[0]):
            return super()._write(states, buffer, noise, weights)
        for (moment, scale, row, signed), random in zip(_moments(buffer), noise, strict=True):
            values = row if signed else row.sqrt()
            codes, scales = quantize(values.view(-1, BLOCK), signed, random.view(-1, BLOCK))
            stored = [local_tensor(state[scale]) for state in states]
            foreach_copy_(
                [local_tensor(state[moment]) for state in states],
                self._views(codes.view(-1), weights),
            )
            parts = scales.split([part.numel() for part in stored])
            foreach_copy_(
                stored, [part.view_as(like) for part, like in zip(parts, stored, strict=True)]
            )


def _moments(buffer: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
    yield from zip(MOMENTS, SCALES, buffer, (True, False), strict=True)


def _has_blocks(param: torch.Tensor) -> bool:
    return param.dim() > 1


def _n_blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def _padded(weight: torch.Tensor) -> tuple[int, ...]:
    """Shape of a parameter with its rows filled up to whole blocks."""
    return *weight.shape[:-1], _n_blocks(weight.shape[-1]) * BLOCK


def _zero_scales(param: torch.Tensor) -> torch.Tensor:
    local = local_tensor(param)
    zeros = torch.zeros(
        (*local.shape[:-1], _n_blocks(local.shape[-1])), dtype=torch.float32, device=local.device
    )
    if not isinstance(param, DTensor):
        return zeros
    shape = torch.Size((*param.shape[:-1], _n_blocks(param.shape[-1])))
    return made_sharded(zeros, param.device_mesh, param.placements, shape, row_major(shape))


def require_whole_blocks(model: nn.Module) -> None:
    """Raise ConfigError if ranks share the rows of a matrix of ``model`` in parts that are not
    whole blocks.
    """
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor) or not _has_blocks(param) or not param.requires_grad:
            continue
        cuts = zip(param.device_mesh.shape, param.placements, strict=True)
        n_ranks = prod(size for size, cut in cuts if cut.is_shard(param.dim() - 1))
        if n_ranks > 1 and param.shape[-1] % (n_ranks * BLOCK):
            raise ConfigError(
                f"config key 'optimizer.type' is 'adam8bit', which quantizes blocks of {BLOCK} "
                f"columns, but {n_ranks} ranks share the {param.shape[-1]} columns of {name}; "
                f"expected a multiple of {n_ranks * BLOCK}. Set 'optimizer.type' to 'adam_bf16', "
                "or t in config key 'backend' to fewer ranks"
            )


@cache
def levels(signed: bool, device: torch.device) -> torch.Tensor:
    """The numbers that a code stands for, ascending: 255 from -1 to 1, or 256 from 0 to 1.

    Each power of ten down to 1e-7 is divided evenly, a smaller one into half as many parts. The
    middles of the parts are levels, and so are 0 and 1.
    """
    found = list[float]()
    for power in range(7):
        n_parts = 2**power if signed else 2 ** (power + 1)
        found += [
            10.0 ** (power - 6) * (0.1 + 0.9 * (part + 0.5) / n_parts) for part in range(n_parts)
        ]
    if signed:
        found[-1] = 1.0
        return torch.tensor([*(-level for level in reversed(found)), 0.0, *found], device=device)
    return torch.tensor([0.0, *found, 1.0], device=device)


def quantize(
    values: torch.Tensor, signed: bool, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, ``[n, BLOCK]`` uint8, and scales, ``[n]``, of float32 numbers ``[n, BLOCK]``.

    A number becomes one of its two neighbours among the `levels`, with the nearer one more likely.
    If these are not signed, it never becomes 0. ``noise`` are random int32 numbers below 2 ** 16.
    """
    scales, codes = values.abs().amax(1), torch.empty_like(values, dtype=torch.uint8)
    rows, known, first = (
        PIECE // BLOCK,
        levels(signed, values.device),
        _first_levels(signed, values.device),
    )
    for part, scale, random, out in zip(
        *(each.split(rows) for each in (values, scales, noise, codes)), strict=True
    ):
        scaled = (part / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None]).view(-1)
        below = first.index_select(0, (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        below.add_(scaled >= known.index_select(0, below + 1)).clamp_(max=len(known) - 2)
        low, high = known.index_select(0, below), known.index_select(0, below + 1)
        goes_up = scaled.sub_(low).div_(high.sub_(low)).mul_(1 << 16) > random.reshape(-1)
        out.copy_(below.add_(goes_up).clamp_(min=0 if signed else 1).view_as(out))
    return codes, scales


@cache
def _first_levels(signed: bool, device: torch.device) -> torch.Tensor:
    """Code of the level at or below all float32 numbers with the same upper 16 bits, for each value
    of these bits.

    No two levels have the same upper bits, so the code of a number is this or the next one. On a
    CPU this takes a tenth of the time of a binary search.
    """
    known, lowest = (
        levels(signed, torch.device("cpu")),
        torch.arange(1 << 16, dtype=torch.int32) << 16,
    )
    lowest = torch.where(lowest < 0, lowest | 0xFFFF, lowest).view(torch.float32)
    return (
        torch.bucketize(lowest, known, right=True, out_int32=True)
        .sub_(1)
        .clamp_(0, len(known) - 2)
        .to(device)
    )


def dequantize(codes: torch.Tensor, scales: torch.Tensor, signed: bool, out: torch.Tensor) -> None:
    """Write the numbers that codes and scales stand for to ``out``. Shapes are as in `quantize`."""
    rows, known = PIECE // BLOCK, levels(signed, codes.device)
    for part, scale, result in zip(
        *(each.split(rows) for each in (codes, scales, out)), strict=True
    ):
        torch.mul(
            known.index_select(0, part.int().view(-1)).view_as(result), scale[:, None], out=result
        )
