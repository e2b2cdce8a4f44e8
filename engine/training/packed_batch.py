"""A micro-batch: rows of a batch, packed.

Sizes are known on the host, so that nothing here waits for the device of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import Batch
from .batch import ROPE_POSITIONS, TOKEN_TYPES, join_pixels
from .shared_prompts import Prompts, SeenKeys, SharedRow


class TakesImages(Protocol):
    """The part of `vision.Vision` that a micro-batch needs."""

    image_tokens: int

    def dummy(self, device: torch.device) -> tuple[Batch, Batch]:
        """See `Vision.dummy`."""
        ...

    def inputs(self, row: "MicroBatch") -> dict[str, Any]:
        """See `Vision.inputs`."""
        ...


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
        shared: the row, if each prompt is in it once. ``data`` are whole sequences in any case.
    """

    data: Batch
    indices: Tensor
    lengths: tuple[int, ...]
    row_tokens: int = 0
    longest: int = 0
    is_dummy: bool = False
    vision: TakesImages | None = None
    pixels: Batch = field(default_factory=dict)
    shared: SharedRow | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """``[n + 1]`` int32 boundaries of the sequences."""
        return self.data["cu_seqlens"]

    @property
    def position_ids(self) -> Tensor:
        """``[T]`` int64 position of every token in its sequence."""
        return self.data["position_ids"]

    @property
    def n_tokens(self) -> int:
        """Number of tokens, T."""
        return self.position_ids.shape[0]

    @property
    def n_row_tokens(self) -> int:
        """Number of tokens in the row before it is filled up, R. T, if nothing is shared."""
        return self.n_tokens if self.shared is None else self.shared.n_tokens

    @property
    def row_ids(self) -> Tensor:
        """``[R]`` tokens of the row before it is filled up."""
        ids = self.data["input_ids"]
        return ids if self.shared is None else ids[self.shared.tokens]

    @property
    def seen(self) -> SeenKeys | None:
        """Keys that each segment of a shared row sees."""
        return None if self.shared is None else self.shared.seen

    def of_sequences(self, values: Tensor) -> Tensor:
        """Values of the row's tokens, ``[R, ...]`` -> of those of whole sequences, ``[T, ...]``."""
        return values if self.shared is None else self.shared.sequences.of(values)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Copy the micro-batch to ``device``."""
        # Not to the host, where data could be read before it arrives.
        ahead = torch.device(device).type == "cuda"

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=ahead)

        return replace(
            self,
            data={key: move(tensor) for key, tensor in self.data.items()},
            indices=move(self.indices),
            pixels={key: move(tensor) for key, tensor in self.pixels.items()},
            shared=None if self.shared is None else self.shared.map(move),
        )

    def first_token(self) -> "MicroBatch":
        """A dummy: the first token, with every other number 0. Its row is filled up like this
        one's.
        """
        data = {}
        for key, tensor in self.data.items():
            first = tensor[:1]
            # In a model that sees, the first token may be an image's.
            is_kept = key == "attention_mask" or (key == "input_ids" and self.vision is None)
            data[key] = first if is_kept else torch.zeros_like(first)
        data["cu_seqlens"] = torch.arange(2, dtype=torch.int32, device=self.cu_seqlens.device)
        return replace(
            self,
            data=data,
            indices=self.indices[:0],
            lengths=(1,),
            longest=self._most_of_filler,
            is_dummy=True,
            pixels={},
            shared=None,
        )

    @property
    def rows(self) -> Tensor:
        """``[T]`` int64 index of each token's sequence in this micro-batch."""
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(numbers, lengths, output_size=self.n_tokens)

    @property
    def _most_of_filler(self) -> int:
        return self.longest or max(self.lengths)

    def row_size(self, multiple: int) -> int:
        """Number of tokens of `row`."""
        # A row has room for a dummy image, so that rows with and without images are of one size.
        n_dummy = 0
        if self.vision is not None:
            n_dummy = self.vision.image_tokens
        n_tokens = self.n_row_tokens
        if not self.pixels:
            n_tokens += n_dummy
        if self.row_tokens:
            n_filled = self.row_tokens + n_dummy
            n_tokens = max(n_tokens, n_filled)

        # Rounded up to a multiple.
        n_parts = -(-n_tokens // multiple)
        return n_parts * multiple

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
        n_more = n_tokens - self.n_row_tokens
        data = {key: self.data[key] for key in _ROW if key in self.data}
        own_lengths = self.lengths
        shared = self.shared
        if shared is not None:
            data = {key: tensor[shared.tokens] for key, tensor in data.items() if key != _CUTS}
            data[_CUTS] = shared.cu_seqlens
            own_lengths = shared.lengths
        if n_more == 0:
            return replace(self, data=data, lengths=own_lengths)

        # Sequences of ``longest`` zeros, and one of what is left.
        longest = self._most_of_filler
        n_whole, rest = divmod(n_more, longest)
        more_lengths = [longest] * n_whole
        if rest:
            more_lengths.append(rest)
        starts = torch.arange(self.n_row_tokens, n_tokens, longest, device=self.cu_seqlens.device)
        last_end = starts.new_full((1,), n_tokens)
        ends = torch.cat([starts[1:], last_end]).to(torch.int32)
        if shared is not None:
            seen = shared.seen.followed_by(more_lengths, ends)
            shared = replace(shared, seen=seen)

        # The share of these sequences in each entry of the row.
        numbers = torch.arange(n_more, device=self.position_ids.device)
        zeros = torch.zeros_like(numbers)
        positions = numbers % longest
        more = {
            "input_ids": zeros,
            "attention_mask": torch.ones_like(numbers),
            "position_ids": positions,
            _CUTS: ends,
            TOKEN_TYPES: zeros,
            ROPE_POSITIONS: positions[:, None].expand(-1, 3),
        }
        return replace(
            self,
            data=_appended(data, more),
            lengths=(*own_lengths, *more_lengths),
            shared=shared,
        )

    def _with_dummy_image(self, vision: TakesImages) -> "MicroBatch":
        more, pixels = vision.dummy(self.position_ids.device)
        more["cu_seqlens"] = self.cu_seqlens[-1:] + vision.image_tokens
        data = {key: self.data[key] for key in more}
        return replace(
            self,
            data=_appended(data, more),
            lengths=(*self.lengths, vision.image_tokens),
            longest=self._most_of_filler,
            pixels=pixels,
        )

    def in_rows(
        self,
        values: Tensor,
        packed: bool,
        multiple: int = 1,
    ) -> Tensor:
        """Values of whole sequences, ``[T, ...]`` -> those of the tokens that the layers of the
        model see, in the order of `row` or, if not ``packed``, of `padded`. Filling has zeros.

        Of shared prompts, the values of the first sequence.
        """
        if not packed:
            shape = (len(self.lengths), max(self.lengths))
            padded = values.new_zeros(*shape, *values.shape[1:])
            padded[self.rows, self.position_ids] = values
            return padded.flatten(0, 1)
        if self.shared is not None:
            values = values[self.shared.tokens]
        n_more = self.row_size(multiple) - len(values)
        # `F.pad` takes a pair for each dimension, the last one first.
        behind = (0, 0) * (values.dim() - 1)
        return F.pad(values, (*behind, 0, n_more))

    def padded(self) -> Batch:
        """``input_ids`` and ``attention_mask``, ``[n, longest]`` int64, for a model that does not
        support packing.

        ``output[mb.rows, mb.position_ids]`` turns the ``[n, longest, ...]`` output into ``[T,
        ...]``.
        """
        shape = (len(self.lengths), max(self.lengths))
        input_ids = self.position_ids.new_zeros(shape)
        attention_mask = torch.zeros_like(input_ids)

        # The place of each token: its row, and its position there.
        places = (self.rows, self.position_ids)
        input_ids[places] = self.data["input_ids"].long()
        attention_mask[places] = 1
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
        }


