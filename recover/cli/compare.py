"""Compare two generations or Hugging Face folders tensor by tensor, one block of rows at a time."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ...engine.dcp.format import read_layout
from ...engine.dcp.state import ROOT
from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointNotFoundError, ConfigError
from ..convert.stored_tensors import stored_safetensors, stored_tensor
from .folders import Folder, local_copy

BLOCK_BYTES = 16 << 20
"""Approximate size of the block that is in memory."""


@dataclass
class Difference:
    """Difference between two tensors of the same name."""

    name: str
    # values, bits (equal in float64, for example 0 and -0), shape, dtype (equal values), only in A,
    # only in B
    kind: str
    elements: int = 0  # number of elements that differ
    of: int = 0  # number of elements
    largest: float = 0.0  # largest absolute difference. NaN if only one of two elements is a NaN
    relative: float = 0.0  # norm of the difference divided by the norm of A
    note: str = ""  # the two shapes or dtypes, if they differ


def compare_folders(a: Folder, b: Folder, engine: str | None) -> tuple[list[Difference], int]:
    """Compare two generations or exports. Only the weights of ``engine`` are compared if it is
    given.

    Returns:
        the differences, and the number of tensors that are equal.

    Raises:
        ConfigError: ``engine`` is None, an export is compared with a generation, and that has
            several engines.
        CheckpointNotFoundError: there is no such engine.
    """
    with ExitStack() as files:
        sides = [files.enter_context(local_copy(folder)) for folder in (a, b)]
        exports = [(side / "config.json").is_file() for side in sides]
        if engine is None and any(exports) and not all(exports):
            engine = _only_engine(sides[exports.index(False)])
        pair = (
            stored_safetensors(side, files) if is_export else _read_generation(side, engine)
            for side, is_export in zip(sides, exports, strict=True)
        )
        return _compare(*pair)


def _only_engine(path: Path) -> str:
    engine, *more = names = _engine_names(path)
    if more:
        raise ConfigError(f"{path} holds the engines {', '.join(names)}; say which with --engine")
    return engine


def _engine_names(path: Path) -> list[str]:
    if not (names := sorted(found.parent.name for found in path.glob("*/.metadata"))):
        raise CheckpointNotFoundError(f"{path} holds no engine: no folder in it has a .metadata")
    return names


def _read_generation(path: Path, engine: str | None) -> dict[str, LazyTensor]:
    """All tensors as ``<engine>/model.<parameter>`` ..., or the parameters and buffers of
    ``engine`` by their names.
    """
    names = _engine_names(path)
    if engine not in (None, *names):
        raise CheckpointNotFoundError(
            f"{path} has no engine {engine!r}; there are: {', '.join(names)}"
        )
    found = {}
    for name in names if engine is None else [engine]:
        layout = read_layout(path / name)
        prefix, shown = (f"{ROOT}.", f"{name}/") if engine is None else (f"{ROOT}.model.", "")
        for key in layout.tensors:
            if key.startswith(prefix):
                found[shown + key.removeprefix(prefix)] = stored_tensor(path / name, layout, key)
    return found


def _compare(a: dict[str, LazyTensor], b: dict[str, LazyTensor]) -> tuple[list[Difference], int]:
    found = [Difference(name, "only in A") for name in a.keys() - b.keys()]
    found += [Difference(name, "only in B") for name in b.keys() - a.keys()]
    found.sort(key=lambda one: one.name)
    compared = [_compare_tensor(name, a[name], b[name]) for name in a if name in b]
    return found + [one for one in compared if one is not None], compared.count(None)


def _compare_tensor(name: str, a: LazyTensor, b: LazyTensor) -> Difference | None:
    if a.shape != b.shape:
        return Difference(name, "shape", note=f"{list(a.shape)} and {list(b.shape)}")
    elements, in_bits, largest, squares, norm = 0, 0, 0.0, 0.0, 0.0
    wide = torch.complex128 if a.dtype.is_complex or b.dtype.is_complex else torch.float64
    for first, last in _row_blocks(a):
        one, other = a.rows(first, last), b.rows(first, last)
        if a.dtype == b.dtype:
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
    dtypes = "" if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}".replace("torch.", "")
    if not elements and not dtypes:
        return Difference(name, "bits", in_bits, a.numel) if in_bits else None
    relative = math.sqrt(squares / norm) if norm else math.inf if squares else 0.0
    return Difference(
        name, "values" if elements else "dtype", elements, a.numel, largest, relative, dtypes
    )


def _row_blocks(tensor: LazyTensor) -> Iterator[tuple[int, int]]:
    """First and last row of each block. A scalar is one block."""
    n_rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, BLOCK_BYTES // (tensor.row_elements * tensor.dtype.itemsize))
    yield from ((first, min(first + step, n_rows)) for first in range(0, n_rows, step))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, one row per element. As bytes, equal NaNs are equal, while 0 and -0
    differ.
    """
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
