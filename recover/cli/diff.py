"""``holdfast diff``: list the tensors in which two generations or exports differ."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import click

from .folders import Folder
from .output import (
    json_option,
    number_text,
    print_json,
    print_table,
)
from .runs import is_url, local_path, read_generation

if TYPE_CHECKING:
    from .compare import Difference

T = TypeVar("T")

_COLUMNS = ("tensor", "what", "elements>", "largest>", "relative>")


@click.command("diff", short_help="List tensors that differ, and by how much.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--engine",
    help="Compare only the weights of this engine. Required to compare an export with a "
    "generation that has several engines.",
)
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything differs.")
@json_option
@click.pass_context
def diff_command(
    ctx: click.Context,
    a: str,
    b: str,
    engine: str | None,
    exit_code: bool,
    as_json: bool,
) -> None:
    """Compare two checkpoints A and B tensor by tensor. Each is a generation or a Hugging Face
    folder.

    Tensors are equal if all their bits are. The size of a difference is computed in float64.
    Digests are not checked (see `holdfast verify`), except when a copy at a URL is fetched into the
    temporary folder (TMPDIR).
    """
    from .compare import compare_folders

    # A run may delete a generation while it is read. Then it is looked up again, B inside of A.
    def compare_with(folder: Folder) -> tuple[list["Difference"], int]:
        return _read(b, lambda other: compare_folders(folder, other, engine))

    found, same = _read(a, compare_with)
    if as_json:
        differences = [asdict(one) for one in found]
        print_json({"a": a, "b": b, "equal_tensors": same, "differences": differences})
    elif found:
        title = f"{len(found)} of {same + len(found)} tensors differ: A is {a}, B is {b}"
        print_table(_COLUMNS, [_row(one) for one in found], title)
    else:
        click.echo(f"all {same} tensors are equal to the bit")
    if found and exit_code:
        ctx.exit(1)


def _read(text: str, read: Callable[[Folder], T]) -> T:
    # An export has no step, so it cannot be looked up.
    path = local_path(text)
    is_export = not is_url(text) and (path / "config.json").is_file()
    if is_export:
        return read(Folder(path))
    return read_generation(text, read)


def _row(one: "Difference") -> list[str]:
    # Cells that a kind of difference has no value for are empty.
    what = one.kind
    if one.note:
        what += f": {one.note}"
    count = ""
    if one.kind in ("bits", "values"):
        count = f"{one.elements} of {one.of}"
    largest = ""
    relative = ""
    if one.kind == "values":
        largest = number_text(one.largest)
        relative = f"{one.relative:.3g}"
    return [one.name, what, count, largest, relative]
