"""Cuts a rank's share of a batch into packed micro-batches of about equal token counts, and puts results back.

Sequences are ragged, so padded rows waste compute (2.3 times measured on a ragged batch of 8) and equal row counts
waste memory. Here the rows of a micro-batch are concatenated without padding, their tokens are balanced (`partition`),
and every rank gets the same number of micro-batches, because each forward is a collective under FSDP. All of it is
deterministic: ties go to the lower index. Cost: one copy of the batch, and one small collective, in which the ranks
agree on the number of micro-batches and on what the whole batch weighs in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...utils.distributed import gather_numbers_of, get_rank
from ...utils.errors import BatchError
from ..api import Batch, LossWeightFn, Trajectories
from ..config import MicroBatchSpec
from .partition import partition_within, split_until, warn_of_long_rows
from .trajectories import join_trajectories

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, packed.

    Attributes:
        data: what loss functions see. Tensors that were ``[B, S, ...]`` are ``[T, ...]``: the rows one after another
            without padding; those that were ``[B]`` are ``[n]``. Always holds ``input_ids``, ``attention_mask``,
            ``loss_mask`` (0 at the first token of every sequence, which nothing predicts), ``position_ids`` ``[T]``
            int64 (restarts at 0 with every sequence) and ``cu_seqlens`` ``[n + 1]`` int32 (sequence ``i`` is
            ``[cu_seqlens[i]:cu_seqlens[i + 1]]``).
        indices: ``[n]`` int64, the rows of the original batch; empty for a dummy.
        lengths: tokens of each sequence, on the host.
        row_tokens: how many tokens a packed row is filled up to; 0: as it is.
        longest: most tokens of a sequence that fills up a row; 0: as many as the longest of ``lengths``.
        is_dummy: one token with loss mask 0, there only so that this rank joins its peers' collectives.
    """

    data: Batch
    indices: torch.Tensor
    lengths: tuple[int, ...]
    row_tokens: int = 0
    longest: int = 0
    is_dummy: bool = False

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
        """T."""
        return self.position_ids.shape[0]

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch on ``device``."""
        ahead = torch.device(device).type == "cuda"  # the host would read what has not arrived yet
        data = {key: tensor.to(device, non_blocking=ahead) for key, tensor in self.data.items()}
        return replace(self, data=data, indices=self.indices.to(device, non_blocking=ahead))

    def first_token(self) -> "MicroBatch":
        """A dummy: the first token, with every other number 0. Its row is filled up like this one's."""
        data = {key: torch.zeros_like(tensor[:1]) for key, tensor in self.data.items()}
        data |= {key: self.data[key][:1] for key in ("input_ids", "attention_mask")}
        data["cu_seqlens"] = torch.arange(2, dtype=torch.int32, device=self.cu_seqlens.device)
        longest = self.longest or max(self.lengths)
        return MicroBatch(data, self.indices[:0], (1,), self.row_tokens, longest, is_dummy=True)

    @property
    def rows(self) -> torch.Tensor:
        """``[T]`` int64, which of its sequences each token is of."""
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(numbers, lengths, output_size=self.n_tokens)

    def row(self) -> "MicroBatch":
        """The input of a model that can be packed: the tokens, filled up to ``row_tokens`` with zeros.

        The zeros are sequences behind the others, none longer than the longest of these, whose positions the model
        takes.
        """
        n_more = self.row_tokens - self.n_tokens
        data = {key: self.data[key] for key in ("input_ids", "attention_mask", "position_ids", "cu_seqlens")}
        if n_more <= 0:
            return replace(self, data=data)
        longest = self.longest or max(self.lengths)
        numbers = torch.arange(n_more, device=self.position_ids.device)
        ends = torch.arange(self.n_tokens, self.row_tokens, longest, device=self.cu_seqlens.device)[1:]
        more = {"input_ids": numbers.new_zeros(n_more), "attention_mask": numbers.new_ones(n_more)}
        more |= {
            "position_ids": numbers % longest,
            "cu_seqlens": torch.cat([ends, ends.new_full((1,), self.row_tokens)]),
        }
        filled = {key: torch.cat([data[key], more[key].to(data[key].dtype)]) for key in data}
        whole, rest = divmod(n_more, longest)
        return replace(self, data=filled, lengths=(*self.lengths, *[longest] * whole, *[rest] * (rest > 0)))

    def padded(self) -> Batch:
        """``input_ids`` and ``attention_mask``, ``[n, longest]`` int64, for a model that cannot be packed.

        ``output[mb.rows, mb.position_ids]`` brings the model's ``[n, longest, ...]`` output to ``[T, ...]``.
        """
        input_ids = self.position_ids.new_zeros((len(self.lengths), max(self.lengths)))
        mask, places = input_ids.clone(), (self.rows, self.position_ids)
        input_ids[places], mask[places] = self.data["input_ids"].long(), 1
        return {"input_ids": input_ids, "attention_mask": mask}