_CUTS = "cu_seqlens"
_ROW = (
    "input_ids",
    "attention_mask",
    "position_ids",
    _CUTS,
    TOKEN_TYPES,
    ROPE_POSITIONS,
)
"""Entries of a row."""


def _appended(data: Batch, more: Batch) -> Batch:
    """The tensors of ``data``, each followed by that of ``more``."""
    result = {}
    for key, tensor in data.items():
        added = more[key].to(tensor.dtype)
        result[key] = torch.cat([tensor, added])
    return result


def pack_rows(
    batch: Batch,
    rows: Sequence[int],
    lengths: Sequence[int],
    row_tokens: int = 0,
    vision: TakesImages | None = None,
    pixels: Sequence[Batch] = (),
    prompts: Prompts | None = None,
) -> MicroBatch:
    """Pack rows of a batch, with images as `Vision.prepare` returns them, and with shared prompts
    as `find_prompts` does.

    Sizes are known on the host, so this never waits for the device of the batch.
    """
    device = batch["input_ids"].device

    # Where each token of the pack is in the batch: its row and its position. Computed on the host.
    indices = torch.tensor(rows, dtype=torch.int64)
    own_lengths = [lengths[row] for row in rows]
    n_tokens = torch.tensor(own_lengths, dtype=torch.int64)
    cu_seqlens = F.pad(n_tokens.cumsum(0), (1, 0))
    starts = torch.repeat_interleave(cu_seqlens[:-1], n_tokens)
    position_ids = torch.arange(len(starts)) - starts
    token_rows = torch.repeat_interleave(indices, n_tokens)

    position_ids = position_ids.to(device, non_blocking=True)
    token_rows = token_rows.to(device, non_blocking=True)
    indices = indices.to(device, non_blocking=True)

    data = {}
    for key, tensor in batch.items():
        is_per_token = tensor.dim() >= 2
        data[key] = tensor[token_rows, position_ids] if is_per_token else tensor[indices]

    # Embeddings and most losses take no smaller integers.
    data["input_ids"] = data["input_ids"].long()

    # The first token of a sequence is not predicted.
    loss_mask = data.get("loss_mask", data["attention_mask"])
    is_first = position_ids == 0
    data["loss_mask"] = loss_mask.masked_fill(is_first, 0)
    data["position_ids"] = position_ids
    data["cu_seqlens"] = cu_seqlens.to(device, torch.int32, non_blocking=True)

    own_pixels = [pixels[row] for row in rows] if pixels else []
    return MicroBatch(
        data,
        indices,
        tuple(own_lengths),
        row_tokens,
        vision=vision,
        pixels=join_pixels(own_pixels),
        shared=None if prompts is None else prompts.row(rows),
    )


def expand_to_tokens(values: Tensor, cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """Repeat per-sequence ``values`` ``[n, ...]`` for each of the ``n_tokens`` tokens:
    ``[n_tokens, ...]``.
    """
    lengths = cu_seqlens.diff().to(values.device).long()
    # Without the number of tokens, the host would wait for the device to sum the lengths.
    return torch.repeat_interleave(values, lengths, dim=0, output_size=n_tokens)
