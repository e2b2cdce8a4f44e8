"""A vLLM plugin for tests: while a file exists, the server confirms loads of weights without
loading them. While another one exists, each step of the model takes as long as a larger model's.
"""

import os
import time
from pathlib import Path
from typing import Any

SWITCH = "HOLDFAST_TEST_LIAR"
SLOW = ".slow"
_STEP_S = 0.02


def register() -> None:
    """Entry point ``vllm.general_plugins``."""
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[import-not-found]

    for name in ("reload_weights", "update_weights"):
        setattr(Worker, name, _unless_lying(getattr(Worker, name)))
    Worker.execute_model = _maybe_slow(Worker.execute_model)


def _unless_lying(load: Any) -> Any:
    def load_or_lie(*args: Any, **kwargs: Any) -> None:
        if not Path(os.environ[SWITCH]).exists():
            load(*args, **kwargs)

    return load_or_lie


def _maybe_slow(step: Any) -> Any:
    def slow_step(*args: Any, **kwargs: Any) -> Any:
        if Path(os.environ[SWITCH] + SLOW).exists():
            time.sleep(_STEP_S)
        return step(*args, **kwargs)

    return slow_step