def validate_batch(batch: Batch) -> None:
    """Check that a batch can be packed.

    Raises:
        BatchError: ``input_ids`` or ``attention_mask`` is missing, not ``[B, S]`` or of a wrong dtype; there are no
            sequences; a mask row is not ones followed by zeros, or has no token; another entry is no tensor, or
            neither ``[B, S, ...]`` nor ``[B]``. The message names the key and the rows.
    """
    for key in ("input_ids", "attention_mask"):
        if key not in batch:
            raise BatchError(f"the batch has no {key!r}; it has {sorted(batch)}")
    for key, tensor in batch.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(f"batch[{key!r}] is a {type(tensor).__name__}; expected a torch.Tensor")
    input_ids, mask = batch["input_ids"], batch["attention_mask"]
    if input_ids.dim() != 2:
        raise BatchError(f"batch['input_ids'] has shape {list(input_ids.shape)}; expected [batch, seqlen]")
    if input_ids.dtype not in _INTEGERS:
        raise BatchError(f"batch['input_ids'] has dtype {input_ids.dtype}; expected token ids of an integer dtype")
    if input_ids.numel() == 0:
        raise BatchError(f"the batch is empty: batch['input_ids'] has shape {list(input_ids.shape)}")
    if mask.shape != input_ids.shape:
        raise BatchError(f"batch['attention_mask'] has shape {list(mask.shape)}, input_ids {list(input_ids.shape)}")
    for key, tensor in batch.items():
        if tensor.shape != input_ids.shape[:1] and tensor.shape[:2] != input_ids.shape:
            expected = f"{list(input_ids.shape)} (per token) or {list(input_ids.shape[:1])} (per sequence)"
            raise BatchError(f"batch[{key!r}] has shape {list(tensor.shape)}; expected {expected}")
    _validate_mask(mask)


def _validate_mask(mask: torch.Tensor) -> None:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BatchError("batch['attention_mask'] holds values other than 0 and 1")
    mask = mask.bool()
    if bool((empty := ~mask.any(dim=1)).any()):
        raise BatchError(f"row(s) {_rows(empty)} have no token: batch['attention_mask'] is all zeros there")
    if bool((ragged := (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)).any()):
        raise BatchError(
            f"row(s) {_rows(ragged)} are not right-padded: each row of batch['attention_mask'] must be ones, then zeros"
        )


def _rows(flags: torch.Tensor) -> str:
    rows = flags.nonzero().flatten().tolist()
    return ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")


@dataclass(frozen=True)
class WeighedBatch:
    """This rank's share of a batch, cut into micro-batches, and what they count in the loss.

    Attributes:
        micro_batches: as many on every rank.
        weights: of each micro-batch; 0 for a dummy.
        total: what the weights of all ranks add up to, as far as they were known when the ranks agreed.
        correction: how much more the weights of this rank add up to than ``total`` says. Not 0 only if the batch was
            cut once more after that, and ``loss_weight_fn`` gives the parts of a micro-batch another weight in all.
    """

    micro_batches: list[MicroBatch]
    weights: list[float]
    total: float
    correction: float

    def shares(self, device: torch.device) -> list[tuple[MicroBatch, float]]:
        """Micro-batches on the device, each with its share of ``total``."""
        pairs = zip(self.micro_batches, self.weights, strict=True)
        return [(mb.to(device), weight / self.total) for mb, weight in pairs]


def split_batch(
    batch: Trajectories,
    spec: MicroBatchSpec,
    group: dist.ProcessGroup | None = None,
    row_tokens: int = 0,
    max_model_len: int | None = None,
) -> list[MicroBatch]:
    """Cut this rank's ``batch`` into packed micro-batches, as many on every rank of ``group``.

    There are at least ``spec.n_mbs`` of them, and as many more as keep each within ``spec.max_tokens_per_mb`` (only
    a single longer sequence exceeds it). The largest comes first, so that what runs at the same time on
    different ranks is of like size. A rank with fewer sequences than micro-batches fills up with dummies.

    Args:
        batch: padded; without ``loss_mask``, every token but the first of a sequence counts. Or a list of such, which
            is joined first.
        spec: limits and algorithm.
        group: ranks that must agree on the number; None is the default group (or no other rank at all).
        row_tokens: of each micro-batch, see `MicroBatch`.
        max_model_len: most tokens of a sequence; None: no limit.

    Raises:
        BatchError: see `validate_batch` and `join_trajectories`; or ``spec.granularity`` does not divide the number of
            sequences; or a sequence is longer than ``max_model_len``. The other ranks raise `PeerError`.
    """
    cutter = _Cutter(batch, spec, lambda data: torch.zeros(()), row_tokens, max_model_len)
    return _cut_together(cutter, group).micro_batches


