"""The changes of one rank between two published versions, as a safetensors file.

For each piece with changes the file has two tensors: the places of the changed elements in the
shortest of three codes, and their new values. Values are absolute, so they may be applied twice.
They are compared and stored as unsigned integers, so every bit counts. The format is described in
docs/checkpoint-format.md.
"""

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.files import DurableFile
from ...utils.manifest import FileEntry
from ...utils.pieces import Piece
from .safetensors_layout import encode_header

# Larger changes wait on the disk until the header is known.
_IN_MEMORY_BYTES = 64 << 20


def unsigned(itemsize: int) -> np.dtype:
    """The unsigned integers of this size, in the byte order of safetensors."""
    return np.dtype(f"<u{itemsize}")


def encode_places(
    places: np.ndarray,
    mask: np.ndarray | None,
) -> tuple[str, np.ndarray]:
    """Encode rising ``places`` in the code that takes the fewest bytes. Returns the name of the
    code and its values.

    - ``gap8``, ``gap16``: for each place, the number of elements between it and the one before, or
      the start. The largest number of the dtype means: skip that many elements, no place here.
    - ``bits``: a mask of all elements, lowest bit first. Possible if ``mask`` has one value for
      each element.
    """
    # Many changes are shortest as bits, whatever the gaps are: a gap takes at least a byte.
    mask_bytes = np.inf if mask is None else -(-len(mask) // 8)
    if mask is not None and mask_bytes <= len(places):
        return "bits", np.packbits(mask, bitorder="little")

    # 255 and 65535 are the codes that skip elements.
    gaps = np.diff(places, prepend=-1)
    gaps -= 1
    gap8_bytes = _count_codes(gaps, 255)
    gap16_bytes = 2 * _count_codes(gaps, 65535)
    if mask is not None and mask_bytes <= min(gap8_bytes, gap16_bytes):
        return "bits", np.packbits(mask, bitorder="little")
    if gap8_bytes <= gap16_bytes:
        return "gap8", _gap_codes(gaps, unsigned(1))
    return "gap16", _gap_codes(gaps, unsigned(2))


def _count_codes(gaps: np.ndarray, most: int) -> int:
    """Number of codes for ``gaps``, with those that skip ``most`` elements."""
    skips = gaps // most
    return len(gaps) + int(skips.sum())


def _gap_codes(gaps: np.ndarray, dtype: np.dtype) -> np.ndarray:
    most = np.iinfo(dtype).max
    skips = gaps // most

    # The code of a gap follows its skips, and everything else is a skip.
    codes = np.full(len(gaps) + int(skips.sum()), most, dtype)
    ends = np.cumsum(skips + 1) - 1
    codes[ends] = gaps - skips * most
    return codes


class DeltaFile:
    """The file ``name`` in ``folder``. Both are created by `close` if there are changes."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._data: Any = io.BytesIO()
        self._header: dict[str, Any] = {}
        self.changed = 0

    def add(
        self,
        tensor: str,
        first: int,
        piece: Piece,
        changed: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Add the changes of a piece of a file tensor, which begins at its element ``first``.

        ``changed`` is a mask of the piece's elements, ``values`` its new elements as `unsigned`
        integers.
        """
        places = np.flatnonzero(changed)
        if not len(places):
            return
        self.changed += len(places)
        new = values[places]
        mask = changed

        # In the tensor there are other elements between the runs, which the mask does not cover.
        if piece.rows > 1:
            run = piece.run // values.itemsize
            step = piece.step // values.itemsize
            places = places // run * step + places % run
            mask = None

        code, codes = encode_places(places, mask)
        name = f"{tensor}@{first}"
        self._put(f"{name}.{code}", codes)
        self._put(f"{name}.values", new)

    def _put(self, name: str, values: np.ndarray) -> None:
        begin = self._data.tell()
        if begin > _IN_MEMORY_BYTES and isinstance(self._data, io.BytesIO):
            self._move_to_disk(self._data)
        self._data.write(values.data)

        # Offsets count from the end of the header.
        self._header[name] = {
            "dtype": f"U{8 * values.itemsize}",
            "shape": list(values.shape),
            "data_offsets": [begin, begin + values.nbytes],
        }

    def _move_to_disk(self, in_memory: io.BytesIO) -> None:
        self._folder.mkdir(exist_ok=True)
        self._data = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._data.write(in_memory.getbuffer())

    def close(self) -> list[FileEntry]:
        """Write and fsync the file. Returns its entry for a manifest. Without changes there is no
        file.
        """
        if not self._header:
            return []
        # The header comes first in the file, and is known last.
        self._folder.mkdir(exist_ok=True)
        with self._data, DurableFile(self._folder / self._name) as file:
            file.write(encode_header(self._header))
            self._data.seek(0)
            shutil.copyfileobj(self._data, file, 1 << 20)
        return [FileEntry(self._name, file.bytes, file.digest)]
