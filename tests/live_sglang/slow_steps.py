"""A plugin of SGLang for tests: while a file exists, each step of the model takes as long as a
larger model's.

Each slow step adds a byte to the file, so that a test knows when some tokens were sampled.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SWITCH = "HOLDFAST_TEST_SLOW"
_STEP_S = 0.1


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from sglang.srt.managers.scheduler import Scheduler  # type: ignore[import-not-found]

    Scheduler.run_batch = _maybe_slow(Scheduler.run_batch)


def _count(switch: Path) -> None:
    with suppress(FileNotFoundError):  # it was removed in the step, and must not come back
        counter = os.open(switch, os.O_WRONLY | os.O_APPEND)
        os.write(counter, b".")
        os.close(counter)


def _maybe_slow(step: Any) -> Any:
    def slow_step(*args: Any, **options: Any) -> Any:
        switch = Path(os.environ[SWITCH])
        if switch.exists():
            time.sleep(_STEP_S)
            _count(switch)
        return step(*args, **options)

    return slow_step
