"""Compare two generations or Hugging Face folders tensor by tensor, one block of rows at a time."""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...engine.dcp.state import ROOT
from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointNotFoundError, ConfigError
from ..export.stored_tensors import (
    DCPFolder,
    Tensors,
    stored_safetensors,
)
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
        generations = [side for side in sides if not _is_export(side)]

        # An export has the weights of one engine.
        if engine is None and len(generations) == 1:
            engine = _only_engine(generations[0])

        found: list[Tensors] = []
        for side in sides:
            if _is_export(side):
                found.append(stored_safetensors(side, files))
            else:
                found.append(_read_generation(side, engine))
        return _compare(*found)


def _is_export(path: Path) -> bool:
    return (path / "config.json").is_file()


def _only_engine(path: Path) -> str:
    names = _engine_names(path)
    if len(names) > 1:
        raise ConfigError(f"{path} holds the engines {', '.join(names)}; say which with --engine")
    return names[0]


def _engine_names(path: Path) -> list[str]:
    names = sorted(found.parent.name for found in path.glob("*/.metadata"))
    if not names:
        raise CheckpointNotFoundError(f"{path} holds no engine: no folder in it has a .metadata")
    return names


def _read_generation(path: Path, engine: str | None) -> Tensors:
    """All tensors as ``<engine>/model.<parameter>`` ..., or the parameters and buffers of
    ``engine`` by their names.
    """
    names = _engine_names(path)
    if engine is None:
        found: Tensors = {}
        for name in names:
            found |= _read_below(path / name, f"{ROOT}.", f"{name}/")
        return found
    if engine not in names:
        raise CheckpointNotFoundError(
            f"{path} has no engine {engine!r}; there are: {', '.join(names)}"
        )
    return _read_below(path / engine, f"{ROOT}.model.", "")


def _read_below(path: Path, prefix: str, shown: str) -> Tensors:
    """The tensors of an engine below ``prefix``, which becomes ``shown`` in their names."""
    folder = DCPFolder(path)
    found: Tensors = {}
    for key in folder.layout.tensors:
        if key.startswith(prefix):
            name = shown + key.removeprefix(prefix)
            found[name] = folder.tensor(key)
    return found


def _compare(a: Tensors, b: Tensors) -> tuple[list[Difference], int]:
    """The differences, those of names first, and the number of tensors that are equal."""
    found = [Difference(name, "only in A") for name in a.keys() - b.keys()]
    found += [Difference(name, "only in B") for name in b.keys() - a.keys()]
    found.sort(key=lambda one: one.name)

    equal = 0
    for name, tensor in a.items():
        if name not in b:
            continue
        difference = _compare_tensor(name, tensor, b[name])
        if difference is None:
            equal += 1
        else:
            found.append(difference)
    return found, equal


def _compare_tensor(name: str, a: LazyTensor, b: LazyTensor) -> Difference | None:
    if a.shape != b.shape:
        return Difference(name, "shape", note=f"{list(a.shape)} and {list(b.shape)}")

    # Block by block, so that tensors of any size can be compared.
    sums = _Sums(a.dtype, b.dtype)
    for first, last in a.row_blocks(BLOCK_BYTES):
        sums.add(a.rows(first, last), b.rows(first, last))

    # Equal in float64, and of one dtype: at most the bits differ.
    if not sums.elements and sums.same_dtype:
        if not sums.in_bits:
            return None
        return Difference(name, "bits", sums.in_bits, a.numel)

    dtypes = ""
    if not sums.same_dtype:
        dtypes = f"{a.dtype} and {b.dtype}".replace("torch.", "")
    return Difference(
        name,
        "values" if sums.elements else "dtype",
        sums.elements,
        a.numel,
        sums.largest,
        sums.relative,
        dtypes,
    )


class _Sums:
    """What two tensors differ by, added up over their blocks.

    Attributes:
        same_dtype: whether the tensors have one dtype.
        elements: number of elements with different values.
        in_bits: number of elements with different bits. 0 if the dtypes differ.
        largest: largest absolute difference, or NaN.
    """

    def __init__(self, dtype: torch.dtype, other: torch.dtype) -> None:
        self.same_dtype = dtype == other
        self.elements = 0
        self.in_bits = 0
        self.largest = 0.0
        self._squares = 0.0  # of the differences
        self._norm = 0.0  # squares of A
        is_complex = dtype.is_complex or other.is_complex
        self._wide = torch.complex128 if is_complex else torch.float64

    def add(self, one: Tensor, other: Tensor) -> None:
        """Add a block of A and the same block of B."""
        if self.same_dtype:
            differing_bits = (_bits(one) != _bits(other)).any(1)
            n_differing = int(differing_bits.sum())
            self.in_bits += n_differing
            # Most blocks are equal, and need no arithmetic in float64.
            if not n_differing:
                self._norm += _sum_of_squares(one.to(self._wide))
                return

        one = one.to(self._wide)
        other = other.to(self._wide)
        both_nan = one.isnan() & other.isnan()
        differs = (one != other) & ~both_nan
        self.elements += int(differs.sum())

        distance = (one - other).abs()[differs]
        if distance.numel():
            peak = float(distance.max())
            # A NaN stays, because no number is larger.
            if math.isnan(peak) or peak > self.largest:
                self.largest = peak
        self._squares += _sum_of_squares(distance)
        self._norm += _sum_of_squares(one)

    @property
    def relative(self) -> float:
        """Norm of the difference divided by the norm of A."""
        if self._norm:
            return math.sqrt(self._squares / self._norm)
        return math.inf if self._squares else 0.0


def _sum_of_squares(values: Tensor) -> float:
    return float(values.abs().square().sum())


def _bits(tensor: Tensor) -> Tensor:
    """Bytes of a tensor, one row per element. As bytes, equal NaNs are equal, while 0 and -0
    differ.
    """
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
