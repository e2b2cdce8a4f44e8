"""Time of `make test` by file, from its junit XML. ``make durations`` writes the table."""

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
        # A module that is skipped as a whole has a name alone.
        module = case.attrib["classname"] or case.attrib["name"]
        file = module.replace(".", "/") + ".py"
        tests, seconds = found[file]
        found[file] = tests + 1, seconds + float(case.attrib["time"])
    return dict(found)


def render(files: dict[str, tuple[int, float]], how: str) -> str:
    """Format the page: files by their seconds, longest first."""
    rows = sorted(files.items(), key=lambda row: (-row[1][1], row[0]))
    total = (sum(tests for tests, _ in files.values()), sum(each for _, each in files.values()))
    rows.append(("total", total))
    lines = [f"| {name} | {tests} | {seconds:.1f} |" for name, (tests, seconds) in rows]
    return "\n".join(
        (
            "# Seconds of the tests",
            "",
            f"{how} Tests run side by side, so the sum is larger than the time that passes.",
            "",
            "| file | tests in `make test` | seconds |",
            "|---|---:|---:|",
            *lines,
            "",
        )
    )


def main() -> None:
    """Write the page next to this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="junit XML of make test")
    parser.add_argument(
        "--note", default="", help="a remark for the page, for example other load on the machine"
    )
    options = parser.parse_args()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    how = f"Measured on {date.today()} by `make durations`: {versions}."
    note = f" {options.note}" if options.note else ""
    PAGE.write_text(render(by_file(options.report), how + note))


if __name__ == "__main__":
    main()
