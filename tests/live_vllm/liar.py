"""A vLLM plugin for tests: while a file exists, the server confirms loads of weights without loading them."""

import os
from pathlib import Path
from typing import Any

SWITCH = "HOLDFAST_TEST_LIAR"


def register() -> None:
    """Entry point ``vllm.general_plugins``."""
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[import-not-found]

    for name in ("reload_weights", "update_weights"):
        setattr(Worker, name, _unless_lying(getattr(Worker, name)))


def _unless_lying(load: Any) -> Any:
    def load_or_lie(*args: Any, **kwargs: Any) -> None:
        if not Path(os.environ[SWITCH]).exists():
            load(*args, **kwargs)

    return load_or_lie
