"""``holdfast diff``: in which tensors two generations or exports differ, and by how much."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .copies import local_copy
from .folders import Folder, LocalFolder
from .output import json_option, number_text, print_json, print_table
from .places import is_url, local_path, read_generation

if TYPE_CHECKING:
    from .tensors import Tensors

T = TypeVar("T")


@dataclass
class Difference:
    """Of one tensor.

    Attributes:
        name: of it.
        kind: ``values``, ``bits`` (values equal in float64: 0 and -0, NaNs, large integers), ``shape``, ``dtype``
            (equal values in another one), ``only in A`` or ``only in B``.
        elements: how many differ.
        of: how many there are.
        largest: the largest absolute difference; NaN where one of two is not a number and the other is.
        relative: the norm of the difference by that of A.
        note: shapes or dtypes where these differ.
    """

    name: str
    kind: str
    elements: int = 0
    of: int = 0
    largest: float = 0.0
    relative: float = 0.0
    note: str = ""


@click.command("diff", short_help="Which tensors differ, and how much.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--engine", help="Compare only the weights of this engine; needed where one side is an export and a "
              "generation has several.")  # fmt: skip
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything differs.")
@json_option
@click.pass_context
def diff_command(ctx: click.Context, a: str, b: str, engine: str | None, exit_code: bool, as_json: bool) -> None:
    """Compare generations A and B, or weights of one with a Hugging Face folder, tensor by tensor.

    Bits are compared; how much values differ is computed in float64. Digests are not looked at (`holdfast verify`
    does), but of a copy at a URL, which is fetched into the folder for temporary files (TMPDIR).
    """
    found, same = _read(a, lambda one: _read(b, lambda other: _compare_folders(one, other, engine)))
    if as_json:
        print_json({"a": a, "b": b, "equal_tensors": same, "differences": [asdict(one) for one in found]})
    else:
        rows = [_row(one) for one in found]
        title = f"{len(found)} of {same + len(found)} tensors differ: A is {a}, B is {b}"
        if rows:
            print_table(("tensor", "what", "elements>", "largest>", "relative>"), rows, title)
        else:
            click.echo(f"all {same} tensors are equal to the bit")
    if found and exit_code:
        ctx.exit(1)


def _read(text: str, read: Callable[[Folder], T]) -> T:
    """Call ``read`` with a Hugging Face folder of this machine, or with a generation as `read_generation` does."""
    path = local_path(text)
    if not is_url(text) and (path / "config.json").is_file():
        return read(LocalFolder(path))
    return read_generation(text, read)


def _compare_folders(a: Folder, b: Folder, engine: str | None) -> tuple[list[Difference], int]:
    from .tensors import the_engine

    with ExitStack() as stack:
        sides = [stack.enter_context(local_copy(folder)) for folder in (a, b)]
        exports = [(side / "config.json").is_file() for side in sides]
        if engine is None and any(exports) and not all(exports):
            engine = the_engine(sides[exports.index(False)], None)
        opened = (_opened(side, export, engine) for side, export in zip(sides, exports, strict=True))
        return _compare(*map(stack.enter_context, opened))


@contextmanager
def _opened(path: Path, export: bool, engine: str | None) -> "Iterator[Tensors]":
    from .tensors import ExportTensors, GenerationTensors

    tensors = ExportTensors(path) if export else GenerationTensors(path, engine)
    try:
        yield tensors
    finally:
        tensors.close()


def _compare(a: "Tensors", b: "Tensors") -> tuple[list[Difference], int]:
    """What differs, and how many tensors do not."""
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


def _compare_tensor(name: str, a: "Tensors", b: "Tensors") -> Difference | None:
    import torch

    from .tensors import row_blocks

    (shape, dtype), (other_shape, other_dtype) = a.found[name], b.found[name]
    if shape != other_shape:
        return Difference(name, "shape", note=f"{list(shape)} and {list(other_shape)}")
    elements, in_bits, largest, squares, norm = 0, 0, 0.0, 0.0, 0.0
    wide = torch.complex128 if dtype.is_complex or other_dtype.is_complex else torch.float64
    for first, count in row_blocks(shape, dtype):
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


def _bits(tensor: Any) -> Any:
    """The bytes of a tensor, a row for each element: NaN is equal to NaN, and 0 is not to -0."""
    import torch

    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _row(one: Difference) -> list[str]:
    what = f"{one.kind}: {one.note}" if one.note else one.kind
    if one.kind == "bits":
        return [one.name, what, f"{one.elements} of {one.of}", "", ""]
    if one.kind != "values":
        return [one.name, what, "", "", ""]
    return [one.name, what, f"{one.elements} of {one.of}", number_text(one.largest), f"{one.relative:.3g}"]
