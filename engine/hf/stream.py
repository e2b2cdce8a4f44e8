"""The weight files of a sharded model as streams: one rank owns a file, the others send it their bytes, in file order.

For stores that take a file from one writer, from start to end. All ranks take turns together. In a turn every owner
gets the next block of its file from those who hold it, cast where it lies, by one uneven all-to-all, and writes it.
What needs an all-gather (see `Plan`) is gathered in the turn in which an owner comes to it. Every message says
whether its sender is well, so that all stop in the same turn.

Cost: every byte is sent once; what is gathered goes to everybody, as often as a file comes back to it. Memory beside
the model: `BLOCK_BYTES` to receive, `TURN_BYTES` to send at most, two blocks of what is gathered, and what a stream
keeps.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...utils.distributed import control_group, get_rank, get_world_size
from ...utils.heartbeat import beat
from .file_io import Encoder, chunks_of
from .name_mapping import element_map
from .safetensors_layout import WeightFile
from .shard_ranges import LocalPart, Plan, gathered_block, overlap, own_share, whole_tensor
from .stream_steps import Gathered, Group, Rows, Run, Step, cut, deal_files, plan_steps

BLOCK_BYTES = 8 << 20
"""Most that an owner receives in a turn."""

TURN_BYTES = 64 << 20
"""Most that a rank sends in a turn, when it is the one who holds what all owners need; with many of them, blocks are
smaller."""

_PIECE_BYTES = 1 << 20  # values that are no run in memory are looked at in pieces of so many bytes
_KEPT_BLOCKS = 2  # of what an owner had gathered: two tensors may take turns in its file


class Stream(Protocol):
    """A file that is being written from start to end."""

    def write(self, data: memoryview) -> None:
        """Append."""

    def close(self) -> None:
        """Complete the file."""

    def discard(self) -> None:
        """Give the file up."""


@dataclass(frozen=True)
class _Piece:
    """The bytes ``[start, stop)`` of a file that one rank answers for; there, with the values they are made of."""

    start: int
    stop: int
    rank: int
    values: torch.Tensor | None = None
    dtype: torch.dtype = torch.uint8

    def part(self, run: Run) -> tuple[int, int]:
        """Which of the bytes are in ``run``."""
        return max(self.start, run.start), min(self.stop, run.stop)

    def values_in(self, run: Run) -> torch.Tensor:
        """The values of these bytes."""
        assert self.values is not None, f"rank {self.rank} has them"
        first, last = ((at - self.start) // self.dtype.itemsize for at in self.part(run))
        return self.values.reshape(-1)[first:last]


class WeightStreaming:
    """Weight files about to be streamed. Every rank of ``group`` makes one, without communication, then calls `run`.

    Args:
        files: of the layout of ``plan``, the same on all ranks.
        model: asked how its tensors are converted; not for their values.
        plan: of this rank; its ``parts`` have the values, live or staged.
        stored: ``state_dict`` key -> tensor, for what must be gathered.
        group: what the bytes travel over, as CPU tensors (see `control_group`); None takes the default group.
        gather_group: see `save_hf`.
    """

    def __init__(
        self,
        files: Sequence[WeightFile],
        model: PreTrainedModel,
        plan: Plan,
        stored: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        gather_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model, self._plan, self._stored, self._gather_group = model, plan, stored, gather_group
        self._group, self._rank, self._world_size = group, get_rank(group), get_world_size(group)
        self._dealt = deal_files(files, self._world_size)
        self._steps = plan_steps(files, plan, stored)
        self._pieces = self._own_pieces(files)
        self._starts: dict[str, list[int]] = {}
        self._encoder = Encoder()
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._kept: list[OrderedDict[Rows | Group, Any]] = [OrderedDict() for _ in range(self._world_size)]
        self._stream: Stream | None = None
        self._error: Exception | None = None

    @torch.no_grad()
    def run(self, open_stream: Callable[[WeightFile], Stream]) -> None:
        """Write all files; when this ends, no stream is open. Once.

        Args:
            open_stream: opens a file that this rank owns.

        Raises:
            Exception: what went wrong on this rank. When only others failed this returns, with files missing: callers
                let the ranks agree (`all_ranks_succeed`).
        """
        self._open_stream, self._group = open_stream, control_group(self._group)
        self._learn_pieces()
        owners = sum(bool(owned) for owned in self._dealt)
        block_bytes = min(BLOCK_BYTES, TURN_BYTES // owners // 8 * 8)  # no value is wider, or begins elsewhere
        try:
            for turn in zip_longest(*(self._steps_of(owned, block_bytes) for owned in self._dealt)):
                if not self._take_turn(turn):
                    break
        finally:
            if self._stream is not None:
                self._stream.discard()
        if self._error is not None:
            raise self._error

    def _own_pieces(self, files: Sequence[WeightFile]) -> dict[str, list[_Piece]]:
        """What this rank answers for, by file."""
        places = {key: place for file in files for key, place in file.places.items()}
        pieces: dict[str, list[_Piece]] = {file.name: [] for file in files}
        for file in self._dealt[self._rank]:
            header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
            pieces[file.name].append(_Piece(0, len(header), self._rank, header))
        for tensor, span in self._plan.direct:
            place, part = places[tensor.key], self._plan.parts[span.source]
            if (held := overlap(span, part)) is None:
                continue
            at, values = own_share(held, part)
            start = place.offset + at * place.dtype.itemsize
            whole = values.is_contiguous()
            for piece in [values] if whole else chunks_of(values, _PIECE_BYTES // place.dtype.itemsize):
                stop = start + piece.numel() * place.dtype.itemsize
                if start < stop:
                    pieces[place.file].append(_Piece(start, stop, self._rank, piece, place.dtype))
                start = stop
        return pieces

    def _learn_pieces(self) -> None:
        """Tell every owner what is held here of its files, and learn who holds what of the own ones."""
        tables = [
            torch.tensor(
                [(number, p.start, p.stop) for number, file in enumerate(owned) for p in self._pieces[file.name]],
                dtype=torch.int64,
            ).reshape(-1, 3)
            for owned in self._dealt
        ]
        if self._world_size > 1:
            counts = torch.tensor([table.numel() for table in tables])
            incoming = torch.empty_like(counts)
            dist.all_to_all_single(incoming, counts, group=self._group)
            received = torch.empty(int(incoming.sum()), dtype=torch.int64)
            dist.all_to_all_single(
                received, torch.cat(tables).reshape(-1), incoming.tolist(), counts.tolist(), group=self._group
            )
            for rank, table in enumerate(received.split(incoming.tolist())):
                for number, start, stop in table.view(-1, 3).tolist() if rank != self._rank else ():
                    self._pieces[self._dealt[self._rank][number].name].append(_Piece(start, stop, rank))
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.start)
            self._starts[name] = [piece.start for piece in pieces]

    def _steps_of(self, owned: Sequence[WeightFile], block_bytes: int) -> Iterator[tuple[WeightFile, Step]]:
        for file in owned:
            for step in cut(self._steps[file.name], block_bytes):
                yield file, step

    def _take_turn(self, turn: Sequence[tuple[WeightFile, Step] | None]) -> bool:
        """One step of every owner that has one left; False, on all ranks alike, when any of them has failed before."""
        received = self._exchange(turn)
        if received is None:
            return False
        for owner, todo in enumerate(turn):
            if todo is None:
                continue
            file, step = todo
            if isinstance(step, Gathered):
                self._gather(owner, step.block)
            if owner == self._rank:
                with self._noting():
                    self._write(file, step, received)
        beat()
        return True

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep the first error in the block for later: the others are to be told, not left waiting."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def _held(self, file: WeightFile, run: Run) -> Iterator[_Piece]:
        """The pieces known here that have bytes of ``run``, in order."""
        first = max(bisect_right(self._starts[file.name], run.start) - 1, 0)
        for piece in islice(self._pieces[file.name], first, None):
            if piece.start >= run.stop:
                break
            if piece.stop > run.start:
                yield piece

    def _exchange(self, turn: Sequence[tuple[WeightFile, Step] | None]) -> list[memoryview] | None:
        """Send every owner whose step is a run what it lacks of it.

        Returns:
            What each rank sent to this one, in the order of the file; None when any rank says that it has failed.
        """
        if self._world_size == 1:
            return None if self._error is not None else []
        # Each message begins with a byte that says whether its sender is well.
        outgoing, incoming = ([int(rank != self._rank) for rank in range(self._world_size)] for _ in range(2))
        parcels: list[list[tuple[_Piece, Run]]] = [[] for _ in turn]
        for owner, todo in enumerate(turn):
            if todo is None or not isinstance(run := todo[1], Run):
                continue
            file = todo[0]
            for piece in self._held(file, run):
                start, stop = piece.part(run)
                if owner != self._rank:
                    outgoing[owner] += stop - start
                    parcels[owner].append((piece, run))
                elif piece.rank != owner:
                    incoming[piece.rank] += stop - start
        sent, received = self._buffer(0, sum(outgoing)), self._buffer(1, sum(incoming))
        with self._noting():
            for message, parcel in zip(sent.split(outgoing), parcels, strict=True):
                self._pack(message.numpy().data[1:], parcel)
        for message in sent.split(outgoing):
            message[:1] = self._error is not None
        dist.all_to_all_single(received, sent, incoming, outgoing, group=self._group)
        messages = received.split(incoming)
        if self._error is not None or any(message[:1].any() for message in messages):
            return None
        return [message.numpy().data[1:] for message in messages]

    def _pack(self, message: memoryview, parcel: Sequence[tuple[_Piece, Run]]) -> None:
        at = 0
        for piece, run in parcel:
            for data in self._encoder.chunks(piece.values_in(run), piece.dtype):
                message[at : at + len(data)] = data
                at += len(data)

    def _buffer(self, which: int, n_bytes: int) -> torch.Tensor:
        """Kept memory to send from (0), or to receive into (1)."""
        if len(self._buffers[which]) < n_bytes:
            self._buffers[which] = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        return self._buffers[which][:n_bytes]

    def _gather(self, owner: int, block: Rows | Group) -> None:
        """See that ``owner`` has a block; all ranks take part, unless it has kept it."""
        kept = self._kept[owner]
        if block not in kept:
            if len(kept) == _KEPT_BLOCKS:
                kept.popitem(last=False)
            if isinstance(block, Rows):
                whole = self._gather_rows(block)
            else:
                whole = self._gather_sources(block, convert=owner == self._rank)
            kept[block] = whole if owner == self._rank else None
        kept.move_to_end(block)

    def _gather_rows(self, rows: Rows) -> LocalPart:
        tensor = self._stored[rows.source]
        assert isinstance(tensor, DTensor), "a plain tensor is on every rank as a whole"
        return gathered_block(tensor, rows.first, rows.last, self._gather_group)

    def _gather_sources(self, group: Group, convert: bool) -> dict[str, torch.Tensor] | None:
        """The flattened values of its file tensors, by key."""
        tensors = self._plan.unmapped[group.number]
        sources = sorted({source for tensor in tensors for source in tensor.sources})
        wholes = {source: whole_tensor(self._stored[source], self._gather_group) for source in sources}
        with self._noting():
            if convert:
                elements = element_map(self._model, {source: whole.shape for source, whole in wholes.items()}, tensors)
                flat = torch.cat([whole.reshape(-1) for whole in wholes.values()])
                return {tensor.key: flat[elements[tensor.key]] for tensor in tensors}
        return None

    def _write(self, file: WeightFile, step: Step, received: Sequence[memoryview]) -> None:
        """Append a step to the file that is being written, or begin with it; nothing after an error."""
        if self._error is not None:
            return
        if self._stream is None:
            self._stream = self._open_stream(file)
        for data in self._bytes(file, step, received):
            self._stream.write(data)
        if step.stop == file.total_bytes:
            self._stream.close()
            self._stream = None

    def _bytes(self, file: WeightFile, step: Step, received: Sequence[memoryview]) -> Iterator[memoryview]:
        """All bytes of a step, each chunk good until the next one is asked for."""
        if isinstance(step, Gathered):
            yield from self._encoder.chunks(self._gathered_values(step), step.tensor.dtype)
            return
        at, rest = step.start, list(received)
        for piece in self._held(file, step):
            start, stop = piece.part(step)
            assert start == at, f"{file.name}: rank {piece.rank} answers for byte {start}, and nobody for {at}"
            at = stop
            if piece.rank == self._rank:
                yield from self._encoder.chunks(piece.values_in(step), piece.dtype)
            else:
                yield rest[piece.rank][: stop - start]
                rest[piece.rank] = rest[piece.rank][stop - start :]
        assert at == step.stop, f"{file.name}: nobody answers for the bytes from {at} to {step.stop}"

    def _gathered_values(self, step: Gathered) -> torch.Tensor:
        block = self._kept[self._rank][step.block]
        if step.span is None:
            return block[step.tensor.key]
        held = overlap(step.span, block)
        assert held is not None, f"{step.tensor.key} has nothing in {step.block}"
        return held[1]