def split_and_weigh(
    batch: Trajectories,
    spec: MicroBatchSpec,
    loss_weight_fn: LossWeightFn,
    group: dist.ProcessGroup | None = None,
    row_tokens: int = 0,
    max_model_len: int | None = None,
) -> WeighedBatch:
    """`split_batch`, with the weight of each micro-batch; in the same small collective.

    Raises:
        BatchError: see `split_batch`; the other ranks raise `PeerError`. Or no token counts on any rank.
        Exception: whatever ``loss_weight_fn`` raised; the other ranks raise `PeerError`. If it raises only when this
            rank cuts once more, because another one has more micro-batches, the others wait for the group's timeout,
            as for an error of the loss.
    """
    weighed = _cut_together(_Cutter(batch, spec, loss_weight_fn, row_tokens, max_model_len), group)
    if not weighed.total > 0:
        raise BatchError(f"no token of the batch counts: the loss weights of all ranks add up to {weighed.total}")
    return weighed


def _cut_together(cutter: "_Cutter", group: dist.ProcessGroup | None) -> WeighedBatch:
    rows = gather_numbers_of("cutting the batch into micro-batches", cutter.cut, 2, group)
    cutter.cut_further(max(int(n_mbs) for n_mbs, _ in rows))
    total, announced = sum(weight for _, weight in rows), rows[get_rank(group)][1]
    return WeighedBatch(cutter.micro_batches, cutter.weights, total, sum(cutter.weights) - announced)


class _Cutter:
    """Cuts a batch into micro-batches, and then into more of them, of which only the new ones are packed and weighed.

    What is distributed over bins are units: ``spec.granularity`` adjacent rows each.

    Attributes:
        micro_batches: by tokens, the largest first; dummies come last.
        weights: of each.
    """

    def __init__(
        self,
        batch: Trajectories,
        spec: MicroBatchSpec,
        loss_weight_fn: LossWeightFn,
        row_tokens: int,
        max_model_len: int | None,
    ) -> None:
        self._given, self._spec, self._loss_weight_fn = batch, spec, loss_weight_fn
        self._row_tokens, self._max_model_len = row_tokens, max_model_len
        self._batch: Batch = {}
        self._lengths: list[int] = []
        self._unit_lengths: list[int] = []
        self._bins: list[list[int]] = []
        self.micro_batches: list[MicroBatch] = []
        self.weights: list[float] = []

    def cut(self) -> tuple[float, float]:
        """Cut into as few as the limits allow; their number, and what they weigh together."""
        self._batch = join_trajectories(self._given)
        validate_batch(self._batch)
        self._lengths, step = sequence_lengths(self._batch), self._spec.granularity
        if self._max_model_len is not None and max(self._lengths) > self._max_model_len:
            longest = max(self._lengths)
            raise BatchError(
                f"row {self._lengths.index(longest)} of the batch has {longest} tokens; expected at most "
                f"{self._max_model_len}, which is config key 'max_model_len' or, when that is null, the length of the "
                "model's rotary frequencies; set it to the --max-model-len of the inference servers, or cut sequences"
            )
        if len(self._lengths) % step:
            raise BatchError(
                f"the batch has {len(self._lengths)} sequences, which config key 'mb_spec.granularity' ({step}) does "
                "not divide; give it whole groups of them"
            )
        self._unit_lengths = [sum(self._lengths[row : row + step]) for row in range(0, len(self._lengths), step)]
        self._pack(partition_within(self._unit_lengths, self._spec))
        return len(self._bins), sum(self.weights)

    def cut_further(self, n_mbs: int) -> None:
        """Cut into ``n_mbs`` or a few more, as the spec asks; where sequences are lacking, add dummies."""
        n_mbs = self._spec.rounded(n_mbs)
        self._pack(split_until(self._bins, min(n_mbs, len(self._unit_lengths)), self._unit_lengths))
        if self._spec.max_tokens_per_mb is None:
            warn_of_long_rows([self._rows(units) for units in self._bins], self._lengths)
        n_dummies = n_mbs - len(self._bins)
        self.micro_batches += [self.micro_batches[0].first_token()] * n_dummies
        self.weights += [0.0] * n_dummies

    def _pack(self, bins: list[list[int]]) -> None:
        """Pack and weigh those of ``bins`` that are new."""
        done = dict(zip(map(tuple, self._bins), zip(self.micro_batches, self.weights, strict=True), strict=True))
        self._bins = sorted(bins, key=lambda units: (-sum(self._unit_lengths[unit] for unit in units), units[0]))
        new = [units for units in self._bins if tuple(units) not in done]
        packed = [_pack(self._batch, self._rows(units), self._lengths, self._row_tokens) for units in new]
        done |= zip(map(tuple, new), zip(packed, weigh(packed, self._loss_weight_fn), strict=True), strict=True)
        self.micro_batches = [done[tuple(units)][0] for units in self._bins]
        self.weights = [done[tuple(units)][1] for units in self._bins]

    def _rows(self, units: Sequence[int]) -> list[int]:
        step = self._spec.granularity
        return [row for unit in units for row in range(unit * step, (unit + 1) * step)]


