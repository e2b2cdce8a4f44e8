"""Output of the commands: tables for people, or one JSON document. Also their exit codes."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
Row = Sequence[Any]
"""Cells of a table as text."""

DAMAGED, FAILED, INTERRUPTED = 1, 2, 130
"""Exit codes: damage was found, the command could not do its work, Ctrl-C."""

NARROWEST = 100
"""Width of a table if the output is not a terminal."""
_WRAPPED_FROM = 20
"""Cells up to this length are not wrapped."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def dtype_option(default: str) -> Callable[[F], F]:
    """Add the option ``--dtype``, for a command that writes weights."""
    names = ("float32", "bfloat16", "float16")  # `EXPORT_DTYPES`, whose module imports torch
    return click.option(
        "--dtype",
        type=click.Choice(names),
        help=f"Dtype of floating-point weights.  [default: {default}]",
    )


def print_json(document: Any) -> None:
    """Print ``document`` as JSON. NaN and infinity, which JSON lacks, become null."""
    text = json.dumps(_finite(document), indent=1)
    click.echo(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(
    columns: Sequence[str],
    rows: Sequence[Row],
    title: str | None = None,
) -> None:
    """Print a table and a blank line. Columns without any value are left out.

    Args:
        columns: names of the columns, all empty for a table without a head. ``>`` at the end aligns
            to the right.
        rows: cells as text.
        title: line before the table.
    """
    # A column that says nothing takes room from the others.
    used: list[int] = []
    for at in range(len(columns)):
        if not rows or any(str(row[at]) for row in rows):
            used.append(at)
    names = [columns[at] for at in used]
    cells = [[row[at] for at in used] for row in rows]

    if title is not None:
        heading = click.style(title, bold=True)
        click.echo(heading)
    print_rich(make_table(names, cells))
    click.echo()


def make_table(columns: Sequence[str], rows: Sequence[Row]) -> Any:
    """Build a rich table for `print_table`, with all columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(columns),
        show_edge=False,
    )

    # Numbers, and columns of short cells, stay on one line.
    for at, column in enumerate(columns):
        is_right = column.endswith(">")
        lengths = [len(str(row[at])) for row in rows]
        is_short = max(lengths, default=0) <= _WRAPPED_FROM
        table.add_column(
            column.removesuffix(">"),
            justify="right" if is_right else "left",
            overflow="fold",
            no_wrap=is_right or is_short,
        )

    # As Text, so that brackets are not taken for markup.
    for row in rows:
        cells: list[Text] = []
        for cell in row:
            if not isinstance(cell, Text):
                cell = Text(str(cell))
            cells.append(cell)
        table.add_row(*cells)
    return table


def print_rich(thing: Any) -> None:
    """Print a rich object, as plain text if the output is not a terminal."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = None if terminal else NARROWEST
    console = Console(file=sys.stdout, width=width, highlight=False)
    with console.capture() as captured:
        console.print(thing)

    # rich fills lines up to the width with spaces, which only a terminal should get.
    lines = captured.get().rstrip().split("\n")
    if not terminal:
        lines = [line.rstrip() for line in lines]
    click.echo("\n".join(lines))


def size_text(n_bytes: int) -> str:
    """Format a size as ``1.2 GB``, in powers of 1000 like disks and object stores."""
    value, unit = _in_units(n_bytes, ("B", "kB", "MB", "GB", "TB"))
    if unit == "B" or value >= 100:
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"


def _in_units(count: int, units: Sequence[str]) -> tuple[float, str]:
    """The number in the largest of ``units`` that fits, each 1000 of the one before."""
    value = float(count)
    unit, *larger_units = units
    for larger in larger_units:
        if value >= 999.5:  # it would be rounded to 1000 of a unit
            value /= 1000
            unit = larger
    return value, unit


def number_of(count: int) -> str:
    """Format a large number of things as ``1.1M``, in powers of 1000."""
    value, unit = _in_units(count, ("", "k", "M", "G"))
    return f"{value:.3g}{unit}"


def seconds_text(seconds: float) -> str:
    """Format a duration: ``0.012 s``, ``3.4 s``, ``12.0 min``, ``3.1 h``, ``2.4 d``."""
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def time_text(moment: float) -> str:
    """Format a time in seconds since the epoch as local time."""
    local = time.localtime(moment)
    return time.strftime("%Y-%m-%d %H:%M:%S", local)


def number_text(value: Any) -> str:
    """Format a float with six digits, and anything else with ``str``."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
