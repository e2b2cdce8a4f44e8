"""Digests of files that several processes write at the same time, each its own pieces.

A piece is a few runs of bytes at equal distances, such as the columns of a matrix that one rank
holds. Its writer digests it from memory at the moment of the write. The digest of the file is
computed from the digests of its pieces, so that no process reads the file again. Pieces cover every
byte of a file exactly once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import xxhash

from .heartbeat import beat

PIECE_BYTES = 4 << 20
"""Largest piece. It is still in the processor's cache when it is digested and written."""
_WINDOW_BYTES = 16 << 20  # most bytes read at a time, to digest runs with the bytes between them


class Piece(NamedTuple):
    """Part of a file: ``rows`` runs of ``run`` bytes."""

    offset: int  # first byte
    run: int  # bytes of a run
    step: int  # from the beginning of a run to the beginning of the next. 0 for a single run
    rows: int  # number of runs

    @property
    def n_bytes(self) -> int:
        """Number of bytes."""
        return self.run * self.rows


def piece_digest(data: bytes | memoryview) -> bytes:
    """Digest of a piece, whose runs are side by side in ``data``."""
    return xxhash.xxh3_128_digest(data)


def join_digests(digests: Iterable[bytes]) -> str:
    """Digest of a file, ``"xxh3_128t:<hex>"``, from the digests of its pieces in the order of their
    offsets.
    """
    return f"xxh3_128t:{xxhash.xxh3_128_hexdigest(b''.join(digests))}"


def read_digest(
    pieces: Iterable[Sequence[int]], read: Callable[[int, int], bytes | memoryview]
) -> str:
    """Digest of a file with these pieces. ``read(offset, n_bytes)`` returns a part, shorter at the
    end of the file.
    """
    return join_digests(_read_piece(Piece(*piece), read) for piece in pieces)


def _read_piece(piece: Piece, read: Callable[[int, int], bytes | memoryview]) -> bytes:
    digest = xxhash.xxh3_128()
    step = piece.step or piece.run
    rows_at_once = max(1, _WINDOW_BYTES // step)
    for first in range(0, piece.rows, rows_at_once):
        # Read several runs with the bytes between them.
        rows = min(rows_at_once, piece.rows - first)
        window = read(piece.offset + first * step, (rows - 1) * step + piece.run)
        for begin in range(0, rows * step, step):
            digest.update(window[begin : begin + piece.run])
    beat()
    return digest.digest()


def require_whole(pieces: Iterable[Sequence[int]], n_bytes: int) -> None:
    """Raise ValueError if these pieces, in the order of their offsets, cannot cover a file of
    ``n_bytes``.
    """
    covered = 0
    before = -1
    for numbers in pieces:
        piece = Piece(*numbers)
        offset, run, step, rows = piece

        # Runs follow each other without an overlap. A single run has no step.
        has_integers = all(isinstance(number, int) for number in piece)
        has_bytes = run >= 1 and rows >= 1
        apart = step >= run if rows > 1 else step == 0
        if not has_integers or offset <= before or not has_bytes or not apart:
            raise ValueError(f"a file cannot have the piece {list(piece)}")
        if piece.n_bytes > PIECE_BYTES:
            raise ValueError(f"the piece {list(piece)} is larger than {PIECE_BYTES} bytes")
        if offset + (rows - 1) * step + run > n_bytes:
            raise ValueError(
                f"the piece {list(piece)} is outside of the file, which has {n_bytes} bytes"
            )
        covered += piece.n_bytes
        before = offset
    if covered != n_bytes:
        raise ValueError(f"the pieces of a file of {n_bytes} bytes have {covered} bytes")
