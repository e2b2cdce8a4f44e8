"""``holdfast diff``: list the tensors in which two generations or exports differ."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import click

from .folders import Folder
from .output import json_option, number_text, print_json, print_table
from .runs import is_url, local_path, read_generation

if TYPE_CHECKING:
    from .compare import Difference

T = TypeVar("T")


@click.command("diff", short_help="List tensors that differ, and by how much.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--engine", help="Compare only the weights of this engine. Required to compare an export with a "
              "generation that has several engines.")  # fmt: skip
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything differs.")
@json_option
@click.pass_context
def diff_command(
    ctx: click.Context, a: str, b: str, engine: str | None, exit_code: bool, as_json: bool
) -> None:
    """Compare two checkpoints A and B tensor by tensor. Each is a generation or a Hugging Face
    folder.

    Tensors are equal if all their bits are. The size of a difference is computed in float64.
    Digests are not checked (see `holdfast verify`), except when a copy at a URL is fetched into the
    temporary folder (TMPDIR).
    """
    from .compare import compare_folders

    found, same = _read(a, lambda one: _read(b, lambda other: compare_folders(one, other, engine)))
    if as_json:
        print_json(
            {"a": a, "b": b, "equal_tensors": same, "differences": [asdict(one) for one in found]}
        )
    elif found:
        title = f"{len(found)} of {same + len(found)} tensors differ: A is {a}, B is {b}"
        print_table(
            ("tensor", "what", "elements>", "largest>", "relative>"),
            [_row(one) for one in found],
            title,
        )
    else:
        click.echo(f"all {same} tensors are equal to the bit")
    if found and exit_code:
        ctx.exit(1)


def _read(text: str, read: Callable[[Folder], T]) -> T:
    path = local_path(text)
    if not is_url(text) and (path / "config.json").is_file():
        return read(Folder(path))
    return read_generation(text, read)


def _row(one: "Difference") -> list[str]:
    what = f"{one.kind}: {one.note}" if one.note else one.kind
    count = f"{one.elements} of {one.of}" if one.kind in ("bits", "values") else ""
    sizes = [number_text(one.largest), f"{one.relative:.3g}"] if one.kind == "values" else ["", ""]
    return [one.name, what, count, *sizes]
