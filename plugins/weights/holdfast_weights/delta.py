"""Apply deltas to the weight files of a folder.

A rank file is a safetensors file with two tensors for each chunk of changes: ``<tensor>@<first
element>.<code>`` has the places, ``<tensor>@<first element>.values`` the new values. Places count
elements of the tensor in the weight file.

- ``gap8``, ``gap16``: number of unchanged elements before each change. 255 or 65535 skips that many
  without a change.
- ``bits``: a mask over the elements from the first one on, in little bit order.

Nothing in a rank file is trusted: names, dtypes, sizes, counts and places are checked, and a place
outside of its tensor is never written. The work is divided by tensors, so no two threads write the
same bytes. A thread decodes a block of places at a time and changes at most 4 MiB of a file at a
time.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from .errors import NOT_AS_EXPECTED, FolderError
from .files import read_exactly, write_exactly
from .manifest import PIECE_BYTES
from .threads import in_parallel
from .versions import Delta

MAX_HEADER_BYTES = 100_000_000
# Bytes of places that a thread decodes at a time.
_BLOCK_BYTES = 256 << 10
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_CODES = {"gap8": "U8", "gap16": "U16", "bits": "U8"}
_CHUNK_NAME = re.compile(r"(.*)@(0|[1-9]\d{0,17})\.(gap8|gap16|bits|values)", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file."""

    path: Path
    name: str
    dtype: str
    count: int  # elements
    offset: int  # first byte in the file

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Chunk:
    """Changes of one tensor."""

    tensor: str
    first: int
    code: str
    places: Tensor
    values: Tensor

    def __str__(self) -> str:
        return f"{self.places.path.name}, {self.places.name}"


def apply_deltas(
    folder: Path,
    weights: Iterable[str],
    deltas: Sequence[tuple[Path, Delta]],
) -> None:
    """Change the weight files of ``folder`` by deltas, in their order, in place.

    Args:
        folder: a copy that no other process uses.
        weights: names of its weight files.
        deltas: verified local copies of the ``delta`` folders, and their manifests.

    Raises:
        FolderError: a rank file is wrong. The weight files may have changed.
    """
    # All tensors of the base, and their number of elements.
    tensors = {}
    for name in weights:
        for tensor in read_header(folder / name):
            if tensor.name in tensors:
                raise FolderError(
                    f"{folder}: {tensor.name} is in {tensors[tensor.name].path.name} and in {name}"
                )
            tensors[tensor.name] = tensor
    elements = sum(tensor.count for tensor in tensors.values())

    # Everything but the places is checked before a byte is changed.
    changes = {}
    for path, delta in deltas:
        manifest = delta.manifest
        if manifest.facts["elements"] != elements:
            raise FolderError(
                f"{manifest.where} counts {manifest.facts['elements']} elements, "
                f"the weights of its base have {elements}"
            )
        chunks = []
        for name in manifest.weights:
            chunks += read_chunks(path / name, tensors)
        changed = sum(chunk.values.count for chunk in chunks)
        if changed != manifest.facts["changed"]:
            raise FolderError(
                f"{manifest.where} counts {manifest.facts['changed']} changed elements, "
                f"its rank files have {changed}"
            )
        for chunk in chunks:
            changes.setdefault(chunk.tensor, []).append(chunk)

    # A thread applies all chunks of a tensor in their order.
    def change(item: tuple[str, list[Chunk]]) -> None:
        name, chunks = item
        tensor = tensors[name]
        with open(tensor.path, "r+b", buffering=0) as file:
            for chunk in chunks:
                _apply(file, tensor, chunk)

    in_parallel(change, changes.items())


