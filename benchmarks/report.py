"""Results for people: a table in the terminal, the same as Markdown, and a plot.

``python -m benchmarks.report bench_out/results.json`` puts table and plot of a run into
docs/performance.md.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .harness import OURS, Figure, Spread, read_figures
from .plot import draw

PAGE, PLOT = "performance.md", "performance.svg"
BEGIN, END = (
    "<!-- results: written by python -m benchmarks.report -->\n",
    "<!-- end of results -->\n",
)


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print a table for each benchmark."""
    console.print(describe(document))
    for name, figures in _by_benchmark(document).items():
        table = Table(*_HEADINGS, title=name, title_justify="left")
        for figure in figures:
            for row in _rows(figure):
                style = "bold" if row[1].startswith(OURS) else None
                table.add_row(*row, style="red" if row[-1].endswith(_MARKS[False]) else style)
            table.add_section()
        console.print(table)


def write_report(document: Mapping[str, Any], folder: Path) -> None:
    """Write the table and the plot into ``folder``."""
    (folder / PAGE).write_text(markdown(document))
    (folder / PLOT).write_text(draw(read_figures(document)))


def describe(document: Mapping[str, Any]) -> str:
    """Describe options and machine of a run in one line."""
    machine, options = document["machine"], document["options"]
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
        lines = [f"### {name}\n", *_explained(figures), ""]
        lines += [f"| {' | '.join(_HEADINGS)} |", f"|---|---|{'---:|' * 3}---|"]
        lines += [f"| {' | '.join(row)} |" for figure in figures for row in _rows(figure)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _explained(figures: Sequence[Figure]) -> Iterator[str]:
    """A line for each figure. Figures of other sizes share one, without the size behind the colon
    of their titles.
    """
    alike: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        measured = figure.title.partition(":")[0]
        alike.setdefault((measured, figure.better, figure.note), []).append(figure)
    for (measured, better, note), members in alike.items():
        names = ", ".join(f"`{_short(figure)}`" for figure in members)
        title = members[0].title if len(members) == 1 else measured
        sentence = f". {note[0].upper()}{note[1:]}" if note else ""
        yield f"- {names}: {title} ({better} is better){sentence}."


_HEADINGS = ("figure", "way", "ratio", "quartiles", "seconds", "needed")
_MARKS = {True: "met", False: "NOT met"}


def _by_benchmark(document: Mapping[str, Any]) -> dict[str, list[Figure]]:
    benchmarks: dict[str, list[Figure]] = {}
    for figure in read_figures(document):
        benchmarks.setdefault(figure.name.partition(".")[0], []).append(figure)
    return benchmarks


def _short(figure: Figure) -> str:
    return figure.name.partition(".")[2]


def _rows(figure: Figure) -> list[tuple[str, ...]]:
    rows = []
    for way in [*figure.samples, *(name for name in figure.seconds if name not in figure.samples)]:
        ratio, quartiles, needed = "", "", ""
        if way in figure.samples:
            spread = figure.spread(way)
            ratio, low, high = (number(value) for value in (spread.median, spread.low, spread.high))
            quartiles = "" if low == high else f"{low} - {high}"
        if way in figure.needed:
            sign = "<=" if figure.better == "lower" else ">="
            needed = f"{sign} {figure.needed[way]:g}: {_MARKS[figure.met(way)]}"
        seconds = number(Spread.of(figure.seconds[way]).median) if way in figure.seconds else ""
        rows.append((_short(figure), way, ratio, quartiles, seconds, needed))
    return rows


def number(value: float) -> str:
    """Format a number with three significant digits."""
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.3g}"
        if abs(value) < 1
        else f"{value:.2f}"
    )


def put_into(page: str, results: str) -> str:
    """Replace the text between the marks in ``page``.

    Raises:
        ValueError: the marks are missing.
    """
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
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
    page = given.docs / PAGE
    page.write_text(put_into(page.read_text(), markdown(document)))
    (given.docs / PLOT).write_text(draw(read_figures(document)))


if __name__ == "__main__":
    main()
