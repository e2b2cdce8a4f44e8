"""Servers of the stand-in for vLLM, which `ServerProcesses` starts by the real command."""

import os
import sys
from pathlib import Path
from typing import Any

from holdfast.engine.launch import ServerSpec, WatchLimits
from tests.limits import stretched

ROOT = Path(__file__).parents[3]


def quick_limits() -> WatchLimits:
    """Limits of quick tests, stretched by the load of this moment and not of the collection."""
    return WatchLimits(max_restarts=50, hang_timeout_s=stretched(1.5), stop_timeout_s=0.5)


def stand_in_environment(**variables: str) -> dict[str, str]:
    """Environment in which ``python -m vllm...`` starts the stand-in."""
    search = [ROOT / "tests" / "stand_ins", ROOT / "plugins" / "vllm", ROOT]
    return {"PYTHONPATH": os.pathsep.join(map(str, search)), **variables}


def stand_in_spec(folder: Path, **options: Any) -> ServerSpec:
    """Servers with hashed weights. Their starts end while ``folder/ends`` exists, and
    ``folder/record`` has their records.
    """
    (folder / "record").mkdir(parents=True, exist_ok=True)
    variables = stand_in_environment(
        FAKE_VLLM_HASHED="1",
        FAKE_VLLM_RECORD=str(folder / "record"),
        FAKE_VLLM_ENDS=str(folder / "ends"),
    )
    variables |= options.pop("environment", {})
    return ServerSpec("vllm", str(folder), sys.executable, environment=variables, **options)
