"""The prompt of several answers, computed once.

A row of a family holds ``[prompt without its last token] [last prompt token, answer 1] [last prompt
token, answer 2] ...``, each a segment. The last prompt token is there for each answer, because it
predicts another first token in each. So the next token of the row is the right target everywhere.

The tokens of an answer attend to the keys of the prompt and then, causally, to their own
(`SeenKeys`). Scores of the row become values of whole sequences by `Repeated`, so loss functions do
not know of it.

Only tokens before the first loss token are shared, and they are found by their contents. A sequence
without siblings is cut into the same segments, so its numbers do not depend on who shares its row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ...utils.logging import get_logger
from ..api import Batch
from ..config import MicroBatchSpec
from ..memory.tensors import bytes_of, memory_of
from .partition import partition_within, split_until

logger = get_logger(__name__)

MOST_COPIES = 4
"""Keys for each token of a row above which copies of them cause a warning."""


class _Tensors:
    """A dataclass of tensors, which may contain another."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``change`` to every tensor."""
        changed: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                changed[each.name] = change(value)
            elif isinstance(value, _Tensors):
                changed[each.name] = value.map(change)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class Repeated(_Tensors):
    """Entries of a tensor, some of them several times: ``index [n]`` int64. Every entry has a use.

    The other fields are for the gradient, the sum over the uses of an entry. ``first [m]`` is where
    each entry is used first. ``entries`` and ``places`` list all later uses: first the second use
    of each entry that has one, then the third uses, and so on. ``sizes`` are the numbers of these.
    """

    index: Tensor
    first: Tensor
    entries: Tensor
    places: Tensor
    sizes: tuple[int, ...]

    def of(self, source: Tensor) -> Tensor:
        """``source [m, ...]`` -> ``[n, ...]``. Differentiable, with the same bits in every run."""
        return _Repeat.apply(source, self)


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        repeated: Repeated,
    ) -> Tensor:
        ctx.repeated = repeated
        return source.index_select(0, repeated.index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # On CUDA `index_add` adds in any order. In each of these rounds no entry is twice.
        repeated: Repeated = ctx.repeated
        total = grad.index_select(0, repeated.first).float()
        rounds = zip(
            repeated.entries.split(repeated.sizes),
            repeated.places.split(repeated.sizes),
            strict=True,
        )
        for entries, places in rounds:
            total[entries] += grad.index_select(0, places)
        return total.to(grad.dtype), None


def repeat(index: Tensor, size: int) -> Repeated:
    """`Repeated` for an ``index [n]`` on the host into a tensor of ``size`` entries."""
    # Uses of the same entry are neighbours, in the order of their places.
    order = torch.argsort(index, stable=True)
    used = index[order]
    starts = torch.searchsorted(used, torch.arange(size))
    number = torch.arange(len(index)) - starts[used]

    # First uses, in the order of entries, then second ones ...
    by_number = torch.argsort(number, stable=True)
    first = by_number[:size]
    later = by_number[size:]
    sizes = torch.bincount(number)[1:]
    return Repeated(
        index,
        first=order[first],
        entries=used[later],
        places=order[later],
        sizes=tuple(sizes.tolist()),
    )


@dataclass(frozen=True)
class SeenKeys(_Tensors):
    """The keys that each segment of a row sees: those of its prompt, then its own.

    ``lengths`` are the keys of each segment, ``cu_seqlens`` ``[n + 1]`` int32 their boundaries, and
    ``keys`` the places of all of them in the row.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    keys: Repeated

    def of(self, heads: Tensor) -> Tensor:
        """Keys or values of a row, ``[1, heads, tokens, dim]`` -> those that segments see."""
        by_token = heads[0].transpose(0, 1)
        seen = self.keys.of(by_token)
        return seen.transpose(0, 1)[None]

    def followed_by(
        self,
        lengths: Sequence[int],
        ends: Tensor,
    ) -> "SeenKeys":
        """These, and those of more segments, which see only themselves. ``ends`` int32 are theirs
        in the row.
        """
        n_keys = len(self.keys.index)
        n_tokens = len(self.keys.first)
        numbers = torch.arange(sum(lengths), device=ends.device)
        index = torch.cat([self.keys.index, n_tokens + numbers])
        first = torch.cat([self.keys.first, n_keys + numbers])
        keys = replace(
            self.keys,
            index=index,
            first=first,
        )
        more_boundaries = ends + (n_keys - n_tokens)
        return SeenKeys(
            lengths=(*self.lengths, *lengths),
            cu_seqlens=torch.cat([self.cu_seqlens, more_boundaries]),
            keys=keys,
        )


@dataclass(frozen=True)
class SharedRow(_Tensors):
    """A row with the tokens of several sequences, in which each prompt is once.

    Attributes:
        lengths: tokens of each segment.
        cu_seqlens: ``[n + 1]`` int32, their boundaries.
        n_sequences: how many sequences each segment is part of.
        uses: ``[R]`` int64, the same for each token of the row.
        tokens: ``[R]`` int64, the place of each token of the row among those of whole sequences.
        sequences: ``[T]``, the way back.
        seen: keys that each segment sees.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    n_sequences: tuple[int, ...]
    uses: Tensor
    tokens: Tensor
    sequences: Repeated
    seen: SeenKeys

    @property
    def n_tokens(self) -> int:
        """Number of tokens, R."""
        return len(self.tokens)

    def uses_between(self, start: int, end: int) -> int:
        """The sum of ``uses[start:end]``, without waiting for the device."""
        total = 0
        first = 0
        for length, number in zip(self.lengths, self.n_sequences, strict=True):
            last = first + length
            overlap = min(last, end) - max(first, start)
            total += number * max(overlap, 0)
            first = last
        return total


class _Layout:
    """A row in the making: its segments, one after the other."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.lengths: list[int] = []
        self.n_keys: list[int] = []
        self.n_sequences: list[int] = []
        self.tokens: list[Tensor] = []
        self.keys: list[Tensor] = []

    def add(
        self,
        tokens: range,
        prompt: Tensor,
        n_sequences: int,
    ) -> Tensor:
        """Add a segment with the ``tokens`` of whole sequences, which sees the keys at the places
        ``prompt``. Returns its own places in the row.
        """
        end = self.n_tokens + len(tokens)
        places = torch.arange(self.n_tokens, end)
        self.n_tokens = end
        self.lengths.append(len(tokens))
        n_keys = len(prompt) + len(tokens)
        self.n_keys.append(n_keys)
        self.n_sequences.append(n_sequences)
        own = torch.arange(tokens.start, tokens.stop)
        self.tokens.append(own)
        self.keys += [prompt, places]
        return places

    def finished(self, places: Tensor) -> SharedRow:
        """The row. ``places`` has the place in it for each token of whole sequences."""
        lengths = torch.tensor(self.lengths)
        n_sequences = torch.tensor(self.n_sequences)
        keys = repeat(torch.cat(self.keys), self.n_tokens)
        seen = SeenKeys(
            lengths=tuple(self.n_keys),
            cu_seqlens=_boundaries(self.n_keys),
            keys=keys,
        )
        return SharedRow(
            lengths=tuple(self.lengths),
            cu_seqlens=_boundaries(self.lengths),
            n_sequences=tuple(self.n_sequences),
            uses=n_sequences.repeat_interleave(lengths),
            tokens=torch.cat(self.tokens),
            sequences=repeat(places, self.n_tokens),
            seen=seen,
        )


def _boundaries(lengths: Sequence[int]) -> Tensor:
    boundaries = [0, *accumulate(lengths)]
    return torch.tensor(boundaries, dtype=torch.int32)


class Beginning(NamedTuple):
    """What a row of a batch may share with others: its prompt without the last token."""

    family: int
    """The first row of the batch that begins like this one."""
    n_tokens: int
    """0: it shares nothing, and is a family of its own."""


class Unit(NamedTuple):
    """Rows that stay together, and the tokens of a packed row with them."""

    rows: list[int]
    n_tokens: int


@dataclass(frozen=True)
class Prompts:
    """The beginning and the number of tokens of each row of a batch."""

    beginnings: list[Beginning]
    lengths: Sequence[int]

    def tokens_of(self, rows: Sequence[int]) -> int:
        """Tokens of a packed row with these rows. The beginning of a family counts once."""
        shared: dict[int, int] = {}
        total = 0
        for row in rows:
            family, n_shared = self.beginnings[row]
            shared[family] = n_shared
            total += self.lengths[row] - n_shared
        return total + sum(shared.values())

    def families(self, spec: MicroBatchSpec) -> list[Unit]:
        """Families as units of a cut.

        Rows of ``spec.granularity`` stay together in any case. A family of more than
        ``spec.max_tokens_per_mb`` tokens becomes parts of about equal size, as few as possible,
        each with the prompt. Large families are also halved if there are fewer units than
        micro-batches.
        """
        families: dict[tuple[int, ...], list[int]] = {}
        groups = []
        step = spec.granularity
        for start in range(0, len(self.lengths), step):
            group = range(start, start + step)
            prompts = tuple(self.beginnings[row].family for row in group)
            families.setdefault(prompts, []).append(len(groups))
            groups.append(group)

        # Tokens of each group without its prompts, which it shares with the others of its family.
        own_tokens = [0] * len(groups)
        parts: list[list[int]] = []
        for prompts, members in families.items():
            n_shared = 0
            for row in set(prompts):
                n_shared += self.beginnings[row].n_tokens
            for number in members:
                n_tokens = self.tokens_of(groups[number])
                own_tokens[number] = n_tokens - n_shared
            parts += _parts_of(members, own_tokens, n_shared, spec)

        least = min(spec.rounded(1), len(groups))
        units = []
        for part in split_until(parts, least, own_tokens):
            rows: list[int] = []
            for number in sorted(part):
                rows += groups[number]
            n_tokens = self.tokens_of(rows)
            units.append(Unit(rows, n_tokens))
        return sorted(units)

    def row(self, rows: Sequence[int]) -> SharedRow | None:
        """Lay out these rows, packed in this order. All tensors are on the host. None if no row
        has anything to share.
        """
        if not any(self.beginnings[row].n_tokens for row in rows):
            return None
        families: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            family = self.beginnings[row].family
            families.setdefault(family, []).append(number)

        layout = _Layout()
        lengths = [self.lengths[row] for row in rows]
        starts = [0, *accumulate(lengths)]
        places = torch.empty(starts[-1], dtype=torch.int64)
        nothing = places[:0]
        for members in families.values():
            # The prompt once, then the rest of each sequence behind it.
            head = members[0]
            n_shared = self.beginnings[rows[head]].n_tokens
            prompt = nothing
            if n_shared:
                start = starts[head]
                shared = range(start, start + n_shared)
                prompt = layout.add(shared, nothing, len(members))
            for member in members:
                start = starts[member]
                end = starts[member + 1]
                own = start + n_shared
                places[start:own] = prompt
                answer = range(own, end)
                places[own:end] = layout.add(answer, prompt, 1)
        return layout.finished(places)


def find_prompts(batch: Batch, lengths: Sequence[int]) -> Prompts:
    """Find rows with the same prompt. Waits for the device of the batch.

    A row without a loss token has no known prompt, so it shares nothing. Neither does a batch
    without ``loss_mask``.
    """
    if "loss_mask" not in batch:
        alone = [Beginning(row, 0) for row in range(len(lengths))]
        return Prompts(alone, lengths)
    ids = batch["input_ids"].cpu().contiguous()
    attended = batch["attention_mask"].bool()
    mask = batch["loss_mask"].bool() & attended
    # Nothing predicts the first token of a sequence.
    mask[:, 0] = False
    first_losses = mask.int().argmax(dim=1).tolist()

    families: dict[bytes, int] = {}
    beginnings = []
    for row, first_loss in enumerate(first_losses):
        # The last prompt token is not shared, because it predicts the first token of each answer.
        n_tokens = max(first_loss - 1, 0)
        family = row
        if n_tokens:
            # The last prompt token is compared, too: the shared part predicts it.
            memory = memory_of(bytes_of(ids[row, :first_loss]))
            content = bytes(memory)
            family = families.setdefault(content, row)
        beginnings.append(Beginning(family, n_tokens))
    return Prompts(beginnings, lengths)


def warn_of_copies(row: SharedRow | None) -> None:
    """Warn once if each layer keeps copies of keys for many times the tokens of a row."""
    if row is None:
        return
    n_keys = len(row.seen.keys.index)
    if n_keys > MOST_COPIES * row.n_tokens:
        _warn_of_copies()


@cache
def _warn_of_copies() -> None:
    logger.warning(
        "answers see more than %d keys of their prompts for each token of a row, and without "
        "gradient checkpointing every layer keeps copies of them; if memory is short, set config "
        "key 'gradient_checkpointing' to true ('holdfast plan --group' says what it takes)",
        MOST_COPIES,
    )


def _parts_of(
    family: list[int],
    own_tokens: Sequence[int],
    n_shared: int,
    spec: MicroBatchSpec,
) -> list[list[int]]:
    tokens = [own_tokens[group] for group in family]
    total = n_shared + sum(tokens)
    capacity = spec.max_tokens_per_mb
    if capacity is None or total <= capacity:
        return [family]
    # Each part has the prompt, so less is left for answers.
    room = max(capacity - n_shared, 1)
    alone = replace(spec, n_mbs=1, n_mbs_divisor=1, max_tokens_per_mb=room)
    parts = partition_within(tokens, alone)
    return [[family[number] for number in part] for part in parts]
