"""Results for people: a table in the terminal, the same as Markdown, and a plot.

``python -m benchmarks.report bench_out/results.json`` puts table and plot of a run into
docs/performance.md.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .harness import OURS, Figure, Spread, read_figures
from .plot import draw

PAGE = "performance.md"
PLOT = "performance.svg"
BEGIN = "<!-- results: written by python -m benchmarks.report -->\n"
END = "<!-- end of results -->\n"


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print a table for each benchmark."""
    console.print(describe(document))
    for name, figures in _by_benchmark(document).items():
        table = Table(*_HEADINGS, title=name, title_justify="left")
        for figure in figures:
            for row in _rows(figure):
                # Holdfast's ways stand out, and misses stand out more.
                style = None
                if row.needed.endswith(_MISSED):
                    style = "red"
                elif row.way.startswith(OURS):
                    style = "bold"
                table.add_row(*row, style=style)
            table.add_section()
        console.print(table)


def write_report(document: Mapping[str, Any], folder: Path) -> None:
    """Write the table and the plot into ``folder``."""
    (folder / PAGE).write_text(markdown(document))
    (folder / PLOT).write_text(draw(read_figures(document)))


def describe(document: Mapping[str, Any]) -> str:
    """Describe options and machine of a run in one line."""
    machine = document["machine"]
    options = document["options"]
    return (
        f"{document['date']}: {options['parameters'] / 1e6:g}M parameters or more, float32 and "
        f"AdamW, {options['ranks']} ranks on {options['device']}, {options['rounds']} rounds, "
        f"{machine['cores']} cores, {machine['gpu'] or 'no GPU'}, torch {machine['torch']}, load "
        f"average {machine['load_average']:.1f} at the end"
    )


def markdown(document: Mapping[str, Any]) -> str:
    """Format the results as a section with one table per benchmark."""
    parts = [f"{describe(document)}.\n"]
    for name, figures in _by_benchmark(document).items():
        # The explanations come first, then the table. Numbers are aligned to the right.
        lines = [f"### {name}\n", *_explained(figures), ""]
        lines.append(_line(_HEADINGS))
        lines.append("|---|---|---:|---:|---:|---|")
        for figure in figures:
            lines += map(_line, _rows(figure))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _explained(figures: Sequence[Figure]) -> Iterator[str]:
    """A line for each figure. Figures of other sizes share one, without the size behind the colon
    of their titles.
    """
    alike: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        measured = figure.title.partition(":")[0]
        key = (measured, figure.better, figure.note)
        alike.setdefault(key, []).append(figure)

    for (title, better, note), members in alike.items():
        names = ", ".join(f"`{_short(figure)}`" for figure in members)
        if len(members) == 1:
            title = members[0].title
        # A note is a part of a sentence and becomes one.
        sentence = ""
        if note:
            sentence = f". {note[0].upper()}{note[1:]}"
        yield f"- {names}: {title} ({better} is better){sentence}."


class _Row(NamedTuple):
    """A row of the tables, as it is printed."""

    figure: str
    way: str
    ratio: str
    quartiles: str
    seconds: str
    needed: str


_HEADINGS = _Row._fields
_MISSED = "NOT met"


def _by_benchmark(document: Mapping[str, Any]) -> dict[str, list[Figure]]:
    # The name of a figure is that of its benchmark, a dot, and its own.
    benchmarks: dict[str, list[Figure]] = {}
    for figure in read_figures(document):
        benchmark = figure.name.partition(".")[0]
        benchmarks.setdefault(benchmark, []).append(figure)
    return benchmarks


def _short(figure: Figure) -> str:
    return figure.name.partition(".")[2]


def _rows(figure: Figure) -> list[_Row]:
    """A row for each way. Those that have only seconds, such as limits, come last."""
    rows = []
    for way in figure.samples | figure.seconds:
        # A single round has no spread to show.
        ratio = ""
        quartiles = ""
        if way in figure.samples:
            spread = figure.spread(way)
            ratio = number(spread.median)
            low = number(spread.low)
            high = number(spread.high)
            if low != high:
                quartiles = f"{low} - {high}"

        seconds = ""
        if way in figure.seconds:
            spread = Spread.of(figure.seconds[way])
            seconds = number(spread.median)

        # The target, and whether the median reaches it.
        needed = ""
        if way in figure.needed:
            sign = "<=" if figure.better == "lower" else ">="
            mark = "met" if figure.met(way) else _MISSED
            needed = f"{sign} {figure.needed[way]:g}: {mark}"
        rows.append(_Row(_short(figure), way, ratio, quartiles, seconds, needed))
    return rows


def number(value: float) -> str:
    """Format a number with three significant digits."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:.2f}"


def put_into(page: str, results: str) -> str:
    """Replace the text between the marks in ``page``.

    Raises:
        ValueError: the marks are missing.
    """
    # The marks divide the page into three parts.
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"the page has no {BEGIN.strip()!r} ... {END.strip()!r} to put the results between"
        )
    return f"{before}{BEGIN}\n{results}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    """Put a run into the documentation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    given = parser.parse_args(argv)
    document = json.loads(given.results.read_text())

    # The page keeps its text around the results.
    page = given.docs / PAGE
    page.write_text(put_into(page.read_text(), markdown(document)))
    (given.docs / PLOT).write_text(draw(read_figures(document)))


if __name__ == "__main__":
    main()
