"""Seconds from the optimizer step to a server's first token, by phase and way. ``make bench-vllm``
prints them.

Ranks publish weights to a vLLM server on the same machine, in turns: to a disk and to memory
(tmpfs), in float32 and bfloat16, loaded by vLLM itself, by the plugin, or sent. Also adapters
alone. The first turn warms up, and the medians of the others are printed.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from holdfast.engine import FinetuneSpec, FSDPEngine, TrainEngineConfig, WeightUpdateMeta
from holdfast.engine.api import UpdateType
from holdfast.engine.servers import ServerFleet, VLLMServer
from tests.engine.models import write_model_folder
from tests.helpers import run_ranks
from tests.live.trainer import sample
from tests.live_vllm.live_server import LiveServer, plugin

PHASES = ("probe", "write", "commit", "pause", "load", "check", "tell", "first token", "all")
_MEMORY = "/dev/shm"


def model_config(layers: int) -> Qwen3Config:
    """A model with 5.9M parameters per layer, and 49M in embedding and head."""
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


LORA_RANK = 32
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SERVERS = {
    "loads": plugin("holdfast_disk"),
    "loads, bfloat16": (*plugin("holdfast_disk"), "--dtype", "bfloat16"),
    "receives": plugin("holdfast_gloo"),
    "receives, bfloat16": (*plugin("holdfast_gloo"), "--dtype", "bfloat16"),
    "adapts": (
        *("--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", "2"),
        *("--logprobs-mode", "processed_logprobs", "--lora-target-modules", *LAYERS),
    ),
}
"""Options of each server. All of them can also load by themselves."""


@dataclass(frozen=True)
class Way:
    """A way to publish weights.

    Attributes:
        type: see `WeightUpdateMeta`.
        folder: place of the folder, ``"disk"`` or ``"tmpfs"``. None: no folder.
        server: one of `SERVERS`.
        dtype: published dtype.
        transfer: how the server loads a folder, see `VLLMServer`.
    """

    type: UpdateType
    folder: str | None
    server: str
    dtype: str = "float32"
    transfer: str | None = None


WAYS = {
    "disk, reload_weights": Way("disk", "disk", "loads"),
    "disk, holdfast_disk": Way("disk", "disk", "loads", transfer="holdfast_disk"),
    "disk, holdfast_disk, bfloat16": Way(
        "disk", "disk", "loads, bfloat16", "bfloat16", "holdfast_disk"
    ),
    "tmpfs, reload_weights": Way("disk", "tmpfs", "loads"),
    "tmpfs, holdfast_disk": Way("disk", "tmpfs", "loads", transfer="holdfast_disk"),
    "tmpfs, holdfast_disk, bfloat16": Way(
        "disk", "tmpfs", "loads, bfloat16", "bfloat16", "holdfast_disk"
    ),
    "sent": Way("xccl", None, "receives"),
    "sent, bfloat16": Way("xccl", None, "receives, bfloat16", "bfloat16"),
    "tmpfs, sent": Way("xccl", "tmpfs", "receives"),
    "disk, adapters": Way("adapter", "disk", "adapts"),
}


@contextmanager
def started(model: Path, scratch: Path) -> Iterator[Mapping[str, LiveServer]]:
    """Start the `SERVERS` and wait until they are ready."""
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


def make_engine(model: Path, **options: Any) -> FSDPEngine:
    """Make the engine of the calling ranks."""
    engine = FSDPEngine(
        TrainEngineConfig(path=str(model), dtype="float32", optimizer=None, **options)
    )
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1))
    return engine


def measure(
    engine: FSDPEngine, client: VLLMServer, meta: WeightUpdateMeta, rank: int
) -> dict[str, float]:
    """Measure the seconds of each of `PHASES` in one publication, on rank 0."""
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if meta.type != "adapter" or "lora_" in name:
                parameter.add_(1e-5)
    engine.set_version(engine.get_version() + 1)
    engine.connect_engine(ServerFleet([client] if rank == 0 else [], probe_interval_s=None), meta)
    dist.barrier()
    begin = time.monotonic()
    published = engine.update_weights()
    if rank != 0:
        return {}
    confirmed = time.monotonic()
    sample(client, tokens=1)
    end = time.monotonic()
    seconds = {
        **client.seconds,
        **published.seconds,
        "first token": end - confirmed,
        "all": end - begin,
    }
    return {phase: seconds.get(phase, 0.0) for phase in PHASES}


def publish(
    rank: int,
    world_size: int,
    model: Path,
    urls: Mapping[str, str],
    folders: Mapping[str, Path],
    rounds: int,
) -> dict[str, list[dict[str, float]]]:
    """Publish in all ways in turns, ``1 + rounds`` times. Returns `measure` of each on rank 0."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    lora: dict[str, Any] = {"use_lora": True, "lora_rank": LORA_RANK, "lora_alpha": 2 * LORA_RANK}
    whole, adapted = make_engine(model), make_engine(model, **lora)
    clients = {
        name: VLLMServer(urls[way.server], transfer=way.transfer, timeout_s=900)
        for name, way in WAYS.items()
    }
    for _ in range(1 + rounds):
        for name, way in WAYS.items():
            path = None if way.folder is None else str(folders[way.folder] / way.type)
            meta = WeightUpdateMeta(way.type, path, keep=1, timeout_s=900, dtype=way.dtype)
            rows[name].append(
                measure(adapted if way.type == "adapter" else whole, clients[name], meta, rank)
            )
    adapted.destroy()
    whole.destroy()
    return rows


def main() -> None:
    """Start the servers, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=13, help="13 are 128M parameters with both ends"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    given = parser.parse_args()
    scratch, memory = (
        Path(tempfile.mkdtemp(prefix="publish-")),
        Path(tempfile.mkdtemp(prefix="publish-", dir=_MEMORY)),
    )
    folders = {"disk": scratch / "weights", "tmpfs": memory / "weights"}
    try:
        model = write_model_folder(scratch / "model", model_config(given.layers))
        parameters = model.num_parameters()
        del model
        with started(scratch / "model", scratch) as servers:
            urls = {name: server.url for name, server in servers.items()}
            arguments = (scratch / "model", urls, folders, given.rounds)
            rows = run_ranks(publish, given.ranks, *arguments, timeout_s=3600)[0]
    finally:
        shutil.rmtree(scratch)
        shutil.rmtree(memory)
    title = (
        f"{parameters / 1e6:.0f}M parameters, {given.ranks} rank(s), seconds, medians of "
        f"{given.rounds}"
    )
    table = Table("", *PHASES, title=title)
    for way, measured in rows.items():
        table.add_row(
            way,
            *(f"{statistics.median(row[phase] for row in measured[1:]):.2f}" for phase in PHASES),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
