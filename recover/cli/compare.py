"""Compare two generations or Hugging Face folders tensor by tensor, one block of rows at a time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ...engine.dcp.format import Destination, read_layout
from ...engine.dcp.reader import read_now
from ...engine.dcp.state import ROOT
from ...engine.hf.weight_files import WeightReader
from ...engine.memory.tensors import Box
from ...utils.errors import CheckpointNotFoundError, ConfigError
from .folders import Folder, local_copy

BLOCK_BYTES = 16 << 20
"""Approximate size of the block that is in memory."""


@dataclass
class Difference:
    """Difference between two tensors of the same name."""

    name: str
    # values, bits (equal in float64, for example 0 and -0), shape, dtype (equal values), only in A, only in B
    kind: str
    elements: int = 0  # number of elements that differ
    of: int = 0  # number of elements
    largest: float = 0.0  # largest absolute difference. NaN if only one of two elements is a NaN
    relative: float = 0.0  # norm of the difference divided by the norm of A
    note: str = ""  # the two shapes or dtypes, if they differ


class Tensors(ABC):
    """Named tensors on disk.

    Attributes:
        found: name -> shape and dtype.
    """

    found: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @abstractmethod
    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Rows of a tensor. A scalar is returned as a whole."""


class GenerationTensors(Tensors):
    """Tensors of all engines of a generation, named ``<engine>/model.<parameter>`` ...

    Args:
        path: the generation.
        weights_of: read only the parameters and buffers of this engine, under their own names. None reads everything.
    """

    def __init__(self, path: Path, weights_of: str | None = None) -> None:
        names = _engine_names(path) if weights_of is None else [the_engine(path, weights_of)]
        self._folders = {name: path / name for name in names}
        self._layouts = {name: read_layout(folder) for name, folder in self._folders.items()}
        prefix = f"{ROOT}." if weights_of is None else f"{ROOT}.model."
        self._keys = {
            f"{'' if weights_of else name + '/'}{key.removeprefix(prefix)}": (name, key)
            for name, layout in self._layouts.items()
            for key in layout.tensors
            if key.startswith(prefix)
        }
        stored = {name: self._layouts[engine].tensors[key] for name, (engine, key) in self._keys.items()}
        self.found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """See `Tensors.rows`."""
        (shape, dtype), (engine, key) = self.found[name], self._keys[name]
        sizes = (count, *shape[1:]) if shape else ()
        target = torch.empty(sizes, dtype=dtype)
        box = Box((first, *(0 for _ in shape[1:])) if shape else (), sizes)
        read_now(self._folders[engine], self._layouts[engine], {key: Destination(box, target)})
        return target


class ExportTensors(Tensors):
    """Tensors of a Hugging Face folder under their names in the files. ``files`` closes the files."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self._files = files.enter_context(WeightReader(path))
        self._slots = self._files.layout()
        self.found = {name: (tuple(slot.shape), slot.dtype) for name, slot in self._slots.items()}

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """See `Tensors.rows`."""
        shape, dtype = self.found[name]
        target = torch.empty((count, *shape[1:]) if shape else (), dtype=dtype)
        self._files.read(self._slots[name], first * math.prod(shape[1:]) if shape else 0, target)
        return target


def _engine_names(path: Path) -> list[str]:
    if not (names := sorted(found.parent.name for found in path.glob("*/.metadata"))):
        raise CheckpointNotFoundError(f"{path} holds no engine: no folder in it has a .metadata")
    return names


def the_engine(path: Path, name: str | None) -> str:
    """Name of one engine of a generation.

    Raises:
        ConfigError: ``name`` is None, and there are several engines.
        CheckpointNotFoundError: there is no such engine.
    """
    names = _engine_names(path)
    if name is None and len(names) > 1:
        raise ConfigError(f"{path} holds the engines {', '.join(names)}; say which with --engine")
    if name not in (None, *names):
        raise CheckpointNotFoundError(f"{path} has no engine {name!r}; there are: {', '.join(names)}")
    return name or names[0]


def compare_folders(a: Folder, b: Folder, engine: str | None) -> tuple[list[Difference], int]:
    """Compare two generations or exports. Only the weights of ``engine`` are compared if it is given.

    Returns:
        the differences, and the number of tensors that are equal.
    """
    with ExitStack() as stack:
        sides = [stack.enter_context(local_copy(folder)) for folder in (a, b)]
        exports = [(side / "config.json").is_file() for side in sides]
        if engine is None and any(exports) and not all(exports):
            engine = the_engine(sides[exports.index(False)], None)
        opened = (
            ExportTensors(side, stack) if export else GenerationTensors(side, engine)
            for side, export in zip(sides, exports, strict=True)
        )
        return _compare(*opened)


def _compare(a: Tensors, b: Tensors) -> tuple[list[Difference], int]:
    found = [Difference(name, "only in A") for name in a.found.keys() - b.found.keys()]
    found += [Difference(name, "only in B") for name in b.found.keys() - a.found.keys()]
    found.sort(key=lambda one: one.name)
    same = 0
    for name in (name for name in a.found if name in b.found):
        if (difference := _compare_tensor(name, a, b)) is None:
            same += 1
        else:
            found.append(difference)
    return found, same


def _compare_tensor(name: str, a: Tensors, b: Tensors) -> Difference | None:
    (shape, dtype), (other_shape, other_dtype) = a.found[name], b.found[name]
    if shape != other_shape:
        return Difference(name, "shape", note=f"{list(shape)} and {list(other_shape)}")
    elements, in_bits, largest, squares, norm = 0, 0, 0.0, 0.0, 0.0
    wide = torch.complex128 if dtype.is_complex or other_dtype.is_complex else torch.float64
    for first, count in _row_blocks(shape, dtype):
        one, other = a.rows(name, first, count), b.rows(name, first, count)
        if dtype == other_dtype:
            moved = int((_bits(one) != _bits(other)).any(1).sum())
            if not moved:
                norm += float(one.to(wide).abs().square().sum())
                continue
            in_bits += moved
        one, other = one.to(wide), other.to(wide)
        differs = (one != other) & ~(one.isnan() & other.isnan())
        distance = (one - other).abs()[differs]
        elements += int(differs.sum())
        if distance.numel():
            peak = float(distance.max())
            largest = peak if peak != peak or peak > largest else largest
        squares += float(distance.square().sum())
        norm += float(one.abs().square().sum())
    dtypes = "" if dtype == other_dtype else f"{dtype} and {other_dtype}".replace("torch.", "")
    if not elements and not dtypes:
        return Difference(name, "bits", in_bits, math.prod(shape)) if in_bits else None
    relative = math.sqrt(squares / norm) if norm else math.inf if squares else 0.0
    kind = "values" if elements else "dtype"
    return Difference(name, kind, elements, math.prod(shape), largest, relative, dtypes)


def _row_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each block. A scalar is one block."""
    if not shape:
        yield 0, 1
        return
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, one row per element. As bytes, equal NaNs are equal, while 0 and -0 differ."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
