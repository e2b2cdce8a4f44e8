"""Peak host memory of a Hugging Face export and import, against the rank's own shard.

Every rank builds its shard of a random Qwen3 (on the meta device, so that no rank ever has the whole model), saves it,
overwrites it, loads it back and checks it bit by bit. Meanwhile a thread reads the process's anonymous resident memory
(``RssAnon``, which leaves out file pages) every 5 ms; the table shows its peak above the level before the call.

    python benchmarks/hf_memory.py [--ranks 2] [--layers 12] [--dtype bfloat16] [--device cuda] [--json out.json]
"""

import argparse
import gc
import json
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from holdfast.engine.hf_checkpoint import save_hf
from holdfast.engine.hf_import import load_hf

SAMPLE_S = 0.005
LIMIT = 1.2


@dataclass
class Measurement:
    """One call on one rank.

    Attributes:
        action: what was called.
        rank: where.
        seconds: wall-clock time, fsync included.
        shard_bytes: what the rank holds of the model.
        peak_bytes: highest ``RssAnon`` during the call, above the level before it.
        maxrss_bytes: how much the process's lifetime peak (``ru_maxrss``) exceeds the resident memory before the call.
        samples: how often memory was read.
    """

    action: str
    rank: int
    seconds: float
    shard_bytes: int
    peak_bytes: int
    maxrss_bytes: int
    samples: int

    @property
    def ratio(self) -> float:
        """Peak over own shard."""
        return self.peak_bytes / self.shard_bytes


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def _measure(action: str, rank: int, shard_bytes: int, call: Callable[[], object]) -> Measurement:
    gc.collect()
    dist.barrier()
    baseline, resident, peaks = _status_bytes("RssAnon"), _status_bytes("VmRSS"), [0]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            peaks.append(_status_bytes("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    start = time.perf_counter()
    try:
        call()
    finally:
        seconds = time.perf_counter() - start
        stop.set()
        sampler.join()
    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measurement(
        action, rank, seconds, shard_bytes, max(max(peaks) - baseline, 0), max(maxrss - resident, 0), len(peaks)
    )


def _build(layers: int, device: str, world_size: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    mesh = init_device_mesh(device, (world_size,))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device=device)


def _shards(model: PreTrainedModel) -> list[torch.Tensor]:
    state = model.state_dict().values()
    return [value.to_local() if isinstance(value, DTensor) else value for value in state]


def _draw(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for shard in _shards(model):
        shard.normal_(generator=generator)


def _rank_main(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{store}/rendezvous",
        rank=rank,
        world_size=options.ranks,
    )
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    model = _build(options.layers, options.device, options.ranks)
    _draw(model, rank)
    shard_bytes = sum(shard.nbytes for shard in _shards(model))
    path, dtype = f"{store}/export", getattr(torch, options.dtype)
    saved = _measure("save_hf", rank, shard_bytes, lambda: save_hf(model, path, group=control, dtype=dtype))
    _draw(model, rank + 1000)
    loaded = _measure("load_hf", rank, shard_bytes, lambda: load_hf(model, path, group=control))
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(rank)
    for shard in _shards(model):
        expected = torch.empty_like(shard).normal_(generator=generator).to(dtype).to(shard.dtype)
        assert torch.equal(shard, expected), "what was loaded is not what was saved"
    results.put((rank, model.num_parameters(), [saved, loaded]))
    dist.destroy_process_group()


def _report(parameters: int, measured: list[Measurement]) -> None:
    print(f"{parameters / 1e6:.1f}M parameters, float32 in memory")
    print(f"{'call':8} {'rank':>4} {'shard MB':>9} {'peak MB':>8} {'ratio':>6} {'maxrss MB':>10} {'s':>6} {'MB/s':>7}")
    for m in measured:
        print(
            f"{m.action:8} {m.rank:4d} {m.shard_bytes / 1e6:9.1f} {m.peak_bytes / 1e6:8.1f} {m.ratio:6.3f} "
            f"{m.maxrss_bytes / 1e6:10.1f} {m.seconds:6.2f} {m.shard_bytes / m.seconds / 1e6:7.0f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the ranks, print the table, and fail when a ratio reaches the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the files")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as store:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank_main, (options, store, results), nprocs=options.ranks)  # type: ignore[arg-type]
        reports = sorted((results.get() for _ in range(options.ranks)), key=lambda report: report[0])
    measured = sorted((m for _, _, pair in reports for m in pair), key=lambda m: (m.action != "save_hf", m.rank))
    _report(reports[0][1], measured)
    if options.json:
        document = {"parameters": reports[0][1], "options": vars(options)}
        rows = [asdict(m) | {"ratio": m.ratio} for m in measured]
        Path(options.json).write_text(json.dumps(document | {"measured": rows}, indent=1))
    worst = max(m.ratio for m in measured)
    if worst >= LIMIT:
        raise SystemExit(f"peak memory reached {worst:.2f} of the shard; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
