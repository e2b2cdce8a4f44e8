"""Write docs/models.md: ``python -m tests.engine.architectures [model type ...]``; with names, only their rows anew."""

import sys
import time

from tests.engine.architectures.checks import PADDED, YES
from tests.engine.architectures.matrix import judge
from tests.engine.architectures.page import PAGE, read, render
from tests.engine.architectures.tiny import model_types


def main(names: list[str]) -> None:
    """Judge architectures, all or those named, and write the page."""
    results = {}
    if names:
        _, results = read(PAGE.read_text(encoding="utf-8"))
    for number, model_type in enumerate(names or model_types(), start=1):
        started = time.monotonic()
        results[model_type] = verdicts = judge(model_type)
        poor = [f"{name} {verdict.word}" for name, verdict in verdicts.items() if verdict.word not in (YES, PADDED)]
        print(f"{number:3d} {model_type}: {', '.join(poor) or 'all'} ({time.monotonic() - started:.1f} s)", flush=True)
        if names:  # a row at a time: the others are there
            PAGE.write_text(render(results), encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
