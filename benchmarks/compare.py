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
    figures = {
        f"{figure.name}: {way}": {"better": figure.better, **asdict(figure.spread(way))}
        for figure in read_figures(document)
        for way in figure.samples
        if way.startswith(OURS)
    }
    return {**{key: document[key] for key in ("date", "machine", "options")}, "figures": figures}


def compare(baseline: Mapping[str, Any], document: Mapping[str, Any]) -> list[Change]:
    """Compare every figure that is in the baseline or in the results."""
    before, after = baseline["figures"], make_baseline(document)["figures"]
    changes = []
    for name in [*before, *(name for name in after if name not in before)]:
        spreads = [
            Spread(f["median"], f["low"], f["high"]) if f else None
            for f in (before.get(name), after.get(name))
        ]
        old, new = spreads
        if old is None or new is None:
            changes.append(Change(name, old, new))
            continue
        lower = after[name]["better"] == "lower"
        worse = _ratio(new.median, old.median) if lower else _ratio(old.median, new.median)
        apart = new.low > old.high if lower else new.high < old.low
        changes.append(Change(name, old, new, worse, worse >= MARGIN and apart))
    return changes


def _ratio(a: float, b: float) -> float:
    return a / b if b else (1.0 if a == b else float("inf"))


def show(changes: Sequence[Change], console: Console) -> None:
    """Print the table, with regressions in red."""
    table = Table("figure", "baseline", "now", "times worse", "")
    for change in changes:
        spreads = [
            "-" if s is None else f"{number(s.median)} ({number(s.low)} - {number(s.high)})"
            for s in (change.before, change.after)
        ]
        measured = change.before is not None and change.after is not None
        verdict = "REGRESSION" if change.regressed else "" if measured else "not in both"
        table.add_row(
            change.figure,
            *spreads,
            f"{change.worse:.2f}" if measured else "",
            verdict,
            style="red" if change.regressed else None,
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or accept. Returns 1 if a figure has regressed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="?", help="results of a run (default: measure everything now)"
    )
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--accept", action="store_true", help="make the results the baseline")
    given = parser.parse_args(argv)
    results = given.results
    if results is None:
        if code := run.main([]):
            return code
        results = Path("bench_out") / run.RESULTS
    document = json.loads(results.read_text())
    if given.accept:
        given.baseline.write_text(json.dumps(make_baseline(document), indent=1) + "\n")
        return 0
    changes = compare(json.loads(given.baseline.read_text()), document)
    show(changes, Console())
    return int(any(change.regressed for change in changes))


if __name__ == "__main__":
    raise SystemExit(main())
