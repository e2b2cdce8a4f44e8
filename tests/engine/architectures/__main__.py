"""Write docs/models.md: ``python -m tests.engine.architectures [name ...]``.

Names are model types and released models. Only their rows are judged and replaced. Without names, all are.
"""

import sys
import time

from tests.engine.architectures.checks import GOOD
from tests.engine.architectures.matrix import judge
from tests.engine.architectures.page import PAGE, other_model_types, read, render
from tests.engine.architectures.released import model_names


def main(names: list[str]) -> None:
    """Judge architectures, all or those named, and write the page."""
    results = {}
    if names:
        _, results = read(PAGE.read_text(encoding="utf-8"))
    for number, name in enumerate(names or [*model_names(), *other_model_types()], start=1):
        started = time.monotonic()
        results[name] = verdicts = judge(name)
        poor = [f"{check} {verdict.word}" for check, verdict in verdicts.items() if verdict.word not in GOOD]
        print(f"{number:3d} {name}: {', '.join(poor) or 'all'} ({time.monotonic() - started:.1f} s)", flush=True)
        if names:  # update one row at a time and keep the others
            PAGE.write_text(render(results), encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
