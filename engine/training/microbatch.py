"""Cut a rank's share of a batch into packed micro-batches of about equal token counts, and restore
results.

Sequences are ragged, so padded rows waste compute (2.3 times measured on a ragged batch of 8) and
equal row counts waste memory. Rows are therefore concatenated without padding and balanced by
tokens (`partition`). Every rank gets the same number of micro-batches, because each forward is a
collective under FSDP. Ties go to the lower index, so the result is deterministic. Cost: one copy of
the batch and one small collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isclose

import torch
import torch.distributed as dist
import xxhash

from ...utils.distributed import gather_numbers_of, get_rank
from ...utils.errors import BatchError
from ..api import Batch, LossWeightFn, Trajectories
from ..config import MicroBatchSpec
from ..memory.tensors import bytes_of, memory_of
from .batch import (
    join_trajectories,
    refuse_images,
    refuse_unknown_tokens,
    sequence_lengths,
    validate_batch,
)
from .partition import partition_within, split_until, warn_of_long_rows
from .vision import ROPE_POSITIONS, TOKEN_TYPES, Vision, join_pixels

_ROUNDING = 1e-3
"""Relative difference between the numbers of ranks with the same data that counts as rounding."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, packed.

    Attributes:
        data: input of the loss functions. ``[B, S, ...]`` tensors become ``[T, ...]``, with rows
            concatenated and no padding. ``[B]`` tensors become ``[n]``. Always contains
            ``input_ids``, ``attention_mask``, ``loss_mask`` (0 at the first token of a sequence,
            which nothing predicts), ``position_ids`` ``[T]`` int64 (restarts at 0 for every
            sequence) and ``cu_seqlens`` ``[n + 1]`` int32 (boundaries of the sequences).
        indices: ``[n]`` int64 rows of the original batch. Empty for a dummy.
        lengths: tokens of each sequence, on the host.
        row_tokens: token count to which a packed row is filled up. 0: no filling.
        longest: most tokens of a filler sequence. 0: as many as the longest of ``lengths``.
        is_dummy: one token with loss mask 0, so that this rank can join the collectives of its
            peers.
        vision: how the model takes images. None: it is trained on text.
        pixels: pixels of all images, in order. Empty without images.
    """

    data: Batch
    indices: torch.Tensor
    lengths: tuple[int, ...]
    row_tokens: int = 0
    longest: int = 0
    is_dummy: bool = False
    vision: Vision | None = None
    pixels: Batch = field(default_factory=dict)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """``[n + 1]`` int32 boundaries of the sequences."""
        return self.data["cu_seqlens"]

    @property
    def position_ids(self) -> torch.Tensor:
        """``[T]`` int64 position of every token in its sequence."""
        return self.data["position_ids"]

    @property
    def n_tokens(self) -> int:
        """Number of tokens, T."""
        return self.position_ids.shape[0]

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Copy the micro-batch to ``device``."""
        ahead = (
            torch.device(device).type == "cuda"
        )  # to the host, data could be read before it arrives
        data = {key: tensor.to(device, non_blocking=ahead) for key, tensor in self.data.items()}
        pixels = {key: tensor.to(device, non_blocking=ahead) for key, tensor in self.pixels.items()}
        return replace(
            self, data=data, indices=self.indices.to(device, non_blocking=ahead), pixels=pixels
        )

    def first_token(self) -> "MicroBatch":
        """A dummy: the first token, with every other number 0. Its row is filled up like this
        one's.
        """
        data = {key: torch.zeros_like(tensor[:1]) for key, tensor in self.data.items()}
        kept = (
            ("input_ids", "attention_mask") if self.vision is None else ("attention_mask",)
        )  # no image's token
        data |= {key: self.data[key][:1] for key in kept}
        data["cu_seqlens"] = torch.arange(2, dtype=torch.int32, device=self.cu_seqlens.device)
        longest = self.longest or max(self.lengths)
        return MicroBatch(
            data,
            self.indices[:0],
            (1,),
            self.row_tokens,
            longest,
            is_dummy=True,
            vision=self.vision,
        )

    @property
    def rows(self) -> torch.Tensor:
        """``[T]`` int64 index of each token's sequence in this micro-batch."""
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(numbers, lengths, output_size=self.n_tokens)

    def row_size(self, multiple: int = 1) -> int:
        """Number of tokens of `row`."""
        dummy = 0 if self.vision is None else self.vision.image_tokens
        full = self.row_tokens + dummy if self.row_tokens else 0
        return -(-max(full, self.n_tokens + (0 if self.pixels else dummy)) // multiple) * multiple

    def row(self, multiple: int = 1) -> "MicroBatch":
        """Input for a model that supports packing: the tokens, filled up to ``row_tokens`` with
        zeros.

        The length is a multiple of ``multiple``. The zeros form extra sequences at the end, none
        longer than the longest real one. If the model takes images and the row has none, a dummy
        image comes before the zeros.
        """
        if self.vision is not None and not self.pixels:
            return self._with_dummy_image(self.vision).row(multiple)
        n_tokens = self.row_size(multiple)
        n_more = n_tokens - self.n_tokens
        data = {key: self.data[key] for key in _ROW if key in self.data}
        if n_more == 0:
            return replace(self, data=data)
        longest = self.longest or max(self.lengths)
        numbers = torch.arange(n_more, device=self.position_ids.device)
        ends = torch.arange(self.n_tokens, n_tokens, longest, device=self.cu_seqlens.device)[1:]
        more = {"input_ids": numbers.new_zeros(n_more), "attention_mask": numbers.new_ones(n_more)}
        more |= {
            "position_ids": numbers % longest,
            "cu_seqlens": torch.cat([ends, ends.new_full((1,), n_tokens)]),
            TOKEN_TYPES: numbers.new_zeros(n_more),
            ROPE_POSITIONS: (numbers % longest)[:, None].expand(-1, 3),
        }
        filled = {key: torch.cat([data[key], more[key].to(data[key].dtype)]) for key in data}
        whole, rest = divmod(n_more, longest)
        return replace(
            self, data=filled, lengths=(*self.lengths, *[longest] * whole, *[rest] * (rest > 0))
        )

    def _with_dummy_image(self, vision: Vision) -> "MicroBatch":
        more, pixels = vision.dummy(self.position_ids.device)
        more["cu_seqlens"] = self.cu_seqlens[-1:] + vision.image_tokens
        data = {
            key: torch.cat([self.data[key], tensor.to(self.data[key].dtype)])
            for key, tensor in more.items()
        }
        longest = self.longest or max(self.lengths)
        return replace(
            self,
            data=data,
            lengths=(*self.lengths, vision.image_tokens),
            longest=longest,
            pixels=pixels,
        )

    def padded(self) -> Batch:
        """``input_ids`` and ``attention_mask``, ``[n, longest]`` int64, for a model that does not
        support packing.

        ``output[mb.rows, mb.position_ids]`` turns the ``[n, longest, ...]`` output into ``[T,
        ...]``.
        """
        input_ids = self.position_ids.new_zeros((len(self.lengths), max(self.lengths)))
        mask, places = input_ids.clone(), (self.rows, self.position_ids)
        input_ids[places], mask[places] = self.data["input_ids"].long(), 1
        return {"input_ids": input_ids, "attention_mask": mask}


_ROW = ("input_ids", "attention_mask", "position_ids", "cu_seqlens", TOKEN_TYPES, ROPE_POSITIONS)
"""Entries of a row."""


@dataclass(frozen=True)
class WeighedBatch:
    """This rank's micro-batches (as many on every rank) and their weights in the loss (0 for a
    dummy).

    ``total`` is the sum of the weights over all data, as known when the ranks agreed.
    ``correction`` is the excess of this rank's weights over its part of ``total``. It is not 0 only
    if the batch was then cut further and ``loss_weight_fn`` gives the parts of a micro-batch
    another total weight.
    """

    micro_batches: list[MicroBatch]
    weights: list[float]
    total: float
    correction: float

    def shares(self, device: torch.device) -> list[tuple[MicroBatch, float]]:
        """Micro-batches on the device, each with its share of ``total``."""
        pairs = zip(self.micro_batches, self.weights, strict=True)
        return [(mb.to(device), weight / self.total) for mb, weight in pairs]


@dataclass(frozen=True)
class CutRules:
    """What a model and its ranks require of micro-batches.

    Attributes:
        row_tokens: see `MicroBatch`.
        max_model_len: most tokens of a sequence. None: no limit.
        ranks_with_same_data: number of consecutive ranks that are given the same batch.
        vision: how the model takes images. None: it is trained on text.
        n_known_tokens: token ids of the model are below it. None: not known.
    """

    row_tokens: int = 0
    max_model_len: int | None = None
    ranks_with_same_data: int = 1
    vision: Vision | None = None
    n_known_tokens: int | None = None


NO_RULES = CutRules()


def split_batch(
    batch: Trajectories,
    spec: MicroBatchSpec,
    group: dist.ProcessGroup | None = None,
    rules: CutRules = NO_RULES,
) -> list[MicroBatch]:
    """Cut this rank's ``batch`` into packed micro-batches, the same number on every rank of
    ``group``.

    The number is at least ``spec.n_mbs`` and keeps each micro-batch within
    ``spec.max_tokens_per_mb`` (only a single longer sequence exceeds it). The largest comes first,
    so that ranks work on similar sizes at the same time. A rank with fewer sequences than
    micro-batches adds dummies.

    Args:
        batch: a padded batch, or a list of them to be joined. Without ``loss_mask``, every token
            except the first of a sequence counts.
        spec: limits and algorithm.
        group: ranks that must agree on the number. None: the default group (or no other rank).
        rules: what the model and its ranks require.

    Raises:
        BatchError: see `validate_batch`, `join_trajectories` and `refuse_unknown_tokens`. Or
            ``spec.granularity`` does not divide the number of sequences, or a sequence is longer
            than ``rules.max_model_len``. The other ranks raise `PeerError`. Or ranks with the same
            data were given different batches. All ranks raise this.
    """
    cutter = _Cutter(batch, spec, lambda data: torch.zeros(()), rules)
    return _cut_together(cutter, group).micro_batches


def split_and_weigh(
    batch: Trajectories,
    spec: MicroBatchSpec,
    loss_weight_fn: LossWeightFn,
    group: dist.ProcessGroup | None = None,
    rules: CutRules = NO_RULES,
) -> WeighedBatch:
    """`split_batch`, and the weight of each micro-batch, in the same collective.

    Raises:
        BatchError: no token counts on any rank. Or see `split_batch`. The other ranks raise
            `PeerError`.
        Exception: ``loss_weight_fn`` raised it. The other ranks raise `PeerError`. If it only fails
            when this rank cuts further because another rank has more micro-batches, the others wait
            for the group's timeout.
    """
    cutter = _Cutter(batch, spec, loss_weight_fn, rules)
    weighed = _cut_together(cutter, group)
    if not weighed.total > 0:
        raise BatchError(
            f"no token of the batch counts: the loss weights of all ranks add up to {weighed.total}"
        )
    return weighed


def _cut_together(cutter: "_Cutter", group: dist.ProcessGroup | None) -> WeighedBatch:
    ranks_with_same_data = cutter.rules.ranks_with_same_data

    def cut() -> tuple[float, ...]:
        return *cutter.cut(), *(cutter.fingerprint() if ranks_with_same_data > 1 else (0.0, 0.0))

    rows = gather_numbers_of("cutting the batch into micro-batches", cut, 4, group)
    for rank, (_, _, bits, magnitude) in enumerate(rows):
        head = rank - rank % ranks_with_same_data
        if bits != rows[head][2] or not isclose(magnitude, rows[head][3], rel_tol=_ROUNDING):
            raise BatchError(
                f"ranks {head} and {rank} share their data ({ranks_with_same_data} ranks do), but "
                "were given different batches; give both the same, for instance "
                "engine.broadcast_batch(batch)"
            )
    cutter.cut_further(max(int(n_mbs) for n_mbs, *_ in rows))
    total, announced = sum(row[1] for row in rows[::ranks_with_same_data]), rows[get_rank(group)][1]
    return WeighedBatch(
        cutter.micro_batches, cutter.weights, total, sum(cutter.weights) - announced
    )


class _Cutter:
    """Cuts a batch, and later cuts it further. Only new parts are packed and weighed.

    Bins contain units of ``spec.granularity`` adjacent rows. ``micro_batches`` are sorted, largest
    first, dummies last.
    """

    def __init__(
        self,
        batch: Trajectories,
        spec: MicroBatchSpec,
        loss_weight_fn: LossWeightFn,
        rules: CutRules,
    ) -> None:
        self._given, self._spec, self._loss_weight_fn, self.rules = (
            batch,
            spec,
            loss_weight_fn,
            rules,
        )
        self._batch: Batch = {}
        self._pixels: list[Batch] = []
        self._lengths: list[int] = []
        self._unit_lengths: list[int] = []
        self._bins: list[list[int]] = []
        self.micro_batches: list[MicroBatch] = []
        self.weights: list[float] = []

    def cut(self) -> tuple[float, float]:
        """Cut into as few micro-batches as the limits allow. Return their number and total weight."""
        self._batch = join_trajectories(self._given)
        validate_batch(self._batch)
        if self.rules.n_known_tokens is not None:
            image_token = None if self.rules.vision is None else self.rules.vision.image_token
            refuse_unknown_tokens(self._batch, self.rules.n_known_tokens, image_token)
        self._lengths, step = sequence_lengths(self._batch), self._spec.granularity
        longest, limit = max(self._lengths), self.rules.max_model_len
        if limit is not None and longest > limit:
            raise BatchError(
                f"row {self._lengths.index(longest)} of the batch has {longest} tokens; expected "
                f"at most {limit}, which is config key 'max_model_len' or, when that is null, the "
                "length of the model's rotary frequencies; set it to the --max-model-len of the "
                "inference servers, or cut sequences"
            )
        if len(self._lengths) % step:
            raise BatchError(
                f"the batch has {len(self._lengths)} sequences, which config key "
                f"'mb_spec.granularity' ({step}) does not divide; give it whole groups of them"
            )
        vision, most, costs = self.rules.vision, self._spec.max_tokens_per_mb, self._lengths
        if vision is None:
            refuse_images(self._batch)
        else:
            self._batch, self._pixels, costs = vision.prepare(self._batch, self._lengths, most)
        self._unit_lengths = [sum(costs[row : row + step]) for row in range(0, len(costs), step)]
        self._pack(partition_within(self._unit_lengths, self._spec))
        return len(self._bins), sum(self.weights)

    def fingerprint(self) -> tuple[float, float]:
        """53 bits of a hash of all integers in the batch, and the sum of the magnitudes of all
        other numbers.

        The others may differ by rounding where ranks computed them (log-probabilities, advantages).
        """
        bits, magnitude = xxhash.xxh3_64(), 0.0
        for key in sorted(self._batch):
            value = self._batch[key].cpu()
            if value.is_floating_point():
                magnitude += float(value.nan_to_num().abs().sum(dtype=torch.float64))
            else:
                bits.update(key.encode())
                bits.update(memory_of(bytes_of(value.contiguous())))
        return float(bits.intdigest() >> 11), magnitude

    def cut_further(self, n_mbs: int) -> None:
        """Cut into ``n_mbs``, rounded up as the spec requires. Add dummies if there are too few
        sequences.
        """
        n_mbs = self._spec.rounded(n_mbs)
        self._pack(split_until(self._bins, min(n_mbs, len(self._unit_lengths)), self._unit_lengths))
        if self._spec.max_tokens_per_mb is None:
            warn_of_long_rows([self._rows(units) for units in self._bins], self._lengths)
        n_dummies = n_mbs - len(self._bins)
        self.micro_batches += [self.micro_batches[0].first_token()] * n_dummies
        self.weights += [0.0] * n_dummies

    def _pack(self, bins: list[list[int]]) -> None:
        done = dict(
            zip(
                map(tuple, self._bins),
                zip(self.micro_batches, self.weights, strict=True),
                strict=True,
            )
        )
        self._bins = sorted(
            bins, key=lambda units: (-sum(self._unit_lengths[unit] for unit in units), units[0])
        )
        new = [units for units in self._bins if tuple(units) not in done]
        how = self._lengths, self.rules.row_tokens, self.rules.vision, self._pixels
        packed = [pack_rows(self._batch, self._rows(units), *how) for units in new]
        done |= zip(
            map(tuple, new),
            zip(packed, weigh(packed, self._loss_weight_fn), strict=True),
            strict=True,
        )
        self.micro_batches = [done[tuple(units)][0] for units in self._bins]
        self.weights = [done[tuple(units)][1] for units in self._bins]

    def _rows(self, units: Sequence[int]) -> list[int]:
        step = self._spec.granularity
        return [row for unit in units for row in range(unit * step, (unit + 1) * step)]


def weigh(micro_batches: Sequence[MicroBatch], loss_weight_fn: LossWeightFn) -> list[float]:
    """Call ``loss_weight_fn`` for each micro-batch. Waits for the device once."""
    numbers = [loss_weight_fn(mb.data) for mb in micro_batches]
    given = [torch.as_tensor(number, dtype=torch.float64).reshape(()) for number in numbers]
    device = next(
        (weight.device for weight in given if weight.is_cuda), torch.device("cpu")
    )  # they may be on both
    return (
        torch.stack([weight.to(device, non_blocking=True) for weight in given]).tolist()
        if given
        else []
    )


def unpack(
    outputs: Sequence[torch.Tensor],
    micro_batches: Sequence[MicroBatch],
    batch_size: int,
    seqlen: int,
) -> torch.Tensor:
    """Put per-token ``outputs``, one ``[T_i, ...]`` per micro-batch of `split_batch`, back into
    ``[B, S, ...]``.

    Padding is zero. Outputs of dummies are dropped.

    Raises:
        BatchError: an output does not have one row per token.
    """
    result = outputs[0].new_zeros((batch_size, seqlen, *outputs[0].shape[1:]))
    for output, mb in zip(outputs, micro_batches, strict=True):
        if output.shape[0] != mb.n_tokens:
            raise BatchError(
                f"an output of shape {list(output.shape)} for a micro-batch of {mb.n_tokens} tokens"
            )
        if not mb.is_dummy:
            rows = expand_to_tokens(mb.indices, mb.cu_seqlens)
            result[rows.to(output.device), mb.position_ids.to(output.device)] = output
    return result


def expand_to_tokens(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Repeat per-sequence ``values`` ``[n, ...]`` for each token: ``[T, ...]``."""
    return torch.repeat_interleave(values, cu_seqlens.diff().to(values.device).long(), dim=0)


def pack_rows(
    batch: Batch,
    rows: Sequence[int],
    lengths: Sequence[int],
    row_tokens: int = 0,
    vision: Vision | None = None,
    pixels: Sequence[Batch] = (),
) -> MicroBatch:
    """Pack rows of a batch, with images as `Vision.prepare` returns them.

    Sizes are known on the host, so this never waits for the device of the batch.
    """
    device = batch["input_ids"].device
    indices = torch.tensor(rows, dtype=torch.int64)
    row_lengths = torch.tensor([lengths[row] for row in rows], dtype=torch.int64)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), row_lengths.cumsum(0)])
    starts = torch.repeat_interleave(cu_seqlens[:-1], row_lengths)
    position_ids = (torch.arange(len(starts)) - starts).to(device, non_blocking=True)
    token_rows = torch.repeat_interleave(indices, row_lengths).to(device, non_blocking=True)
    indices = indices.to(device, non_blocking=True)

    data = {
        key: tensor[token_rows, position_ids] if tensor.dim() >= 2 else tensor[indices]
        for key, tensor in batch.items()
    }
    loss_mask = data.get("loss_mask", data["attention_mask"])
    data["loss_mask"] = loss_mask.masked_fill(position_ids == 0, 0)
    data["position_ids"], data["cu_seqlens"] = (
        position_ids,
        cu_seqlens.to(device, torch.int32, non_blocking=True),
    )
    images = join_pixels([pixels[row] for row in rows] if pixels else ())
    return MicroBatch(
        data, indices, tuple(lengths[row] for row in rows), row_tokens, vision=vision, pixels=images
    )
