"""``make bench-compare``: how far each ratio of Holdfast has moved from the baseline.

    python -m benchmarks.compare [bench_out/results.json] [--accept]

Measures first if no results are given. The baseline (``benchmarks/baseline.json``) holds ratios to
the limits of the machine instead of seconds, so that it is valid on another machine too. A figure
is a regression if its median is worse by `MARGIN` or more and its quartiles do not overlap with the
baseline's. Then the exit code is 1. ``--accept`` makes the results the new baseline.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import run
from .harness import OURS, Spread, read_figures
from .report import number

BASELINE = Path(__file__).with_name("baseline.json")
MARGIN = 1.25


@dataclass(frozen=True)
class Change:
    """One figure of Holdfast, in the baseline and now.

    Attributes:
        figure: name of the figure and the way.
        before: spread in the baseline, None if the figure is new.
        after: spread in the results, None if they do not have the figure.
        worse: factor by which the median is worse. Below 1 it is better.
        regressed: True if the change is a regression (see the module).
    """

    figure: str
    before: Spread | None
    after: Spread | None
    worse: float = 1.0
    regressed: bool = False


def make_baseline(document: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce results to a baseline: date, machine, options, and the spread of every ratio of
    Holdfast.
    """
    # Rivals do not count: their regressions are not ours.
    figures = {}
    for figure in read_figures(document):
        for way in figure.samples:
            if way.startswith(OURS):
                spread = asdict(figure.spread(way))
                figures[f"{figure.name}: {way}"] = {"better": figure.better, **spread}
    return {
        "date": document["date"],
        "machine": document["machine"],
        "options": document["options"],
        "figures": figures,
    }


def compare(baseline: Mapping[str, Any], document: Mapping[str, Any]) -> list[Change]:
    """Compare every figure that is in the baseline or in the results."""
    before = baseline["figures"]
    after = make_baseline(document)["figures"]
    changes = []
    for name in before | after:
        # A new figure, or one that was not measured, is listed without a verdict.
        old = _spread(before.get(name))
        new = _spread(after.get(name))
        if old is None or new is None:
            changes.append(Change(name, old, new))
            continue

        # Worse is more of some figures, and less of others.
        if after[name]["better"] == "lower":
            worse = _ratio(new.median, old.median)
            apart = new.low > old.high
        else:
            worse = _ratio(old.median, new.median)
            apart = new.high < old.low
        regressed = worse >= MARGIN and apart
        changes.append(Change(name, old, new, worse, regressed))
    return changes


def _spread(figure: Mapping[str, Any] | None) -> Spread | None:
    if figure is None:
        return None
    return Spread(figure["median"], figure["low"], figure["high"])


def _ratio(a: float, b: float) -> float:
    if b:
        return a / b
    return 1.0 if a == b else float("inf")


def show(changes: Sequence[Change], console: Console) -> None:
    """Print the table, with regressions in red."""
    table = Table("figure", "baseline", "now", "times worse", "")
    for change in changes:
        worse = f"{change.worse:.2f}"
        verdict = ""
        style = None
        if change.regressed:
            verdict = "REGRESSION"
            style = "red"

        # A figure that only one of the two has cannot have changed.
        if change.before is None or change.after is None:
            worse = ""
            verdict = "not in both"
        before = _cell(change.before)
        after = _cell(change.after)
        table.add_row(change.figure, before, after, worse, verdict, style=style)
    console.print(table)


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{number(spread.median)} ({number(spread.low)} - {number(spread.high)})"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or accept. Returns 1 if a figure has regressed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument(
        "results",
        type=Path,
        nargs="?",
        help="results of a run (default: measure everything now)",
    )
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--accept", action="store_true", help="make the results the baseline")
    given = parser.parse_args(argv)
    # Without results, everything is measured first.
    results = given.results
    if results is None:
        code = run.main([])
        if code:
            return code
        results = Path("bench_out") / run.RESULTS
    document = json.loads(results.read_text())

    if given.accept:
        accepted = json.dumps(make_baseline(document), indent=1)
        given.baseline.write_text(accepted + "\n")
        return 0

    changes = compare(json.loads(given.baseline.read_text()), document)
    show(changes, Console())
    return int(any(change.regressed for change in changes))


if __name__ == "__main__":
    raise SystemExit(main())
