"""Write docs/models.md and docs/models-table.md.

``python -m tests.engine.architectures [--checks CHECK ...] [name ...]``

Names are model types and released models. Only their rows are judged and replaced. Without names,
all are. With checks, only these columns are judged, of models that start.
"""

import argparse
import time

from tests.engine.architectures.checks import GOOD, NONE, RELEASED_CHECKS, YES, Verdict
from tests.engine.architectures.matrix import Verdicts, checks_of, judge
from tests.engine.architectures.page import (
    PAGE,
    SUMMARY,
    other_model_types,
    read,
    render,
    summarise,
)
from tests.engine.architectures.released import model_names, seeing_names


def main() -> None:
    """Judge architectures, all or those named, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.architectures", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--checks", nargs="+", choices=[*RELEASED_CHECKS], default=None)
    given = parser.parse_args()
    results: dict[str, Verdicts] = {}
    if given.names or given.checks:
        _, results = read(PAGE.read_text(encoding="utf-8"))
    for number, name in enumerate(
        given.names or [*model_names(), *seeing_names(), *other_model_types()], start=1
    ):
        started = time.monotonic()
        results[name] = verdicts = _row(name, given.checks, results.get(name, {}))
        poor = [
            f"{check} {verdict.word}"
            for check, verdict in verdicts.items()
            if verdict.word not in GOOD
        ]
        print(
            f"{number:3d} {name}: {', '.join(poor) or 'all'} ({time.monotonic() - started:.1f} s)",
            flush=True,
        )
        if given.names or given.checks:  # update one row at a time and keep the others
            _write(results)
    _write(results)
    print(f"wrote {SUMMARY} and {PAGE}")


def _write(results: dict[str, Verdicts]) -> None:
    PAGE.write_text(render(results), encoding="utf-8")
    SUMMARY.write_text(summarise(results), encoding="utf-8")


def _row(name: str, checks: list[str] | None, known: Verdicts) -> Verdicts:
    if checks is None:
        return judge(name)
    if known["starts"].word == YES:
        return known | judge(name, [check for check in checks if check in checks_of(name)])
    return known | {check: Verdict(NONE) for check in checks if check in checks_of(name)}


if __name__ == "__main__":
    main()