def weigh(micro_batches: Sequence[MicroBatch], loss_weight_fn: LossWeightFn) -> list[float]:
    """What ``loss_weight_fn`` gives for each micro-batch; one wait for the device in all."""
    numbers = [loss_weight_fn(mb.data) for mb in micro_batches]
    given = [torch.as_tensor(number, dtype=torch.float64).reshape(()) for number in numbers]
    device = next((weight.device for weight in given if weight.is_cuda), torch.device("cpu"))  # they may be on both
    return torch.stack([weight.to(device, non_blocking=True) for weight in given]).tolist() if given else []


def unpack(
    outputs: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], batch_size: int, seqlen: int
) -> torch.Tensor:
    """Put per-token results back where `split_batch` took the tokens from.

    Args:
        outputs: one ``[T_i, ...]`` tensor a micro-batch; what a dummy gave is dropped.
        micro_batches: what `split_batch` returned, in the same order.
        batch_size: B.
        seqlen: S.

    Returns:
        ``[B, S, ...]`` of the outputs' dtype, zeros at padding.

    Raises:
        BatchError: an output has not one row a token.
    """
    result = outputs[0].new_zeros((batch_size, seqlen, *outputs[0].shape[1:]))
    for output, mb in zip(outputs, micro_batches, strict=True):
        if output.shape[0] != mb.n_tokens:
            raise BatchError(f"an output of shape {list(output.shape)} for a micro-batch of {mb.n_tokens} tokens")
        if not mb.is_dummy:
            rows = expand_to_tokens(mb.indices, mb.cu_seqlens)
            result[rows.to(output.device), mb.position_ids.to(output.device)] = output
    return result


def expand_to_tokens(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Repeat per-sequence ``values`` ``[n, ...]`` for each token: ``[T, ...]``."""
    return torch.repeat_interleave(values, cu_seqlens.diff().to(values.device).long(), dim=0)


def sequence_lengths(batch: Batch) -> list[int]:
    """Tokens of each row of a padded batch."""
    return batch["attention_mask"].bool().sum(dim=1).tolist()


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """The given rows of a padded batch, cut to the longest of them."""
    index = torch.tensor(rows, dtype=torch.int64, device=batch["input_ids"].device)
    longest = max(int(batch["attention_mask"][index].bool().sum(dim=1).max()), 1)
    picked = {key: tensor[index] for key, tensor in batch.items()}
    return {key: tensor[:, :longest] if tensor.dim() >= 2 else tensor for key, tensor in picked.items()}


def _pack(batch: Batch, rows: Sequence[int], lengths: Sequence[int], row_tokens: int) -> MicroBatch:
    """All sizes are known on the host, so nothing here waits for the device of the batch."""
    device = batch["input_ids"].device
    indices = torch.tensor(rows, dtype=torch.int64)
    row_lengths = torch.tensor([lengths[row] for row in rows], dtype=torch.int64)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), row_lengths.cumsum(0)])
    starts = torch.repeat_interleave(cu_seqlens[:-1], row_lengths)
    position_ids = (torch.arange(len(starts)) - starts).to(device, non_blocking=True)
    token_rows = torch.repeat_interleave(indices, row_lengths).to(device, non_blocking=True)
    indices = indices.to(device, non_blocking=True)

    data = {
        key: tensor[token_rows, position_ids] if tensor.dim() >= 2 else tensor[indices] for key, tensor in batch.items()
    }
    loss_mask = data.get("loss_mask", data["attention_mask"])
    data["loss_mask"] = loss_mask.masked_fill(position_ids == 0, 0)
    data["position_ids"], data["cu_seqlens"] = position_ids, cu_seqlens.to(device, torch.int32, non_blocking=True)
    return MicroBatch(data, indices, tuple(lengths[row] for row in rows), row_tokens)
