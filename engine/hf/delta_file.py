"""The changes of one rank between two published versions, as a safetensors file.

For each piece with changes the file has two tensors: the places of the changed elements in the
shortest of three codes, and their new values. Values are absolute, so they may be applied twice.
They are compared and stored as unsigned integers, so every bit counts. The format is described in
docs/checkpoint-format.md.
"""

import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.files import DurableFile
from ...utils.manifest import FileEntry
from ...utils.pieces import Piece

_IN_MEMORY_BYTES = 64 << 20  # larger changes wait on the disk until the header is known
_DTYPES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


def unsigned(itemsize: int) -> np.dtype:
    """The unsigned integers of this size, in the byte order of safetensors."""
    return np.dtype(f"<u{itemsize}")


def encode_places(places: np.ndarray, mask: np.ndarray | None) -> tuple[str, np.ndarray]:
    """Encode rising ``places`` in the code that takes the fewest bytes. Returns the name of the
    code and its values.

    - ``gap8``, ``gap16``: for each place, the number of elements between it and the one before, or
      the start. The largest number of the dtype means: skip that many elements, no place here.
    - ``bits``: a mask of all elements, lowest bit first. Possible if ``mask`` has one value for
      each element.
    """
    n_bits = np.inf if mask is None else -(-len(mask) // 8)
    if mask is not None and n_bits <= len(places):  # a gap takes at least a byte
        return "bits", np.packbits(mask, bitorder="little")
    gaps = np.diff(places, prepend=-1) - 1
    n_bytes = {
        "gap8": len(gaps) + int((gaps // 255).sum()),
        "gap16": 2 * (len(gaps) + int((gaps // 65535).sum())),
    }
    code = min(n_bytes, key=n_bytes.__getitem__)
    if mask is not None and n_bits <= n_bytes[code]:
        return "bits", np.packbits(mask, bitorder="little")
    dtype = unsigned(1 if code == "gap8" else 2)
    most = np.iinfo(dtype).max
    skips = gaps // most
    codes = np.full(n_bytes[code] // dtype.itemsize, most, dtype)
    codes[np.cumsum(skips + 1) - 1] = gaps - skips * most
    return code, codes


class DeltaFile:
    """The file ``name`` in ``folder``. Both are created by `close` if there are changes."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._data: Any = io.BytesIO()
        self._header: dict[str, Any] = {}
        self.changed = 0

    def add(
        self, tensor: str, first: int, piece: Piece, changed: np.ndarray, values: np.ndarray
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
        if piece.rows > 1:  # in the tensor there are other elements between the runs
            run, step = piece.run // values.itemsize, piece.step // values.itemsize
            places = places // run * step + places % run
        code, codes = encode_places(places, changed if piece.rows == 1 else None)
        for kind, part in ((code, codes), ("values", new)):
            self._put(f"{tensor}@{first}.{kind}", part)

    def _put(self, name: str, values: np.ndarray) -> None:
        begin = self._data.tell()
        if begin > _IN_MEMORY_BYTES and isinstance(self._data, io.BytesIO):
            self._folder.mkdir(exist_ok=True)
            memory, self._data = self._data, tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._data.write(memory.getbuffer())
        self._data.write(values.data)
        dtype, offsets = _DTYPES[values.itemsize], [begin, begin + values.nbytes]
        self._header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}

    def close(self) -> list[FileEntry]:
        """Write and fsync the file. Returns its entry for a manifest. Without changes there is no
        file.
        """
        if not self._header:
            return []
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._folder.mkdir(exist_ok=True)
        with self._data, DurableFile(self._folder / self._name) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            self._data.seek(0)
            shutil.copyfileobj(self._data, file, 1 << 20)
        return [FileEntry(self._name, file.bytes, file.digest)]
