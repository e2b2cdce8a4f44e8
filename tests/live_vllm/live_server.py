"""A vLLM server as a process with its own environment: ``HOLDFAST_VLLM``, or ``.venv-vllm``."""

import json
import os
from pathlib import Path

import httpx2

from tests.limits import stretched
from tests.live.process import LiveProcess, environment_python, plugin_distribution
from tests.live_vllm import liar

PYTHON = environment_python("HOLDFAST_VLLM", ".venv-vllm")
"""Python of the environment with vLLM and the plugin."""

TORCHVISION = PYTHON.parents[1] / "torchvision"
"""Folder with torchvision, which vLLM imports for models that see."""
_OPERATORS = """import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""``sitecustomize.py``: torchvision of PyPI, which is built for CUDA, can be imported if two of its
operators exist.
"""
_GENERATED = "vllm:generation_tokens_total{"
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB. With it, and eager mode, there is no warm-up
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class LiveServer(LiveProcess):
    """One vLLM server.

    Args:
        model: initial model folder.
        scratch: folder for its log.
        options: options of vLLM in addition to the common ones.
        sees: whether prompts have images. The server then needs its tokenizer, and torchvision.
    """

    def __init__(self, model: Path, scratch: Path, *options: str, sees: bool = False) -> None:
        super().__init__("vllm", scratch)
        plugins = scratch / f"plugins-{self.port}"
        search = [plugin_distribution(plugins, "vllm.general_plugins", liar.__file__)]
        if sees:
            (search[0] / "sitecustomize.py").write_text(_OPERATORS)
            search.append(TORCHVISION)
        path = os.pathsep.join([*map(str, search), os.environ.get("PYTHONPATH", "")])
        self._environment = {
            **_ENVIRONMENT,
            "PYTHONPATH": path,
            liar.SWITCH: str(self._switch),
        }
        self._command = (
            # The command `vllm` is not in the CPU build.
            *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enable-scale-out"),
            *([] if sees else ["--skip-tokenizer-init"]),
            *("--enforce-eager", "--dtype", "float32"),
            *("--max-model-len", "2048", "--max-num-seqs", "16", *options),
            # On CPUs vLLM 0.32 dies of a request with a seed whose prompt is computed in parts, so
            # all must fit at once.
            *("--max-num-batched-tokens", str(16 * 2048)),
        )

    def lie(self, on: bool) -> None:
        """Begin or stop to confirm loads of weights without loading them."""
        if on:
            self._switch.touch()
        else:
            self._switch.unlink(missing_ok=True)

    def sleeps(self) -> bool:
        """Whether vLLM says that it sleeps."""
        return (
            httpx2.get(self.url + "/is_sleeping", timeout=stretched(60))
            .raise_for_status()
            .json()["is_sleeping"]
        )

    def generated_tokens(self) -> float:
        """Number of tokens sampled since its start."""
        metrics = httpx2.get(self.url + "/metrics", timeout=stretched(60)).raise_for_status().text
        return sum(
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith(_GENERATED)
        )


def plugin(backend: str) -> tuple[str, str]:
    """The options that choose a backend of ``plugins/vllm``."""
    return "--weight-transfer-config", json.dumps({"backend": backend})
