"""Time of the tests by file, from the junit XML of both tiers. ``make durations`` writes the
table.
"""

import argparse
import platform
from collections import defaultdict
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import torch

PAGE = Path(__file__).with_suffix(".md")


def by_file(report: Path) -> dict[str, tuple[int, float]]:
    """Parse the output of ``--junitxml``: file -> number of tests, and their seconds with set-up
    and teardown.
    """
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        tests, seconds = found[file]
        found[file] = tests + 1, seconds + float(case.attrib["time"])
    return dict(found)


def _sums(tier: dict[str, tuple[int, float]]) -> tuple[int, float]:
    return sum(tests for tests, _ in tier.values()), sum(seconds for _, seconds in tier.values())


def render(fast: dict[str, tuple[int, float]], slow: dict[str, tuple[int, float]], how: str) -> str:
    """Format the page: files by their seconds in the fast tier, longest first."""
    none = (0, 0.0)
    rows = [
        (file, *fast.get(file, none), *slow.get(file, none)) for file in fast.keys() | slow.keys()
    ]
    rows.sort(key=lambda row: (-row[2], -row[4], row[0]))
    rows.append(("total", *_sums(fast), *_sums(slow)))
    lines = [f"| {name} | {n} | {s:.1f} | {m} | {t:.1f} |" for name, n, s, m, t in rows]
    return "\n".join(
        (
            "# Seconds of the tests",
            "",
            f"{how} Tests run side by side, so the sums are larger than the time that passes.",
            "",
            "| file | tests in `make test` | seconds | tests in `make test-slow` | seconds |",
            "|---|---:|---:|---:|---:|",
            *lines,
            "",
        )
    )


def main() -> None:
    """Write the page next to this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fast", type=Path, help="junit XML of make test")
    parser.add_argument("slow", type=Path, help="junit XML of make test-slow")
    parser.add_argument(
        "--note", default="", help="a remark for the page, for example other load on the machine"
    )
    options = parser.parse_args()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    how = f"Measured on {date.today()} by `make durations`: {versions}."
    note = f" {options.note}" if options.note else ""
    PAGE.write_text(render(by_file(options.fast), by_file(options.slow), how + note))


if __name__ == "__main__":
    main()
