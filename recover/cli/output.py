"""Output of the commands: tables for people, or one JSON document. Also their exit codes."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

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
    click.echo(json.dumps(_finite(document), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None
) -> None:
    """Print a table and a blank line. Columns without any value are left out.

    Args:
        columns: names of the columns, all empty for a table without a head. ``>`` at the end aligns
            to the right.
        rows: cells as text.
        title: line before the table.
    """
    used = [at for at in range(len(columns)) if not rows or any(str(row[at]) for row in rows)]
    if title is not None:
        click.echo(click.style(title, bold=True))
    print_rich(make_table([columns[at] for at in used], [[row[at] for at in used] for row in rows]))
    click.echo()


def make_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Build a rich table for `print_table`, with all columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns), show_edge=False)
    for at, column in enumerate(columns):
        right = column.endswith(">")
        short = all(len(str(row[at])) <= _WRAPPED_FROM for row in rows)
        justify = "right" if right else "left"
        table.add_column(
            column.removesuffix(">"), justify=justify, overflow="fold", no_wrap=right or short
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def print_rich(thing: Any) -> None:
    """Print a rich object, as plain text if the output is not a terminal."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else NARROWEST, highlight=False)
    with console.capture() as captured:
        console.print(thing)
    lines = captured.get().rstrip().split("\n")
    click.echo("\n".join(line if terminal else line.rstrip() for line in lines))


def size_text(n_bytes: int) -> str:
    """Format a size as ``1.2 GB``, in powers of 1000 like disks and object stores."""
    value, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value >= 999.5:
            value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"


def seconds_text(seconds: float) -> str:
    """Format a duration: ``0.012 s``, ``3.4 s``, ``12.0 min``, ``3.1 h``, ``2.4 d``."""
    if seconds < 1:
        return f"{seconds:.3f} s"
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:.1f} d"


def time_text(moment: float) -> str:
    """Format a time in seconds since the epoch as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def number_text(value: Any) -> str:
    """Format a float with six digits, and anything else with ``str``."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