def read_header(path: Path) -> list[Tensor]:
    """Return the tensors of a safetensors file, without reading values. FolderError if its header
    is wrong.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_exactly(file, 0, min(size, 8)), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise FolderError(
                f"{path} has {size} bytes and a header of {length}; at most {MAX_HEADER_BYTES} "
                "are read"
            )
        text = read_exactly(file, 8, length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = [_parse_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    except FolderError:
        raise
    except NOT_AS_EXPECTED as error:
        raise FolderError(f"{path} has a broken header: {type(error).__name__}: {error}") from error

    # Tensors follow each other without gaps, from the end of the header to the end of the file.
    expected = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.count)):
        if tensor.offset != expected:
            raise FolderError(
                f"{path}: {tensor.name} begins at byte {tensor.offset}, expected {expected}"
            )
        expected += tensor.count * tensor.item_bytes
    if expected != size:
        raise FolderError(f"{path} has {size} bytes, its header asks for {expected}")
    return tensors


def _parse_tensor(
    path: Path,
    name: str,
    entry: Mapping[str, Any],
    start: int,
) -> Tensor:
    dtype = entry["dtype"]
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if dtype not in _ITEM_BYTES:
        raise FolderError(
            f"{path}: {name} has dtype {dtype!r}, expected one of {', '.join(_ITEM_BYTES)}"
        )
    if len(shape) > 32 or not all(map(_is_count, (*shape, begin, end))):
        raise FolderError(f"{path}: {name} has the shape {shape} at {[begin, end]}")
    tensor = Tensor(path, name, dtype, math.prod(shape), start + begin)
    if tensor.count * tensor.item_bytes != end - begin:
        raise FolderError(
            f"{path}: {name} with {tensor.count} elements of {dtype} cannot be at {[begin, end]}"
        )
    return tensor


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 48


def read_chunks(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[Chunk]:
    """Yield the chunks of a rank file, checked against the tensors that they change, but for their
    places.
    """
    parts = {}
    for stored in read_header(path):
        match = _CHUNK_NAME.fullmatch(stored.name)
        if match is None or match[1] not in tensors:
            raise FolderError(f"{path}: {stored.name!r} is no change of a tensor in the base")
        name, first, code = match.groups()
        target = tensors[name]
        expected = _CODES.get(code) or f"U{8 * target.item_bytes}"
        if stored.dtype != expected:
            raise FolderError(
                f"{path}: {stored.name} has dtype {stored.dtype}, expected {expected}"
            )
        parts.setdefault((name, int(first)), {})[code] = stored

    # A chunk has its places in one code, and its values.
    for (name, first), found in parts.items():
        values = found.pop("values", None)
        if values is None or len(found) != 1:
            raise FolderError(
                f"{path}: {name}@{first} has {sorted(found)} and "
                f"{'no' if values is None else 'its'} values"
            )
        ((code, places),) = found.items()
        yield Chunk(name, first, code, places, values)


def _apply(file: FileIO, tensor: Tensor, chunk: Chunk) -> None:
    """Write the values of a chunk into a weight file."""
    itemsize = tensor.item_bytes
    dtype = np.dtype(f"<u{itemsize}")
    done = 0
    with open(chunk.values.path, "rb", buffering=0) as changes:
        for places in _places(changes, chunk):
            if places.size and places[-1] >= tensor.count:
                raise FolderError(
                    f"{chunk} changes element {places[-1]}, {tensor.name} has {tensor.count}"
                )
            if done + places.size > chunk.values.count:
                break
            offset = chunk.values.offset + done * itemsize
            data = read_exactly(changes, offset, places.size * itemsize)
            _change(file, tensor, places, np.frombuffer(data, dtype))
            done += places.size
        else:
            if done == chunk.values.count:
                return
    raise FolderError(
        f"{chunk} has another number of places than of values, which are {chunk.values.count}"
    )


def _change(
    file: FileIO,
    tensor: Tensor,
    places: np.ndarray,
    values: np.ndarray,
) -> None:
    """Set the elements at rising ``places``. Reads and writes a window of the file at a time."""
    itemsize = tensor.item_bytes
    window = PIECE_BYTES // itemsize
    while places.size:
        first = int(places[0])
        count = int(np.searchsorted(places, first + window))
        inside = places[:count] - first

        offset = tensor.offset + first * itemsize
        n_bytes = (int(inside[-1]) + 1) * itemsize
        data = bytearray(read_exactly(file, offset, n_bytes))
        np.frombuffer(data, values.dtype)[inside] = values[:count]
        write_exactly(file, offset, memoryview(data))

        places = places[count:]
        values = values[count:]


def _places(file: FileIO, chunk: Chunk) -> Iterator[np.ndarray]:
    """Yield the changed elements of a chunk, rising, a block at a time."""
    n_bytes = chunk.places.count * chunk.places.item_bytes
    dtype = np.dtype(f"<u{chunk.places.item_bytes}")
    next_place = chunk.first
    for at in range(0, n_bytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, n_bytes - at)
        codes = np.frombuffer(read_exactly(file, chunk.places.offset + at, size), dtype)
        if chunk.code == "bits":
            yield next_place + np.flatnonzero(np.unpackbits(codes, bitorder="little"))
            next_place += 8 * size
            continue

        # A gap is followed by a change, the largest code only skips elements.
        gaps = codes.astype(np.int64)
        changed = gaps != np.iinfo(dtype).max
        ends = next_place + np.cumsum(gaps + changed)
        yield ends[changed] - 1
        next_place = int(ends[-1])
