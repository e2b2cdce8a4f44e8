"""Seconds from the optimizer step to a server's first token, by phase and by way; ``make bench-vllm`` prints them.

One rank publishes weights to a vLLM server on the same machine, in turns: to a disk and to memory (tmpfs), in float32
and bfloat16, loaded by vLLM itself, by the plugin, or sent. The first turn warms up; medians of the others are printed.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from holdfast.engine import FinetuneSpec, FSDPEngine, TrainEngineConfig, WeightUpdateMeta
from holdfast.engine.servers import ServerFleet, VLLMServer
from tests.engine.models import write_model_folder
from tests.live_vllm.live_server import LiveServer, plugin
from tests.live_vllm.trainer import sample

PHASES = ("probe", "write", "digest", "pause", "load", "check", "tell", "first token", "all")
_MEMORY = "/dev/shm"


def model_config(layers: int) -> Qwen3Config:
    """5.9M parameters a layer, and 49M in both ends."""
    return Qwen3Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=1920,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


SERVERS = {
    "loads": plugin("holdfast_disk"),
    "loads, bfloat16": (*plugin("holdfast_disk"), "--dtype", "bfloat16"),
    "receives": plugin("holdfast_broadcast"),
}
"""Options of each; all can load by themselves, too."""
WAYS = {
    "disk, reload_weights": ("disk", "loads", None, "float32"),
    "disk, holdfast_disk": ("disk", "loads", "holdfast_disk", "float32"),
    "disk, holdfast_disk, bfloat16": ("disk", "loads, bfloat16", "holdfast_disk", "bfloat16"),
    "tmpfs, reload_weights": ("tmpfs", "loads", None, "float32"),
    "tmpfs, holdfast_disk": ("tmpfs", "loads", "holdfast_disk", "float32"),
    "tmpfs, holdfast_disk, bfloat16": ("tmpfs", "loads, bfloat16", "holdfast_disk", "bfloat16"),
    "tmpfs, broadcast": ("tmpfs", "receives", None, "float32"),
}
"""Where the folder is, which server, how it loads a folder, and the dtype that is published."""


@contextmanager
def started(model: Path, scratch: Path) -> Iterator[Mapping[str, LiveServer]]:
    """The `SERVERS`, ready."""
    servers = {name: LiveServer(model, scratch, *options) for name, options in SERVERS.items()}
    try:
        for server in servers.values():
            server.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(LiveServer.wait_until_ready, servers.values()))
        yield servers
    finally:
        for server in servers.values():
            server.kill()


def measure(engine: FSDPEngine, client: VLLMServer, meta: WeightUpdateMeta) -> dict[str, float]:
    """Seconds of each of `PHASES` of one publication."""
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(1e-5)
    engine.set_version(engine.get_version() + 1)
    engine.connect_engine(ServerFleet([client], probe_interval_s=None), meta)
    begin = time.monotonic()
    published = engine.update_weights()
    confirmed = time.monotonic()
    sample(client, tokens=1)
    end = time.monotonic()
    seconds = {**client.seconds, **published.seconds, "first token": end - confirmed, "all": end - begin}
    return {phase: seconds.get(phase, 0.0) for phase in PHASES}


def main() -> None:
    """Start the servers, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=13, help="13 are 128M parameters with both ends")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    given = parser.parse_args()
    scratch, memory = Path(tempfile.mkdtemp(prefix="publish-")), Path(tempfile.mkdtemp(prefix="publish-", dir=_MEMORY))
    folders = {"disk": scratch / "weights", "tmpfs": memory / "weights"}
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    torch.set_num_threads(1)
    try:
        model = write_model_folder(scratch / "model", model_config(given.layers))
        parameters = model.num_parameters()
        del model
        with started(scratch / "model", scratch) as servers:
            engine = FSDPEngine(TrainEngineConfig(path=str(scratch / "model"), dtype="float32", optimizer=None))
            engine.create_process_group()
            engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1))
            for _ in range(1 + given.rounds):
                for way, (where, server, transfer, dtype) in WAYS.items():
                    client = VLLMServer(servers[server].url, transfer=transfer, timeout_s=900)
                    kind = "broadcast" if server == "receives" else "disk"
                    meta = WeightUpdateMeta(kind, str(folders[where]), keep=1, timeout_s=900, dtype=dtype)
                    rows[way].append(measure(engine, client, meta))
            engine.destroy()
    finally:
        shutil.rmtree(scratch)
        shutil.rmtree(memory)
    table = Table("", *PHASES, title=f"{parameters / 1e6:.0f}M parameters, seconds, medians of {given.rounds}")
    for way, measured in rows.items():
        table.add_row(way, *(f"{statistics.median(row[phase] for row in measured[1:]):.2f}" for phase in PHASES))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
