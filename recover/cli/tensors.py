"""The tensors of a generation or a Hugging Face folder, read a block of rows at a time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from ...engine.dcp.metadata import Destination, read_layout
from ...engine.dcp.reader import read_now
from ...engine.dcp.state import ROOT
from ...engine.hf.file_io import WeightReader
from ...engine.memory.tensors import Box
from ...utils.errors import CheckpointNotFoundError, ConfigError

BLOCK_BYTES = 16 << 20
"""About how much of a tensor is in memory at a time."""


class Tensors(ABC):
    """Named tensors on a disk.

    Attributes:
        found: name -> shape and dtype.
    """

    found: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @abstractmethod
    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Rows of a tensor, or all of one that has none."""

    def close(self) -> None:  # noqa: B027  (nothing is open between two calls, as a rule)
        """Close the files."""


class GenerationTensors(Tensors):
    """Those of all engines of a generation: ``<engine>/model.<parameter>`` ...

    Args:
        path: the generation.
        weights_of: only the parameters and buffers of this engine, by their own names; None: everything of all.
    """

    def __init__(self, path: Path, weights_of: str | None = None) -> None:
        names = engine_names(path) if weights_of is None else [the_engine(path, weights_of)]
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
    """Those of a Hugging Face folder, by their names in the files."""

    def __init__(self, path: Path) -> None:
        self._undo = ExitStack()
        self._files = self._undo.enter_context(WeightReader(path))
        self._slots = self._files.layout()
        self.found = {name: (tuple(slot.shape), slot.dtype) for name, slot in self._slots.items()}

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """See `Tensors.rows`."""
        shape, dtype = self.found[name]
        target = torch.empty((count, *shape[1:]) if shape else (), dtype=dtype)
        self._files.read(self._slots[name], first * math.prod(shape[1:]) if shape else 0, target)
        return target

    def close(self) -> None:
        """See `Tensors.close`."""
        self._undo.close()


def engine_names(path: Path) -> list[str]:
    """The engines of a generation.

    Raises:
        CheckpointNotFoundError: it has none.
    """
    if not (names := sorted(found.parent.name for found in path.glob("*/.metadata"))):
        raise CheckpointNotFoundError(f"{path} holds no engine: no folder in it has a .metadata")
    return names


def the_engine(path: Path, name: str | None) -> str:
    """The engine of a generation that is meant.

    Raises:
        ConfigError: there are several, and ``name`` is None.
        CheckpointNotFoundError: there is no such engine.
    """
    names = engine_names(path)
    if name is None and len(names) > 1:
        raise ConfigError(f"{path} holds the engines {', '.join(names)}; say which with --engine")
    if name not in (None, *names):
        raise CheckpointNotFoundError(f"{path} has no engine {name!r}; there are: {', '.join(names)}")
    return name or names[0]


def row_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """First row and number of rows of blocks of about `BLOCK_BYTES`; one block for a tensor without rows."""
    if not shape:
        yield 0, 1
        return
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)
