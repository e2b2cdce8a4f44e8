"""The command ``holdfast-weights``, killed at a step of a new version: ``python -m ... STEP ARMED
arguments``.

The process sends SIGKILL to itself at the step once the file ARMED exists.
"""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from holdfast_weights import cli, delta, mirror, source

STEPS: dict[
    str, tuple[Any, str, int, bool]
] = {  # object, function, the call, whether it is done before the kill
    "chain": (mirror, "make_plan", 1, False),
    "chained": (mirror, "make_plan", 1, True),
    "retire": (mirror, "_remove", 1, False),
    "room": (mirror.Mirror, "_make_room", 1, True),
    "fetch": (source, "write_exactly", 1, False),
    "fetching": (source, "write_exactly", 2, True),
    "copy": (mirror, "copy_file", 1, False),
    "copying": (mirror, "copy_file", 2, True),
    "patch": (delta, "write_exactly", 1, False),
    "patching": (delta, "write_exactly", 3, True),
    "verify": (mirror, "check_folder", 1, False),
    "verified": (mirror, "check_folder", 1, True),
    "sync": (mirror, "fsync", 2, True),
    "rename": (mirror.Mirror, "_commit", 1, False),
    "renamed": (mirror.Mirror, "_point", 1, False),
    "linked": (os, "replace", 1, False),
    "current": (os, "replace", 1, True),
    "done": (mirror.Mirror, "_commit", 1, True),
}


def _kill_at(owner: Any, name: str, call: int, after: bool, armed: Path) -> None:
    function: Callable[..., Any] = getattr(owner, name)
    calls = count(1)

    def watched(*args: Any, **options: Any) -> Any:
        this_one = armed.exists() and next(calls) == call
        if this_one and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if this_one:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, watched)


if __name__ == "__main__":
    step, armed = sys.argv[1:3]
    _kill_at(*STEPS[step], Path(armed))
    sys.argv[1:] = sys.argv[3:]
    cli.main()
