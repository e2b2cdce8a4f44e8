"""An SGLang server as a process with its own environment: ``HOLDFAST_SGLANG``, or
``.venv-sglang``.
"""

import os
from pathlib import Path

from tests.live.process import LiveProcess, environment_python, plugin_distribution
from tests.live_sglang import slow_steps

PYTHON = environment_python("HOLDFAST_SGLANG", ".venv-sglang")
"""Python of the environment with SGLang."""

STAND_INS = Path(__file__).parent / "stand_ins"
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_FLAGS = (
    *("--device", "cpu", "--skip-server-warmup"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--lora-backend", "torch_native"),
    # Without it the KV cache takes most of the machine's memory.
    *("--max-total-tokens", "16384"),
)


class LiveServer(LiveProcess):
    """One SGLang server.

    Args:
        model: initial model folder, with a tokenizer.
        scratch: folder for its log.
        options: options of SGLang in addition to the common ones.
    """

    def __init__(self, model: Path, scratch: Path, *options: str) -> None:
        super().__init__("sglang", scratch)
        plugins = plugin_distribution(
            scratch / f"plugins-{self.port}", "sglang.srt.plugins", slow_steps.__file__
        )
        search = [str(STAND_INS), str(plugins), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **CPU_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(search),
            slow_steps.SWITCH: str(self._slow),
        }
        self._command = (
            *(PYTHON, "-m", "sglang.launch_server", "--model-path", model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *CPU_FLAGS,
            *("--dtype", "float32", "--max-running-requests", "16", *options),
        )

    def slow_steps(self) -> int:
        """Number of steps of the model since the block of `slow` began."""
        return self._slow.stat().st_size
