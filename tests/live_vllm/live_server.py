"""A vLLM server as a process with its own environment: ``HOLDFAST_VLLM``, or ``.venv-vllm``."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from holdfast.utils.guard import start_guarded
from tests.helpers import free_port
from tests.limits import stretched
from tests.live_vllm import liar

PYTHON = (
    Path(os.environ.get("HOLDFAST_VLLM", Path(__file__).parents[2] / ".venv-vllm"))
    / "bin"
    / "python"
)
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
_START_S = 300
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB. With it, and eager mode, there is no warm-up
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class LiveServer:
    """One server and its port, which stays the same over restarts.

    Args:
        model: initial model folder.
        scratch: folder for its log.
        options: options of vLLM in addition to the common ones.
        sees: whether prompts have images. The server then needs its tokenizer, and torchvision.
    """

    def __init__(self, model: Path, scratch: Path, *options: str, sees: bool = False) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = scratch / f"vllm-{self.port}.log"
        self._lie = scratch / f"lie-{self.port}"
        self._search = [_liar_distribution(scratch / f"plugins-{self.port}")]
        if sees:
            (self._search[0] / "sitecustomize.py").write_text(_OPERATORS)
            self._search.append(TORCHVISION)
        self._command: Sequence[str | Path] = (
            *(
                PYTHON,
                "-m",
                "vllm.entrypoints.openai.api_server",
            ),  # the command `vllm` is not in the CPU build
            *(
                "--model",
                model,
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--enable-scale-out",
            ),
            *([] if sees else ["--skip-tokenizer-init"]),
            *("--enforce-eager", "--dtype", "float32"),
            *("--max-model-len", "2048", "--max-num-seqs", "16", *options),
            # On CPUs vLLM 0.32 dies of a request with a seed whose prompt is computed in parts, so
            # all must fit at once.
            *("--max-num-batched-tokens", str(16 * 2048)),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. `wait_until_ready` waits for the server."""
        search = os.pathsep.join([*map(str, self._search), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "PYTHONPATH": search,
            liar.SWITCH: str(self._lie),
        }
        with open(self.log, "ab") as log:
            self._process = start_guarded(self._command, log, env=environment)

    def wait_until_ready(self) -> None:
        """Wait until it answers requests. Raises AssertionError with the end of its log if it does
        not.
        """
        deadline = time.monotonic() + stretched(_START_S)
        while True:
            try:
                if httpx2.get(f"{self.url}/health", timeout=stretched(5)).status_code == 200:
                    return
            except httpx2.TransportError:
                assert self._process is not None
                ended = self._process.poll() is not None
                assert not ended and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL all processes of the server, and wait for their end."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait(stretched(20))
            self._process = None

    def restart(self) -> None:
        """Kill it, start it again with its initial folder, and wait until it is ready."""
        self.kill()
        self.start()
        self.wait_until_ready()

    def lie(self, on: bool) -> None:
        """Begin or stop to confirm loads of weights without loading them."""
        if on:
            self._lie.touch()
        else:
            self._lie.unlink(missing_ok=True)

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Let each step of the model take 20 ms more in the block.

        Steps of a tiny model are so short that vLLM 0.32 answers nothing else until a request is
        done.
        """
        switch = self._lie.with_name(self._lie.name + liar.SLOW)
        switch.touch()
        try:
            yield
        finally:
            switch.unlink()

    def post(self, route: str, body: object = None, timeout_s: float = 60) -> httpx2.Response:
        """Send one request."""
        return httpx2.post(self.url + route, json=body, timeout=stretched(timeout_s))

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


def _liar_distribution(folder: Path) -> Path:
    """Make a folder for ``PYTHONPATH`` in which vLLM finds `liar` as an installed plugin."""
    facts = folder / "holdfast_test_liar-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: holdfast-test-liar\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nliar = holdfast_test_liar:register\n"
    )
    (folder / "holdfast_test_liar.py").write_text(Path(liar.__file__).read_text())
    return folder
