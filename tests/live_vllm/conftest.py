"""Two vLLM servers for all tests, and the engine that publishes to them.

A start takes half a minute on an idle machine, so everything here is started once. A test leaves
both servers healthy: it may restart them, and the next publication updates them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import Qwen3Config

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.servers import VLLMServer
from tests.engine.models import write_model_folder
from tests.limits import stretched
from tests.live.trainer import Trainer, started_trainer
from tests.live_vllm.live_server import PYTHON, LiveServer, plugin

CONFIG = Qwen3Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,  # the smallest that vLLM's attention on CPUs accepts
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the session."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model_folder(scratch: Path) -> Path:
    """Initial model of servers and engine."""
    write_model_folder(scratch / "model", CONFIG)
    return scratch / "model"


@pytest.fixture(scope="session")
def live_servers(model_folder: Path, scratch: Path) -> Iterator[dict[str, LiveServer]]:
    """``stock``, with processed log-probabilities, and ``plugin``, with raw log-probabilities, both
    ready.
    """
    assert PYTHON.exists(), (
        f"{PYTHON} is missing: make test-vllm makes it, or name an environment by HOLDFAST_VLLM"
    )
    servers = {
        "stock": LiveServer(model_folder, scratch, "--logprobs-mode", "processed_logprobs"),
        "plugin": LiveServer(model_folder, scratch, *plugin("holdfast_disk")),
    }
    try:
        for server in servers.values():
            server.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(LiveServer.wait_until_ready, servers.values()))
        yield servers
    finally:
        for server in servers.values():
            server.kill()


@pytest.fixture(scope="session")
def clients(live_servers: dict[str, LiveServer]) -> dict[str, VLLMServer]:
    """A client of each."""
    return {
        "stock": VLLMServer(live_servers["stock"].url, timeout_s=stretched(60)),
        "plugin": VLLMServer(
            live_servers["plugin"].url, timeout_s=stretched(60), transfer="holdfast_disk"
        ),
    }


@pytest.fixture(scope="session")
def trainer(model_folder: Path, scratch: Path) -> Iterator[Trainer]:
    """One rank in this process that has published nothing yet."""
    meta = WeightUpdateMeta("disk", str(scratch / "weights"), keep=8, timeout_s=stretched(120))
    with started_trainer(model_folder, meta) as trainer:
        yield trainer
